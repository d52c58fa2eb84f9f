"""Scenes of stock mode: an unmodified vLLM beside a sidecar that makes its file, and beside the janitor.

What vLLM does to the file is done here by hand, call for call; `tests/vllm/test_stock_region.py` has the
real class.
"""

import mmap
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from typing_extensions import override

from kvcellar.cli import clean
from kvcellar.cli import main as command
from kvcellar.contract import Mode, RegionState
from kvcellar.errors import KVCellarError, NotReady
from kvcellar.region import stock
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.janitor import Janitor
from kvcellar.region.names import stock_name
from kvcellar.region.survey import survey
from tests.support.children import Child
from tests.support.scenes.owner import be_quiet, run_command
from tests.support.scenes.scene import CAPACITY, ID, PATTERN, Scene, Sidecar, never
from tests.support.traced import Action, Ending

WAIT_S = 0.01
"""How long a file lies aside here; no process that looked its name up comes for it later."""
EXIT_OK, EXIT_HELD = 0, 4
FILE_BYTES = 2**20
"""Size of a file that vLLM made by itself."""


def join_as_vllm(path: Path, size_bytes: int) -> mmap.mmap:
    """What vLLM's region class does to its file: make it, or join what is there.

    Source: vllm/v1/kv_offload/cpu/shared_offload_region.py, 0.31 and 0.32.
    """
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except FileExistsError:
        fd = os.open(path, os.O_RDWR)
        assert os.fstat(fd).st_size >= size_bytes
    else:
        os.ftruncate(fd, size_bytes)
    try:
        return mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)


class Engine:
    """A process that has a file as vLLM has it, and has written to it."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        def live(connection: Connection) -> None:
            mapped = join_as_vllm(path, size_bytes)
            mapped[: len(PATTERN)] = PATTERN
            connection.send("joined")
            connection.recv()
            connection.send(mapped[: len(PATTERN)])
            connection.recv()

        self.child = Child(live)
        assert self.child.hear() == "joined"

    def leave(self) -> None:
        """See that its bytes are still there, and end it."""
        assert self.child.ask("look") == PATTERN
        self.child.kill()


class _ShortWaits(Scene):
    """A file lies aside for `WAIT_S` only, in all processes of the scene."""

    def __init__(self, volume: Path, driver: Path) -> None:
        super().__init__(volume, driver)
        self._waits = pytest.MonkeyPatch()
        for module in (clean, stock):
            self._waits.setattr(module, "WAIT_S", WAIT_S)

    @override
    def end(self) -> None:
        self._waits.undo()
        super().end()


class _Stock(_ShortWaits):
    """A sidecar in stock mode and an unmodified engine come next."""

    def __init__(self, volume: Path, driver: Path) -> None:
        super().__init__(volume, driver)
        self.file = volume / stock_name(ID)
        self.engine: Engine | None = None

    def make(self) -> Sidecar:
        """A sidecar of this region."""
        return Sidecar(self.path, mode=Mode.STOCK)

    def join(self) -> Engine:
        """An engine that has the region's file."""
        self.engine = Engine(self.file, CAPACITY)
        self.children.append(self.engine.child)
        return self.engine

    @override
    def others(self, ending: Ending | None) -> None:
        """An engine that is there has kept its bytes, also under the name of the file."""
        if ending is not None and self.engine is not None:
            assert self.file.read_bytes()[: len(PATTERN)] == PATTERN
            self.engine.leave()

    @override
    def next_start(self) -> None:
        self.sidecar = sidecar = self.sidecar or self.make()
        sidecar.ready()
        region = sidecar.region
        assert (region.owner.state, region.owner.mode) == (RegionState.READY, Mode.STOCK)
        assert region.reserved_bytes() == region.capacity_bytes == CAPACITY
        status = self.file.stat()
        assert (status.st_size, status.st_nlink) == (CAPACITY, 1)
        engine = self.join()
        assert self.file.stat().st_ino == status.st_ino == region.owner.data_inode
        seen = region.snapshot()
        assert (seen.held, seen.damage) == ((stock.ENGINE_SLOT,), "")
        assert not region.release()
        engine.leave()
        assert region.release()
        assert sidecar.directory.names() == []
        assert os.listdir(self.volume) == [self.path.name]
        self.path.rmdir()


class StockMake(_Stock):
    """A sidecar makes a region, fills it and gives it vLLM's name."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        return lambda: self.make().ready()


class StockJoin(_Stock):
    """An engine joins, beside the sidecar that made its file."""

    lives_on = False

    @override
    def before(self) -> None:
        self.sidecar = self.make().ready()

    @override
    def prepare(self) -> Action:
        def act() -> None:
            try:
                join_as_vllm(self.file, CAPACITY)
            except OSError:  # vLLM's own error, and its own end
                return

        return act


class StockAdopt(_Stock):
    """A second sidecar takes over a region that an engine has."""

    lives_on = False

    @override
    def before(self) -> None:
        first = self.make().ready()
        self.join()
        first.close()

    @override
    def prepare(self) -> Action:
        return self._take_over

    def _take_over(self) -> None:
        sidecar = self.make().ready()
        try:
            sidecar.region.snapshot()
            assert not sidecar.region.release()
        except KVCellarError:
            sidecar.close()
            raise


class StockAgain(_Stock):
    """A sidecar says that its region failed, plans it again, and fills it."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sidecar = self.make().ready()

        def act() -> None:
            try:
                sidecar.region.fail("it was asked to")
                with sidecar.directory.lock():
                    sidecar.region.retry()
                sidecar.region.reserve(never)
            except KVCellarError:
                sidecar.close()  # it may have another file by now, so all of them go
                raise

        return act


class StockRelease(_Stock):
    """A sidecar frees its region."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        return self.make().ready().region.release


class _Cleaned(_ShortWaits):
    """A file of a living vLLM and one of a dead vLLM lie in the root; the next pass of a janitor comes next."""

    @override
    def before(self) -> None:
        RegionDirectory.create(self.path).close()
        self.orphan = self.volume / stock_name(ID)
        self.live = self.volume / "vllm_offload_live.mmap"
        self.engine = Engine(self.live, FILE_BYTES)
        self.children.append(self.engine.child)
        dead = Engine(self.orphan, FILE_BYTES)
        dead.child.kill()

    def janitor(self) -> Janitor:
        """One that waits for nobody."""
        return Janitor(self.volume, wait_s=0.0, young_s=0.0)

    @override
    def others(self, ending: Ending | None) -> None:
        """The living engine's file is where it was, whoever was killed."""
        assert self.live.read_bytes()[: len(PATTERN)] == PATTERN

    @override
    def next_start(self) -> None:
        directory = RegionDirectory.open(self.path)
        janitor = self.janitor()
        left = janitor.set_aside(directory)
        assert [(file.name, file.is_held) for file in left] == [(self.live.name, True)]
        janitor.finish(directory)
        assert sorted(os.listdir(self.volume)) == sorted([self.path.name, self.live.name])
        self.engine.leave()
        assert janitor.set_aside(directory) == []
        assert [file.name for file in janitor.finish(directory)] == [self.live.name]
        janitor.close()
        assert directory.names() == []
        assert survey(directory).loose == ()
        directory.close()
        assert os.listdir(self.volume) == [self.path.name]
        self.path.rmdir()


class Janitors(_Cleaned):
    """A janitor removes the dead engine's file."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        janitor = self.janitor()

        def act() -> None:
            directory = RegionDirectory.open(self.path)
            try:
                self.work(janitor, directory)
            except OSError as error:  # the root cannot be read, as documented: who uses it goes on
                raise NotReady("the root is not cleaned") from error
            finally:
                janitor.close()
                directory.close()

        return act

    def work(self, janitor: Janitor, directory: RegionDirectory) -> None:
        """A pass of the janitor, as the sidecar makes it."""
        janitor.set_aside(directory)
        janitor.finish(directory)


class JanitorResumes(Janitors):
    """A janitor goes on with what one that was killed has set aside."""

    @override
    def before(self) -> None:
        super().before()
        directory = RegionDirectory.open(self.path)
        janitor = self.janitor()
        janitor.set_aside(directory)
        assert not self.orphan.exists()
        janitor.close()
        directory.close()


class JanitorPutsBack(JanitorResumes):
    """A janitor that may only report gives such a file its name again."""

    @override
    def work(self, janitor: Janitor, directory: RegionDirectory) -> None:
        janitor.put_back(directory)


class StockClean(_Cleaned):
    """`kvcellar clean` removes an unowned stock region, beside a file that a vLLM has."""

    lives_on = False

    @override
    def before(self) -> None:
        super().before()
        self.orphan.unlink()
        Sidecar(self.path, mode=Mode.STOCK).ready().close()

    @override
    def prepare(self) -> Action:
        be_quiet(self.volume, self.path)
        return lambda: run_command("clean")

    @override
    def next_start(self) -> None:
        child = Child(self._clean)
        self.children.append(child)
        assert child.hear() in (
            EXIT_OK,
            EXIT_HELD,
        )  # held: only the file of the living one is there
        super().next_start()

    def _clean(self, connection: Connection) -> None:
        be_quiet(self.volume, self.path)
        connection.send(command(["clean"]))

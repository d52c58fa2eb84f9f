"""What a process does when it is stopped at a system call, who lives beside it, and how the next start goes.

A scene has a volume of its own that is empty at first. `before` brings in the others, in processes that
live on; `prepare` runs in the child that will be traced, and returns what is traced. After it was killed,
or after a call of it failed, `next_start` does what the next sidecar and the next engine do, and lets
everything go: then the volume has to be as it was before.
"""

import ctypes
import os
import sys
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from typing_extensions import override

from kvcellar.cli import clean
from kvcellar.cli import main as command
from kvcellar.contract import Direction, EngineId, HugePages, Owner, RegionState
from kvcellar.errors import KVCellarError
from kvcellar.region.cgroups import Limit
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.memory import read_limits
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import reclaim_loose
from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from kvcellar.worker.attached import Region
from kvcellar.worker.ranks import Exchange
from tests.support.children import Child
from tests.support.traced import Action, Ending

ID = EngineId("engine")
CAPACITY = 4 * 2**20
CHUNK_BYTES = 300_000
PATTERN = b"kept"
EXIT_STATUSES = range(7)
"""What commands of kvcellar end with (docs/reference/cli.md)."""
IMPORTED = (clean,)
"""What a command would import while it is traced."""
HEARS_S = 5.0
"""Within it another rank has to know that one has failed or died; it takes milliseconds."""


def usage(volume: Path) -> tuple[int, int]:
    """(bytes, files) that are in use on a volume."""
    status = os.statvfs(volume)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return used, status.f_files - status.f_ffree


def _never() -> bool:
    return False


class Sidecar:
    """What a sidecar does at its start, in this process."""

    def __init__(self, path: Path, *, capacity: int = CAPACITY, reads_limits: bool = False) -> None:
        self.directory = RegionDirectory.create(path)
        try:
            reclaim_loose(self.directory)
            request = RegionRequest(ID, capacity, huge_pages=HugePages.AUTO)
            self.region = OwnedRegion.acquire(
                self.directory, request, self._limits if reads_limits else list
            )
        except (KVCellarError, OSError):
            self.directory.close()
            raise

    def _limits(self) -> list[Limit]:
        return read_limits(self.directory.fd)

    def ready(self) -> "Sidecar":
        """Reserve and settle; let go if that fails."""
        try:
            self.region.reserve(_never)
            self.region.settle(_never)
        except KVCellarError:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Leave the files, as a sidecar that is stopped does."""
        self.region.close()
        self.directory.close()


def options(path: Path, **more: object) -> AttachOptions:
    """How an engine of these scenes attaches."""
    return AttachOptions(directory=path, timeout_s=2.0, **more)  # type: ignore[arg-type]  # mixed fields


def run_engine(path: Path, sent: AttachOptions | None = None) -> int:
    """A whole life of an engine with one rank; returns its generation."""
    used = sent or options(path)
    region = attach(ID, CHUNK_BYTES, options=used)
    scheduler = attach_scheduler(ID, world_size=1, options=used)
    assert scheduler.take_failed(list(range(scheduler.num_chunks))) == set()
    last = region.base_address + (region.num_chunks - 1) * region.geometry.chunk_stride_bytes
    ctypes.memset(last, 7, CHUNK_BYTES)
    generation = region.generation
    scheduler.close()
    region.close()
    return generation


class Scene:
    """The base of all scenes: nobody is there, and a sidecar and an engine come next."""

    lives_on = True
    """Whether the next start works while the process whose call failed still lives."""

    def __init__(self, volume: Path) -> None:
        self.volume = volume
        self.path = volume / "kvcellar"
        self.sidecar: Sidecar | None = None
        self.children: list[Child] = []

    def before(self) -> None:
        """Bring in the others."""

    def prepare(self) -> Action:
        """Get ready in the child that will be traced; returns what is traced."""
        raise NotImplementedError

    def forked(self) -> None:
        """Let go, in the test, of what the traced child has now."""

    def others(self, ending: Ending | None) -> None:
        """Look at those that live beside it; without an ending, it lives and a call of it failed."""

    def next_start(self) -> None:
        """A sidecar and an engine start, and all is let go."""
        self.sidecar = sidecar = self.sidecar or Sidecar(self.path)
        sidecar.ready()
        assert sidecar.region.owner.state is RegionState.READY
        assert sidecar.region.reserved_bytes() == sidecar.region.capacity_bytes
        run_engine(self.path)
        assert not sidecar.region.snapshot().damage
        assert sidecar.region.release()
        assert sidecar.directory.names() == []
        self.path.rmdir()

    def end(self) -> None:
        """Let go of what is still there, whatever went wrong."""
        for child in self.children:
            child.kill()
        if self.sidecar is not None:
            self.sidecar.close()


# --- the owner


class Make(Scene):
    """A sidecar makes the directory and a region, and reads every limit."""

    @override
    def prepare(self) -> Action:
        return lambda: Sidecar(self.path, reads_limits=True)


class Reserve(Scene):
    """A sidecar reserves."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sidecar = Sidecar(self.path)
        return lambda: sidecar.region.reserve(_never)


class ReserveSmallPages(Scene):
    """A sidecar reserves without huge pages."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        directory = RegionDirectory.create(self.path)
        request = RegionRequest(ID, CAPACITY, huge_pages=HugePages.NEVER)
        region = OwnedRegion.acquire(directory, request, list)
        return lambda: region.reserve(_never)


class Settle(Scene):
    """A sidecar settles beside an engine that is attached and has written."""

    lives_on = False
    engine: Region

    @override
    def prepare(self) -> Action:
        sidecar = Sidecar(self.path)
        sidecar.region.reserve(_never)
        self._let_engine_in()
        return lambda: sidecar.region.settle(_never)

    def _let_engine_in(self) -> None:
        self._here.send("reserved")
        assert self._here.recv() == "attached"

    @override
    def before(self) -> None:
        self._here, there = Pipe()

        def engine(connection: Connection) -> None:
            assert there.recv() == "reserved"
            region = attach(ID, CHUNK_BYTES, options=options(self.path))
            ctypes.memmove(region.base_address, PATTERN, len(PATTERN))
            there.send("attached")
            connection.recv()
            connection.send(ctypes.string_at(region.base_address, len(PATTERN)))
            region.close()

        self.children.append(Child(engine, close=[self._here]))
        there.close()

    @override
    def others(self, ending: Ending | None) -> None:
        if ending is not None:
            assert self.children[0].ask("look") == PATTERN
            assert self.children[0].wait() == 0

    @override
    def end(self) -> None:
        self._here.close()
        super().end()


class Adopt(Scene):
    """A second sidecar takes over a region that an engine holds."""

    holder: Region

    @override
    def before(self) -> None:
        first = Sidecar(self.path).ready()
        self.holder = attach(ID, CHUNK_BYTES, options=options(self.path))
        ctypes.memmove(self.holder.base_address, PATTERN, len(PATTERN))
        first.close()

    @override
    def prepare(self) -> Action:
        return lambda: Sidecar(self.path).ready()

    @override
    def others(self, ending: Ending | None) -> None:
        if self.holder.base_address:
            assert ctypes.string_at(self.holder.base_address, len(PATTERN)) == PATTERN
            self.holder.close()

    @override
    def end(self) -> None:
        self.holder.close()
        super().end()


class Anew(Scene):
    """A second sidecar replaces an unheld region of another capacity."""

    @override
    def before(self) -> None:
        Sidecar(self.path, capacity=2 * CAPACITY).ready().close()

    @override
    def prepare(self) -> Action:
        return lambda: Sidecar(self.path)


class Resume(Scene):
    """A second sidecar goes on with a region whose owner was killed before it had reserved."""

    @override
    def before(self) -> None:
        Sidecar(self.path).close()

    @override
    def prepare(self) -> Action:
        return lambda: Sidecar(self.path).ready()


class Look(Scene):
    """A sidecar looks at its region, says that it failed, and plans it again."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        region = Sidecar(self.path).ready().region

        def act() -> None:
            region.snapshot()
            region.repair()
            region.fail("it was asked to")
            region.retry()

        return act


class Release(Scene):
    """A sidecar frees its region."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sidecar = Sidecar(self.path).ready()
        return sidecar.region.release


class Clean(Scene):
    """`kvcellar clean` finds a region that nobody owns, and what a killed owner left."""

    @override
    def before(self) -> None:
        Sidecar(self.path).ready().close()
        for name in ("other.0123456789abcdef.data", ".new.other.0123456789abcdef"):
            (self.path / name).write_bytes(b"x" * 10_000)

    @override
    def prepare(self) -> Action:
        os.environ["KVCELLAR_ROOT"] = str(self.volume)
        os.environ["KVCELLAR_DIR"] = str(self.path)
        # For as long as the child lives.
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

        def act() -> None:
            if (status := command(["clean"])) not in EXIT_STATUSES:
                raise AssertionError(f"it ended with status {status}")

        return act


# --- the engine's side


class Attach(Scene):
    """An engine of one rank attaches, beside a sidecar that lives."""

    @override
    def before(self) -> None:
        self.sidecar = Sidecar(self.path).ready()

    @override
    def prepare(self) -> Action:
        return lambda: self.attach()

    def attach(self) -> Region:
        return attach(ID, CHUNK_BYTES, options=options(self.path))


class NewGeneration(Attach):
    """An engine of another fingerprint and other chunks attaches to a region that has been used."""

    @override
    def before(self) -> None:
        super().before()
        run_engine(self.path, options(self.path, fingerprint="aa"))

    @override
    def attach(self) -> Region:
        return attach(ID, CHUNK_BYTES // 2, options=options(self.path, fingerprint="bb"))


class _OneOfTwo(Attach):
    """One rank of two attaches; the other lives on, attached or with its error."""

    rank = 0

    @override
    def before(self) -> None:
        super().before()
        self._mine, theirs = Pipe()
        self._options = options(self.path)

        def other(connection: Connection) -> None:
            try:
                region = self._attach(1 - self.rank, theirs)
            except (KVCellarError, OSError, EOFError) as error:
                connection.send(error)
                connection.recv()
                return
            connection.send("attached")
            connection.recv()
            region.close()

        self.children.append(Child(other, close=[self._mine]))
        theirs.close()

    @override
    def attach(self) -> Region:
        return self._attach(self.rank, self._mine)

    def _attach(self, rank: int, end: Connection) -> Region:
        sent = replace(self._options, exchange=_exchange_of_two(rank, end))
        return attach(ID, CHUNK_BYTES, rank=rank, world_size=2, options=sent)

    @override
    def forked(self) -> None:
        self._mine.close()

    @override
    def others(self, ending: Ending | None) -> None:
        """It hears of the other's death or error at once, in time for the next start."""
        heard: object
        try:
            heard = self.children[0].hear(HEARS_S)
        except (KVCellarError, EOFError, OSError) as error:
            heard = error
        if heard == "attached":
            assert ending is not None, "one rank is in without the other"
            self.children[0].tell("close")
            assert self.children[0].wait() == 0


class AttachRankZeroOfTwo(_OneOfTwo):
    """Rank 0 of two attaches."""


class AttachRankOneOfTwo(_OneOfTwo):
    """Rank 1 of two attaches."""

    rank = 1


class AttachScheduler(Attach):
    """The scheduler attaches beside its rank, which lives."""

    @override
    def before(self) -> None:
        super().before()
        self._options = options(self.path)
        self.holder = attach(ID, CHUNK_BYTES, options=self._options)

    @override
    def prepare(self) -> Action:
        return lambda: attach_scheduler(ID, world_size=1, options=self._options)

    @override
    def others(self, ending: Ending | None) -> None:
        self.holder.close()

    @override
    def end(self) -> None:
        self.holder.close()
        super().end()


class Detach(Attach):
    """A rank and its scheduler count, and leave."""

    @override
    def prepare(self) -> Action:
        sent = options(self.path)
        region = attach(ID, CHUNK_BYTES, options=sent)
        scheduler = attach_scheduler(ID, world_size=1, options=sent)

        def act() -> None:
            region.add_counters(Direction.STORE, CHUNK_BYTES, ok=True)
            scheduler.close()
            region.close()

        return act


class Mark(Attach):
    """A rank marks a store that failed, counts one, and its scheduler reads the mark."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sent = options(self.path)
        region = attach(ID, CHUNK_BYTES, options=sent)
        scheduler = attach_scheduler(ID, world_size=1, options=sent)

        def act() -> None:
            region.mark_failed_store(1)
            region.add_counters(Direction.STORE, CHUNK_BYTES, ok=False)
            scheduler.take_failed([0, 1, 2])

        return act


class _Alone(Scene):
    """An engine owns its region; nobody else is there."""

    def options(self) -> AttachOptions:
        """As this engine start, and no other, attaches."""
        return options(self.path, owner=Owner.ENGINE, capacity_bytes=CAPACITY)

    @override
    def next_start(self) -> None:
        run_engine(self.path, self.options())
        directory = RegionDirectory.open(self.path)
        assert directory.names() == []
        directory.close()
        self.path.rmdir()


class OwnRegion(_Alone):
    """An engine makes the region that it owns, beside what a killed one has left."""

    @override
    def before(self) -> None:
        child = Child(self._attach_and_say)
        assert child.hear() == "attached"
        child.kill()
        assert len(os.listdir(self.path)) == 3

    def _attach_and_say(self, connection: Connection) -> None:
        region = attach(ID, CHUNK_BYTES, options=self.options())
        connection.send("attached")
        connection.recv()
        region.close()

    @override
    def prepare(self) -> Action:
        sent = self.options()
        return lambda: attach(ID, CHUNK_BYTES, options=sent)


class OwnScheduler(_Alone):
    """The scheduler of such an engine attaches and removes the names, and all of them leave."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sent = self.options()
        region = attach(ID, CHUNK_BYTES, options=sent)

        def act() -> None:
            scheduler = attach_scheduler(ID, world_size=1, options=sent)
            scheduler.close()
            region.close()

        return act


class OwnDetach(_Alone):
    """Such an engine leaves before it has a scheduler."""

    @override
    def prepare(self) -> Action:
        return attach(ID, CHUNK_BYTES, options=self.options()).close


def _exchange_of_two(rank: int, end: Connection) -> Exchange:
    def exchange(mine: object) -> list[object]:
        end.send(mine)
        theirs: object = end.recv()
        return [mine, theirs] if rank == 0 else [theirs, mine]

    return exchange


SCENES: dict[str, type[Scene]] = {
    scene.__name__: scene
    for scene in (
        Make,
        Reserve,
        ReserveSmallPages,
        Settle,
        Adopt,
        Anew,
        Resume,
        Look,
        Release,
        Clean,
        Attach,
        NewGeneration,
        AttachRankZeroOfTwo,
        AttachRankOneOfTwo,
        AttachScheduler,
        Detach,
        Mark,
        OwnRegion,
        OwnScheduler,
        OwnDetach,
    )
}

"""Scenes of the owning side: a sidecar makes, fills, watches and frees its region, or takes one over."""

import ctypes
import os
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from typing_extensions import override

from kvcellar.cli import clean
from kvcellar.cli import main as command
from kvcellar.contract import HugePages
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.worker.attach import attach
from kvcellar.worker.attached import Region
from tests.support.children import Child
from tests.support.scenes.scene import (
    CAPACITY,
    CHUNK_BYTES,
    ID,
    PATTERN,
    Scene,
    Sidecar,
    never,
    options,
)
from tests.support.traced import Action, Ending

EXIT_STATUSES = range(7)
"""What commands of kvcellar end with (docs/reference/cli.md)."""
IMPORTED = (clean,)
"""What a command would import while it is traced."""


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
        return lambda: sidecar.region.reserve(never)


class ReserveSmallPages(Scene):
    """A sidecar reserves without huge pages."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        directory = RegionDirectory.create(self.path)
        request = RegionRequest(ID, CAPACITY, huge_pages=HugePages.NEVER)
        region = OwnedRegion.acquire(directory, request, list)
        return lambda: region.reserve(never)


class Settle(Scene):
    """A sidecar settles beside an engine that is attached and has written."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sidecar = Sidecar(self.path)
        sidecar.region.reserve(never)
        self._let_engine_in()
        return lambda: sidecar.region.settle(never)

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
        sidecar = Sidecar(self.path).ready()
        region = sidecar.region

        def act() -> None:
            region.snapshot()
            region.repair()
            region.fail("it was asked to")
            with sidecar.directory.lock():
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
        be_quiet(self.volume, self.path)
        return lambda: run_command("clean")


def be_quiet(root: Path, path: Path) -> None:
    """Let commands of this process, which is a child of the test, work on this volume and write nothing."""
    os.environ["KVCELLAR_ROOT"] = str(root)
    os.environ["KVCELLAR_DIR"] = str(path)
    # For as long as the child lives.
    sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def run_command(*words: str) -> None:
    """A command of kvcellar; it has to end with one of its own statuses."""
    if (status := command([*words])) not in EXIT_STATUSES:
        raise AssertionError(f"it ended with status {status}")

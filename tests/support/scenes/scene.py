"""What every scene is made of: a volume, the others who live on it, one action, and the next start.

A scene has a volume of its own that is empty at first. `before` brings in the others, in processes that
live on; `prepare` runs in the child that will be traced, and returns what is traced. After it was killed,
or after a call of it failed, `next_start` does what the next sidecar and the next engine do, and lets
everything go: then the volume has to be as it was before.
"""

import ctypes
import os
from pathlib import Path

from kvcellar.contract import EngineId, HugePages, Mode, RegionState
from kvcellar.errors import KVCellarError
from kvcellar.region.cgroups import Limit
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.memory import read_limits
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import reclaim_loose
from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from tests.support.children import Child
from tests.support.traced import Action, Ending

ID = EngineId("engine")
CAPACITY = 4 * 2**20
CHUNK_BYTES = 300_000
PATTERN = b"kept"
HEARS_S = 5.0
"""Within it another process has to know that one has failed or died; it takes milliseconds."""


def usage(volume: Path) -> tuple[int, int]:
    """(bytes, files) that are in use on a volume."""
    status = os.statvfs(volume)
    used = (status.f_blocks - status.f_bfree) * status.f_frsize
    return used, status.f_files - status.f_ffree


def never() -> bool:
    """A stop flag that nobody sets."""
    return False


class Sidecar:
    """What a sidecar does at its start, in this process."""

    def __init__(
        self,
        path: Path,
        *,
        capacity: int = CAPACITY,
        mode: Mode = Mode.PLUGIN,
        reads_limits: bool = False,
    ) -> None:
        self.directory = RegionDirectory.create(path)
        try:
            reclaim_loose(self.directory)
            request = RegionRequest(ID, capacity, mode, huge_pages=HugePages.AUTO)
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
            self.region.reserve(never)
            self.region.settle(never)
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

    def __init__(self, volume: Path, driver: Path) -> None:
        """Remember the volume, and where the simulated driver lies."""
        self.volume = volume
        self.driver = driver
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

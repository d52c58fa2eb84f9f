"""The processes of one engine start, without an engine: ranks that attach, and a scheduler.

Each is a real process. `attach` runs in all ranks at once, with an all-gather over pipes that breaks
when a rank dies, as a real one does. Afterwards a rank does what it is told (`Rank.ask`).
"""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from kvcellar.worker.attached import Region
from tests.support.children import Child

CHUNK_BYTES = 300_000


@dataclass
class Ranks:
    """One engine start: `rank[i]` is the process of rank i."""

    engine_id: str
    options: AttachOptions
    rank: list[Child] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        path: Path,
        world_size: int = 2,
        engine_id: str = "engine",
        chunk_bytes: Callable[[int], int] = lambda rank: CHUNK_BYTES,
        **options: object,
    ) -> "Ranks":
        """Fork the ranks; each attaches at once. `hear` of each tells how it went."""
        made = AttachOptions(directory=path, session=secrets.token_hex(16), timeout_s=5.0)
        made = replace(made, **options)  # type: ignore[arg-type]  # fields of AttachOptions
        start = cls(engine_id, made)
        pairs = [Pipe() for _ in range(world_size)]
        for rank in range(world_size):
            start.rank.append(start._fork(rank, world_size, pairs, chunk_bytes(rank)))
        for ends in pairs:
            for end in ends:
                end.close()
        return start

    def _fork(
        self, rank: int, world_size: int, pairs: list[tuple[Connection, Connection]], chunk: int
    ) -> Child:
        hub, spokes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        mine = hub[1:] if rank == 0 else [spokes[rank]]
        others = [end for end in (*hub, *spokes) if end not in mine]
        exchange = _gather(mine) if rank == 0 else _report(spokes[rank])
        options = replace(self.options, exchange=exchange)

        def program(connection: Connection) -> None:
            region = attach(
                self.engine_id, chunk, rank=rank, world_size=world_size, options=options
            )
            connection.send("attached")
            _obey(region, connection)

        return Child(program, close=others)

    def outcomes(self) -> list[object]:
        """The word "attached", or the error, of each rank."""
        heard: list[object] = []
        for child in self.rank:
            try:
                heard.append(child.hear())
            except Exception as error:  # noqa: BLE001 - it is what the caller looks at
                heard.append(error)
        return heard

    def attached(self) -> "Ranks":
        """Wait until all ranks are attached; else an assertion shows what became of each."""
        outcomes = self.outcomes()
        assert outcomes == ["attached"] * len(self.rank), outcomes
        return self

    def scheduler(self) -> Child:
        """Fork the scheduler; `hear` gives its number of chunks."""

        def program(connection: Connection) -> None:
            handle = attach_scheduler(
                self.engine_id, world_size=len(self.rank), options=self.options
            )
            connection.send(handle.num_chunks)
            while (said := connection.recv()) != "close":
                connection.send(handle.take_failed(list(said)))
            handle.close()
            connection.send("closed")

        return Child(program)

    def kill(self) -> None:
        """SIGKILL all ranks."""
        for child in self.rank:
            child.kill()


def _gather(ends: list[Connection]) -> Callable[[object], list[object]]:
    def exchange(mine: object) -> list[object]:
        heard = [mine, *(end.recv() for end in ends)]
        for end in ends:
            end.send(heard)
        return heard

    return exchange


def _report(end: Connection) -> Callable[[object], list[object]]:
    def exchange(mine: object) -> list[object]:
        end.send(mine)
        heard: list[object] = end.recv()
        return heard

    return exchange


# --- what an attached rank can be told


def _obey(region: Region, connection: Connection) -> None:
    """Answer the name of an action of `_ACTIONS`, or a tuple of the name and its arguments.

    In place of a name a function of a module may be given.
    """
    while True:
        said = connection.recv()
        name, *arguments = said if isinstance(said, tuple) else (said,)
        action = name if callable(name) else _ACTIONS[name]
        connection.send(action(region, *arguments))


@dataclass(frozen=True)
class Look:
    """What a rank sees of its region."""

    identity: tuple[int, int]
    generation: int
    num_chunks: int
    rank_bytes: int
    capacity_bytes: int
    mapped_bytes: list[int]
    """Sizes of the mappings of the data file in /proc/self/maps."""
    offsets: list[int]
    """And where in the file they begin."""
    is_aligned: bool


def _look(region: Region) -> Look:
    sizes, offsets = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, inode, *_ = line.split()
        if int(inode) == region.data_identity[1]:
            low, high = (int(part, 16) for part in addresses.split("-"))
            sizes.append(high - low)
            offsets.append(int(offset, 16))
    return Look(
        region.data_identity,
        region.generation,
        region.num_chunks,
        region.geometry.rank_bytes,
        region.geometry.capacity_bytes,
        sizes,
        offsets,
        region.base_address % (2 * 2**20) == 0,
    )


def _fill(region: Region, chunk: int, pattern: bytes) -> str:
    size = region.geometry.chunk_bytes
    whole = (pattern * (size // len(pattern) + 1))[:size]
    address = region.base_address + chunk * region.geometry.chunk_stride_bytes
    ctypes.memmove(address, whole, size)
    return "filled"


def _mark(region: Region, chunk: int) -> str:
    region.mark_failed_store(chunk)
    return "marked"


def _close(region: Region) -> str:
    region.close()
    region.close()
    return "closed"


def _fork(_region: Region) -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def _fork_in_c(_region: Region) -> int:
    """A fork that Python does not know of, so that its handlers do not run."""
    pid = int(ctypes.CDLL(None).fork())
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def _subprocess(_region: Region) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid


_ACTIONS: dict[str, Callable[..., object]] = {
    "close": _close,
    "look": _look,
    "fork": _fork,
    "fork in C": _fork_in_c,
    "subprocess": _subprocess,
    "mark": _mark,
    "fill": _fill,
}

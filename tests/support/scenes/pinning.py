"""Scenes of pinning: one rank of two registers its chunks with the simulated driver, or undoes that.

The other rank does the same and lives on. Who registers first is settled, so that every run makes the same
calls. What came of it has to be one and the same on both ranks, unless one was killed.
"""

import mmap
from dataclasses import replace
from enum import IntEnum
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from typing_extensions import override

from kvcellar.errors import KVCellarError
from kvcellar.worker.attach import attach
from kvcellar.worker.attached import Region
from tests.support.children import Child
from tests.support.gpus import CUDA, StubGpu
from tests.support.scenes.engine import Attach, exchange_of_two
from tests.support.scenes.scene import CHUNK_BYTES, HEARS_S, ID, options
from tests.support.traced import INJECTED, KILLED, Action, Ending


class Outcome(IntEnum):
    """What came of pinning on one rank."""

    RAISED = 0
    UNPINNED = 1
    PINNED = 2


class Pinner:
    """A region and the driver that it is registered with: what the region says holds in the driver, too."""

    def __init__(self, scene: "_OneOfTwo", region: Region) -> None:
        self._region = region
        self._gpu = StubGpu(CUDA, scene.driver)
        self._device = self._gpu.device(self._gpu.new_stream())

    def pin(self) -> Outcome:
        """Pin; nothing is registered if that raises."""
        is_pinned = False
        try:
            is_pinned = self._region.pin(self._device)
        finally:
            assert bool(self._gpu.count("registrations")) is is_pinned
            assert self._gpu.violation == ""
        return Outcome.PINNED if is_pinned else Outcome.UNPINNED

    def leave(self) -> None:
        """Undo it, and detach."""
        self._region.unpin()
        assert self._gpu.count("registrations") == 0
        self._region.close()


class _OneOfTwo(Attach):
    rank = 0
    is_first = False
    lives_on = False

    @override
    def before(self) -> None:
        super().before()
        self._mine, self._theirs = Pipe()
        self._options = options(self.path)
        self._said = mmap.mmap(-1, mmap.PAGESIZE)
        self.children.append(Child(self._live_beside, close=[self._mine]))
        self._theirs.close()

    def _pinner(self, rank: int, end: Connection) -> Pinner:
        sent = replace(self._options, exchange=exchange_of_two(rank, end))
        return Pinner(self, attach(ID, CHUNK_BYTES, rank=rank, world_size=2, options=sent))

    def _live_beside(self, connection: Connection) -> None:
        """The other rank: it pins, says what came of it, and stays until it is told to leave."""
        pinner = self._pinner(1 - self.rank, self._theirs)
        if self.is_first:
            self._wait_for_other(self._theirs)
        try:
            outcome = pinner.pin()
        except (KVCellarError, EOFError, OSError):
            outcome = Outcome.RAISED
        connection.send(outcome)
        connection.recv()
        pinner.leave()

    def _wait_for_other(self, end: Connection) -> None:
        """Wait until the other rank has registered, or died."""
        assert end.poll(HEARS_S)

    def _pin(self, pinner: Pinner) -> None:
        self._said[0] = pinner.pin()  # in memory of both processes: no call is added

    @override
    def prepare(self) -> Action:
        pinner = self._pinner(self.rank, self._mine)
        if not self.is_first:
            self._wait_for_other(self._mine)
        return lambda: self._pin(pinner)

    @override
    def forked(self) -> None:
        self._mine.close()

    @override
    def others(self, ending: Ending | None) -> None:
        if ending is None:
            return
        (other,) = self.children
        outcome = other.hear(HEARS_S)
        if ending.status != KILLED:
            assert outcome == self._said[0], f"{outcome!r} beside {Outcome(self._said[0])!r}"
        if ending.status == 0 and INJECTED not in ending.log:
            assert outcome is Outcome.PINNED
        assert self.sidecar is not None
        shown = [row.pinned for _, row, is_held in self.sidecar.region.snapshot().rows if is_held]
        assert shown == [outcome is Outcome.PINNED]
        other.tell("leave")
        assert other.wait() == 0

    @override
    def next_start(self) -> None:
        """The next engine pins as well."""
        child = Child(self._pin_alone)
        self.children.append(child)
        assert child.hear() is Outcome.PINNED
        assert child.wait() == 0
        super().next_start()

    def _pin_alone(self, connection: Connection) -> None:
        pinner = Pinner(self, attach(ID, CHUNK_BYTES, options=options(self.path)))
        connection.send(pinner.pin())
        pinner.leave()


class PinRankZeroOfTwo(_OneOfTwo):
    """Rank 0 pins once rank 1 has registered."""


class PinRankOneOfTwo(_OneOfTwo):
    """Rank 1 pins before rank 0 registers."""

    rank = 1
    is_first = True


class Unpin(_OneOfTwo):
    """A pinned rank undoes that and leaves, beside one that stays pinned."""

    @override
    def prepare(self) -> Action:
        pinner = self._pinner(self.rank, self._mine)
        self._wait_for_other(self._mine)
        self._pin(pinner)
        return pinner.leave

"""A device that runs queued work in any order which its events allow.

Nothing runs when it is queued. Each question (`query`, `synchronize`) lets a seeded random choice of
streams take a few steps first, so a test that passes for many seeds does not rest on an order that
nobody asked for. The memory is real, so copies can be checked byte for byte.

It follows `kvcellar.worker.devices.Device`; tests/unit/test_copier.py runs the same tests with the
CPU device.
"""

import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from kvcellar.contract import Direction
from kvcellar.errors import TransferFailed
from kvcellar.worker.devices import Addresses, Event, Stream

COMPUTE = Stream(7)


@dataclass
class _Step:
    run: Callable[[], None]
    waits_for: Event | None = None
    """The step may run only when this event is reached, as it was recorded at that time."""
    recording: int = 0


@dataclass
class _EventState:
    recordings: int = 0
    reached: int = 0
    time_s: float = 0.0
    failure: str = ""


@dataclass
class SimulatedDevice:
    """See the module. `log` names the calls that tests ask about, in order."""

    seed: int
    log: list[str] = field(default_factory=list)
    failures: deque[str] = field(default_factory=deque)
    """Each batch takes one: not empty means that it fails with it."""
    refusals: deque[str] = field(default_factory=deque)
    """Each call of `copy_batch` takes one: not empty means that it raises."""
    destroy_fails: bool = False
    pins_host: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._streams: dict[Stream, deque[_Step]] = {COMPUTE: deque()}
        self._stream_failures: dict[Stream, str] = {}
        self._events: dict[Event, _EventState] = {}
        self._next_handle = 100
        self._now_s = 0.0

    # --- for tests

    def compute(self, work: Callable[[], None]) -> None:
        """Queue work of the engine on its own stream."""
        self._streams[COMPUTE].append(_Step(work))

    @property
    def n_streams(self) -> int:
        return len(self._streams) - 1

    @property
    def n_events(self) -> int:
        return len(self._events)

    # --- Device

    def new_stream(self) -> Stream:
        stream = Stream(self._handle())
        self._streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        self.log.append("destroy_stream")
        while self._streams[stream]:
            self._step()
        del self._streams[stream]
        if self.destroy_fails:
            raise TransferFailed("the simulated device fails at release")

    def current_stream(self) -> Stream:
        return COMPUTE

    def new_event(self, *, is_timed: bool = True) -> Event:
        del is_timed
        event = Event(self._handle())
        self._events[event] = _EventState()
        return event

    def destroy_event(self, event: Event) -> None:
        self.log.append("destroy_event")
        del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        state = self._events[event]
        state.recordings += 1
        recording = state.recordings
        self._streams[stream].append(_Step(lambda: self._reach(state, recording, stream)))

    def wait_event(self, stream: Stream, event: Event) -> None:
        recording = self._events[event].recordings
        self._streams[stream].append(_Step(lambda: None, event, recording))

    def query(self, event: Event) -> bool:
        for _ in range(self._random.randrange(4)):
            self._step()
        state = self._events[event]
        if state.reached < state.recordings:
            return False
        if state.failure:
            raise TransferFailed(state.failure)
        return True

    def synchronize(self, event: Event) -> None:
        state = self._events[event]
        while state.reached < state.recordings:
            self._step()
        if state.failure:
            raise TransferFailed(state.failure)

    def elapsed_s(self, start: Event, end: Event) -> float:
        return self._events[end].time_s - self._events[start].time_s

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        assert stream != COMPUTE, "copies never run on the default stream"
        self.log.append(f"copy {direction}")
        if self.refusals and (reason := self.refusals.popleft()):
            raise TransferFailed(reason)
        failure = self.failures.popleft() if self.failures else ""
        arrays = [weakref.ref(array) for array in (dst, src, sizes)]
        as_queued = [array.copy() for array in (dst, src, sizes)]

        def run() -> None:
            for reference, expected in zip(arrays, as_queued, strict=True):
                array = reference()
                assert array is not None, "descriptors were let go before their event was reached"
                assert np.array_equal(array, expected), "descriptors were used again too early"
            if failure:
                self._stream_failures[stream] = failure
                return
            for to, origin, size in zip(*(array.tolist() for array in as_queued), strict=True):
                ctypes.memmove(to, origin, size)

        self._streams[stream].append(_Step(run))

    def register_host(self, address: int, size_bytes: int) -> None:
        self.log.append(f"register {address} {size_bytes}")

    def unregister_host(self, address: int) -> None:
        self.log.append(f"unregister {address}")

    def synchronize_all(self) -> None:
        self.log.append("synchronize_all")
        while any(self._streams.values()):
            self._step()

    def close(self) -> None:
        self.log.append("close")

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _reach(self, state: _EventState, recording: int, stream: Stream) -> None:
        self._now_s += 1e-6
        state.reached = recording
        state.time_s = self._now_s
        state.failure = self._stream_failures.pop(stream, "")

    def _step(self) -> None:
        """One step of a random stream that may go on."""
        ready = [steps for steps in self._streams.values() if steps and self._may_run(steps[0])]
        if not ready:
            assert not any(self._streams.values()), "every stream waits for another: a deadlock"
            return
        self._random.choice(ready).popleft().run()

    def _may_run(self, step: _Step) -> bool:
        return step.waits_for is None or self._events[step.waits_for].reached >= step.recording

"""The CPU as a device, for engines whose KV cache is host memory itself.

A stream is a thread that works off a queue in order, so copies overlap with the engine. What fails in
a thread is kept for the next event of its stream, as the seam asks (`devices.Device`).

This module must not know plans, jobs, torch or vLLM.
"""

import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from kvcellar.contract import Direction
from kvcellar.errors import TransferFailed
from kvcellar.worker.devices import Addresses, Event, Stream

logger = logging.getLogger(__name__)

_COMPUTE_STREAM = Stream(0)
"""Work of the engine on a CPU is done when the call returns, so its stream never has work left."""

_SMALL_BYTES = 8 * 1024
"""Copies up to this size go through numpy, larger ones through memmove one by one.

GB/s of scattered copies, memmove against numpy: 512 B 0.6 / 1.9, 4 KiB 2.3 / 3.8, 8 KiB 3.2 / 3.7,
16 KiB 5.6 / 4.2, 256 KiB 13 / 9 (2 cores of a Zen 4 guest, December 2026). A memmove of a few
KiB costs less than the call, and each call gives the interpreter lock away and takes it back.
"""

_BOUNCE_BYTES = 256 * 1024
"""Bytes that numpy gathers before it scatters them: they stay in the second-level cache."""


class _CpuEvent:
    """An event of a CPU stream, and the failure of the work before it."""

    def __init__(self) -> None:
        self.is_reached = threading.Event()
        self.is_reached.set()
        self.time_s = 0.0
        self.failure = ""

    def reach(self, failure: str) -> None:
        self.failure = failure
        self.time_s = time.perf_counter()
        self.is_reached.set()


class _CpuStream:
    """A thread that works off a queue in order; it ends with the step None."""

    def __init__(self, name: str) -> None:
        self._steps: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure = ""
        # A daemon, so that an engine that never calls shutdown can still end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def enqueue(self, step: Callable[[], None]) -> None:
        self._steps.put(step)

    def mark(self, event: _CpuEvent) -> None:
        """Reach the event, with the first failure since the event before it."""
        failure, self._failure = self._failure, ""
        event.reach(failure)

    def close(self) -> None:
        self._steps.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (step := self._steps.get()) is not None:
            try:
                step()
            except Exception as error:
                # The border of the copy thread: whatever went wrong belongs to the next event.
                logger.exception("a copy between CPU buffers failed")
                self._failure = self._failure or f"{type(error).__name__}: {error}"


class CpuDevice:
    """The CPU as a device: copies between buffers of host memory, one thread a stream."""

    pins_host: ClassVar[bool] = False

    def __init__(self) -> None:
        self._handles: Iterator[int] = count(1)
        self._streams: dict[Stream, _CpuStream] = {}
        self._events: dict[Event, _CpuEvent] = {}
        # Through CDLL the call releases the interpreter lock.
        self._memmove = ctypes.CDLL(None).memmove
        self._memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._memmove.restype = None

    def new_stream(self) -> Stream:
        """Start a thread."""
        stream = Stream(next(self._handles))
        self._streams[stream] = _CpuStream(f"kvcellar-copy-{stream}")
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        """Let the thread finish its queue, and end it."""
        self._streams.pop(stream).close()

    def current_stream(self) -> Stream:
        """A stream without work: what the engine computed on the CPU is done."""
        return _COMPUTE_STREAM

    def new_event(self, *, is_timed: bool = True) -> Event:
        """Make an event; all of them are timed."""
        del is_timed
        event = Event(next(self._handles))
        self._events[event] = _CpuEvent()
        return event

    def destroy_event(self, event: Event) -> None:
        """Forget an event."""
        del self._events[event]

    def record(self, event: Event, stream: Stream) -> None:
        """Reach the event when the thread comes to it; at once on the engine's own stream."""
        state = self._events[event]
        if stream == _COMPUTE_STREAM:
            state.reach("")
            return
        state.is_reached.clear()
        cpu_stream = self._streams[stream]
        cpu_stream.enqueue(partial(cpu_stream.mark, state))

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make the thread wait, unless the event is reached already."""
        state = self._events[event]
        if not state.is_reached.is_set():
            self._streams[stream].enqueue(partial(_wait, state.is_reached))

    def query(self, event: Event) -> bool:
        """Whether the thread came to the event."""
        state = self._events[event]
        if not state.is_reached.is_set():
            return False
        if state.failure:
            raise TransferFailed(f"copies between CPU buffers failed: {state.failure}")
        return True

    def synchronize(self, event: Event) -> None:
        """Block until the thread came to the event."""
        self._events[event].is_reached.wait()
        self.query(event)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds from `start` to `end`, by the clock of this machine."""
        return self._events[end].time_s - self._events[start].time_s

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        """Queue the copies; both directions are the same here."""
        del direction
        self._streams[stream].enqueue(partial(self._copy, dst, src, sizes))

    def register_host(self, address: int, size_bytes: int) -> None:
        """Nothing to pin: a CPU reads all memory alike."""
        del address, size_bytes

    def unregister_host(self, address: int) -> None:
        """Nothing was pinned."""
        del address

    def synchronize_all(self) -> None:
        """Block until all threads have worked off their queues."""
        for stream in self._streams.values():
            is_idle = threading.Event()
            stream.enqueue(is_idle.set)
            is_idle.wait()

    def close(self) -> None:
        """End the threads that are left, and forget all events."""
        for stream in list(self._streams):
            self.destroy_stream(stream)
        self._events.clear()

    def _copy(self, dst: Addresses, src: Addresses, sizes: Addresses) -> None:
        is_small = sizes <= _SMALL_BYTES
        for size in np.unique(sizes[is_small]).tolist():
            is_of_size = sizes == size
            _copy_small(dst[is_of_size], src[is_of_size], size)
        memmove = self._memmove
        is_large = ~is_small
        for to, origin, size in zip(
            dst[is_large].tolist(), src[is_large].tolist(), sizes[is_large].tolist(), strict=True
        ):
            memmove(to, origin, size)


def _wait(is_reached: threading.Event) -> None:
    is_reached.wait()


class _Memory:
    """Memory from `address` on, as numpy's array interface: items that begin at every byte."""

    def __init__(self, address: int, n_items: int, item_bytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (n_items,),
            "typestr": f"|V{item_bytes}",
            "strides": (1,),
            "version": 3,
        }


def _view(addresses: Addresses, item_bytes: int) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """An array and the indices in it whose items lie at `addresses`.

    It spans everything from the lowest to the highest address, mapped or not; numpy touches the
    items that are indexed, and no others.
    """
    lowest = addresses.min()
    memory = _Memory(int(lowest), int(addresses.max() - lowest) + 1, item_bytes)
    items = cast("NDArray[np.void]", np.asarray(memory))
    return items, (addresses - lowest).view(np.int64)


def _copy_small(dst: Addresses, src: Addresses, size_bytes: int) -> None:
    """Copy pieces of one size: gather some, scatter them, without a step of Python for each."""
    to, to_idx = _view(dst, size_bytes)
    origin, origin_idx = _view(src, size_bytes)
    step = max(1, _BOUNCE_BYTES // size_bytes)
    for first in range(0, len(dst), step):
        part = slice(first, first + step)
        to[to_idx[part]] = origin[origin_idx[part]]

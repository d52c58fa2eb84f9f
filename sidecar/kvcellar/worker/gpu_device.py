"""A GPU as a device, over a driver that `DriverCalls` describes: CUDA or ROCm.

Streams are low-priority and non-blocking: they never wait for the legacy default stream, nor it for
them. All work happens on what was current on the thread that made the device (torch's context); nothing
here creates one. A thread that works on nothing is put there too; a thread that works in another context
is refused.

An asynchronous error of a GPU stays: every later call of the process fails with it, on any stream.

This module must not know plans, jobs, torch or vLLM.
"""

import logging
import threading
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_void_p
from typing import ClassVar

from kvcellar.contract import Direction
from kvcellar.errors import TransferFailed, Unsupported
from kvcellar.worker.devices import Addresses, Event, Stream
from kvcellar.worker.driver import (
    EVENT_DISABLE_TIMING,
    NOT_READY,
    NOT_SUPPORTED,
    STREAM_NON_BLOCKING,
    Call,
    DriverCalls,
)

logger = logging.getLogger(__name__)


class GpuDevice:
    """Copies between host memory and a GPU.

    Args:
        calls: the driver.
        current_stream: handle of the stream that the engine computes on, such as torch's
            `current_stream().cuda_stream`. 0, the legacy default stream, is one; copies never use it.

    Raises:
        Unsupported: this thread works on no device.
        TransferFailed: the driver gave an error.
    """

    pins_host: ClassVar[bool] = True

    def __init__(self, calls: DriverCalls, current_stream: Callable[[], int]) -> None:
        self._calls = calls
        self._current_stream = current_stream
        self._copy_batch = calls.copy_batch
        self._threads: set[int] = {threading.get_ident()}
        home = self._working_on()
        if home is None:
            raise Unsupported(
                f"no {calls.name} device is in use on this thread, so there is none to copy from: make "
                "the worker after the engine has set its device"
            )
        self._home = home
        lowest, highest = c_int(0), c_int(0)
        self._check(calls.priority_range(byref(lowest), byref(highest)), "read stream priorities")
        self._priority = lowest.value

    def new_stream(self) -> Stream:
        """Make a stream of the lowest priority that blocks no other."""
        handle = c_void_p()
        self._bind()
        code = self._calls.stream_create(byref(handle), STREAM_NON_BLOCKING, self._priority)
        self._check(code, "make a stream")
        return Stream(self._handle(handle, "a stream"))

    def destroy_stream(self, stream: Stream) -> None:
        """Wait for the stream's work, then release it; released too if waiting failed."""
        self._bind()
        code = self._calls.stream_synchronize(stream)
        released = self._calls.stream_destroy(stream)
        self._check(code, "wait for a stream")
        self._check(released, "release a stream")

    def current_stream(self) -> Stream:
        """The stream that the engine computes on."""
        return Stream(self._current_stream())

    def new_event(self, *, is_timed: bool = True) -> Event:
        """Make an event; one without timing is cheaper to wait for."""
        handle = c_void_p()
        self._bind()
        flags = 0 if is_timed else EVENT_DISABLE_TIMING
        self._check(self._calls.event_create(byref(handle), flags), "make an event")
        return Event(self._handle(handle, "an event"))

    def destroy_event(self, event: Event) -> None:
        """Release an event."""
        self._bind()
        self._check(self._calls.event_destroy(event), "release an event")

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the end of the work that the stream has now."""
        self._bind()
        self._check(self._calls.event_record(event, stream), "record an event")

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make later work of the stream wait, on the device."""
        self._bind()
        self._check(self._calls.stream_wait_event(stream, event, 0), "let a stream wait")

    def query(self, event: Event) -> bool:
        """Whether the event is reached."""
        self._bind()
        code = self._calls.event_query(event)
        if code == NOT_READY:
            self._forget_error()
            return False
        self._check(code, "copy (seen at an event)")
        return True

    def synchronize(self, event: Event) -> None:
        """Block until the event is reached; other threads of Python run meanwhile."""
        self._bind()
        self._check(self._calls.event_synchronize(event), "copy (seen at an event)")

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two timed events, by the device's clock."""
        self._bind()
        milliseconds = c_float(0.0)
        code = self._calls.event_elapsed(byref(milliseconds), start, end)
        self._check(code, "read the time of a copy")
        return milliseconds.value / 1000.0

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        """Queue the copies: in one call, or one by one where the driver has no batch."""
        self._bind()
        if self._copy_batch is not None:
            code = self._copy_batch(
                dst.ctypes.data,
                src.ctypes.data,
                sizes.ctypes.data,
                len(sizes),
                # Nobody writes a chunk that is being loaded; a block is ready in stream order only.
                direction is Direction.LOAD,
                stream,
            )
            if code != NOT_SUPPORTED:
                self._check(code, f"queue {len(sizes)} copies")
                return
            self._forget_error()
            self._copy_batch = None
            logger.warning(
                "%s has a batched copy but not for this device; copies are queued one by one",
                self._calls.name,
            )
        self._copy_singly(dst, src, sizes, stream, direction)

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin host memory.

        Raises:
            TransferFailed: the driver refused, or a graph is being captured.
        """
        self._bind()
        status = c_int(0)
        code = self._calls.stream_is_capturing(self.current_stream(), byref(status))
        self._check(code, "ask for a graph capture")
        if status.value:
            raise TransferFailed(
                f"{size_bytes} bytes of host memory were to be registered with {self._calls.name} while "
                "a graph is being captured, which would break the capture: register them before"
            )
        # Flags 0: mapped and portable, with unified addressing. Source: CUDA driver API, "Unified Addressing".
        code = self._calls.host_register(address, size_bytes, 0)
        self._check(code, f"register {size_bytes} bytes of host memory")

    def unregister_host(self, address: int) -> None:
        """Undo `register_host` of exactly this address."""
        self._bind()
        self._check(self._calls.host_unregister(address), "unregister host memory")

    def synchronize_all(self) -> None:
        """Block until the device has no work left."""
        self._bind()
        self._check(self._calls.synchronize(), "wait for the device")

    def close(self) -> None:
        """Nothing of its own is left: the context is the engine's."""

    def _copy_singly(
        self, dst: Addresses, src: Addresses, sizes: Addresses, stream: Stream, direction: Direction
    ) -> None:
        calls = self._calls
        copy: Call = calls.copy_to_device if direction is Direction.LOAD else calls.copy_to_host
        pieces = zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True)
        for idx, (to, origin, size) in enumerate(pieces):
            code = copy(to, origin, size, stream)
            if code:
                self._check(code, f"queue copy {idx} of {len(sizes)}")

    def _working_on(self) -> int | None:
        """The context or device of this thread; None if there is none."""
        code, current = self._calls.current()
        self._check(code, "ask for the current device")
        return current

    def _bind(self) -> None:
        """Let this thread work where the device was made."""
        if threading.get_ident() in self._threads:
            return
        current = self._working_on()
        if current is None or self._calls.has_default:
            self._check(self._calls.set_current(self._home), "set the device of a thread")
        elif current != self._home:
            raise TransferFailed(
                f"a thread that works in another {self._calls.name} context asked for a copy: call from "
                "the thread that made the worker"
            )
        self._threads.add(threading.get_ident())

    def _handle(self, handle: c_void_p, what: str) -> int:
        if not handle.value:
            raise TransferFailed(
                f"{self._calls.name} was asked for {what} and gave none, without an error: the driver "
                "and its library do not belong together; reinstall them"
            )
        return handle.value

    def _check(self, code: int, what: str) -> None:
        if not code:
            return
        name, text = self._describe(code)
        self._forget_error()
        raise TransferFailed(f"{self._calls.name} could not {what}: {name} ({code}), {text}")

    def _describe(self, code: int) -> tuple[str, str]:
        found = []
        for call in (self._calls.error_name, self._calls.error_text):
            string = c_char_p()
            is_known = call(code, byref(string)) == 0 and string.value is not None
            found.append((string.value or b"").decode(errors="replace") if is_known else "unknown")
        return found[0], found[1]

    def _forget_error(self) -> None:
        if self._calls.forget_error is not None:
            self._calls.forget_error()

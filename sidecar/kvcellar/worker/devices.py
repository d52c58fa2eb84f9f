"""The device seam: what kvcellar needs of a device to move bytes between it and the host.

`Device` has the shape of the CUDA and HIP driver APIs: raw addresses, streams, events, one batched
copy. Handles are plain integers, which is what a driver's handles are, so no implementation leaks its
types. Implementations stand in modules of their own; `platforms` says which one serves which tensors.

This module must not know plans, jobs, torch or vLLM.
"""

from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcellar.contract import Direction

Stream = NewType("Stream", int)
"""A queue of work on the device that runs in order."""

Event = NewType("Event", int)
"""A mark in a stream that can be waited for."""

Addresses = NDArray[np.uint64]
"""Addresses or sizes in bytes, C contiguous."""


class Device(Protocol):
    """What can copy between a device and the host. One thread calls it.

    Every method may raise `TransferFailed` when the device reports an error. A copy that fails after
    it was queued shows at the next event recorded on its stream: `query` and `synchronize` of that
    event raise, each time, until it is recorded again.
    """

    @property
    def pins_host(self) -> bool:
        """Whether copies are faster from and to registered host memory."""
        ...

    def new_stream(self) -> Stream:
        """Make a stream. It is never the default stream, and does not wait for it."""
        ...

    def destroy_stream(self, stream: Stream) -> None:
        """Wait for the stream's work, then release it."""
        ...

    def current_stream(self) -> Stream:
        """The stream that the engine computes on at this moment."""
        ...

    def new_event(self, *, is_timed: bool = True) -> Event:
        """Make an event. One that was never recorded counts as reached.

        Only events that are timed may be given to `elapsed_s`.
        """
        ...

    def destroy_event(self, event: Event) -> None:
        """Release an event."""
        ...

    def record(self, event: Event, stream: Stream) -> None:
        """Mark the end of the work that the stream has now."""
        ...

    def wait_event(self, stream: Stream, event: Event) -> None:
        """Make work queued later on `stream` wait for `event`, as it is recorded now. Does not block."""
        ...

    def query(self, event: Event) -> bool:
        """Whether the event is reached. Does not block."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block until the event is reached."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Seconds between two events that were reached."""
        ...

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        """Queue one copy for each index. Does not block.

        The caller keeps the arrays, and the memory that they point to, as they are until an event
        recorded later on the stream is reached. Destinations do not overlap; the order of the
        copies is not defined. With `Direction.LOAD` the source does not change meanwhile, so it
        may be read at any time; with `Direction.STORE` it is read in stream order.
        """
        ...

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin host memory for direct access. It may take seconds. Only for a device that `pins_host`."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo `register_host` of exactly this address."""
        ...

    def synchronize_all(self) -> None:
        """Block until the device has no work left, in any stream."""
        ...

    def close(self) -> None:
        """Release what the device holds. Streams and events must be destroyed before."""
        ...

"""A device whose copies fail or vanish as a test wants, around a real one.

It follows `kvcellar.worker.devices.Device`. Unit tests use it in process; `tests/vllm/faulty_spec.py`
puts it into the workers of a real engine.
"""

from collections.abc import Callable
from enum import Enum
from itertools import count

from kvcellar.contract import Direction
from kvcellar.errors import TransferFailed
from kvcellar.worker.devices import Addresses, Device, Event, Stream


class Fault(Enum):
    """What happens to a batch of copies."""

    NONE = "none"
    REFUSE = "refuse"
    """Queueing it fails."""
    FAIL = "fail"
    """It is queued, copies nothing, and its event reports a failure."""
    SKIP = "skip"
    """It copies nothing and reports success: what a check of the contents has to notice."""


class FaultyDevice:
    """A device whose copies fail as a test wants.

    Args:
        inner: the device that does the work.
        choose: called for each batch with its direction and its number in that direction, from 0
            (a repeated batch counts again).
    """

    def __init__(self, inner: Device, choose: Callable[[Direction, int], Fault]) -> None:
        self.pins_host = inner.pins_host
        self._inner = inner
        self._choose = choose
        self._counts = {direction: count() for direction in Direction}
        self._fails_next: dict[Stream, bool] = {}
        self._failed: set[Event] = set()

    def new_stream(self) -> Stream:
        """As the inner device."""
        return self._inner.new_stream()

    def destroy_stream(self, stream: Stream) -> None:
        """As the inner device."""
        self._inner.destroy_stream(stream)

    def current_stream(self) -> Stream:
        """As the inner device."""
        return self._inner.current_stream()

    def new_event(self, *, is_timed: bool = True) -> Event:
        """As the inner device."""
        return self._inner.new_event(is_timed=is_timed)

    def destroy_event(self, event: Event) -> None:
        """As the inner device."""
        self._failed.discard(event)
        self._inner.destroy_event(event)

    def record(self, event: Event, stream: Stream) -> None:
        """As the inner device; the event fails if the batch before it was chosen to."""
        self._failed.discard(event)
        if self._fails_next.pop(stream, False):
            self._failed.add(event)
        self._inner.record(event, stream)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """As the inner device."""
        self._inner.wait_event(stream, event)

    def query(self, event: Event) -> bool:
        """As the inner device, then the chosen failure."""
        is_reached = self._inner.query(event)
        if is_reached:
            self._raise_if_failed(event)
        return is_reached

    def synchronize(self, event: Event) -> None:
        """As the inner device, then the chosen failure."""
        self._inner.synchronize(event)
        self._raise_if_failed(event)

    def elapsed_s(self, start: Event, end: Event) -> float:
        """As the inner device."""
        return self._inner.elapsed_s(start, end)

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        """Copy, refuse, fail or skip, as `choose` says."""
        number = next(self._counts[direction])
        match self._choose(direction, number):
            case Fault.NONE:
                self._inner.copy_batch(dst, src, sizes, stream, direction)
            case Fault.REFUSE:
                raise TransferFailed(f"{direction} {number} was chosen to be refused")
            case Fault.FAIL:
                self._fails_next[stream] = True
            case Fault.SKIP:
                pass

    def register_host(self, address: int, size_bytes: int) -> None:
        """As the inner device."""
        self._inner.register_host(address, size_bytes)

    def unregister_host(self, address: int) -> None:
        """As the inner device."""
        self._inner.unregister_host(address)

    def synchronize_all(self) -> None:
        """As the inner device."""
        self._inner.synchronize_all()

    def close(self) -> None:
        """As the inner device."""
        self._inner.close()

    def _raise_if_failed(self, event: Event) -> None:
        if event in self._failed:
            raise TransferFailed("these copies were chosen to fail")

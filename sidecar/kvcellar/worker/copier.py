"""Transfers of one direction: queue them, ask what is finished, wait.

A transfer goes through these states, in this order only:

- *queued*: its copies are on the copier's stream, behind an event of the compute stream, so a store
  reads what the engine has written, and a load overwrites nothing that is still being read or
  zeroed. A load that fails is queued once more.
- *settled*: its end event was reached, or it failed for good; its result is known.
- *reported*: `poll` handed out the result. Its events are used again, its arrays are let go.

Invariants: a copier has one stream, never the compute stream; results come in the order of `submit`;
the descriptor arrays of a transfer live until its end event is reached; of a transfer that is settled
no copy runs any more, failed or not, since its blocks and chunks go to others then. One thread calls a
copier.

This module must not know chunks, regions, torch or vLLM.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from kvcellar.contract import Direction
from kvcellar.errors import ConfigurationError, TransferFailed
from kvcellar.worker.devices import Device, Event, Stream
from kvcellar.worker.plan import CopyPlan

logger = logging.getLogger(__name__)


class Finished(NamedTuple):
    """The result of a transfer.

    Attributes:
        job_id: as given to `submit`.
        ok: whether all bytes are where they belong.
        size_bytes: bytes copied; 0 if not ok.
        seconds: time between start and end on the device; 0 if not ok.
        error: what went wrong, for people; empty if nothing did.
    """

    job_id: int
    ok: bool
    size_bytes: int
    seconds: float
    error: str


@dataclass(slots=True)
class _Transfer:
    job_id: int
    plan: CopyPlan
    retries_left: int
    events: list[Event] = field(default_factory=list)  # start, end
    end: Event | None = None  # None: nothing of it is on the stream, or nobody can say when it ends
    error: str = ""  # why it could not be queued
    result: Finished | None = None


class Copier:
    """The transfers of one direction.

    Args:
        device: makes the copies; it stays the caller's.
        direction: store (device to host) or load (host to device).
    """

    _RETRIES: ClassVar[dict[Direction, int]] = {Direction.STORE: 0, Direction.LOAD: 1}
    """A failed load costs a recomputation at best and the engine at worst, so it is tried again. A
    failed store loses a chunk and no more, and meanwhile the engine cannot use its blocks."""

    def __init__(self, device: Device, direction: Direction) -> None:
        self._device = device
        self._direction = direction
        self._stream: Stream | None = None
        # One for all transfers: a stream waits for an event as it was recorded at that moment.
        self._fence: Event | None = None
        self._queue: deque[_Transfer] = deque()
        self._by_job: dict[int, _Transfer] = {}
        self._free_events: list[Event] = []
        self._is_closed = False

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        """Queue a transfer. Does not block; whatever fails from here on is in its result.

        Raises:
            ConfigurationError: the job is in flight already, or the copier is closed.
        """
        if self._is_closed or job_id in self._by_job:
            why = "the copier is closed" if self._is_closed else "a job of this id is in flight"
            raise ConfigurationError(
                f"{self._direction} job {job_id} was submitted, but {why}: use a new id for each job, "
                "and none after shutdown"
            )
        transfer = _Transfer(job_id, plan, self._RETRIES[self._direction])
        self._queue.append(transfer)
        self._by_job[job_id] = transfer
        self._enqueue(transfer)

    def poll(self) -> list[Finished]:
        """The results that came since the last call, in the order of `submit`. Does not block."""
        finished: list[Finished] = []
        while self._queue and (result := self._settle(self._queue[0])) is not None:
            transfer = self._queue.popleft()
            del self._by_job[transfer.job_id]
            self._free_events += transfer.events
            finished.append(result)
        return finished

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until these jobs are settled; `poll` still reports them. Unknown ids are ignored."""
        for job_id in job_ids:
            transfer = self._by_job.get(job_id)
            if transfer is not None:
                self._settle_blocking(transfer)

    def close(self) -> None:
        """Wait for all copies and release stream and events. A second call does nothing.

        Results that were not polled are dropped. Everything is released that can be, whatever goes
        wrong on the way.

        Raises:
            TransferFailed: the device could not be drained or gave an error at release, so copies
                may still be running.
        """
        if self._is_closed:
            return
        self._is_closed = True
        with ExitStack() as release:  # in reverse order: drain, events, stream
            if self._stream is not None:
                release.callback(self._device.destroy_stream, self._stream)
            if self._fence is not None:
                release.callback(self._device.destroy_event, self._fence)
            for event in self._free_events:
                release.callback(self._device.destroy_event, event)
            for transfer in self._queue:
                for event in transfer.events:
                    release.callback(self._device.destroy_event, event)
            release.callback(self._forget)
            for transfer in reversed(self._queue):
                transfer.retries_left = 0
                release.callback(self._settle_blocking, transfer)

    def _forget(self) -> None:
        if self._queue:
            logger.info("dropped the results of %d %s jobs", len(self._queue), self._direction)
        self._queue.clear()
        self._by_job.clear()
        self._free_events.clear()

    def _enqueue(self, transfer: _Transfer) -> None:
        """Put the copies on the stream; a failure is kept in the transfer."""
        transfer.error, transfer.end = "", None
        try:
            self._enqueue_copies(transfer)
        except TransferFailed as error:
            transfer.error = str(error)

    def _enqueue_copies(self, transfer: _Transfer) -> None:
        device = self._device
        if self._stream is None:
            self._stream = device.new_stream()
        if self._fence is None:
            self._fence = device.new_event(is_timed=False)
        while len(transfer.events) < 2:
            transfer.events.append(
                self._free_events.pop() if self._free_events else device.new_event()
            )
        start, end = transfer.events
        device.record(self._fence, device.current_stream())
        device.wait_event(self._stream, self._fence)
        device.record(start, self._stream)
        try:
            self._copy(transfer.plan, self._stream)
        finally:
            # A batch that fails may have queued some of its copies: they are waited for as well.
            device.record(end, self._stream)
            transfer.end = end

    def _copy(self, plan: CopyPlan, stream: Stream) -> None:
        if not len(plan.sizes):
            return
        is_store = self._direction is Direction.STORE
        dst, src = (plan.host, plan.device) if is_store else (plan.device, plan.host)
        self._device.copy_batch(dst, src, plan.sizes, stream, self._direction)

    def _settle(self, transfer: _Transfer) -> Finished | None:
        """The result of a transfer, None while its copies run. Does not block."""
        while transfer.result is None:
            if not self._conclude(transfer, self._device.query):
                return None
        return transfer.result

    def _settle_blocking(self, transfer: _Transfer) -> None:
        while transfer.result is None:
            self._conclude(transfer, self._reach)

    def _reach(self, event: Event) -> bool:
        self._device.synchronize(event)
        return True

    def _conclude(self, transfer: _Transfer, is_reached: Callable[[Event], bool]) -> bool:
        """Give a transfer its result or queue it once more; False if its copies still run."""
        seconds, error = 0.0, transfer.error
        try:
            if transfer.end is not None:
                if not is_reached(transfer.end):
                    return False
                seconds = self._device.elapsed_s(transfer.events[0], transfer.end)
        except TransferFailed as failure:
            error = error or str(failure)
        if not error:
            size_bytes = transfer.plan.total_bytes
            transfer.result = Finished(transfer.job_id, True, size_bytes, seconds, "")
        elif transfer.retries_left:
            transfer.retries_left -= 1
            logger.warning("%s job %d is tried again: %s", self._direction, transfer.job_id, error)
            self._enqueue(transfer)
        else:
            self._drain()
            transfer.result = Finished(transfer.job_id, False, 0, 0.0, error)
        return True

    def _drain(self) -> None:
        """Wait for everything: after an error nobody can say which of the copies still run.

        If that fails as well the device is broken, and so is whatever the engine would do with it next.
        """
        try:
            self._device.synchronize_all()
        except TransferFailed as error:
            logger.error("%s copies could not be waited for: %s", self._direction, error)  # noqa: TRY400

"""What a process of an engine has of its region once it is attached: `attach` makes these.

`Region` is a rank's own share, mapped; `SchedulerHandle` is the scheduler's place, which maps nothing.
Each is called by one thread, may be closed again, and does nothing in a forked child.
"""

import logging
import os
from dataclasses import dataclass, replace

from kvcellar.contract import Direction, Pin
from kvcellar.errors import KVCellarError, TransferFailed
from kvcellar.region.geometry import Geometry
from kvcellar.region.mapping import Mapping
from kvcellar.region.metadata import Counters
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.participants import Participant
from kvcellar.worker.devices import Device
from kvcellar.worker.pin import PinnedMemory, PinRequest, cut, pin_on_all_ranks
from kvcellar.worker.ranks import Exchange, exchange_alone

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PinTerms:
    """How a region may be pinned: whether at all (KVCELLAR_PIN), and with which ranks."""

    wish: Pin = Pin.AUTO
    exchange: Exchange = exchange_alone


class Region:
    """This rank's share of the region: mapped, addressable by chunk, counted. End it with `close`.

    The mapping covers the rank's own range only: chunk `i` begins at
    `base_address + i * geometry.chunk_stride_bytes`.
    """

    def __init__(
        self,
        participant: Participant,
        mapping: Mapping | None,
        rank: int,
        owned: OwnedRegion | None,
        terms: PinTerms,
    ) -> None:
        """Take over an attached participant; use `attach.attach`."""
        self._participant = participant
        self._mapping = mapping
        self._owned = owned
        self._terms = terms
        self._pinned: PinnedMemory | None = None
        self._counters = Counters()
        self._pid = os.getpid()
        self.rank = rank

    @property
    def geometry(self) -> Geometry:
        """The geometry of the session, the same on all ranks."""
        return self._participant.geometry

    @property
    def num_chunks(self) -> int:
        """Chunks of this rank; 0 if the region is too small for one."""
        return self.geometry.num_chunks

    @property
    def base_address(self) -> int:
        """Address of chunk 0 of this rank, a multiple of 2 MiB; 0 without chunks or after `close`."""
        return self._mapping.address if self._mapping and self._mapping.length_bytes else 0

    @property
    def session(self) -> str:
        """The session, 32 hexadecimal digits."""
        return self._participant.session.session

    @property
    def data_identity(self) -> tuple[int, int]:
        """(device, inode) of the data file."""
        return self._participant.data_identity

    @property
    def generation(self) -> int:
        """The generation of the contents."""
        return self._participant.session.generation

    def add_counters(self, direction: Direction, num_bytes: int, *, ok: bool) -> None:
        """Count one finished transfer and publish it in this rank's row."""
        now = self._counters
        if direction is Direction.STORE:
            self._counters = replace(
                now,
                store_bytes=now.store_bytes + (num_bytes if ok else 0),
                stores_ok=now.stores_ok + ok,
                stores_failed=now.stores_failed + (not ok),
            )
        else:
            self._counters = replace(
                now,
                load_bytes=now.load_bytes + (num_bytes if ok else 0),
                loads_ok=now.loads_ok + ok,
                loads_failed=now.loads_failed + (not ok),
            )
        self._participant.report(self._counters)

    def mark_failed_store(self, chunk: int) -> None:
        """Tell the scheduler that the last store into `chunk` failed, before the store is reported done.

        Raises:
            TransferFailed: the mark cannot be written, so the chunk would pass for a good one.
        """
        try:
            self._participant.marks.mark(self.rank, chunk)
        except OSError as error:
            raise TransferFailed(
                f"the failed store of chunk {chunk} cannot be marked in the index file of region "
                f"{self._participant.engine_id} ({error.strerror}): start the engine again"
            ) from error

    def pin(self, device: Device) -> bool:
        """Register this rank's chunks with the device's driver, on all ranks or on none.

        A collective call: every rank has to make it, once; a repeated one only answers. It does nothing
        for a device that does not pin, and for a region without chunks, which are the same on all ranks.

        Returns:
            Whether the chunks are pinned.

        Raises:
            NotReady: some rank's part of the region cannot be read; so on all ranks.
        """
        if self._pinned is None and device.pins_host and self.base_address and self.num_chunks:
            stride_bytes = self.geometry.chunk_stride_bytes
            request = PinRequest(
                name=str(self._participant.engine_id),
                rank=self.rank,
                pieces=cut(self.base_address, stride_bytes, self.num_chunks),
                wish=self._terms.wish,
                lock_fd=self._participant.data_fd,
                exchange=self._terms.exchange,
            )
            self._pinned = pin_on_all_ranks(device, request)
            self._publish_pinned()
        return self.is_pinned

    @property
    def is_pinned(self) -> bool:
        """Whether this rank's chunks are registered with the device's driver now."""
        return self._pinned is not None and self._pinned.size_bytes > 0

    def unpin(self) -> None:
        """Undo `pin`, once no copy runs any more. A second call does nothing.

        Raises:
            TransferFailed: the driver refused a piece; the others are undone all the same.
        """
        if self._pinned is None or os.getpid() != self._pid:
            return
        try:
            self._pinned.close()
        finally:
            self._publish_pinned()

    def _publish_pinned(self) -> None:
        self._participant.report(self._counters, pinned=self.is_pinned)

    def close(self) -> None:
        """Unmap, leave the slot, and end an owned region with its names; `unpin` comes before.

        Safe to call again, or in a child.
        """
        if os.getpid() != self._pid:
            return
        if self._mapping is not None:
            self._mapping.close()
        owned, self._owned = self._owned, None
        if owned is not None:
            end_ownership(owned, self.session)
        self._participant.close()


class SchedulerHandle:
    """The scheduler's place in the region: counts, failure marks, its row. End it with `close`."""

    def __init__(self, participant: Participant) -> None:
        """Take over an attached participant; use `attach.attach_scheduler`."""
        self._participant = participant

    @property
    def geometry(self) -> Geometry:
        """The geometry that rank 0 wrote."""
        return self._participant.geometry

    @property
    def num_chunks(self) -> int:
        """Chunks that the index may hand out."""
        return self.geometry.num_chunks

    def take_failed(self, chunks: list[int]) -> set[int]:
        """Those of `chunks` whose last store failed on some rank; their marks are cleared.

        Raises:
            TransferFailed: the marks cannot be read, so nobody knows which chunks are good.
        """
        try:
            return self._participant.marks.take_failed(chunks)
        except OSError as error:
            raise TransferFailed(
                f"the marks of failed stores in the index file of region {self._participant.engine_id} cannot be read "
                f"({error.strerror}): start the engine again"
            ) from error

    def report(self, counters: Counters) -> None:
        """Publish the scheduler's counters in its row."""
        self._participant.report(counters)

    def close(self) -> None:
        """Leave the slot. Safe to call again."""
        self._participant.close()


def end_ownership(owned: OwnedRegion, session: str) -> None:
    """End an engine's ownership. What cannot be removed now is removed by the next start of an engine."""
    try:
        owned.remove_names(session)
    except (KVCellarError, OSError) as error:
        logger.warning("the names of region %s stay for now: %s", owned.engine_id, error)
    owned.close()

"""What a process of an engine has of its region once it is attached: `attach` makes these.

`Region` is a rank's own share, mapped; `SchedulerHandle` is the scheduler's place, which maps nothing.
Each is called by one thread, may be closed again, and does nothing in a forked child.
"""

import logging
import os
from dataclasses import replace

from kvcellar.contract import Direction
from kvcellar.errors import KVCellarError
from kvcellar.region.geometry import Geometry
from kvcellar.region.mapping import Mapping
from kvcellar.region.metadata import Counters
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.participants import Participant

logger = logging.getLogger(__name__)


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
    ) -> None:
        """Take over an attached participant; use `attach.attach`."""
        self._participant = participant
        self._mapping = mapping
        self._owned = owned
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
        """Tell the scheduler that the last store into `chunk` failed, before the store is reported done."""
        self._participant.marks.mark(self.rank, chunk)

    def set_pinned(self, is_pinned: bool) -> None:
        """Publish whether this rank's range is registered with the device driver."""
        self._participant.report(self._counters, pinned=is_pinned)

    def close(self) -> None:
        """Unmap, leave the slot, and end an owned region with its names. Safe to call again, or in a child."""
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
        """Those of `chunks` whose last store failed on some rank; their marks are cleared."""
        return self._participant.marks.take_failed(chunks)

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

"""The engine's side of a region: join a session, hold a slot, leave.

A participant is one process of one engine start. It holds a slot: the lock on a byte far behind the end
of the data file, on the very description that it maps. So the slot is held exactly as long as any
descriptor or mapping of the participant lives, in whatever child, and goes however it dies.

Who comes in, and in which order:

1. Rank 0 opens the session (`open_session`). It waits until the region is reserved and until nobody of
   another session holds a slot (lingering ranks of a killed engine), takes a slot, lays out the index
   file and then writes the session: geometry, fingerprint, a new generation.
2. The other ranks join (`join_session`) once the page shows their own session. Their geometry, computed
   from the same capacity by the same function, has to be the one that the page shows.
3. The scheduler joins last (`join_scheduler`), only if the slots of all ranks are held in its session.

A taken (role, rank) is refused, a session is never joined by another one, and a region whose name was
removed is never made again from this side.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import replace

from kvcellar.contract import EngineId
from kvcellar.errors import DoesNotFit, NotReady, RanksDisagree
from kvcellar.region import making, metafile
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import Geometry
from kvcellar.region.index_file import FailureMarks, format_index
from kvcellar.region.joining import (
    JoinRequest,
    Place,
    all_ranks_are_here,
    join,
    others_are_gone,
    session_is_ours,
)
from kvcellar.region.metadata import Counters, SessionSection
from kvcellar.region.names import data_name, index_name, meta_name

logger = logging.getLogger(__name__)

GeometryOf = Callable[[int], Geometry]
"""The geometry that this process computes for a capacity in bytes."""


class Participant:
    """An attached process: open files, a held slot, its row. Made by the functions of this module."""

    def __init__(
        self,
        directory: RegionDirectory,
        request: JoinRequest,
        place: Place,
        session: SessionSection,
    ) -> None:
        """Take over what `Place` holds: open descriptors and a slot."""
        self._directory = directory
        self._engine_id = request.engine_id
        self._place = place
        self._pid = os.getpid()
        self._is_report_lost = False
        try:
            self._data_identity = making.identity(place.data_fd)
        except OSError:
            place.close()
            raise
        self.session = session
        self.marks = FailureMarks(place.index_fd, session.geometry)

    @property
    def engine_id(self) -> EngineId:
        """The region's name."""
        return self._engine_id

    @property
    def geometry(self) -> Geometry:
        """The geometry of the session, the same in all its processes."""
        return self.session.geometry

    @property
    def data_fd(self) -> int:
        """The description that holds the slot; map it, so that the mapping holds the slot as well."""
        return self._place.data_fd

    @property
    def slot(self) -> int:
        """The slot that is held."""
        return self._place.slot

    @property
    def data_identity(self) -> tuple[int, int]:
        """(device, inode) of the data file, also after `close`: all ranks of an engine must see the same."""
        return self._data_identity

    def report(self, counters: Counters, *, pinned: bool | None = None) -> None:
        """Publish this participant's counters (two small writes, a few microseconds).

        They are for people: a page that cannot be written is logged once and stops nothing.
        """
        place = self._place
        if os.getpid() != self._pid or place.meta_fd < 0:
            return
        place.row = replace(
            place.row, counters=counters, pinned=place.row.pinned if pinned is None else pinned
        )
        try:
            metafile.write_slot(place.meta_fd, place.slot, place.row)
        except OSError as error:
            if not self._is_report_lost:
                logger.warning(
                    "counters of region %s are not published: %s", self._engine_id, error
                )
            self._is_report_lost = True

    def remove_names(self) -> bool:
        """Remove the region's names, so that nothing can leak; for engines that own their region.

        All participants keep what they have open. Only files whose identity this process knows go.
        """
        place = self._place
        with self._directory.lock():
            nonce = metafile.read_owner(place.meta_fd).nonce
            if not self._directory.unlink_if(
                meta_name(self._engine_id), making.identity(place.meta_fd)
            ):
                return False
            self._directory.unlink_if(data_name(self._engine_id, nonce), self.data_identity)
            self._directory.unlink_if(
                index_name(self._engine_id, nonce), making.identity(place.index_fd)
            )
        return True

    def close(self) -> None:
        """Leave: the slot goes with the last descriptor and mapping. Safe to call again, or in a child."""
        if os.getpid() == self._pid:
            self.marks.close()
            self._place.close()
            self._directory.close()


def open_session(
    directory: RegionDirectory, request: JoinRequest, geometry_of: GeometryOf
) -> Participant:
    """Join as rank 0 and begin a session: a new generation with this engine's geometry.

    Blocks until the region is reserved and nobody of another session is left.

    Raises:
        NotReady: the region is Failed, or made no progress until the deadline.
        RegionHeld: processes of another session stayed until the deadline.
        RankTaken, NoFreeSlot: see the classes.
        RegionMismatch, MetadataDamaged: the files are not what the owner made.
        DoesNotFit: no room for the index file.
    """
    place, contents = join(directory, request, others_are_gone)
    try:
        geometry = geometry_of(contents.owner.capacity_bytes)
        format_index(place.index_fd, geometry)
        before = contents.session
        session = SessionSection(
            request.session,
            request.fingerprint.ljust(64, "0"),
            generation=before.generation + 1 if before else 1,
            engine_starts=before.engine_starts + 1 if before else 1,
            geometry=geometry,
        )
        metafile.write_session(place.meta_fd, session)
    except OSError as error:
        place.close()
        raise DoesNotFit(
            f"the index file of region {request.engine_id} cannot be made ({error.strerror}): leave "
            "0.03 % of the capacity free on the volume besides the region",
            asked_bytes=contents.owner.capacity_bytes // 4096,
            free_bytes=0,
            binding_limit="tmpfs",
        ) from error
    except BaseException:
        place.close()
        raise
    return Participant(directory, request, place, session)


def join_session(
    directory: RegionDirectory, request: JoinRequest, geometry_of: GeometryOf
) -> Participant:
    """Join as a rank above 0, in the session that rank 0 began.

    Raises:
        RanksDisagree: this rank computes another geometry than rank 0.
        Others as `open_session`.
    """
    place, contents = join(directory, request, session_is_ours)
    session = contents.session
    try:
        own = geometry_of(contents.owner.capacity_bytes)
    except BaseException:
        place.close()
        raise
    if session is None or session.geometry != own:
        place.close()
        raise RanksDisagree(
            f"rank {request.rank} computes {own} for region {request.engine_id}, rank 0 wrote "
            f"{session.geometry if session else None}: all ranks need the same vLLM, model and settings"
        )
    return Participant(directory, request, place, session)


def join_scheduler(directory: RegionDirectory, request: JoinRequest) -> Participant:
    """Join as the scheduler, which is made after all workers: no waiting, all ranks have to be there.

    Raises:
        NotReady: the region shows another session, or not every rank holds a slot in this one.
    """
    place, contents = join(directory, replace(request, timeout_s=0.0), all_ranks_are_here)
    if contents.session is None:  # unreachable: `all_ranks_are_here` looked at it
        place.close()
        raise NotReady(f"region {request.engine_id} has no session")
    return Participant(directory, request, place, contents.session)

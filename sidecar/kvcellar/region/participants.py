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
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvcellar.contract import EngineId, RegionState, Role
from kvcellar.errors import (
    DoesNotFit,
    KVCellarError,
    NoFreeSlot,
    NotReady,
    RanksDisagree,
    RankTaken,
    RegionHeld,
    RegionMismatch,
)
from kvcellar.region import file, locks, metafile
from kvcellar.region.directory import RegionDirectory, data_name, index_name, meta_name
from kvcellar.region.geometry import Geometry
from kvcellar.region.index_file import FailureMarks, format_index
from kvcellar.region.metadata import MAX_SLOTS, Counters, OwnerSection, SessionSection, SlotRow
from kvcellar.region.metafile import MetaContents

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_REPORT_S = 10.0
ATTACHABLE = frozenset({RegionState.RESERVED, RegionState.READY})
"""States in which every page is promised, so that an engine may attach."""

GeometryOf = Callable[[int], Geometry]
"""The geometry that this process computes for a capacity in bytes."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Who wants to join.

    Attributes:
        session: 32 hexadecimal digits that all processes of one engine start share.
        fingerprint: up to 64 hexadecimal digits over what gives the bytes their meaning.
        timeout_s: how long to wait *without progress*: a region that goes on being reserved is waited for.
    """

    engine_id: EngineId
    session: str
    role: Role
    rank: int
    world_size: int
    fingerprint: str = ""
    timeout_s: float = 300.0


class Participant:
    """An attached process: open files, a held slot, its row. Made by the functions of this module."""

    def __init__(
        self,
        directory: RegionDirectory,
        request: JoinRequest,
        place: "_Place",
        session: SessionSection,
    ) -> None:
        """Take over what `_Place` holds: open descriptors and a slot."""
        self._directory = directory
        self._engine_id = request.engine_id
        self._place = place
        self._pid = os.getpid()
        self.session = session
        self.marks = FailureMarks(place.index_fd, session.geometry)
        close_in_child = weakref.WeakMethod(place.close)
        os.register_at_fork(after_in_child=lambda: _call(close_in_child))

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
        """(device, inode) of the data file: all ranks of an engine must see the same."""
        return _identity(self._place.data_fd)

    def report(self, counters: Counters, *, pinned: bool | None = None) -> None:
        """Publish this participant's counters (two small writes, a few microseconds)."""
        place = self._place
        if os.getpid() != self._pid or place.meta_fd < 0:
            return
        place.row = replace(
            place.row, counters=counters, pinned=place.row.pinned if pinned is None else pinned
        )
        metafile.write_slot(place.meta_fd, place.slot, place.row)

    def ranks_held(self) -> list[int]:
        """Ranks whose workers hold slots of this session now."""
        contents = metafile.read_contents(self._place.meta_fd)
        held = locks.held_slots(self._place.data_fd, MAX_SLOTS)
        return _ranks(contents, [*held, self.slot], self.session.session)

    def remove_names(self) -> bool:
        """Remove the region's names, so that nothing can leak; for engines that own their region.

        All participants keep what they have open. Only files whose identity this process knows go.
        """
        place = self._place
        with self._directory.lock():
            nonce = metafile.read_owner(place.meta_fd).nonce
            if not self._directory.unlink_if(meta_name(self._engine_id), _identity(place.meta_fd)):
                return False
            self._directory.unlink_if(data_name(self._engine_id, nonce), self.data_identity)
            self._directory.unlink_if(index_name(self._engine_id, nonce), _identity(place.index_fd))
        return True

    def close(self) -> None:
        """Leave: the slot goes with the last descriptor and mapping. Safe to call again, or in a child."""
        if os.getpid() == self._pid:
            self._place.close()
            self._directory.close()


class _Place:
    """Open descriptors and a held slot while a process joins, and afterwards inside `Participant`."""

    def __init__(self, meta_fd: int, data_fd: int, index_fd: int) -> None:
        self.meta_fd = meta_fd
        self.data_fd = data_fd
        self.index_fd = index_fd
        self.slot = -1
        self.row = SlotRow("0" * 32, Role.WORKER, 0, 0.0)

    @classmethod
    def open(
        cls, directory: RegionDirectory, meta_fd: int, engine_id: EngineId, owner: OwnerSection
    ) -> "_Place":
        """Open what the page names; the data file has to be the very one, whole."""
        name = data_name(engine_id, owner.nonce)
        try:
            data_fd = directory.open_file(name)
        except FileNotFoundError as error:
            raise RegionMismatch(
                f"the data file {name} of region {engine_id} is gone: {_RESTART}"
            ) from error
        place = cls(meta_fd, data_fd, -1)
        status = os.fstat(data_fd)
        found = (status.st_dev, status.st_ino, status.st_size)
        if found != (owner.data_device, owner.data_inode, owner.capacity_bytes):
            os.close(data_fd)
            raise RegionMismatch(
                f"the data file {name} is (device, inode, bytes) {found}, the sidecar made "
                f"{(owner.data_device, owner.data_inode, owner.capacity_bytes)}: {_RESTART}"
            )
        try:
            place.index_fd = directory.open_file(index_name(engine_id, owner.nonce))
        except (KVCellarError, OSError):
            os.close(data_fd)
            raise
        return place

    def take(self, slot: int, row: SlotRow) -> None:
        """Take a free slot and write its row. Call it under the big lock, which makes it free of races."""
        if not locks.try_lock(self.data_fd, locks.SLOT_BASE + slot):
            raise NoFreeSlot(
                f"slot {slot} of the region was taken at the same moment: start the engine again"
            )
        self.slot, self.row = slot, row
        metafile.write_slot(self.meta_fd, slot, row)

    def close(self) -> None:
        """Close, never unlock: in a forked child an unlock would free the parent's slot."""
        for fd in (self.index_fd, self.data_fd, self.meta_fd):
            if fd >= 0:
                os.close(fd)
        self.meta_fd = self.data_fd = self.index_fd = -1


_RESTART = "restart the sidecar container, which makes the region anew once nobody holds it"


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
    place, contents = _join(directory, request, _others_are_gone)
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
    except KVCellarError:
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
    place, contents = _join(directory, request, _session_is_ours)
    session = contents.session
    own = geometry_of(contents.owner.capacity_bytes)
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
    place, contents = _join(directory, replace(request, timeout_s=0.0), _all_ranks_are_here)
    if contents.session is None:  # unreachable: `_all_ranks_are_here` looked at it
        place.close()
        raise NotReady(f"region {request.engine_id} has no session")
    return Participant(directory, request, place, contents.session)


# --- when a process may come in: a sentence why not yet, or an empty one ----------------------------------

_Admit = Callable[[JoinRequest, MetaContents, list[int]], str]


def _others_are_gone(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
    strangers = [slot for slot in held if not _is_ours(contents, slot, request.session)]
    if not strangers:
        return ""
    who = ", ".join(_describe(contents, slot) for slot in strangers)
    return f"region {request.engine_id} is still held by another engine start ({who})"


def _session_is_ours(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
    if contents.session is not None and contents.session.session == request.session:
        return ""
    return f"rank 0 has not opened this engine start's session on region {request.engine_id}"


def _all_ranks_are_here(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
    if missing := _session_is_ours(request, contents, held):
        return missing
    here = _ranks(contents, held, request.session)
    if here == list(range(request.world_size)):
        return ""
    return f"of {request.world_size} ranks only {here} are attached to region {request.engine_id}"


def _ranks(contents: MetaContents, held: list[int], session: str) -> list[int]:
    rows = [contents.rows[slot] for slot in held if _is_ours(contents, slot, session)]
    return sorted(row.rank for row in rows if row.role is Role.WORKER)


def _is_ours(contents: MetaContents, slot: int, session: str) -> bool:
    row = contents.rows.get(slot)
    return row is not None and row.session == session


def _describe(contents: MetaContents, slot: int) -> str:
    row = contents.rows.get(slot)
    return (
        f"slot {slot}"
        if row is None
        else f"{row.role} {row.rank} since {time.ctime(row.since_unix_s)}"
    )


# --- the loop that all three share ------------------------------------------------------------------------


def _join(
    directory: RegionDirectory, request: JoinRequest, admit: _Admit
) -> tuple[_Place, MetaContents]:
    """Try until admitted, failed, or no progress for `timeout_s`. Progress: reserved bytes or the reason change."""
    began = last_progress = time.monotonic()
    reported = began
    seen: tuple[int, str] | None = None
    while True:
        outcome = _try_join(directory, request, admit)
        if not isinstance(outcome, _Wait):
            return outcome
        now = time.monotonic()
        if (outcome.reserved_bytes, outcome.why) != seen:
            seen, last_progress = (outcome.reserved_bytes, outcome.why), now
        if now - last_progress >= request.timeout_s:
            waited = f"{outcome.why}; waited {now - began:.1f} s, {request.timeout_s:g} s of them without progress"
            raise outcome.error(
                f"{waited} (KVCELLAR_ATTACH_TIMEOUT): look at `kvcellar status` and the sidecar's log"
            )
        if now - reported >= _REPORT_S:
            reported = now
            logger.info(
                "waiting to attach: %s (%d bytes reserved)", outcome.why, outcome.reserved_bytes
            )
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class _Wait:
    """Not yet: why, the progress so far, and the error if it stays so."""

    why: str
    reserved_bytes: int = 0
    error: type[KVCellarError] = NotReady


def _try_join(
    directory: RegionDirectory, request: JoinRequest, admit: _Admit
) -> "tuple[_Place, MetaContents] | _Wait":
    with directory.lock():
        try:
            meta_fd = directory.open_file(meta_name(request.engine_id))
        except FileNotFoundError:
            return _Wait(f"there is no region {request.engine_id} in {directory.path}")
        place: _Place | None = None
        try:
            contents = metafile.read_contents(meta_fd)
            if waiting := _not_attachable(directory, request, contents.owner):
                return waiting
            place = _Place.open(directory, meta_fd, request.engine_id, contents.owner)
            held = locks.held_slots(place.data_fd, MAX_SLOTS)
            if why := admit(request, contents, held):
                return _Wait(why, error=RegionHeld if admit is _others_are_gone else NotReady)
            place.take(_free_slot(request, contents, held), _row(request))
            joined, place = place, None
            meta_fd = -1
            return joined, contents
        finally:
            if place is not None:
                place.close()
            elif meta_fd >= 0:
                os.close(meta_fd)


def _not_attachable(
    directory: RegionDirectory, request: JoinRequest, owner: OwnerSection
) -> _Wait | None:
    if owner.state in ATTACHABLE:
        return None
    if owner.state is RegionState.FAILED:
        raise NotReady(f"region {request.engine_id} failed: {owner.reason}")
    reserved = 0
    try:
        data_fd = directory.open_file(data_name(request.engine_id, owner.nonce), os.O_RDONLY)
        reserved = file.reserved_bytes(data_fd)
        os.close(data_fd)
    except FileNotFoundError:
        pass
    return _Wait(f"region {request.engine_id} is {owner.state}", reserved)


def _free_slot(request: JoinRequest, contents: MetaContents, held: list[int]) -> int:
    for slot in held:
        row = contents.rows.get(slot)
        if row is not None and (row.role, row.rank) == (request.role, request.rank):
            raise RankTaken(
                f"{request.role} {request.rank} of region {request.engine_id} is held by a living process since "
                f"{time.ctime(row.since_unix_s)}: two engines may not share an engine id"
            )
    free = next((slot for slot in range(MAX_SLOTS) if slot not in held), None)
    if free is None:
        raise NoFreeSlot(
            f"{request.role} {request.rank} cannot attach to region {request.engine_id}: all {MAX_SLOTS} slots are "
            f"held; an engine may have at most {MAX_SLOTS - 1} ranks"
        )
    return free


def _row(request: JoinRequest) -> SlotRow:
    return SlotRow(request.session, request.role, request.rank, time.time())


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _call(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    function = method()
    if function is not None:
        function()

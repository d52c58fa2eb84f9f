"""Coming into a region: the loop that waits, the rules of admission, and taking a slot.

`join` is the one way in. Under the big lock it opens the page and the files that the page names, looks
at the held slots, asks a rule of admission, and takes a free slot: so no two processes can take one
slot, and nobody comes in between a look and a take.

No rule lets a process in beside a slot of another engine start. For rank 0 alone that would not be
enough: between its taking a slot and its writing the session the page still shows the old session, and
a late rank of that one would come in beside it.
"""

import logging
import math
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcellar.contract import EngineId, Mode, RegionState, Role
from kvcellar.errors import (
    ConfigurationError,
    KVCellarError,
    NoFreeSlot,
    NotReady,
    RankTaken,
    RegionHeld,
    RegionMismatch,
)
from kvcellar.region import file, locks, metafile
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.forks import close_in_children
from kvcellar.region.frame import MAX_SLOTS
from kvcellar.region.metadata import OwnerSection, SlotRow
from kvcellar.region.metafile import MetaContents
from kvcellar.region.names import data_name, index_name, meta_name
from kvcellar.region.states import ATTACHABLE
from kvcellar.region.wholeness import loss_by_state

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_REPORT_S = 10.0
_HEAL_S = 5.0
"""How long a damaged region is waited for: its sidecar makes it anew within a second of its last holder's end."""
_RESTART = "restart the sidecar container, which makes the region anew once nobody holds it"


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

    def __post_init__(self) -> None:
        """Refuse what could not be written into the page.

        Raises:
            ConfigurationError: with the value and the rule.
        """
        if not 0 <= self.rank < self.world_size:
            raise ConfigurationError(
                f"rank {self.rank} of world size {self.world_size} cannot attach to region {self.engine_id}: a rank is "
                "in [0, world size); fold it with fold_rank first"
            )
        if not _is_text("[0-9a-f]{32}", self.session):
            raise ConfigurationError(
                f"session {self.session!r} cannot be used for region {self.engine_id}: a session is 32 hexadecimal "
                "digits, the same in all processes of one engine start"
            )
        if not _is_text("[0-9a-f]{0,64}", self.fingerprint):
            raise ConfigurationError(
                f"fingerprint {self.fingerprint!r} cannot be used for region {self.engine_id}: a fingerprint is up to "
                "64 hexadecimal digits"
            )
        if not _is_wait(self.timeout_s):
            raise ConfigurationError(
                f"timeout_s={self.timeout_s!r} cannot be used for region {self.engine_id}: give seconds, 0 or more and "
                "not without end (KVCELLAR_ATTACH_TIMEOUT)"
            )


def _is_text(pattern: str, value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_wait(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < math.inf


class Place:
    """Open descriptors and a held slot while a process joins, and afterwards inside `Participant`."""

    def __init__(self, meta_fd: int, data_fd: int, index_fd: int) -> None:
        self.meta_fd = meta_fd
        self.data_fd = data_fd
        self.index_fd = index_fd
        self.slot = -1
        self.row = SlotRow("0" * 32, Role.WORKER, 0, 0.0)
        close_in_children(self)

    @classmethod
    def open(
        cls, directory: RegionDirectory, meta_fd: int, engine_id: EngineId, owner: OwnerSection
    ) -> "Place":
        """Open what the page names; the data file has to be the very one, whole. Takes `meta_fd` over."""
        name = data_name(engine_id, owner.nonce)
        try:
            data_fd = directory.open_file(name)
        except FileNotFoundError as error:
            raise RegionMismatch(
                f"the data file {name} of region {engine_id} is gone: {_RESTART}"
            ) from error
        place = cls(meta_fd, data_fd, -1)
        try:
            status = os.fstat(data_fd)
            found = (status.st_dev, status.st_ino, status.st_size)
            if found != (owner.data_device, owner.data_inode, owner.capacity_bytes):
                raise RegionMismatch(
                    f"the data file {name} is (device, inode, bytes) {found}, the sidecar made "
                    f"{(owner.data_device, owner.data_inode, owner.capacity_bytes)}: {_RESTART}"
                )
            if lost := loss_by_state(data_fd, engine_id, owner):
                raise RegionMismatch(f"{lost}: {_RESTART}")
            place.index_fd = directory.open_file(index_name(engine_id, owner.nonce))
        except (KVCellarError, OSError):
            place.data_fd = -1
            os.close(data_fd)
            raise
        return place

    def take(self, slot: int, row: SlotRow) -> None:
        """Write the row of a free slot and take it. Call it under the big lock, which makes it free of races.

        The row first: a process killed in between must not leave a child that holds the slot under the
        row of its last holder.
        """
        metafile.write_slot(self.meta_fd, slot, row)
        if not locks.try_lock(self.data_fd, locks.SLOT_BASE + slot):
            raise NoFreeSlot(
                f"slot {slot} of the region was taken at the same moment: start the engine again"
            )
        self.slot, self.row = slot, row

    def close(self) -> None:
        """Close, never unlock: in a forked child an unlock would free the parent's slot."""
        fds = self.index_fd, self.data_fd, self.meta_fd
        self.meta_fd = self.data_fd = self.index_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def close_in_child(self) -> None:
        """Close the descriptors: a child that kept them would hold the slot of a killed parent."""
        self.close()


# --- when a process may come in: a sentence why not yet, or an empty one ----------------------------------

Admit = Callable[[JoinRequest, MetaContents, list[int]], str]


def others_are_gone(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
    """Rank 0 comes in once nobody of another engine start is left."""
    strangers = [slot for slot in held if not _is_ours(contents, slot, request.session)]
    if not strangers:
        return ""
    who = ", ".join(_describe(contents, slot) for slot in strangers)
    return f"region {request.engine_id} is still held by another engine start ({who})"


def session_is_ours(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
    """A rank above 0 comes in once rank 0 has opened its session, and beside no other session."""
    if contents.session is not None and contents.session.session == request.session:
        return others_are_gone(request, contents, held)
    return f"rank 0 has not opened this engine start's session on region {request.engine_id}"


def all_ranks_are_here(request: JoinRequest, contents: MetaContents, held: list[int]) -> str:
    """The scheduler comes in only beside every rank of its own session."""
    if missing := session_is_ours(request, contents, held):
        return missing
    here = ranks_here(contents, held, request.session)
    if here == list(range(request.world_size)):
        return ""
    return f"of {request.world_size} ranks only {here} are attached to region {request.engine_id}"


def ranks_here(contents: MetaContents, held: list[int], session: str) -> list[int]:
    """Ranks, sorted, whose workers hold one of the `held` slots in `session`."""
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


def join(
    directory: RegionDirectory, request: JoinRequest, admit: Admit
) -> tuple[Place, MetaContents]:
    """Try until admitted, failed, or no progress for `timeout_s`. Progress: reserved bytes or the reason change."""
    began = last_progress = time.monotonic()
    reported = began
    seen: tuple[int, str] | None = None
    while True:
        outcome = _tryjoin(directory, request, admit)
        if not isinstance(outcome, _Wait):
            return outcome
        now = time.monotonic()
        if (outcome.reserved_bytes, outcome.why) != seen:
            seen, last_progress = (outcome.reserved_bytes, outcome.why), now
        timeout_s = min(request.timeout_s, outcome.most_s)
        if now - last_progress >= timeout_s:
            waited = f"{outcome.why}; waited {now - began:.1f} s, {timeout_s:g} s of them without progress"
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
    """Not yet: why, the progress so far, the error if it stays so, and how long it may at most."""

    why: str
    reserved_bytes: int = 0
    error: type[KVCellarError] = NotReady
    most_s: float = math.inf

    @classmethod
    def for_a_sound_one(cls, error: KVCellarError) -> "_Wait":
        """What is there is damaged, and is made anew as soon as nobody holds it."""
        return cls(str(error), error=type(error), most_s=_HEAL_S)


def _tryjoin(
    directory: RegionDirectory, request: JoinRequest, admit: Admit
) -> "tuple[Place, MetaContents] | _Wait":
    with directory.lock():
        try:
            meta_fd = directory.open_file(meta_name(request.engine_id))
        except FileNotFoundError:
            return _Wait(f"there is no region {request.engine_id} in {directory.path}")
        place: Place | None = None
        try:
            opened = _open(directory, request, meta_fd)
            if isinstance(opened, _Wait):
                return opened
            place, contents = opened
            held = locks.held_slots(place.data_fd, MAX_SLOTS)
            if why := admit(request, contents, held):
                return _Wait(why, error=RegionHeld if admit is others_are_gone else NotReady)
            place.take(_free_slot(request, contents, held), _row(request))
            joined, place = place, None
            meta_fd = -1
            return joined, contents
        finally:
            if place is not None:
                place.close()
            elif meta_fd >= 0:
                os.close(meta_fd)


def _open(
    directory: RegionDirectory, request: JoinRequest, meta_fd: int
) -> "tuple[Place, MetaContents] | _Wait":
    try:
        contents = metafile.read_contents(meta_fd)
    except RegionMismatch as error:
        return _Wait.for_a_sound_one(error)
    if waiting := _not_attachable(directory, request, contents):
        return waiting
    try:
        return Place.open(directory, meta_fd, request.engine_id, contents.owner), contents
    except RegionMismatch as error:
        return _Wait.for_a_sound_one(error)


def _not_attachable(
    directory: RegionDirectory, request: JoinRequest, contents: MetaContents
) -> _Wait | None:
    owner = contents.owner
    if owner.mode is Mode.STOCK:
        raise RegionMismatch(
            f"region {request.engine_id} was made for an unmodified vLLM (KVCELLAR_MODE=stock), whose file is laid out "
            "otherwise: start the sidecar with KVCELLAR_MODE=plugin, or vLLM without the plug-in"
        )
    if owner.state in ATTACHABLE:
        return None
    if owner.state is RegionState.FAILED:
        error = NotReady(f"region {request.engine_id} failed: {owner.reason}")
        if contents.session is not None:
            # Engines have used it, so it was whole: what failed since is damage.
            return _Wait.for_a_sound_one(error)
        raise error
    reserved = 0
    try:
        data_fd = directory.open_file(data_name(request.engine_id, owner.nonce), os.O_RDONLY)
        try:
            reserved = file.reserved_bytes(data_fd)
        finally:
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

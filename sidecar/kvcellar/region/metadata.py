"""What the sections of the metadata page say: pure packing and unpacking of their fields.

`frame` holds the rest: where a section lies and how it survives a kill. The fields of each section, as
third programs read them, stand in docs/reference/region-format.md.

The page is written by every container of the group, so a reader trusts nothing in it: each value is
checked when it is unpacked.
"""

import math
import struct
from dataclasses import dataclass, field, fields

from kvcellar.contract import MAX_CAPACITY_BYTES, Mode, Owner, RegionState, Role, printable
from kvcellar.errors import ConfigurationError, MetadataDamaged
from kvcellar.region.geometry import HUGE_PAGE_BYTES, Geometry, Layout

_OWNER = struct.Struct("<BBB5x16sQQQQQQddH512s")
_SESSION = struct.Struct("<16s32sQQB7xIIQQQQQ")
_SLOT = struct.Struct("<16sBB6xId10Q")

_STATES = tuple(RegionState)
_UNPUBLISHED = frozenset({RegionState.PLANNED, RegionState.RELEASED})
"""States without files, so none that a page could show."""
_MODES = tuple(Mode)
_OWNERS = tuple(Owner)
_ROLES = tuple(Role)
_LAYOUTS = tuple(Layout)
_REASON_BYTES = 512
_LAST_UNIX_S = 2.0**40


@dataclass(frozen=True, slots=True)
class OwnerSection:
    """What the owner promises about the region.

    Attributes:
        nonce: 16 hexadecimal digits that make the data file's name unique for ever.
        data_device, data_inode: identity of the data file; a file of another inode is not the region.
        settled_bytes, huge_page_bytes: progress of the owner's own passes.
        reserve_seconds, settle_seconds: how long those passes took.
        kind: what the owner is; a region that a dead engine owned has no future once it is unheld.
    """

    state: RegionState
    reason: str
    mode: Mode
    capacity_bytes: int
    page_bytes: int
    nonce: str
    data_device: int
    data_inode: int
    settled_bytes: int = 0
    huge_page_bytes: int = 0
    reserve_seconds: float = 0.0
    settle_seconds: float = 0.0
    kind: Owner = Owner.SIDECAR


@dataclass(frozen=True, slots=True)
class SessionSection:
    """What rank 0 decided for one engine start.

    Attributes:
        session: 32 hexadecimal digits, the same in all processes of one engine start.
        fingerprint: 64 hexadecimal digits over everything that gives the bytes their meaning.
        generation: rises each time the contents stop being valid.
        engine_starts: sessions that this region has seen.
    """

    session: str
    fingerprint: str
    generation: int
    engine_starts: int
    geometry: Geometry


@dataclass(frozen=True, slots=True)
class Counters:
    """What one participant has done since it attached; `used_chunks` is a gauge of the scheduler."""

    store_bytes: int = 0
    load_bytes: int = 0
    stores_ok: int = 0
    stores_failed: int = 0
    loads_ok: int = 0
    loads_failed: int = 0
    lookup_hit: int = 0
    lookup_miss: int = 0
    lookup_pending: int = 0
    used_chunks: int = 0


@dataclass(frozen=True, slots=True)
class SlotRow:
    """Who holds, or last held, a slot. Only the slot's lock tells whether it is held now."""

    session: str
    role: Role
    rank: int
    since_unix_s: float
    pinned: bool = False
    counters: Counters = field(default_factory=Counters)


def fit_reason(reason: str) -> str:
    """A reason as the page keeps it: `printable`, at most 512 bytes of UTF-8, cut between characters."""
    return printable(reason).encode(errors="replace")[:_REASON_BYTES].decode(errors="ignore")


def pack_owner(owner: OwnerSection) -> bytes:
    """Fields of the owner section; the reason goes through `fit_reason`."""
    reason = fit_reason(owner.reason).encode()
    return _OWNER.pack(
        _STATES.index(owner.state),
        _MODES.index(owner.mode),
        _OWNERS.index(owner.kind),
        owner.nonce.encode("ascii"),
        owner.capacity_bytes,
        owner.page_bytes,
        owner.data_device,
        owner.data_inode,
        owner.settled_bytes,
        owner.huge_page_bytes,
        owner.reserve_seconds,
        owner.settle_seconds,
        len(reason),
        reason,
    )


def unpack_owner(payload: bytes) -> OwnerSection:
    """Fields of the owner section.

    Raises:
        MetadataDamaged: a value outside its range.
    """
    fields_read = _OWNER.unpack_from(payload)
    state, mode, kind, nonce, capacity, page, device, inode, settled, huge = fields_read[:10]
    reserve_s, settle_s, length, reason = fields_read[10:]
    try:
        return OwnerSection(
            state=_published(_STATES[state]),
            reason=printable(reason[: min(length, _REASON_BYTES)].decode(errors="replace")),
            mode=_MODES[mode],
            capacity_bytes=_capacity(capacity),
            page_bytes=_page_size(page),
            nonce=_hex(nonce.decode("ascii"), 16),
            data_device=device,
            data_inode=inode,
            settled_bytes=settled,
            huge_page_bytes=huge,
            reserve_seconds=_seconds(reserve_s),
            settle_seconds=_seconds(settle_s),
            kind=_OWNERS[kind],
        )
    except (IndexError, ValueError) as error:
        raise MetadataDamaged(
            f"the owner section of the metadata page holds an impossible value: {error}"
        ) from error


def pack_session(session: SessionSection) -> bytes:
    """Fields of the session section."""
    geometry = session.geometry
    return _SESSION.pack(
        bytes.fromhex(session.session),
        bytes.fromhex(session.fingerprint.ljust(64, "0")),
        session.generation,
        session.engine_starts,
        _LAYOUTS.index(geometry.layout),
        geometry.world_size,
        geometry.page_bytes,
        geometry.capacity_bytes,
        geometry.chunk_bytes,
        geometry.rank_bytes,
        geometry.chunk_stride_bytes,
        geometry.num_chunks,
    )


def unpack_session(payload: bytes) -> SessionSection:
    """Fields of the session section; the geometry is computed again and has to agree.

    Raises:
        MetadataDamaged: a value outside its range, or numbers that contradict each other.
    """
    session, fingerprint, generation, starts, layout, *numbers = _SESSION.unpack_from(payload)
    world_size, page_bytes, capacity, chunk, rank_bytes, stride, num_chunks = numbers
    try:
        geometry = Geometry.compute(capacity, chunk, world_size, _LAYOUTS[layout], page_bytes)
    except (IndexError, ConfigurationError) as error:
        raise MetadataDamaged(
            f"the session section of the metadata page holds an impossible value: {error}"
        ) from error
    if (geometry.rank_bytes, geometry.chunk_stride_bytes, geometry.num_chunks) != (
        rank_bytes,
        stride,
        num_chunks,
    ):
        raise MetadataDamaged(
            "the session section of the metadata page holds numbers that contradict each other"
        )
    return SessionSection(session.hex(), fingerprint.hex(), generation, starts, geometry)


def pack_slot(row: SlotRow) -> bytes:
    """Fields of a participant's row."""
    return _SLOT.pack(
        bytes.fromhex(row.session),
        _ROLES.index(row.role),
        row.pinned,
        row.rank,
        row.since_unix_s,
        *(getattr(row.counters, f.name) for f in fields(Counters)),
    )


def unpack_slot(payload: bytes) -> SlotRow:
    """Fields of a participant's row.

    Raises:
        MetadataDamaged: a value outside its range.
    """
    session, role, pinned, rank, since, *counters = _SLOT.unpack_from(payload)
    try:
        holder = _ROLES[role]
        since_unix_s = _seconds(since)
    except (IndexError, ValueError) as error:
        raise MetadataDamaged(
            f"a participant's row of the metadata page holds an impossible value: {error}"
        ) from error
    return SlotRow(session.hex(), holder, rank, since_unix_s, bool(pinned), Counters(*counters))


def _hex(text: str, digits: int) -> str:
    if len(text) != digits or any(c not in "0123456789abcdef" for c in text):
        raise ValueError(f"{text!r} is not {digits} hexadecimal digits")
    return text


def _published(state: RegionState) -> RegionState:
    if state in _UNPUBLISHED:
        raise ValueError(f"state {state} of a region that has files")
    return state


def _capacity(size_bytes: int) -> int:
    if size_bytes % HUGE_PAGE_BYTES or not 0 < size_bytes <= MAX_CAPACITY_BYTES:
        raise ValueError(f"a capacity of {size_bytes} bytes")
    return size_bytes


def _page_size(size_bytes: int) -> int:
    if size_bytes & (size_bytes - 1) or not 0 < size_bytes <= HUGE_PAGE_BYTES:
        raise ValueError(f"pages of {size_bytes} bytes")
    return size_bytes


def _seconds(value: float) -> float:
    if not math.isfinite(value) or not 0 <= value < _LAST_UNIX_S:
        raise ValueError(f"a time of {value} s")
    return value

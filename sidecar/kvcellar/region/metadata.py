"""The metadata page of a region: pure packing and unpacking.

The file `<engine_id>.meta` is the only commit point of a region: what it names exists, what it does
not name is garbage. It is `META_BYTES` long (a constant, not a page: pages differ between hosts) and
holds sections, each with **one writer**. All integers are little-endian::

    0      header   magic "KVCELLAR", u32 format version, u32 META_BYTES, u32 MAX_SLOTS, u32 crc32 of these
    1024   owner    section, copies of 1024 bytes     writer: the owner (sidecar, or rank 0)
    4096   session  section, copies of 512 bytes      writer: rank 0 of the engine
    8192   slot 0   section, copies of 256 bytes      writer: the process that holds the slot's lock
    8832   slot 1   ...                               (640 bytes a slot, MAX_SLOTS of them)

    section:  u64 selector (SELECT_FIRST or SELECT_SECOND), 56 bytes of zeros, copy 0, copy 1
    copy:     u32 crc32 of the rest, u32 zero, u64 sequence number, then the fields below, then zeros

A writer fills the copy that the selector does not name and then stores the selector in one aligned
8-byte write; a process killed at any instant leaves the old copy in force. The first write fills both
copies, so that from then on one is always spare. A reader takes the copy that the selector names; if
that copy or the selector is damaged, the other good copy (or the one with the higher sequence number)
serves. A section with selector 0 and no good copy was never written. Third programs read the page by
docs/reference/region-format.md.

The page is written by every container of the group, so a reader trusts nothing in it: each value is
checked when it is unpacked.
"""

import math
import struct
import zlib
from dataclasses import dataclass, field, fields

from kvcellar.contract import MAX_CAPACITY_BYTES, Mode, Owner, RegionState, Role
from kvcellar.errors import ConfigurationError, MetadataDamaged
from kvcellar.region.geometry import HUGE_PAGE_BYTES, Geometry, Layout

META_BYTES = 65536
MAX_SLOTS = 64
"""Participants of one region: a scheduler and up to 63 ranks, above any single node's device count."""
FORMAT_VERSION = 1

_MAGIC = b"KVCELLAR"
_HEADER = struct.Struct("<8sIII")
_CRC = struct.Struct("<I")
_COPY_HEAD = struct.Struct("<IIQ")
_SELECTOR_AREA = 64
SELECT_FIRST = 0x5A5A5A5A5A5A5A5A
SELECT_SECOND = 0xA5A5A5A5A5A5A5A5
"""Two patterns that differ in every bit, so that a damaged selector is seen as damaged."""
SELECTOR = struct.Struct("<Q")

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
class Section:
    """Where a section lies: `offset` of its selector, `copy_bytes` of each of its two copies."""

    name: str
    offset: int
    copy_bytes: int

    def copy_offset(self, which: int) -> int:
        """First byte of copy 0 or 1."""
        return self.offset + _SELECTOR_AREA + which * self.copy_bytes

    @property
    def end(self) -> int:
        """First byte behind the section."""
        return self.copy_offset(2)


OWNER_AT = Section("owner", 1024, 1024)
SESSION_AT = Section("session", 4096, 512)


_SLOTS_AT = tuple(Section(f"slot {slot}", 8192 + slot * 640, 256) for slot in range(MAX_SLOTS))


def slot_at(slot: int) -> Section:
    """The section of a participant slot in `[0, MAX_SLOTS)`."""
    return _SLOTS_AT[slot]


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


@dataclass(frozen=True, slots=True)
class ReadSection:
    """A section as read: the fields' bytes, the copy and sequence in force.

    `needs_repair`: a copy or the selector is bad; one more damage could cost the section.
    """

    payload: bytes
    copy: int
    sequence: int
    needs_repair: bool


# --- header -------------------------------------------------------------------------------------------


def pack_header() -> bytes:
    """The first bytes of a new page."""
    head = _HEADER.pack(_MAGIC, FORMAT_VERSION, META_BYTES, MAX_SLOTS)
    return head + _CRC.pack(zlib.crc32(head))


def check_header(page: bytes) -> None:
    """Refuse a page that is cut, damaged or of another format.

    Raises:
        MetadataDamaged: with what was found and what was expected.
    """
    if len(page) < META_BYTES:
        raise MetadataDamaged(
            f"the metadata page is cut: it has {len(page)} bytes, expected {META_BYTES}"
        )
    magic, version, meta_bytes, max_slots = _HEADER.unpack_from(page)
    (crc,) = _CRC.unpack_from(page, _HEADER.size)
    if magic != _MAGIC or crc != zlib.crc32(page[: _HEADER.size]):
        raise MetadataDamaged("the metadata page is damaged: its header fails the check")
    if (version, meta_bytes, max_slots) != (FORMAT_VERSION, META_BYTES, MAX_SLOTS):
        raise MetadataDamaged(
            f"the metadata page has format version {version}, this kvcellar reads version {FORMAT_VERSION}: use the "
            "same release in the sidecar and the engine"
        )


# --- sections -----------------------------------------------------------------------------------------


def pack_copy(section: Section, sequence: int, payload: bytes) -> bytes:
    """One copy of a section with its checksum, `section.copy_bytes` long."""
    body = _COPY_HEAD.pack(0, 0, sequence)[_CRC.size :] + payload
    body = body.ljust(section.copy_bytes - _CRC.size, b"\0")
    return _CRC.pack(zlib.crc32(body)) + body


def read_section(page: bytes, section: Section) -> ReadSection | None:
    """The copy of a section that is in force; None if it was never written.

    Raises:
        MetadataDamaged: neither copy passes its check.
    """
    if page[section.offset : section.end] == bytes(section.end - section.offset):
        return None  # the usual case of a slot, decided without two checksums
    (selector,) = SELECTOR.unpack_from(page, section.offset)
    copies = [_read_copy(page, section, which) for which in (0, 1)]
    good = [which for which in (0, 1) if copies[which] is not None]
    if not good:
        if selector == 0:  # stored last, so no write was ever finished
            return None
        raise MetadataDamaged(
            f"both copies of the {section.name} section of the metadata page are damaged"
        )
    chosen = {SELECT_FIRST: 0, SELECT_SECOND: 1}.get(selector)
    in_force = chosen if chosen in good else max(good, key=lambda which: _sequence(copies[which]))
    found = copies[in_force]
    if found is None:  # unreachable: `in_force` is one of the good ones
        raise MetadataDamaged(f"the {section.name} section of the metadata page is damaged")
    sequence, payload = found
    needs_repair = in_force != chosen or len(good) < 2
    return ReadSection(payload, in_force, sequence, needs_repair)


def _read_copy(page: bytes, section: Section, which: int) -> tuple[int, bytes] | None:
    start = section.copy_offset(which)
    raw = page[start : start + section.copy_bytes]
    crc, _, sequence = _COPY_HEAD.unpack_from(raw)
    if crc != zlib.crc32(raw[_CRC.size :]):
        return None
    return sequence, raw[_COPY_HEAD.size :]


def _sequence(copy: tuple[int, bytes] | None) -> int:
    return -1 if copy is None else copy[0]


# --- payloads -----------------------------------------------------------------------------------------


def fit_reason(reason: str) -> str:
    """A reason as the page keeps it: at most 512 bytes of UTF-8, cut between characters."""
    return reason.encode(errors="replace")[:_REASON_BYTES].decode(errors="ignore")


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
            reason=reason[: min(length, _REASON_BYTES)].decode(errors="replace"),
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

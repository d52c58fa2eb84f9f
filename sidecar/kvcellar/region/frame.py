"""The frame of the metadata page: its header, and sections that a kill cannot tear. Pure.

The file `<engine_id>.meta` is the only commit point of a region: what it names exists, what it does
not name is garbage. It is `META_BYTES` long (a constant, not a page: pages differ between hosts) and
holds sections, each with **one writer**. All integers are little-endian::

    0      header   magic "KVCELLAR", u32 format version, u32 META_BYTES, u32 MAX_SLOTS, u32 crc32 of these
    1024   owner    section, copies of 1024 bytes     writer: the owner (sidecar, or rank 0)
    4096   session  section, copies of 512 bytes      writer: rank 0 of the engine
    8192   slot 0   section, copies of 256 bytes      writer: the process that holds the slot's lock
    8832   slot 1   ...                               (640 bytes a slot, MAX_SLOTS of them)

    section:  u64 selector (SELECT_FIRST or SELECT_SECOND), 56 bytes of zeros, copy 0, copy 1
    copy:     u32 crc32 of the rest, u32 zero, u64 sequence number, then the fields (`metadata`), then zeros

A writer fills the copy that the selector does not name and then stores the selector in one aligned
8-byte write; a process killed at any instant leaves the old copy in force. The first write fills both
copies, so that from then on one is always spare. A reader takes the copy that the selector names; if
that copy or the selector is damaged, the other good copy (or the one with the higher sequence number)
serves. A section with selector 0 and no good copy was never written. Third programs read the page by
docs/reference/region-format.md.
"""

import struct
import zlib
from dataclasses import dataclass

from kvcellar.errors import MetadataDamaged

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

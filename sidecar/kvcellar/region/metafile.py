"""The metadata page on disk: read whole, write one section.

Reads and writes go through pread and pwrite, never a mapping: a hostile container of the pod can
truncate the file, and that must be an error here, not a SIGBUS.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvcellar.errors import MetadataDamaged
from kvcellar.region import frame, metadata
from kvcellar.region.frame import ReadSection, Section
from kvcellar.region.metadata import OwnerSection, SessionSection, SlotRow

_READ_TRIES = 5
_READ_PAUSE_S = 0.002
"""A page read while a writer is inside a copy fails its check; a writer needs microseconds."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MetaContents:
    """All sections of a page as one reader saw them; a damaged slot row is left out.

    `owner_needs_repair`: one copy of the owner section is bad, the other served.
    """

    owner: OwnerSection
    session: SessionSection | None
    rows: dict[int, SlotRow]
    owner_needs_repair: bool


def read_contents(fd: int) -> MetaContents:
    """Read and check the whole page.

    Raises:
        MetadataDamaged: the page is cut, of another format, or a section has no good copy left.
    """
    return _stable(fd, _parse)


def read_owner(fd: int) -> OwnerSection:
    """Read the owner section alone.

    Raises:
        MetadataDamaged: as `read_contents`.
    """
    return _stable(fd, _parse_owner)


def new_page(owner: OwnerSection) -> bytes:
    """A whole page for a region that is being made."""
    page = bytearray(frame.META_BYTES)
    header = frame.pack_header()
    page[: len(header)] = header
    section = frame.OWNER_AT
    page[section.offset : section.offset + 8] = frame.SELECTOR.pack(frame.SELECT_FIRST)
    copy = frame.pack_copy(section, 1, metadata.pack_owner(owner))
    page[section.copy_offset(0) : section.end] = copy + copy
    return bytes(page)


def write_section(fd: int, section: Section, payload: bytes) -> None:
    """Replace a section: fill the idle copy, then flip the selector. Only the section's writer calls this.

    A section that was never written, or is damaged altogether, gets both copies: whatever was there, the
    new value is in force afterwards, and a spare copy lies beside it.
    """
    here = Section(section.name, 0, section.copy_bytes)
    raw = os.pread(fd, here.end, section.offset).ljust(here.end, b"\0")
    try:
        current = frame.read_section(raw, here)
    except MetadataDamaged:
        current = None
    idle, sequence = (0, 1) if current is None else (1 - current.copy, current.sequence + 1)
    copy = frame.pack_copy(section, sequence, payload)
    os.pwrite(fd, copy, section.copy_offset(idle))
    if current is None:
        os.pwrite(fd, copy, section.copy_offset(1 - idle))
    selector = frame.SELECT_SECOND if idle else frame.SELECT_FIRST
    os.pwrite(fd, frame.SELECTOR.pack(selector), section.offset)


def write_owner(fd: int, owner: OwnerSection) -> None:
    """Publish the owner section (its writer: the holder of the owner byte)."""
    write_section(fd, frame.OWNER_AT, metadata.pack_owner(owner))


def write_session(fd: int, session: SessionSection) -> None:
    """Publish the session section (its writer: rank 0, which holds a slot)."""
    write_section(fd, frame.SESSION_AT, metadata.pack_session(session))


def write_slot(fd: int, slot: int, row: SlotRow) -> None:
    """Publish a participant's row (its writer: the holder of the slot's lock)."""
    write_section(fd, frame.slot_at(slot), metadata.pack_slot(row))


def _stable(fd: int, parse: Callable[[bytes], _T]) -> _T:
    for attempt in range(_READ_TRIES):
        page = os.pread(fd, frame.META_BYTES, 0)
        try:
            return parse(page)
        except MetadataDamaged:
            if attempt == _READ_TRIES - 1:
                raise
            time.sleep(_READ_PAUSE_S)
    raise MetadataDamaged("the metadata page cannot be read")


def _owner_section(page: bytes) -> ReadSection:
    frame.check_header(page)
    found = frame.read_section(page, frame.OWNER_AT)
    if found is None:
        raise MetadataDamaged("the owner section of the metadata page is empty")
    return found


def _parse_owner(page: bytes) -> OwnerSection:
    return metadata.unpack_owner(_owner_section(page).payload)


def _parse(page: bytes) -> MetaContents:
    own = _owner_section(page)
    owner = metadata.unpack_owner(own.payload)
    found = frame.read_section(page, frame.SESSION_AT)
    session = None if found is None else metadata.unpack_session(found.payload)
    return MetaContents(owner, session, _parse_rows(page), own.needs_repair)


def _parse_rows(page: bytes) -> dict[int, SlotRow]:
    """Rows by slot. A damaged row must not take the region down: its lock still says that it is held."""
    rows = {}
    for slot in range(frame.MAX_SLOTS):
        try:
            found = frame.read_section(page, frame.slot_at(slot))
            if found is not None:
                rows[slot] = metadata.unpack_slot(found.payload)
        except MetadataDamaged:
            continue
    return rows

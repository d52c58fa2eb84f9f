"""The metadata page: what is written is read again, and damage never passes for a value."""

import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.contract import Mode, Owner, RegionState, Role, printable
from kvcellar.errors import MetadataDamaged
from kvcellar.region import frame, metadata, metafile
from kvcellar.region.frame import META_BYTES, Section
from kvcellar.region.geometry import HUGE_PAGE_BYTES, Geometry, Layout
from kvcellar.region.metadata import Counters, OwnerSection, SessionSection, SlotRow

MIB = 2**20
u64 = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e9)


def _hex(digits: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=digits, max_size=digits)


owners = st.builds(
    OwnerSection,
    state=st.sampled_from(
        [RegionState.RESERVING, RegionState.RESERVED, RegionState.READY, RegionState.FAILED]
    ),
    reason=st.text(max_size=120).map(metadata.fit_reason),
    mode=st.sampled_from(Mode),
    capacity_bytes=st.integers(1, 2**40).map(lambda n: n * HUGE_PAGE_BYTES),
    page_bytes=st.sampled_from([4096, 16384, 65536]),
    nonce=_hex(16),
    data_device=u64,
    data_inode=u64,
    settled_bytes=u64,
    huge_page_bytes=u64,
    reserve_seconds=seconds,
    settle_seconds=seconds,
    kind=st.sampled_from(Owner),
)
geometries = st.builds(
    Geometry.compute,
    st.integers(0, 2**44),
    st.integers(0, 2**26),
    st.integers(1, 63),
    st.sampled_from(Layout),
    st.sampled_from([4096, 16384, 65536]),
)
sessions = st.builds(
    SessionSection,
    session=_hex(32),
    fingerprint=_hex(64),
    generation=u64,
    engine_starts=u64,
    geometry=geometries,
)
rows = st.builds(
    SlotRow,
    session=_hex(32),
    role=st.sampled_from(Role),
    rank=st.integers(0, 62),
    since_unix_s=seconds,
    pinned=st.booleans(),
    counters=st.builds(Counters, *[u64] * 10),
)

OWNER = OwnerSection(
    RegionState.READY,
    "",
    Mode.PLUGIN,
    80 * MIB,
    4096,
    "0123456789abcdef",
    42,
    7,
    80 * MIB,
    64 * MIB,
)
SESSION = SessionSection(
    "5" * 32, "a" * 64, 3, 4, Geometry.compute(80 * MIB, 100_000, 2, Layout.SHARDED, 4096)
)
ROW = SlotRow("5" * 32, Role.WORKER, 1, 1.75e9, True, Counters(1, 2, 3, 4, 5, 6, 7, 8, 9, 10))


@pytest.fixture
def fd() -> Iterator[int]:
    """A page in memory, just made."""
    made = os.memfd_create("meta")
    os.pwrite(made, metafile.new_page(OWNER), 0)
    yield made
    os.close(made)


def _page(fd: int) -> bytes:
    return os.pread(fd, META_BYTES, 0)


# --- round trips


@given(owners)
def test_the_owner_section_is_read_as_it_was_written(owner: OwnerSection) -> None:
    assert metadata.unpack_owner(metadata.pack_owner(owner)) == owner


@given(sessions)
def test_the_session_section_is_read_as_it_was_written(session: SessionSection) -> None:
    assert metadata.unpack_session(metadata.pack_session(session)) == session


@given(rows)
def test_a_slot_row_is_read_as_it_was_written(row: SlotRow) -> None:
    assert metadata.unpack_slot(metadata.pack_slot(row)) == row


@given(st.text(max_size=600))
def test_a_long_reason_is_cut_between_characters(reason: str) -> None:
    read = metadata.unpack_owner(metadata.pack_owner(replace(OWNER, reason=reason))).reason
    shown = printable(reason)
    assert shown.startswith(read)
    assert len(read.encode()) <= 512
    assert read == shown or len(read.encode()) > 512 - 4
    assert metadata.fit_reason(reason) == read


def test_a_reason_that_another_owner_wrote_moves_no_terminal() -> None:
    raw = metadata.pack_owner(replace(OWNER, reason="QQQQQQQQ is red"))
    read = metadata.unpack_owner(raw.replace(b"QQQQQQQQ", b"\x1b[31m\r\n\x07")).reason
    assert read == r"\x1b[31m\r\n\x07 is red"
    assert metadata.fit_reason("\x1b[31m\r\n\x07 is red") == metadata.fit_reason(read) == read


def test_a_reason_with_bytes_that_are_no_text_is_written_readably() -> None:
    reason = os.fsdecode(b"cannot open /dev/shm/\xff")
    read = metadata.unpack_owner(metadata.pack_owner(replace(OWNER, reason=reason))).reason
    assert read == metadata.fit_reason(reason) == r"cannot open /dev/shm/\udcff"


def test_sections_neither_overlap_nor_leave_the_page() -> None:
    sections = [frame.OWNER_AT, frame.SESSION_AT]
    sections += [frame.slot_at(slot) for slot in range(frame.MAX_SLOTS)]
    ends = [len(frame.pack_header()), *(section.end for section in sections)]
    for end, section in zip(ends, sections, strict=False):
        assert end <= section.offset
        assert section.offset % 8 == 0
    assert ends[-1] <= META_BYTES


def test_the_payload_of_each_section_fits_its_copy() -> None:
    for section, payload in (
        (frame.OWNER_AT, metadata.pack_owner(OWNER)),
        (frame.SESSION_AT, metadata.pack_session(SESSION)),
        (frame.slot_at(0), metadata.pack_slot(ROW)),
    ):
        assert len(frame.pack_copy(section, 1, payload)) == section.copy_bytes


def test_a_whole_page_is_read_as_its_sections_were_written(fd: int) -> None:
    metafile.write_session(fd, SESSION)
    for slot in (0, 1, 63):
        metafile.write_slot(fd, slot, replace(ROW, rank=slot))
    contents = metafile.read_contents(fd)
    assert contents.owner == OWNER
    assert contents.session == SESSION
    assert contents.rows == {slot: replace(ROW, rank=slot) for slot in (0, 1, 63)}
    assert os.fstat(fd).st_size == META_BYTES


def test_a_new_page_has_no_session_and_no_rows(fd: int) -> None:
    contents = metafile.read_contents(fd)
    assert (contents.owner, contents.session, contents.rows) == (OWNER, None, {})


# --- values outside their range: the page is written by other containers too


@pytest.mark.parametrize(
    "bad",
    [
        {"nonce": "0123456789abcdeg"},
        {"nonce": "../../etc/passwd"},
        {"nonce": "0123456789ABCDEF"},
        {"capacity_bytes": HUGE_PAGE_BYTES + 1},
        {"capacity_bytes": 0},
        {"capacity_bytes": 2**63},
        {"page_bytes": 0},
        {"page_bytes": 5000},
        {"page_bytes": 2**40},
        {"reserve_seconds": math.nan},
        {"settle_seconds": math.inf},
        {"settle_seconds": -1.0},
        {"state": RegionState.PLANNED},
        {"state": RegionState.RELEASED},
    ],
    ids=str,
)
def test_an_impossible_owner_section_is_damage(bad: dict[str, object]) -> None:
    payload = metadata.pack_owner(replace(OWNER, **bad))  # type: ignore[arg-type]  # on purpose
    with pytest.raises(MetadataDamaged, match="owner section"):
        metadata.unpack_owner(payload)


@pytest.mark.parametrize("since", [math.nan, math.inf, -1.0, 1e300])
def test_an_impossible_time_in_a_row_is_damage(since: float) -> None:
    with pytest.raises(MetadataDamaged, match="row"):
        metadata.unpack_slot(metadata.pack_slot(replace(ROW, since_unix_s=since)))


@given(st.binary(min_size=1024, max_size=1024))
def test_random_bytes_are_damage_or_possible_values(payload: bytes) -> None:
    unpackers: list[Callable[[bytes], object]] = [
        metadata.unpack_owner,
        metadata.unpack_session,
        metadata.unpack_slot,
    ]
    for unpack in unpackers:
        try:
            unpack(payload)
        except MetadataDamaged as error:
            assert str(error)  # noqa: PT017 - either outcome is fine, another exception is not


def test_a_session_whose_numbers_contradict_each_other_is_damage() -> None:
    wrong = replace(SESSION.geometry, num_chunks=SESSION.geometry.num_chunks + 1)
    with pytest.raises(MetadataDamaged, match="contradict"):
        metadata.unpack_session(metadata.pack_session(replace(SESSION, geometry=wrong)))


# --- damage


SECTIONS: list[tuple[Section, Callable[[bytes], object], list[bytes]]] = [
    (
        frame.OWNER_AT,
        metadata.unpack_owner,
        [metadata.pack_owner(OWNER), metadata.pack_owner(replace(OWNER, settled_bytes=1))],
    ),
    (
        frame.SESSION_AT,
        metadata.unpack_session,
        [metadata.pack_session(SESSION), metadata.pack_session(replace(SESSION, generation=9))],
    ),
    (
        frame.slot_at(5),
        metadata.unpack_slot,
        [metadata.pack_slot(ROW), metadata.pack_slot(replace(ROW, pinned=False))],
    ),
]


@pytest.mark.parametrize("writes", [1, 2, 3])
@pytest.mark.parametrize(
    ("section", "unpack", "payloads"), SECTIONS, ids=["owner", "session", "slot"]
)
def test_a_flipped_byte_costs_at_most_the_last_update(
    section: Section, unpack: Callable[[bytes], object], payloads: list[bytes], writes: int
) -> None:
    fd = os.memfd_create("meta")
    os.ftruncate(fd, META_BYTES)
    for number in range(writes):
        metafile.write_section(fd, section, payloads[number % 2])
    page = _page(fd)
    os.close(fd)
    legal = [unpack(payloads[number % 2]) for number in range(max(writes - 2, 0), writes)]
    clean = frame.read_section(page, section)
    assert clean is not None
    assert unpack(clean.payload) == legal[-1]
    assert not clean.needs_repair
    for at in range(section.offset, section.end):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(page)
            damaged[at] ^= flip
            found = frame.read_section(bytes(damaged), section)
            assert found is not None
            assert unpack(found.payload) in legal
            in_gap = section.offset + 8 <= at < section.copy_offset(0)
            assert found.needs_repair is not in_gap


@pytest.mark.parametrize(
    ("section", "unpack", "payloads"), SECTIONS, ids=["owner", "session", "slot"]
)
def test_two_bad_copies_are_damage(
    section: Section, unpack: Callable[[bytes], object], payloads: list[bytes]
) -> None:
    fd = os.memfd_create("meta")
    os.ftruncate(fd, META_BYTES)
    metafile.write_section(fd, section, payloads[0])
    page = bytearray(_page(fd))
    os.close(fd)
    for which in (0, 1):
        page[section.copy_offset(which) + 20] ^= 0xFF
    with pytest.raises(MetadataDamaged, match=section.name):
        frame.read_section(bytes(page), section)


def test_a_flipped_byte_of_the_header_is_damage(fd: int) -> None:
    page = _page(fd)
    for at in range(len(frame.pack_header())):
        damaged = bytearray(page)
        damaged[at] ^= 0x40
        with pytest.raises(MetadataDamaged):
            frame.check_header(bytes(damaged))


def test_a_flipped_byte_where_nothing_was_written_yet_never_becomes_a_value(fd: int) -> None:
    page = _page(fd)
    for section in (frame.SESSION_AT, frame.slot_at(63)):
        for at in range(section.offset, section.end, 7):
            damaged = bytearray(page)
            damaged[at] ^= 0xFF
            if at < section.offset + 8:  # the selector
                with pytest.raises(MetadataDamaged):
                    frame.read_section(bytes(damaged), section)
            else:
                assert frame.read_section(bytes(damaged), section) is None


@pytest.mark.parametrize("kept", [0, 1, 8, 4095, 4096, 8192, META_BYTES - 1])
def test_a_cut_page_is_refused_with_its_length(fd: int, kept: int) -> None:
    os.ftruncate(fd, kept)
    with pytest.raises(MetadataDamaged, match=f"cut: it has {kept} bytes"):
        metafile.read_contents(fd)


def test_a_page_of_zeros_is_refused() -> None:
    with pytest.raises(MetadataDamaged, match="header"):
        frame.check_header(bytes(META_BYTES))


def test_a_future_version_is_refused_by_its_number(fd: int) -> None:
    head = struct.pack("<8sIII", b"KVCELLAR", 2, META_BYTES, 64)
    os.pwrite(fd, head + struct.pack("<I", zlib.crc32(head)), 0)
    with pytest.raises(MetadataDamaged, match="format version 2, this kvcellar reads version 1"):
        metafile.read_contents(fd)


def test_a_page_whose_owner_section_was_emptied_is_refused(fd: int) -> None:
    os.pwrite(fd, bytes(frame.OWNER_AT.end - 1024), 1024)
    with pytest.raises(MetadataDamaged, match="owner section"):
        metafile.read_owner(fd)


def test_a_damaged_row_is_left_out_and_the_rest_is_read(fd: int) -> None:
    metafile.write_slot(fd, 0, ROW)
    metafile.write_slot(fd, 1, ROW)
    at = frame.slot_at(0)
    os.pwrite(fd, bytes(2 * at.copy_bytes), at.copy_offset(0))
    assert list(metafile.read_contents(fd).rows) == [1]


# --- a writer killed at any moment


class _Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs."""


def _die_after(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next writes write `budget` bytes in all, and die at that byte."""
    real = os.pwrite
    left = [budget]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        part = data[: left[0]]
        left[0] -= len(part)
        real(fd, part, offset)
        if len(part) < len(data):
            raise _Killed
        return len(data)

    monkeypatch.setattr("kvcellar.region.metafile.os.pwrite", pwrite)


@pytest.mark.parametrize("writes_before", [0, 1, 2])
def test_a_writer_killed_at_any_byte_leaves_the_old_value_or_the_new_one(
    fd: int, monkeypatch: pytest.MonkeyPatch, writes_before: int
) -> None:
    at = frame.slot_at(2)
    old = None
    for number in range(writes_before):
        old = replace(ROW, rank=number)
        metafile.write_slot(fd, 2, old)
    page = _page(fd)
    new = replace(ROW, rank=50)
    is_done = False
    for budget in range(2 * at.copy_bytes + 9):
        os.pwrite(fd, page, 0)
        with monkeypatch.context() as patch:
            _die_after(budget, patch)
            try:
                metafile.write_slot(fd, 2, new)
                is_done = True
            except _Killed:
                is_done = False
        found = frame.read_section(_page(fd), at)
        read = None if found is None else metadata.unpack_slot(found.payload)
        # With the selector torn, the newer good copy serves: it is whole, and was meant.
        assert read in ((new,) if is_done else (old, new))
        if not is_done and budget <= at.copy_bytes and writes_before:
            assert read == old
        if not is_done:  # the next writer repairs whatever was left
            metafile.write_slot(fd, 2, new)
            repaired = frame.read_section(_page(fd), at)
            assert repaired is not None
            assert metadata.unpack_slot(repaired.payload) == new
    assert is_done


def test_writing_over_damage_repairs_both_copies(fd: int) -> None:
    at = frame.OWNER_AT
    os.pwrite(fd, b"\xff" * (at.end - at.offset), at.offset)
    metafile.write_owner(fd, OWNER)
    found = frame.read_section(_page(fd), at)
    assert found is not None
    assert not found.needs_repair
    assert metafile.read_owner(fd) == OWNER


@given(st.lists(owners, min_size=1, max_size=6))
def test_the_last_of_many_updates_is_in_force(updates: list[OwnerSection]) -> None:
    fd = os.memfd_create("meta")
    try:
        os.pwrite(fd, metafile.new_page(OWNER), 0)
        for owner in updates:
            metafile.write_owner(fd, owner)
            assert metafile.read_owner(fd) == owner
    finally:
        os.close(fd)

"""Where chunks lie: no two overlap, all are aligned, and everybody computes the same."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcellar.errors import ConfigurationError
from kvcellar.region.geometry import (
    BLOCK_SIZE_ALIGNMENT,
    HUGE_PAGE_BYTES,
    Geometry,
    Layout,
    fold_rank,
    round_down,
    round_up,
)

MIB = 2**20
GIB = 2**30

capacities = st.one_of(st.integers(0, 2**44), st.integers(0, 64 * MIB))
chunk_sizes = st.one_of(st.integers(0, 64 * MIB), st.integers(0, 20_000))
worlds = st.integers(1, 63)
layouts = st.sampled_from(Layout)
pages = st.sampled_from([4096, 16384, 65536, HUGE_PAGE_BYTES])
geometries = st.builds(Geometry.compute, capacities, chunk_sizes, worlds, layouts, pages)


@st.composite
def geometries_with_chunks(draw: st.DrawFn) -> Geometry:
    """Regions with room for at least one chunk a rank."""
    chunk, world, page = draw(st.integers(1, 2**26)), draw(worlds), draw(pages)
    capacity = world * round_up(chunk, HUGE_PAGE_BYTES) + draw(st.integers(0, 2**40))
    return Geometry.compute(capacity, chunk, world, draw(layouts), page)


@given(geometries)
def test_every_range_lies_in_the_file_and_starts_on_a_huge_page(geometry: Geometry) -> None:
    offsets = [geometry.rank_offset_bytes(rank) for rank in range(geometry.world_size)]
    assert all(offset % HUGE_PAGE_BYTES == 0 for offset in offsets)
    assert len(set(offsets)) == (geometry.copies if geometry.rank_bytes else 1)
    assert max(offsets) + geometry.rank_bytes <= geometry.capacity_bytes
    for low, high in itertools.pairwise(sorted(set(offsets))):
        assert low + geometry.rank_bytes <= high


@given(geometries_with_chunks(), st.data())
def test_no_two_chunks_overlap_and_all_are_aligned(geometry: Geometry, data: st.DataObject) -> None:
    assert geometry.num_chunks > 0
    chunks = st.tuples(
        st.integers(0, geometry.world_size - 1), st.integers(0, geometry.num_chunks - 1)
    )
    one, other = data.draw(chunks), data.draw(chunks)
    at, to = geometry.chunk_offset_bytes(*one), geometry.chunk_offset_bytes(*other)
    assert at % geometry.page_bytes == 0
    assert at + geometry.chunk_bytes <= geometry.capacity_bytes
    start = geometry.rank_offset_bytes(one[0])
    assert start <= at <= at + geometry.chunk_bytes <= start + geometry.rank_bytes
    is_same = (geometry.range_index(one[0]), one[1]) == (geometry.range_index(other[0]), other[1])
    if is_same:
        assert at == to
    else:
        assert abs(at - to) >= geometry.chunk_stride_bytes >= geometry.chunk_bytes


def test_all_chunks_of_a_small_region_tile_their_ranges() -> None:
    geometry = Geometry.compute(20 * MIB, 300_000, 3, Layout.SHARDED, 4096)
    taken = sorted(
        geometry.chunk_offset_bytes(rank, chunk)
        for rank in range(3)
        for chunk in range(geometry.num_chunks)
    )
    assert (geometry.rank_bytes, geometry.chunk_stride_bytes) == (6 * MIB, 303_104)
    assert geometry.num_chunks == 20
    assert all(b - a >= geometry.chunk_stride_bytes for a, b in itertools.pairwise(taken))
    assert geometry.unused_tail_bytes == 20 * MIB - 3 * 20 * 303_104


@given(capacities, st.integers(0, 2**40), chunk_sizes, worlds, layouts, pages)
def test_more_capacity_never_gives_fewer_chunks(
    capacity: int, more: int, chunk: int, world: int, layout: Layout, page: int
) -> None:
    small = Geometry.compute(capacity, chunk, world, layout, page)
    large = Geometry.compute(capacity + more, chunk, world, layout, page)
    assert small.num_chunks <= large.num_chunks
    assert small.rank_bytes <= large.rank_bytes


@given(geometries_with_chunks())
def test_less_than_a_chunk_and_a_huge_page_a_range_is_left_over(geometry: Geometry) -> None:
    left = geometry.unused_tail_bytes
    assert 0 <= left < geometry.copies * (geometry.chunk_stride_bytes + HUGE_PAGE_BYTES)


@given(st.integers(1, 2**30))
@example(80 * GIB // HUGE_PAGE_BYTES)
def test_nothing_is_rounded_to_a_power_of_two(huge_pages: int) -> None:
    capacity = huge_pages * HUGE_PAGE_BYTES
    geometry = Geometry.compute(capacity, HUGE_PAGE_BYTES, 1, Layout.SHARDED)
    assert geometry.capacity_bytes == capacity
    assert geometry.num_chunks == huge_pages
    assert geometry.unused_tail_bytes == 0


def test_a_request_of_80_gib_gives_80_gib() -> None:
    geometry = Geometry.compute(80 * GIB, 5 * MIB, 2, Layout.SHARDED)
    assert geometry.capacity_bytes == 80 * GIB
    assert geometry.rank_bytes == 40 * GIB
    assert geometry.num_chunks == 8192


@given(capacities, chunk_sizes, worlds, layouts, pages)
def test_scheduler_and_every_rank_compute_the_same(
    capacity: int, chunk: int, world: int, layout: Layout, page: int
) -> None:
    """Each process starts from the published capacity, which is floored already, or from the raw one."""
    raw = Geometry.compute(capacity, chunk, world, layout, page)
    published = Geometry.compute(raw.capacity_bytes, chunk, world, layout, page)
    assert raw == published
    assert all(raw.range_index(fold_rank(rank, world)) < raw.copies for rank in range(2 * world))


@given(capacities, chunk_sizes, worlds, pages)
def test_replicated_ranks_share_one_range(capacity: int, chunk: int, world: int, page: int) -> None:
    replicated = Geometry.compute(capacity, chunk, world, Layout.REPLICATED, page)
    alone = Geometry.compute(capacity, chunk, 1, Layout.SHARDED, page)
    assert replicated.copies == 1
    assert replicated.rank_bytes == replicated.capacity_bytes
    assert replicated.num_chunks == alone.num_chunks
    assert {replicated.rank_offset_bytes(rank) for rank in range(world)} == {0}


@pytest.mark.parametrize(
    ("capacity", "chunk", "world"),
    [
        (0, 4096, 1),
        (HUGE_PAGE_BYTES - 1, 1, 1),
        (4 * MIB, 4096, 3),
        (2 * MIB, 3 * MIB, 1),
        (8 * MIB, 0, 2),
    ],
)
def test_too_little_for_a_chunk_gives_zero_chunks(capacity: int, chunk: int, world: int) -> None:
    geometry = Geometry.compute(capacity, chunk, world, Layout.SHARDED)
    assert geometry.num_chunks == 0
    assert geometry.unused_tail_bytes == geometry.capacity_bytes
    with pytest.raises(ConfigurationError, match="0 chunks a rank"):
        geometry.chunk_offset_bytes(0, 0)


@pytest.mark.parametrize(("rank", "chunk"), [(0, -1), (0, 2), (0, 3), (-1, 0), (2, 0), (3, 0)])
def test_a_chunk_or_rank_that_is_not_there_has_no_offset(rank: int, chunk: int) -> None:
    geometry = Geometry.compute(8 * MIB, 2 * MIB, 2, Layout.SHARDED)
    assert geometry.num_chunks == 2
    with pytest.raises(ConfigurationError):
        geometry.chunk_offset_bytes(rank, chunk)


@pytest.mark.parametrize(
    ("capacity", "chunk", "world", "page"),
    [
        (-1, 1, 1, 4096),
        (1, -1, 1, 4096),
        (1, 1, 0, 4096),
        (1, 1, 1, 0),
        (1, 1, 1, 3000),
        (1, 1, 1, 5),
        (1, 1, 1, 4 * MIB),
    ],
)
def test_impossible_numbers_are_refused(capacity: int, chunk: int, world: int, page: int) -> None:
    with pytest.raises(ConfigurationError):
        Geometry.compute(capacity, chunk, world, Layout.SHARDED, page)


@given(st.integers(0, 10**6), st.integers(1, 1000))
def test_folded_ranks_count_from_zero_without_collision(rank: int, world: int) -> None:
    assert fold_rank(rank, world) == rank % world
    base = rank // world * world
    assert sorted(fold_rank(base + n, world) for n in range(world)) == list(range(world))


@pytest.mark.parametrize(("rank", "world"), [(-1, 2), (0, 0), (3, -1)])
def test_an_impossible_rank_is_refused(rank: int, world: int) -> None:
    with pytest.raises(ConfigurationError, match="world"):
        fold_rank(rank, world)


@given(st.integers(0, 2**62), st.integers(1, 2**30))
def test_rounding_ends_on_the_nearest_multiples(value: int, alignment: int) -> None:
    assert round_down(value, alignment) <= value <= round_up(value, alignment)
    assert round_up(value, alignment) - round_down(value, alignment) in (0, alignment)
    assert round_up(value, alignment) % alignment == 0


def test_the_alignment_is_a_page_of_this_machine() -> None:
    assert BLOCK_SIZE_ALIGNMENT % 4096 == 0
    assert HUGE_PAGE_BYTES % BLOCK_SIZE_ALIGNMENT == 0


def test_a_geometry_stays_as_it_was_computed() -> None:
    geometry = Geometry.compute(4 * MIB, 4096, 2, Layout.SHARDED)
    with pytest.raises(AttributeError):
        geometry.num_chunks = 7  # type: ignore[misc]  # that it cannot be is what is tested
    assert not hasattr(geometry, "__dict__")


def test_all_replicated_ranks_use_the_first_range() -> None:
    geometry = Geometry.compute(4 * MIB, 4096, 3, Layout.REPLICATED)
    assert [geometry.range_index(rank) for rank in range(3)] == [0, 0, 0]
    assert [geometry.chunk_offset_bytes(rank, 1) for rank in range(3)] == [4096] * 3


def test_a_page_may_be_one_byte() -> None:
    assert Geometry.compute(4 * MIB, 4095, 1, Layout.SHARDED, 1).chunk_stride_bytes == 4095

"""Failure marks: a failed store is seen once, by the scheduler, whatever rank it was."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import IndexMisuse
from kvcellar.region.geometry import HUGE_PAGE_BYTES, Geometry, Layout
from kvcellar.region.index_file import FailureMarks, format_index, index_bound_bytes

MIB = 2**20
SHARDED = Geometry.compute(8 * MIB, 300_000, 2, Layout.SHARDED, 4096)
REPLICATED = Geometry.compute(8 * MIB, 300_000, 2, Layout.REPLICATED, 4096)


@pytest.fixture
def fd() -> Iterator[int]:
    made = os.memfd_create("index")
    format_index(made, SHARDED)
    yield made
    os.close(made)


def test_nothing_has_failed_in_a_new_file(fd: int) -> None:
    assert FailureMarks(fd, SHARDED).take_failed(list(range(SHARDED.num_chunks))) == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_mark_of_any_rank_is_taken_once(fd: int, rank: int) -> None:
    FailureMarks(fd, SHARDED).mark(rank, 5)
    scheduler = FailureMarks(fd, SHARDED)
    assert scheduler.take_failed([4, 6]) == set()
    assert scheduler.take_failed([4, 5, 6]) == {5}
    assert scheduler.take_failed([4, 5, 6]) == set()


def test_a_chunk_that_failed_on_two_ranks_is_one_failure(fd: int) -> None:
    for rank in (0, 1):
        FailureMarks(fd, SHARDED).mark(rank, 0)
    scheduler = FailureMarks(fd, SHARDED)
    assert scheduler.take_failed([0]) == {0}
    assert scheduler.take_failed([0]) == set()


def test_a_chunk_that_fails_again_is_seen_again(fd: int) -> None:
    worker, scheduler = FailureMarks(fd, SHARDED), FailureMarks(fd, SHARDED)
    for _ in range(3):
        worker.mark(1, 2)
        worker.mark(1, 2)
        assert scheduler.take_failed([2]) == {2}


def test_replicated_ranks_mark_the_one_range() -> None:
    fd = os.memfd_create("index")
    format_index(fd, REPLICATED)
    FailureMarks(fd, REPLICATED).mark(1, 3)
    assert FailureMarks(fd, REPLICATED).take_failed([3]) == {3}
    assert os.fstat(fd).st_size == 8192 + REPLICATED.num_chunks
    os.close(fd)


def test_formatting_again_forgets_every_mark(fd: int) -> None:
    FailureMarks(fd, SHARDED).mark(0, 1)
    format_index(fd, SHARDED)
    assert FailureMarks(fd, SHARDED).take_failed([1]) == set()


@pytest.mark.parametrize("chunk", [-1, SHARDED.num_chunks, 10**9])
def test_a_chunk_that_is_not_there_can_be_neither_marked_nor_taken(fd: int, chunk: int) -> None:
    marks = FailureMarks(fd, SHARDED)
    with pytest.raises(IndexMisuse, match=f"chunk {chunk}"):
        marks.mark(0, chunk)
    marks.mark(0, 1)
    with pytest.raises(IndexMisuse, match=f"chunk {chunk}"):
        marks.take_failed([1, chunk])
    size = os.fstat(fd).st_size
    assert size == 8192 + 2 * SHARDED.num_chunks


def test_a_file_cut_by_somebody_is_no_crash(fd: int) -> None:
    FailureMarks(fd, SHARDED).mark(0, 1)
    os.ftruncate(fd, 0)
    assert FailureMarks(fd, SHARDED).take_failed([1]) == set()


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.integers(0, 1),
            st.lists(st.integers(0, SHARDED.num_chunks - 1), min_size=1, max_size=4),
        ),
        max_size=20,
    )
)
def test_marks_behave_as_one_set_of_failed_chunks(
    moves: list[tuple[bool, int, list[int]]],
) -> None:
    fd = os.memfd_create("index")
    format_index(fd, SHARDED)
    worker, scheduler = FailureMarks(fd, SHARDED), FailureMarks(fd, SHARDED)
    failed: set[int] = set()
    for is_mark, rank, chunks in moves:
        if is_mark:
            for chunk in chunks:
                worker.mark(rank, chunk)
            failed |= set(chunks)
        else:
            assert scheduler.take_failed(chunks) == failed & set(chunks)
            failed -= set(chunks)
    os.close(fd)


@given(st.integers(1, 2**30), st.integers(1, 2**26), st.integers(1, 63), st.sampled_from(Layout))
def test_the_bound_covers_every_geometry(
    huge_pages: int, chunk_bytes: int, world: int, layout: Layout
) -> None:
    capacity = huge_pages * HUGE_PAGE_BYTES
    geometry = Geometry.compute(capacity, chunk_bytes, world, layout)
    size = 8192 + geometry.copies * geometry.num_chunks
    pages = -(-size // 4096) * 4096
    assert pages <= index_bound_bytes(capacity)
    assert index_bound_bytes(capacity) <= 16384 + capacity // 4096

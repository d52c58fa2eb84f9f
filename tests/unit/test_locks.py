"""Locks of open file descriptions, on files in memory."""

import fcntl
import os
import signal
from collections.abc import Iterator

import pytest

from kvcellar.region import locks
from kvcellar.region.locks import OWNER_BYTE, SLOT_BASE, held_slots, is_locked, try_lock


@pytest.fixture
def path() -> Iterator[str]:
    """A file in memory that can be opened again by this path, as another description."""
    fd = os.memfd_create("locks")
    yield f"/proc/self/fd/{fd}"
    os.close(fd)


@pytest.fixture
def two(path: str) -> Iterator[tuple[int, int]]:
    fds = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    yield fds
    for fd in fds:
        os.close(fd)


def test_one_byte_is_held_by_one_description(path: str) -> None:
    one, other = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    assert try_lock(one, OWNER_BYTE)
    assert not try_lock(other, OWNER_BYTE)
    os.close(one)
    assert try_lock(other, OWNER_BYTE)
    os.close(other)


def test_a_lock_is_seen_by_others_and_not_by_its_own_description(two: tuple[int, int]) -> None:
    one, other = two
    assert try_lock(one, SLOT_BASE + 3)
    assert try_lock(one, SLOT_BASE + 3)
    assert is_locked(other, SLOT_BASE + 3)
    assert not is_locked(one, SLOT_BASE + 3)
    assert not is_locked(other, SLOT_BASE + 2)


def test_a_reader_may_ask(two: tuple[int, int], path: str) -> None:
    assert try_lock(two[0], SLOT_BASE)
    reader = os.open(path, os.O_RDONLY)
    try:
        assert held_slots(reader, 64) == [0]
    finally:
        os.close(reader)


def test_the_held_slots_are_listed_slot_by_slot(path: str) -> None:
    asking = os.open(path, os.O_RDWR)
    holders = {slot: os.open(path, os.O_RDWR) for slot in (0, 5, 63)}
    try:
        assert held_slots(asking, 64) == []
        for slot, fd in holders.items():
            assert try_lock(fd, SLOT_BASE + slot)
        assert held_slots(asking, 64) == [0, 5, 63]
        assert held_slots(holders[5], 64) == [0, 63]
        assert held_slots(asking, 63) == [0, 5]
        os.close(holders.pop(5))
        assert held_slots(asking, 64) == [0, 63]
    finally:
        for fd in (asking, *holders.values()):
            os.close(fd)


def test_the_owner_byte_is_no_slot(two: tuple[int, int]) -> None:
    assert try_lock(two[0], OWNER_BYTE)
    assert held_slots(two[1], 64) == []


def test_a_duplicate_keeps_the_lock_until_it_is_closed(two: tuple[int, int], path: str) -> None:
    holder = os.open(path, os.O_RDWR)
    assert try_lock(holder, SLOT_BASE)
    copy = os.dup(holder)
    os.close(holder)
    assert held_slots(two[0], 64) == [0]
    os.close(copy)
    assert held_slots(two[0], 64) == []


def test_a_lock_goes_with_a_killed_process_at_once(two: tuple[int, int], path: str) -> None:
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try_lock(os.open(path, os.O_RDWR), SLOT_BASE + 1)
        os.write(tell, b"1")
        signal.pause()
    os.read(ready, 1)
    assert held_slots(two[0], 64) == [1]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert held_slots(two[0], 64) == []
    os.close(ready)
    os.close(tell)


def test_an_error_that_is_not_about_the_lock_is_raised() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        try_lock(writer, 0)


def test_a_read_only_description_cannot_hold_a_slot(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            try_lock(fd, 0)
    finally:
        os.close(fd)


def test_the_structure_is_the_kernels() -> None:
    assert locks._FLOCK.size == 32  # struct flock of 64-bit Linux
    assert fcntl.F_OFD_SETLK == 37

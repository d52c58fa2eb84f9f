"""Pinning by one rank: how memory is cut, populated and registered, and what a failure leaves."""

import errno
import mmap
import os
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.contract import Pin
from kvcellar.errors import TransferFailed
from kvcellar.region import locks, syscalls
from kvcellar.worker import pin
from kvcellar.worker.pin import (
    PinnedMemory,
    PinRequest,
    Range,
    cut,
    pin_on_all_ranks,
    populate,
)
from kvcellar.worker.ranks import Exchange
from tests.fakes.simulated_device import SimulatedDevice

PAGE = 4096


class PickyDevice(SimulatedDevice):
    """Refuses to register or to unregister some addresses."""

    refused: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()

    def register_host(self, address: int, size_bytes: int) -> None:  # type: ignore[explicit-override]
        if address in self.refused:
            raise TransferFailed(f"{address} cannot be registered")
        super().register_host(address, size_bytes)

    def unregister_host(self, address: int) -> None:  # type: ignore[explicit-override]
        super().unregister_host(address)
        if address in self.kept:
            raise TransferFailed(f"{address} cannot be unregistered")


@given(
    stride=st.integers(1, 2**39).map(lambda pages: pages * PAGE),
    num_chunks=st.integers(1, 500),
)
def test_pieces_tile_the_chunks_end_between_two_and_are_bounded(
    stride: int, num_chunks: int
) -> None:
    pieces = cut(2**40, stride, num_chunks)
    assert pieces[0].address == 2**40
    assert all(a.address + a.size_bytes == b.address for a, b in pairwise(pieces))
    assert sum(piece.size_bytes for piece in pieces) == stride * num_chunks
    for piece in pieces:
        assert piece.size_bytes % stride == 0
        assert piece.size_bytes <= max(pin.PIECE_BYTES, stride)
    assert len(pieces) <= -(-num_chunks // pin.chunks_per_piece(stride))


def test_no_chunk_makes_no_piece() -> None:
    assert cut(2**40, PAGE, 0) == []


PIECES = [Range(100, 10), Range(110, 10), Range(120, 5)]


def test_all_pieces_are_registered_and_unregistered_in_reverse() -> None:
    device = SimulatedDevice(seed=1)
    memory = PinnedMemory(device)
    memory.register(PIECES)
    assert (memory.size_bytes, memory.num_pieces) == (25, 3)
    memory.close()
    memory.close()
    assert memory.size_bytes == 0
    assert device.log == [
        "register 100 10",
        "register 110 10",
        "register 120 5",
        "unregister 120",
        "unregister 110",
        "unregister 100",
    ]


@pytest.mark.parametrize("failing", range(3))
def test_a_piece_that_fails_undoes_those_before_it(failing: int) -> None:
    device = PickyDevice(seed=1)
    device.refused = frozenset({PIECES[failing].address})
    memory = PinnedMemory(device)
    with pytest.raises(TransferFailed, match="cannot be registered"):
        memory.register(PIECES)
    assert memory.size_bytes == 0
    undone = [line for line in device.log if line.startswith("unregister")]
    assert undone == [f"unregister {piece.address}" for piece in reversed(PIECES[:failing])]


def test_what_cannot_be_undone_is_said_and_kept_for_another_try(
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = PickyDevice(seed=1)
    device.refused, device.kept = frozenset({120}), frozenset({110})
    memory = PinnedMemory(device)
    with pytest.raises(TransferFailed, match="120 cannot be registered"):
        memory.register(PIECES)
    assert "110 cannot be unregistered" in caplog.text
    assert memory.size_bytes == 10
    with pytest.raises(TransferFailed, match="110 cannot be unregistered"):
        memory.close()
    device.kept = frozenset()
    memory.close()
    assert memory.size_bytes == 0


# --- with other ranks


def request(tmp_path: Path, exchange: Exchange) -> PinRequest:
    (tmp_path / "data").write_bytes(bytes(PAGE))
    fd = os.open(tmp_path / "data", os.O_RDWR)
    return PinRequest("engine", 0, [], Pin.AUTO, fd, exchange)


def test_a_rank_does_not_wait_for_ever_for_another_that_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(tmp_path, lambda mine: [mine])
    other = os.open(tmp_path / "data", os.O_RDWR)
    assert locks.try_lock(other, locks.PIN_BYTE)
    monkeypatch.setattr(pin, "_LOCK_TIMEOUT_S", 0.1)
    memory = pin_on_all_ranks(SimulatedDevice(seed=1), asked)
    assert memory.size_bytes == 0
    assert "another rank has been registering its memory" in caplog.text
    os.close(other)
    os.close(asked.lock_fd)


def test_the_lock_is_given_back_for_the_next_rank(tmp_path: Path) -> None:
    asked = request(tmp_path, lambda mine: [mine])
    pin_on_all_ranks(SimulatedDevice(seed=1), asked)
    other = os.open(tmp_path / "data", os.O_RDWR)
    assert locks.try_lock(other, locks.PIN_BYTE)
    os.close(other)
    os.close(asked.lock_fd)


def test_a_broken_collective_call_unpins(tmp_path: Path) -> None:
    def broken(mine: object) -> list[object]:
        raise ConnectionError("a rank is gone")

    memory = mmap.mmap(-1, PAGE)
    asked = replace(request(tmp_path, broken), pieces=[range_of(memory)])
    device = SimulatedDevice(seed=1)
    with pytest.raises(ConnectionError, match="a rank is gone"):
        pin_on_all_ranks(device, asked)
    assert [line.split()[0] for line in device.log] == ["register", "unregister"]
    os.close(asked.lock_fd)


# --- populating


@pytest.fixture
def memory() -> mmap.mmap:
    """Pages that nobody has touched, with a byte in some."""
    memory = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    memory[5 * PAGE] = 200
    return memory


def range_of(memory: mmap.mmap) -> Range:
    return Range(np.frombuffer(memory, dtype=np.uint8).ctypes.data, len(memory))


def resident_pages(memory: mmap.mmap) -> int:
    """Pages mapped here, by /proc/self/smaps."""
    address = range_of(memory).address
    with open("/proc/self/smaps") as smaps:
        lines = iter(smaps)
        for line in lines:
            if line.startswith(f"{address:x}-"):
                return next(int(x.split()[1]) for x in lines if x.startswith("Rss:")) * 1024 // PAGE
    raise AssertionError("the mapping is not there")


def test_populating_makes_every_page_resident_and_changes_none(memory: mmap.mmap) -> None:
    populate(range_of(memory))
    assert resident_pages(memory) == 64
    assert memory[5 * PAGE] == 200


def test_a_kernel_that_does_not_know_the_advice_gets_reads_and_no_byte_is_lost(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(address: int, length: int, advice: int) -> None:
        assert advice == syscalls.MADV_POPULATE_READ
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(syscalls, "madvise", unknown)
    populate(range_of(memory))
    assert resident_pages(memory) == 64
    assert memory[5 * PAGE] == 200


def test_without_more_threads_one_populates_alone(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as at a limit of processes

    monkeypatch.setattr(pin, "_SLICE_BYTES", 3 * PAGE)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    populate(range_of(memory))
    assert resident_pages(memory) == 64


@pytest.mark.parametrize("number", [errno.EFAULT, errno.ENOMEM, errno.EIO])
def test_any_other_errno_is_an_error(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def broken(address: int, length: int, advice: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(syscalls, "madvise", broken)
    with pytest.raises(OSError, match="no") as caught:
        populate(range_of(memory))
    assert caught.value.errno == number


def test_slices_tile_the_memory_whatever_the_threads(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def note(address: int, length: int, advice: int) -> None:
        asked.append((address, length))

    monkeypatch.setattr(syscalls, "madvise", note)
    monkeypatch.setattr(pin, "_SLICE_BYTES", 3 * PAGE)
    whole = range_of(memory)
    populate(whole)
    asked.sort()
    assert asked[0][0] == whole.address
    assert all(first + length == second for (first, length), (second, _) in pairwise(asked))
    assert sum(length for _, length in asked) == whole.size_bytes

"""Pinning: register a rank's chunks with the device driver, in all ranks of the engine or in none.

Pinned memory is only faster, so nothing here may stop an engine but memory that is not there. The steps,
in every rank:

1. Populate the mapping (MADV_POPULATE_READ by several threads), since a driver that has to fault pages
   in does so with one thread, under locks that stall other processes of the node.
2. Under a lock on the region, one rank at a time: register the chunks in pieces. Ranks that register one
   file at the same time were seen to fail. A piece that fails undoes those before it.
3. One collective call: every rank hears of all; if one is not pinned, all undo theirs. A pinned rank beside
   an unpinned one has the speed of the latter, and pays for the pinning.

Pieces are bounded (one call of 512 GiB fails whatever is free) and end between chunks, since no copy may
cross two registrations. The caller sees to it that no graph is being captured; the device refuses then.

This module must not know plans, jobs, torch or vLLM.
"""

import ctypes
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvcellar.contract import Pin
from kvcellar.errors import KVCellarError, NotReady, TransferFailed
from kvcellar.region import locks, syscalls
from kvcellar.worker.devices import Device
from kvcellar.worker.ranks import Exchange

logger = logging.getLogger(__name__)

GIB = 1 << 30

PIECE_BYTES = 64 * GIB
"""Bytes of one registration at most. Source: vllm issue 51080 (511.96 GiB work, 512.15 do not; some hosts
refuse 96); the lock of the driver is given back between two pieces."""

_SLICE_BYTES = 8 << 20
"""Bytes of one populate call: it holds the lock of the address space, so a mapping or the start of a
thread elsewhere in the engine waits for it (27-70 ms for 2-8 MiB, 370 ms for 512 MiB; docs/design.md)."""

_MAX_THREADS = 8
_LOCK_POLL_S = 0.05
_LOCK_TIMEOUT_S = 300.0
_LOCK_TIMEOUT_PER_GIB_S = 20.0
"""How long a rank waits for the others to register: 1 s per GB of one of them was seen at worst (TensorRT-LLM
pull request 17773), and there may be many."""


@dataclass(frozen=True, slots=True)
class Range:
    """Host memory by address and length, in bytes."""

    address: int
    size_bytes: int


def chunks_per_piece(chunk_stride_bytes: int) -> int:
    """How many chunks are registered in one piece."""
    return max(1, PIECE_BYTES // chunk_stride_bytes)


def cut(address: int, chunk_stride_bytes: int, num_chunks: int) -> list[Range]:
    """The pieces that chunks `[0, num_chunks)` are registered in; they tile the chunks' memory."""
    step = chunks_per_piece(chunk_stride_bytes)
    return [
        Range(
            address + first * chunk_stride_bytes,
            min(step, num_chunks - first) * chunk_stride_bytes,
        )
        for first in range(0, num_chunks, step)
    ]


def populate(memory: Range) -> None:
    """Map every page of this memory, by this thread and some more. Bytes are read at most, never written.

    At a limit of processes there are fewer threads, or only this one.

    Raises:
        OSError: a page is not there (the file was cut short), or cannot be had.
    """
    slices: queue.SimpleQueue[Range] = queue.SimpleQueue()
    for offset in range(0, memory.size_bytes, _SLICE_BYTES):
        size_bytes = min(_SLICE_BYTES, memory.size_bytes - offset)
        slices.put(Range(memory.address + offset, size_bytes))
    errors: list[OSError] = []
    n_threads = min(_MAX_THREADS, os.cpu_count() or 1, slices.qsize())
    threads = _start_threads(n_threads - 1, slices, errors)
    _populate_slices(slices, errors)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _start_threads(
    wanted: int, slices: "queue.SimpleQueue[Range]", errors: list[OSError]
) -> list[threading.Thread]:
    """As many of the wanted threads as the kernel grants."""
    threads: list[threading.Thread] = []
    for _ in range(wanted):
        thread = threading.Thread(
            target=_populate_slices, args=(slices, errors), name="kvcellar-populate"
        )
        try:
            thread.start()
        except RuntimeError as error:  # how Python tells of EAGAIN
            logger.debug("%d threads populate the region: %s", len(threads) + 1, error)
            break
        threads.append(thread)
    return threads


def _populate_slices(slices: "queue.SimpleQueue[Range]", errors: list[OSError]) -> None:
    """Work off the queue, until an error of any thread."""
    while not errors:
        try:
            _populate_slice(slices.get_nowait())
        except queue.Empty:
            return
        except OSError as error:
            errors.append(error)


def _populate_slice(piece: Range) -> None:
    try:
        syscalls.madvise(piece.address, piece.size_bytes, syscalls.MADV_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Linux below 5.14 does not know the advice: read a byte of each page instead.
        memory = memoryview((ctypes.c_char * piece.size_bytes).from_address(piece.address))
        np.frombuffer(memory, dtype=np.uint8)[:: os.sysconf("SC_PAGE_SIZE")].max()


class PinnedMemory:
    """Pieces of host memory that are registered with a device. End it with `close`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pieces: list[Range] = []

    @property
    def size_bytes(self) -> int:
        """Bytes that are registered now."""
        return sum(piece.size_bytes for piece in self._pieces)

    @property
    def num_pieces(self) -> int:
        """Registrations that there are now."""
        return len(self._pieces)

    def register(self, pieces: Sequence[Range]) -> None:
        """Register all pieces, or none.

        Raises:
            TransferFailed: the driver refused one. Those that could not be undone stay counted, and
                `close` tries them again.
        """
        for piece in pieces:
            try:
                self._device.register_host(piece.address, piece.size_bytes)
            except TransferFailed:
                self.release()
                raise
            self._pieces.append(piece)

    def close(self) -> None:
        """Unregister all pieces; a second call does nothing.

        Raises:
            TransferFailed: the driver refused one; the others are unregistered all the same.
        """
        failures = self.release()
        if failures:
            raise failures[0]

    def release(self) -> list[TransferFailed]:
        """Unregister all pieces, the last first; what the driver refused is logged, kept, and returned."""
        failures: list[TransferFailed] = []
        kept: list[Range] = []
        while self._pieces:
            piece = self._pieces.pop()
            try:
                self._device.unregister_host(piece.address)
            except TransferFailed as error:
                failures.append(error)
                kept.insert(0, piece)
                logger.error("memory stays registered with the driver: %s", error)  # noqa: TRY400
        self._pieces = kept
        return failures


@dataclass(frozen=True, slots=True)
class PinRequest:
    """What a rank wants pinned, and with whom.

    Attributes:
        name: of the region, for people.
        rank: of this process.
        pieces: of this rank's chunks, see `cut`.
        wish: KVCELLAR_PIN.
        lock_fd: this rank's own description of the data file.
        exchange: see `Exchange`.
    """

    name: str
    rank: int
    pieces: Sequence[Range]
    wish: Pin
    lock_fd: int
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a rank tells the others."""

    rank: int
    is_pinned: bool
    reason: str = ""
    is_fatal: bool = False  # its memory is not there


def pin_on_all_ranks(device: Device, request: PinRequest) -> PinnedMemory:
    """Pin this rank's chunks if all ranks can pin theirs. Every rank has to call it: one collective call.

    Returns:
        What is pinned: all pieces, or nothing.

    Raises:
        NotReady: a rank's memory cannot be read; so on all ranks.
    """
    start_s = time.monotonic()
    memory = PinnedMemory(device)
    mine = _attempt(memory, request)
    try:
        heard = request.exchange(mine)
    except BaseException:
        memory.release()
        raise
    outcomes = [outcome for outcome in heard if isinstance(outcome, _Outcome)]
    if not all(outcome.is_pinned for outcome in outcomes):
        memory.release()
    _raise_if_fatal(outcomes, mine, request.name)
    if request.rank == 0:
        _log(outcomes, memory, request, time.monotonic() - start_s)
    return memory


def _attempt(memory: PinnedMemory, request: PinRequest) -> _Outcome:
    if request.wish is Pin.NEVER:
        return _Outcome(request.rank, False, "KVCELLAR_PIN=never")
    try:
        for piece in request.pieces:
            populate(piece)
    except OSError as error:
        return _Outcome(request.rank, False, str(error), is_fatal=True)
    total_bytes = sum(piece.size_bytes for piece in request.pieces)
    try:
        with_lock(request.lock_fd, total_bytes, lambda: memory.register(request.pieces))
    except (KVCellarError, OSError) as error:
        return _Outcome(request.rank, False, str(error))
    return _Outcome(request.rank, True)


def with_lock(fd: int, total_bytes: int, step: Callable[[], None]) -> None:
    """Do a step while no other rank of the region does one.

    A rank that dies gives the lock back. The time to wait grows with the ranks' memory.

    Raises:
        NotReady: another rank held the lock for too long.
    """
    timeout_s = _LOCK_TIMEOUT_S + _LOCK_TIMEOUT_PER_GIB_S * total_bytes / GIB
    deadline = time.monotonic() + timeout_s
    while not locks.try_lock(fd, locks.PIN_BYTE):
        if time.monotonic() >= deadline:
            raise NotReady(
                f"another rank has been registering its memory for {timeout_s:.0f} s; this one does not "
                "wait any longer"
            )
        time.sleep(_LOCK_POLL_S)
    try:
        step()
    finally:
        locks.unlock(fd, locks.PIN_BYTE)


def _raise_if_fatal(outcomes: Sequence[_Outcome], mine: _Outcome, name: str) -> None:
    fatal = next((outcome for outcome in (mine, *outcomes) if outcome.is_fatal), None)
    if fatal is not None:
        raise NotReady(
            f"rank {fatal.rank} cannot read its part of region {name} ({fatal.reason}): the file was cut "
            "short or its memory is gone; let the sidecar make the region again"
        )


def _log(
    outcomes: Sequence[_Outcome], memory: PinnedMemory, request: PinRequest, seconds: float
) -> None:
    reasons = {outcome.rank: outcome.reason for outcome in outcomes if not outcome.is_pinned}
    if not reasons:
        logger.info(
            "region %s: %d bytes in %d pieces are pinned on each of %d ranks, after %.1f s",
            request.name,
            memory.size_bytes,
            memory.num_pieces,
            len(outcomes),
            seconds,
        )
        return
    logger.log(
        logging.INFO if request.wish is Pin.NEVER else logging.WARNING,
        "region %s is not pinned on any rank, so transfers are slower: %s",
        request.name,
        "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items()),
    )

"""The index file of a region: failure marks of the transfers of one engine start.

A worker whose store failed cannot tell vLLM so (a failed store kills the engine), so it marks the chunk
here, and the scheduler reads the mark before it lists the chunk as stored. Rank 0 sizes the file, since
it alone knows the number of chunks. Layout, little-endian::

    0      magic "KVCINDEX", u32 version, u32 copies, u64 num_chunks
    4096   u64 marks ever set in range 0, 1, ... (one writer each: the rank that stores into that range)
    8192   one byte a chunk of range 0, then of range 1, ...: 0 good, 1 the last store failed

The scheduler looks at the counts alone (one small read) as long as it has cleared every mark.
"""

import os
import struct

from kvcellar.errors import IndexMisuse
from kvcellar.region.geometry import BLOCK_SIZE_ALIGNMENT, Geometry, round_up

_MAGIC = b"KVCINDEX"
_HEAD = struct.Struct("<8sIIQ")
_VERSION = 1
_COUNTS_AT = 4096
_MARKS_AT = 8192
_COUNT = struct.Struct("<Q")
_GOOD = b"\0"
_BAD = b"\1"
_MIN_CHUNK_BYTES = 4096


def index_bound_bytes(capacity_bytes: int) -> int:
    """An upper bound of the index file for a region of that capacity, for the plan and the volume's size.

    In whole pages, as a tmpfs counts them.
    """
    return round_up(_MARKS_AT + capacity_bytes // _MIN_CHUNK_BYTES, BLOCK_SIZE_ALIGNMENT)


def format_index(fd: int, geometry: Geometry) -> None:
    """Empty the file and lay it out for `geometry`; every mark is good. Only rank 0, which holds a slot.

    Raises:
        OSError: ENOSPC, the volume is full.
    """
    os.ftruncate(fd, 0)
    os.posix_fallocate(fd, 0, _MARKS_AT + geometry.copies * geometry.num_chunks)
    os.pwrite(fd, _HEAD.pack(_MAGIC, _VERSION, geometry.copies, geometry.num_chunks), 0)


class FailureMarks:
    """The marks of one engine start, for writing by workers and reading by the scheduler.

    Read and written with pread and pwrite, so a cut file is an error here and never a SIGBUS.
    """

    def __init__(self, fd: int, geometry: Geometry) -> None:
        """Use an index file that was laid out for `geometry`; `fd` stays the caller's."""
        self._fd = fd
        self._geometry = geometry
        self._cleared = 0

    def close(self) -> None:
        """Forget the descriptor, whose number may soon be another file's; nothing is marked any more."""
        self._fd = -1

    def mark(self, rank: int, chunk: int) -> None:
        """Say that the last store of `rank` into `chunk` failed. Only the rank that writes this range.

        Raises:
            IndexMisuse: there is no such chunk.
        """
        copy = self._geometry.range_index(rank)
        position = self._position(copy, chunk)
        if self._fd < 0:
            return
        if os.pread(self._fd, 1, position) == _BAD:
            return
        os.pwrite(self._fd, _BAD, position)
        at = _COUNTS_AT + copy * _COUNT.size
        (count,) = _COUNT.unpack(os.pread(self._fd, _COUNT.size, at).ljust(_COUNT.size, _GOOD))
        os.pwrite(self._fd, _COUNT.pack(count + 1), at)

    def take_failed(self, chunks: list[int]) -> set[int]:
        """Those of `chunks` that a rank marked; their marks are cleared. Only the scheduler.

        One small read while nothing failed; otherwise one read a range over the span of `chunks`.

        Raises:
            IndexMisuse: there is no such chunk.
        """
        if self._fd < 0:
            return set()
        copies = self._geometry.copies
        raw = os.pread(self._fd, copies * _COUNT.size, _COUNTS_AT)
        marked = sum(
            count for (count,) in _COUNT.iter_unpack(raw[: len(raw) // _COUNT.size * _COUNT.size])
        )
        if marked == self._cleared or not chunks:
            return set()
        return {chunk for copy in range(copies) for chunk in self._take_from(copy, chunks)}

    def _take_from(self, copy: int, chunks: list[int]) -> set[int]:
        low, high = min(chunks), max(chunks)
        first = self._position(copy, low)
        marks = os.pread(self._fd, self._position(copy, high) - first + 1, first)
        marked = {chunk for chunk in chunks if marks[chunk - low : chunk - low + 1] == _BAD}
        for chunk in marked:
            os.pwrite(self._fd, _GOOD, self._position(copy, chunk))
        self._cleared += len(marked)
        return marked

    def _position(self, copy: int, chunk: int) -> int:
        if not 0 <= chunk < self._geometry.num_chunks:
            raise IndexMisuse(
                f"the failure mark of chunk {chunk} was asked for; this region has "
                f"{self._geometry.num_chunks} chunks a rank"
            )
        return _MARKS_AT + copy * self._geometry.num_chunks + chunk

"""The data file: reserving and settling its pages, in bounded steps on a plain descriptor.

*Reserve*: the kernel has promised every page. *Settle*: every page is zeroed and resident. Both passes
are idempotent and never touch data, so a pass that was killed is simply run again. Callers check limits
and their stop flag between steps; a step is one `STEP_BYTES` piece.

Measured on a 2-core VM, Linux 6.18 (docs/design.md, "Reserve and settle"): fallocate reserves at 3.4x the
speed of a one-thread populate, a second fallocate of the same range settles at 1.7x without a mapping.
"""

import errno
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

from kvcellar.contract import HugePages
from kvcellar.region import syscalls
from kvcellar.region.geometry import HUGE_PAGE_BYTES, round_up
from kvcellar.region.mapping import Mapping

logger = logging.getLogger(__name__)

STEP_BYTES = 64 * 1024 * 1024
"""Bytes between two looks at the limits and the stop flag: 16-95 ms of fallocate (measured, 4 KiB pages)."""
_POPULATE_SLICE_BYTES = 8 * 1024 * 1024
"""A populate holds mmap_lock for its slice; larger slices stall thread starts of the process."""
_COLLAPSE_GIVE_UP = 4
"""Failed or slow slices in a row after which the rest of the file gets small pages."""
_COLLAPSE_SLOW_S = 0.05
"""40 MB/s: below that a huge page costs more than it saves (cold guest memory, fragmentation)."""


def reserved_bytes(fd: int) -> int:
    """Bytes that the file system has promised to the file (st_blocks)."""
    return os.fstat(fd).st_blocks * 512


def free_all(fd: int, capacity_bytes: int) -> None:
    """Give every page back and keep the size. Only for a file that nobody holds."""
    os.ftruncate(fd, 0)
    os.ftruncate(fd, capacity_bytes)


class HugePageMaker:
    """Reserves with MADV_COLLAPSE: huge pages on a stock tmpfs, unprivileged, settled at once.

    Per 2 MiB: seed one page with fallocate, then collapse the slice through a temporary mapping. A slice
    that cannot be collapsed is left to the caller's fallocate; after several failures in a row it stops
    trying. A memory limit shows as EBUSY here, not as a kill (Linux 6.18, cgroup v1).

    Attributes:
        made_bytes: bytes that became huge pages.
    """

    def __init__(self, fd: int, huge_pages: HugePages) -> None:
        """Prepare for one data file; on hugetlbfs and with `never` it makes nothing."""
        on_tmpfs = syscalls.filesystem_magic(fd) == syscalls.TMPFS_MAGIC
        self._fd = fd
        self._usable = huge_pages is HugePages.AUTO and on_tmpfs
        self._failures = 0
        self.made_bytes = 0

    def make(self, offset_bytes: int, length_bytes: int) -> None:
        """Collapse what can be collapsed in `[offset_bytes, offset_bytes + length_bytes)`.

        Raises:
            OSError: EBUSY, a memory limit was reached; ENOSPC, the file system is full.
        """
        if self._given_up():
            return
        mapping = Mapping.map_range(self._fd, offset_bytes, length_bytes)
        try:
            for position in range(0, length_bytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
                if self._given_up():
                    return
                if self._seed(offset_bytes + position):
                    self._collapse(mapping.address + position)
        finally:
            mapping.close()

    def _given_up(self) -> bool:
        return not self._usable

    def _seed(self, offset_bytes: int) -> bool:
        """Reserve the slice's first page; False if it was there, so the slice belongs to an earlier pass."""
        before = os.fstat(self._fd).st_blocks
        os.posix_fallocate(self._fd, offset_bytes, os.sysconf("SC_PAGE_SIZE"))
        return os.fstat(self._fd).st_blocks > before

    def _collapse(self, address: int) -> None:
        began = time.monotonic()
        try:
            syscalls.madvise(address, HUGE_PAGE_BYTES, syscalls.MADV_COLLAPSE)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise
            if error.errno not in (errno.ENOMEM, errno.EAGAIN, errno.EINVAL):
                raise
            self._count_failure(error.strerror or "")
            return
        self.made_bytes += HUGE_PAGE_BYTES
        if time.monotonic() - began > _COLLAPSE_SLOW_S:
            self._count_failure("slow")
        else:
            self._failures = 0

    def _count_failure(self, why: str) -> None:
        self._failures += 1
        if self._failures >= _COLLAPSE_GIVE_UP:
            self._usable = False
            logger.info("no more huge pages for this region (%s); the rest gets small pages", why)


def reserve_step(fd: int, offset_bytes: int, length_bytes: int) -> None:
    """Reserve one piece with fallocate; pages that are there stay as they are.

    Raises:
        OSError: ENOSPC, the file system is full; this call's own pages are rolled back then.
    """
    os.posix_fallocate(fd, offset_bytes, length_bytes)


def settle_step(fd: int, offset_bytes: int, length_bytes: int, threads: int = 1) -> None:
    """Zero what one piece has reserved; data that was written stays.

    One thread: a second fallocate of the range (no mapping, no resident memory). More: populate-write
    through a temporary mapping in small slices, which can win on machines with many cores; where the
    kernel does not know the advice (before Linux 5.14), fallocate all the same.

    Raises:
        OSError: the file was cut short by somebody (EFAULT), or the file system is full (ENOSPC).
    """
    if threads > 1:
        try:
            _populate(fd, offset_bytes, length_bytes, threads)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return
    os.posix_fallocate(fd, offset_bytes, length_bytes)


def _populate(fd: int, offset_bytes: int, length_bytes: int, threads: int) -> None:
    mapping = Mapping.map_range(fd, offset_bytes, length_bytes)
    try:
        starts = range(0, round_up(length_bytes, _POPULATE_SLICE_BYTES), _POPULATE_SLICE_BYTES)

        def populate(start: int) -> None:
            length = min(_POPULATE_SLICE_BYTES, length_bytes - start)
            syscalls.madvise(mapping.address + start, length, syscalls.MADV_POPULATE_WRITE)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(populate, starts))
    finally:
        mapping.close()

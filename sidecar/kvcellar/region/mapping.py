"""A mapping of a part of the data file at an address that huge pages can use.

The address is congruent to the file offset modulo 2 MiB (Python's `mmap` cannot ask for that), else
the kernel cannot map the file's huge pages as such: attaching 1 GiB then costs 15 ms instead of 0.3
(docs/design.md, "Reserve and settle").
"""

import os

from kvcellar.region import syscalls
from kvcellar.region.geometry import HUGE_PAGE_BYTES, round_up


class Mapping:
    """`length_bytes` of a file, mapped shared at `address`. Make one with `map_range`, end it with `close`.

    A forked child does not inherit it (MADV_DONTFORK), so a child cannot keep the region's memory or,
    through the mapping, its participant's lock.
    """

    def __init__(self, address: int, length_bytes: int) -> None:
        """Take over an existing mapping."""
        self.address = address
        self.length_bytes = length_bytes
        self._pid = os.getpid()

    @classmethod
    def map_range(cls, fd: int, offset_bytes: int, length_bytes: int) -> "Mapping":
        """Map `[offset_bytes, offset_bytes + length_bytes)` of `fd` for reading and writing.

        Args:
            fd: descriptor open for reading and writing.
            offset_bytes: a multiple of the page size.
            length_bytes: above 0.

        Raises:
            OSError: the kernel refused (ENOMEM: address space or vm.max_map_count).
        """
        length = round_up(length_bytes, os.sysconf("SC_PAGE_SIZE"))
        flags = syscalls.MAP_PRIVATE | syscalls.MAP_ANONYMOUS
        span = length + HUGE_PAGE_BYTES
        start = syscalls.mmap(0, span, syscalls.PROT_NONE, flags, -1, 0)
        address = round_up(start, HUGE_PAGE_BYTES) + offset_bytes % HUGE_PAGE_BYTES
        if address + length > start + span:
            address -= HUGE_PAGE_BYTES
        try:
            protection = syscalls.PROT_READ | syscalls.PROT_WRITE
            fixed = syscalls.MAP_SHARED | syscalls.MAP_FIXED
            syscalls.mmap(address, length, protection, fixed, fd, offset_bytes)
            syscalls.madvise(address, length, syscalls.MADV_DONTFORK)
        except OSError:
            syscalls.munmap(start, span)
            raise
        if address > start:
            syscalls.munmap(start, address - start)
        if start + span > address + length:
            syscalls.munmap(address + length, start + span - address - length)
        return cls(address, length)

    def close(self) -> None:
        """Unmap. Does nothing the second time, or in a forked child (which never had the mapping)."""
        if self.length_bytes and os.getpid() == self._pid:
            syscalls.munmap(self.address, self.length_bytes)
        self.length_bytes = 0

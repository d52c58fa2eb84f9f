"""System calls that Python's standard library lacks, through ctypes (which releases the GIL).

Nothing here decides anything: errno becomes OSError, and callers convert it at their border.
"""

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, cast

MADV_DONTFORK = 10
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
MADV_COLLAPSE = 25
"""Linux >= 6.1; makes huge pages on a tmpfs mounted without `huge=` (docs/design.md, "Reserve and settle")."""

TMPFS_MAGIC = 0x01021994
HUGETLBFS_MAGIC = 0x958458F6
MEMORY_FILESYSTEMS = {TMPFS_MAGIC: "tmpfs", HUGETLBFS_MAGIC: "hugetlbfs"}
"""Those that a region can lie on, by type: none writes its pages to a disk."""
"""Source: include/uapi/linux/magic.h."""

PROT_NONE = 0
PROT_READ = 1
PROT_WRITE = 2
MAP_SHARED = 1
MAP_PRIVATE = 2
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20

_RENAME_NOREPLACE = 1
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)


def _declare(name: str, result: type, *arguments: type) -> Callable[..., Any]:
    function: Any = getattr(_libc, name)
    function.restype = result
    function.argtypes = arguments
    return cast("Callable[..., Any]", function)


_c_int, _c_uint, _size, _ptr = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_madvise = _declare("madvise", _c_int, _ptr, _size, _c_int)
_mmap = _declare("mmap", _ptr, _ptr, _size, _c_int, _c_int, _c_int, ctypes.c_longlong)
_munmap = _declare("munmap", _c_int, _ptr, _size)
_fstatfs = _declare("fstatfs", _c_int, _c_int, _ptr)
_renameat2 = _declare(
    "renameat2", _c_int, _c_int, ctypes.c_char_p, _c_int, ctypes.c_char_p, _c_uint
)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def madvise(address: int, length: int, advice: int) -> None:
    """Tell the kernel how a mapped range will be used, or what to do with it now."""
    _check(_madvise(address, length, advice))


def mmap(address: int, length: int, protection: int, flags: int, fd: int, offset: int) -> int:
    """Map a file or anonymous memory; returns the address."""
    result = _mmap(address, length, protection, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def munmap(address: int, length: int) -> None:
    """Unmap a range."""
    _check(_munmap(address, length))


def filesystem_magic(fd: int) -> int:
    """The file system type of fstatfs(2), such as `TMPFS_MAGIC`."""
    buffer = ctypes.create_string_buffer(256)
    _check(_fstatfs(fd, ctypes.addressof(buffer)))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def rename_no_replace(dir_fd: int, old: str, new: str, new_dir_fd: int | None = None) -> None:
    """Rename, to another directory if one is given; FileExistsError if `new` exists (RENAME_NOREPLACE)."""
    to_fd = dir_fd if new_dir_fd is None else new_dir_fd
    if _renameat2(dir_fd, os.fsencode(old), to_fd, os.fsencode(new), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        if number == errno.EEXIST:
            raise FileExistsError(number, os.strerror(number), new)
        raise OSError(number, os.strerror(number), new)

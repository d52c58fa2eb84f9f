"""Open-file-description locks on single bytes: who is alive, told by the kernel.

An OFD lock belongs to the open file description, so it goes when the last descriptor *and* mapping of
that description is gone, however its process died, and it is seen across PID namespaces. Two rules
follow: one description per participant (locks of one description merge), and a forked child closes,
never unlocks (F_UNLCK in a child frees the parent's lock).

Source: Linux fcntl(2), "Open file description locks"; measured in docs/design.md, "Locks".
"""

import errno
import fcntl
import os
import struct

OWNER_BYTE = 0
"""Byte of the metadata file whose lock makes a process the owner of the region."""
SLOT_BASE = 1 << 61
"""Slot `n` is the lock on byte SLOT_BASE + n of the data file, far behind its end."""

PIN_BYTE = SLOT_BASE - 1
"""Byte of the data file whose lock a rank holds while it registers its memory with the device driver."""

_FLOCK = struct.Struct("@hhqqi4x")


def try_lock(fd: int, byte: int) -> bool:
    """Take the exclusive lock on one byte for `fd`'s description; False if another description has it."""
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, byte: int) -> None:
    """Give a lock back while its holder goes on. Only `PIN_BYTE` ever is; the others go with the process."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_locked(fd: int, byte: int) -> bool:
    """Whether *another* description than `fd`'s holds the byte; a description's own locks are invisible."""
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    answer: tuple[int, ...] = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query))
    return answer[0] != fcntl.F_UNLCK


def held_slots(fd: int, slots: int) -> list[int]:
    """The slots that other descriptions hold, by `fd` as the asking description (64 queries: 0.1 ms)."""
    if not _any_locked(fd, slots):
        return []
    return [slot for slot in range(slots) if is_locked(fd, SLOT_BASE + slot)]


def _any_locked(fd: int, slots: int) -> bool:
    query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, SLOT_BASE, slots, 0)
    answer: tuple[int, ...] = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query))
    return answer[0] != fcntl.F_UNLCK

"""Write leases: whether anybody else has a file open or mapped, told by the kernel.

vLLM takes no lock on its region file, so a lease is the only question that the kernel answers about it.
A write lease (`F_SETLEASE`, `F_WRLCK`) is refused while any other open file description of the inode
exists, also one that only a mapping keeps, in whatever process, and also where the name is gone. Mappings
of the asking description itself do not count.

Who opens the file while the lease is held waits until it is given back (with O_NONBLOCK: EWOULDBLOCK), at
most /proc/sys/fs/lease-break-time seconds, and the holder gets a SIGIO, which kills a process that has not
asked for it to be ignored. Only the file's owner, or a process with CAP_LEASE, may take one.

Source: Linux fcntl(2), "Leases"; measured in docs/design.md.
"""

import contextlib
import errno
import fcntl
import signal
from enum import Enum, auto


class Lease(Enum):
    """What the kernel answers to the wish for a write lease."""

    TAKEN = auto()
    """Nobody else has the file open or mapped, and whoever opens it now waits."""
    REFUSED = auto()
    """Somebody has it."""
    NOT_OURS = auto()
    """The file belongs to another uid, and this process lacks CAP_LEASE: nobody can tell."""
    UNSUPPORTED = auto()
    """This file system has no leases, or this process would be killed by SIGIO: nobody can tell."""


def ignore_breaks() -> None:
    """Let a lease be broken without a signal. For main threads, before anything asks for a lease."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def take(fd: int) -> Lease:
    """Take the write lease for `fd`'s description, and keep it until `give_back` or the last close."""
    if signal.getsignal(signal.SIGIO) is signal.SIG_DFL:
        return Lease.UNSUPPORTED
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        answers = {errno.EAGAIN: Lease.REFUSED, errno.EACCES: Lease.NOT_OURS}
        return answers.get(error.errno or 0, Lease.UNSUPPORTED)
    return Lease.TAKEN


def is_intact(fd: int) -> bool:
    """Whether the lease that `fd`'s description took is still whole: nobody has come to open the file."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK)


def give_back(fd: int) -> None:
    """End the lease; whoever waits in open(2) goes on."""
    with contextlib.suppress(OSError):  # it was broken for too long, and the kernel took it
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def is_held(fd: int) -> bool:
    """Whether another description holds the file of `fd`, or whether nobody can tell.

    It takes the lease and gives it back at once. An engine that opens the file in between sees nothing of
    it but a delay: its open(2), which has no O_NONBLOCK, waits for these two calls to be over,
    microseconds. A description of ours that somebody opens the file beside for a moment, such as a
    command that looks at it, makes the answer yes for that moment.
    """
    answer = take(fd)
    if answer is Lease.TAKEN:
        give_back(fd)
    return answer is not Lease.TAKEN

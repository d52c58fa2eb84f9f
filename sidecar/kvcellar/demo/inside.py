"""The program inside a sandbox: the holder that is its process 1, and the entries of its commands.

`kvcellar.demo.sandbox` starts it, as ``python -m kvcellar.demo.inside hold MOUNTS`` or
``... enter PID STARTED ENVIRONMENT COMMAND...``; what the two processes are for stands there.
It speaks to the kernel by ctypes: Python has no mount, and setns only since 3.12.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kvcellar.demo import processes
from kvcellar.demo.processes import ProcessId

# From sched.h, mount.h and prctl.h.
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True, slots=True)
class Mounts:
    """What the holder mounts.

    Attributes:
        scratch: a folder to cover with a tmpfs, and to remove at the end.
        tmpfs: size in bytes by mount point, scratch among them.
    """

    scratch: str
    tmpfs: dict[str, int]

    def encode(self) -> str:
        """As one argument of a command."""
        return json.dumps([self.scratch, self.tmpfs])

    @classmethod
    def decode(cls, text: str) -> "Mounts":
        """The inverse of `encode`."""
        scratch, tmpfs = json.loads(text)
        return cls(str(scratch), {str(path): int(bytes_) for path, bytes_ in tmpfs.items()})


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _hold(mounts: Mounts) -> None:
    """Be process 1: mount, say so, reap, and end with standard input."""
    # The old /proc is still mounted, so this is our number as the caller sees it.
    outer_pid = Path("/proc/self").readlink().name
    libc = _libc()
    flags = _MS_NOSUID | _MS_NODEV
    _check(libc.mount(b"proc", b"/proc", b"proc", flags, None), "cannot mount /proc")
    for path, size_bytes in mounts.tmpfs.items():
        options = f"size={size_bytes},mode=1777".encode()
        _check(
            libc.mount(b"tmpfs", path.encode(), b"tmpfs", flags, options), f"cannot mount {path}"
        )

    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, _nothing)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    os.write(sys.stdout.fileno(), f"{outer_pid}\n".encode())
    while True:
        ready, _, _ = select.select([sys.stdin.fileno(), waker], [], [])
        if waker in ready:
            os.read(waker, 4096)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 4096):
            break
    # The maker may have been killed, so the folder is ours to remove.
    _check(libc.umount2(mounts.scratch.encode(), _MNT_DETACH), f"cannot unmount {mounts.scratch}")
    Path(mounts.scratch).rmdir()


def _enter(first: ProcessId, environment: int, command: Sequence[str]) -> NoReturn:
    """Join the namespaces of process 1, start the command and stand for it."""
    with open(environment, encoding="utf-8") as file:
        variables = {str(name): str(value) for name, value in json.load(file).items()}
    folder = Path.cwd()
    kinds = _CLONE_NEWNS | _CLONE_NEWPID
    holder = os.pidfd_open(first.pid)
    if not processes.is_alive(first):
        raise ProcessLookupError(f"the sandbox of process {first.pid} is closed")
    if _user_namespace("self") != _user_namespace(str(first.pid)):
        kinds |= _CLONE_NEWUSER
    libc = _libc()
    _check(libc.setns(holder, kinds), "cannot join the sandbox")
    os.close(holder)
    with contextlib.suppress(OSError):
        os.chdir(folder)
    child = os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        try:
            os.execvpe(command[0], list(command), variables)  # noqa: S606  no shell is meant
        except OSError as error:
            sys.stderr.write(f"cannot start {command[0]}: {error}\n")
            os._exit(127)
    _stand_for(child)


def _stand_for(child: int) -> NoReturn:
    """Pass signals on to the child, and end as it ends."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        ending = os.WTERMSIG(status)
        if ending != signal.SIGKILL:
            signal.signal(ending, signal.SIG_DFL)
        os.kill(os.getpid(), ending)
    os._exit(os.WEXITSTATUS(status))


def _user_namespace(pid: str) -> int:
    return Path(f"/proc/{pid}/ns/user").stat().st_ino


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """A handler, so that SIGCHLD is delivered and wakes the holder up."""


def _main(arguments: Sequence[str]) -> int:
    try:
        match arguments:
            case ["hold", mounts]:
                _hold(Mounts.decode(mounts))
            case ["enter", pid, started_ticks, environment, *command] if command:
                _enter(ProcessId(int(pid), int(started_ticks)), int(environment), command)
            case _:
                sys.stderr.write("this program is started by kvcellar.demo.sandbox only\n")
                return 2
    except OSError as error:
        sys.stderr.write(f"sandbox: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))

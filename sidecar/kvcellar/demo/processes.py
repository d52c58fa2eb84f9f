"""Processes by identity: who lives under whom, and how to end exactly those.

A process is named by its id *and* its start time, so that a signal never reaches another one
that was given the same number later. Nothing here matches on names. Reads ``/proc`` as this
process sees it: inside a sandbox the same process has another number there.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_POLL_S = 0.02

# Fields of /proc/<pid>/stat behind the command's closing bracket (proc_pid_stat(5), where
# field 3 is the state).
_STATE_FIELD = 0
_PARENT_FIELD = 1
_STARTED_FIELD = 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process, for good.

    Attributes:
        pid: its number in the caller's PID namespace.
        started_ticks: clock ticks from boot to its start.
    """

    pid: int
    started_ticks: int


@dataclass(frozen=True, slots=True)
class _Status:
    identity: ProcessId
    parent: int
    is_dead: bool


def identify(pid: int) -> ProcessId | None:
    """The identity of a living process, or None."""
    status = _status(pid)
    return None if status is None or status.is_dead else status.identity


def is_alive(process: ProcessId) -> bool:
    """Whether it still runs. A zombie does not: it holds no memory, lock or mapping."""
    return identify(process.pid) == process


def title(process: ProcessId) -> str:
    """Its command line, or an empty string when it is gone or has none."""
    try:
        raw = (_PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip()


def descendants(pid: int) -> list[ProcessId]:
    """All living descendants, parents before children.

    One pass over ``/proc``: a process that forks meanwhile may be missed, so whoever ends a
    tree looks again afterwards.
    """
    children: dict[int, list[_Status]] = {}
    for status in _all():
        children.setdefault(status.parent, []).append(status)
    found: list[ProcessId] = []
    todo = [pid]
    for parent in todo:
        for status in children.get(parent, []):
            todo.append(status.identity.pid)
            if not status.is_dead:
                found.append(status.identity)
    return found


def in_pid_namespace(inode: int) -> list[ProcessId]:
    """All living processes in the PID namespace with that inode, ours to look at or not.

    Processes whose namespace may not be read (another user's) are left out.
    """
    found = []
    for status in _all():
        try:
            same = (_PROC / str(status.identity.pid) / "ns" / "pid").stat().st_ino == inode
        except OSError:
            continue
        if same and not status.is_dead:
            found.append(status.identity)
    return found


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Send a signal to exactly this process.

    Returns:
        False when it is gone already.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor is bound to one process, so checking after opening leaves no gap.
        if not is_alive(process):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
            return True
        return False
    finally:
        os.close(descriptor)


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait until all have ended.

    Returns:
        Those that still run at the deadline.
    """
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if is_alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        left = [process for process in left if is_alive(process)]
    return left


def _all() -> list[_Status]:
    statuses = (_status(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [status for status in statuses if status is not None]


def _status(pid: int) -> _Status | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name stands in brackets and may hold brackets and spaces itself.
    fields = text.rpartition(")")[2].split()
    return _Status(
        identity=ProcessId(pid=pid, started_ticks=int(fields[_STARTED_FIELD])),
        parent=int(fields[_PARENT_FIELD]),
        is_dead=fields[_STATE_FIELD] in "ZX",
    )

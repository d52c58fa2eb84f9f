"""Processes that outlive the one that started them: told apart, and ended by their own id.

A number alone does not name a process: it may be another one's by now. So each is known by its
number, its start and the machine's boot, and is signalled through a descriptor opened before that
was compared.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this machine, for ever."""

    pid: int
    start_ticks: int
    """Clock ticks from boot to its start. Source: proc(5), field 22 of ``/proc/PID/stat``."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """The identity of a process that is running or not yet waited for."""
        return cls(pid, _stat(pid)[1], _boot_id())

    def is_running(self) -> bool:
        """Whether it is still there; one that only waits to be reaped is not."""
        try:
            state, start_ticks = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state != "Z" and (start_ticks, _boot_id()) == (self.start_ticks, self.boot_id)

    def end(self, number: signal.Signals, deadline_s: float) -> bool:
        """Signal it and wait until it is gone; returns whether it is."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.is_running():
                return True
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
            # Readable once the process has ended, reaped or not.
            return bool(select.select([descriptor], [], [], deadline_s)[0])
        finally:
            os.close(descriptor)


def end_all(processes: Iterable[ProcessId], deadline_s: float = 10.0) -> list[ProcessId]:
    """Kill them in the order given; returns those that are still there after the deadline."""
    deadline = time.monotonic() + deadline_s
    return [
        process
        for process in processes
        if not process.end(signal.SIGKILL, max(0.0, deadline - time.monotonic()))
    ]


def _stat(pid: int) -> tuple[str, int]:
    """State and start of a process."""
    # The name in brackets may hold spaces and brackets itself.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

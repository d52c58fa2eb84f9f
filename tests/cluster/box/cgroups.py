"""The cgroups of a node: made before it starts, read by tests, emptied and removed when it stops.

On cgroup v1 every controller has a hierarchy of its own, and the node is in a group of the same name in
each of them; on v2 there is one. Whatever the node starts is in its group, so the group also says what is
still running of it.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.box.processes import ProcessId

ROOT = Path("/sys/fs/cgroup")
_SYSTEM = "system"
"""The group, below the node's, of its programs; pods are in ``kubepods`` beside it."""
_V2_CONTROLLERS = "+cpu +cpuset +memory +pids +io"


def is_v2() -> bool:
    """Whether this machine has the one hierarchy of cgroup v2."""
    return (ROOT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    if is_v2():
        return [ROOT]
    # Links lead from `cpu` to `cpu,cpuacct`.
    return sorted({each.resolve() for each in ROOT.iterdir() if each.is_dir()})


def make(name: str) -> None:
    """Make a node's group in every hierarchy."""
    for hierarchy in _hierarchies():
        group = hierarchy / name
        if not (hierarchy / "cgroup.procs").exists():
            continue
        if is_v2():
            (hierarchy / "cgroup.subtree_control").write_text(_V2_CONTROLLERS)
        group.mkdir(exist_ok=True)
        # A group of v1 takes no process before it has been given CPUs and memory nodes.
        for part in ("cpuset.cpus", "cpuset.mems"):
            if (group / part).exists() and not is_v2():
                (group / part).write_text((hierarchy / part).read_text())
        if is_v2():
            (group / "cgroup.subtree_control").write_text(_V2_CONTROLLERS)
    entrance(name).parent.mkdir(exist_ok=True)


def entrance(name: str) -> Path:
    """The file that a program of the node writes its number to before it starts."""
    hierarchy = ROOT if is_v2() else ROOT / "pids"
    return hierarchy / name / _SYSTEM / "cgroup.procs"


def groups(name: str) -> list[Path]:
    """Every group of a node that there is, the innermost first."""
    found = [hierarchy / name for hierarchy in _hierarchies() if (hierarchy / name).is_dir()]
    below = [Path(path) for group in found for path, _, _ in os.walk(group)]
    return sorted(below, key=lambda path: len(path.parts), reverse=True)


def processes(name: str) -> set[int]:
    """What runs in a node's groups."""
    found: set[int] = set()
    for group in groups(name):
        with contextlib.suppress(OSError):
            found |= {int(line) for line in (group / "cgroup.procs").read_text().split()}
    return found


def remove(name: str, deadline_s: float = 20.0) -> list[str]:
    """Kill what is in a node's groups and remove them; returns what is left after the deadline."""
    deadline = time.monotonic() + deadline_s
    while (left := groups(name)) and time.monotonic() < deadline:
        for pid in processes(name):
            with contextlib.suppress(OSError):
                # Its number may be another's by now, unless it is still in the group.
                process = ProcessId.of(pid)
                if pid in processes(name):
                    process.end(signal.SIGKILL, deadline_s=1.0)
        for group in left:
            # Busy for a moment after its last process has gone.
            with contextlib.suppress(OSError):
                group.rmdir()
        time.sleep(0.01)
    return [str(group) for group in groups(name)]


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """The memory cgroup of a pod, or of one of its containers."""

    folder: Path

    @property
    def usage_bytes(self) -> int:
        """What is charged to it now, page cache and tmpfs included."""
        return int(self._read("memory.usage_in_bytes", "memory.current"))

    @property
    def lasting_bytes(self) -> int:
        """The same without cache of files on a disk, which comes and goes as the kernel likes."""
        return self.usage_bytes - self.charged("active_file", "inactive_file")

    @property
    def shared_bytes(self) -> int:
        """What it is charged for pages of a tmpfs."""
        return self.charged("shmem")

    @property
    def process_bytes(self) -> int:
        """What it is charged for memory of processes."""
        return self.charged("anon" if is_v2() else "rss")

    def charged(self, *kinds: str) -> int:
        """The sum of these kinds of `stat`, of the group and of those below it."""
        stat = self.stat
        # On v1 the figures that include the groups below have names of their own.
        return sum(stat.get(f"total_{kind}", stat[kind]) for kind in kinds)

    @property
    def limit_bytes(self) -> int | None:
        """Its own limit; None if it has none."""
        text = self._read("memory.limit_in_bytes", "memory.max")
        # Without a limit v1 says the largest multiple of a page.
        return None if text == "max" or int(text) >= 1 << 62 else int(text)

    @property
    def stat(self) -> dict[str, int]:
        """What it is charged for, by kind; the kinds' names differ between v1 and v2."""
        lines = self._read("memory.stat", "memory.stat").splitlines()
        return {name: int(value) for name, value in map(str.split, lines)}

    @property
    def pids(self) -> list[int]:
        """The processes in it and below it, as this machine numbers them."""
        found: set[int] = set()
        for path, _, _ in os.walk(self.folder):
            with contextlib.suppress(OSError):
                found |= {int(line) for line in Path(path, "cgroup.procs").read_text().split()}
        return sorted(found)

    def container(self, container_id: str) -> "MemoryGroup":
        """That of a container of the pod, by its id as a pod's status has it."""
        return MemoryGroup(self.folder / container_id.rpartition("/")[2])

    def children(self) -> Iterator["MemoryGroup"]:
        """Those of the containers, the sandbox's among them."""
        for each in self.folder.iterdir():
            if each.is_dir():
                yield MemoryGroup(each)

    def _read(self, on_v1: str, on_v2: str) -> str:
        return (self.folder / (on_v2 if is_v2() else on_v1)).read_text().strip()


def memory_of_pod(name: str, pod_uid: str) -> MemoryGroup | None:
    """The memory cgroup of a pod on a node; None if there is none (any more)."""
    pods = (ROOT if is_v2() else ROOT / "memory") / name / "kubepods"
    for quality in ("", "burstable", "besteffort"):
        folder = pods / quality / f"pod{pod_uid}"
        if folder.is_dir():
            return MemoryGroup(folder)
    return None

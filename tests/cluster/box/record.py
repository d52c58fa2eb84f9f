"""What a cluster has made on this machine, written down before it is made.

The record lies in the cluster's folder. Whoever reads it can remove every trace of the cluster: the
one that started it, the keeper after a crash of that one, or ``make cluster-down`` days later.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.cluster.box import cgroups
from tests.cluster.box.errors import BoxError
from tests.cluster.box.processes import ProcessId, end_all

_FILE = "cluster.json"


@dataclass(slots=True)
class Record:
    """What there is to remove; `save` after each change."""

    folder: Path
    """All of the cluster's files but its logs; removed last, with the record in it."""
    bridge: str | None = None
    link: str | None = None
    """The node's end on the bridge."""
    group: str | None = None
    """The node's cgroup, and with it all that runs on the node."""
    folders: list[str] = field(default_factory=list)
    """Folders outside its own that it had to make, or another cluster; removed if they are empty and no
    other one has anything mounted there: that would be gone with the folder, in all namespaces."""
    processes: dict[str, ProcessId] = field(default_factory=dict)
    """By name, in the order of their start."""

    @classmethod
    def load(cls, folder: Path) -> "Record | None":
        """The record of the cluster in a folder; None if there is none."""
        try:
            raw = json.loads((folder / _FILE).read_text())
        except FileNotFoundError:
            return None
        processes = {name: ProcessId(**process) for name, process in raw["processes"].items()}
        return cls(
            folder, raw["bridge"], raw["link"], raw["group"], list(raw["folders"]), processes
        )

    def save(self) -> None:
        """Replace the file at once, so that a reader sees this record or the one before."""
        processes = {name: asdict(process) for name, process in self.processes.items()}
        links = {"bridge": self.bridge, "link": self.link, "group": self.group}
        raw = {**links, "folders": self.folders, "processes": processes}
        text = json.dumps(raw, indent=2)
        scratch = self.folder / f"{_FILE}.new"
        scratch.write_text(text)
        scratch.rename(self.folder / _FILE)

    def remove_all(self) -> None:
        """End the processes, last started first, then remove links, cgroups and folders.

        What it needs not find is fine: it may follow another one that was interrupted.

        Raises:
            BoxError: a process outlived its kill, or a cgroup is not empty; the record stays.
        """
        left = end_all(reversed(self.processes.values()))
        if left:
            raise BoxError(
                f"processes {[process.pid for process in left]} do not end: {self.folder}"
            )
        if self.group is not None:
            # Containers and their shims: nobody waits for them, and they keep the node's mounts alive.
            groups = cgroups.remove(self.group)
            if groups:
                raise BoxError(f"cgroups {groups} cannot be removed: {self.folder}")
        for link in (self.link, self.bridge):
            if link is not None:
                _remove_link(link)
        _remove_folder(self.folder)
        for folder in self._unused_folders():
            with contextlib.suppress(OSError):
                Path(folder).rmdir()

    def traces(self) -> list[str]:
        """What is left of the cluster on this machine, in words; empty after `remove_all`."""
        left = [
            f"process {process.pid} ({name})"
            for name, process in self.processes.items()
            if process.is_running()
        ]
        if self.group is not None:
            left += [f"cgroup {group}" for group in cgroups.groups(self.group)]
        for link in (self.link, self.bridge):
            if link is not None and Path("/sys/class/net", link).exists():
                left.append(f"interface {link}")
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        left += [f"mount {line}" for line in mounts if f"{self.folder}/" in line]
        if self.folder.exists():
            left.append(f"folder {self.folder}")
        unused = self._unused_folders()
        return left + [f"folder {each}" for each in unused if not any(Path(each).iterdir())]

    def _unused_folders(self) -> list[str]:
        covered = mount_points()
        return [each for each in self.folders if each not in covered and Path(each).exists()]


def to_remove(folders: Iterable[str]) -> list[str]:
    """Those that are not there yet, or are empty and there for another cluster's sake."""
    covered = mount_points()
    return [
        each
        for each in folders
        if not Path(each).exists() or (each in covered and not any(Path(each).iterdir()))
    ]


def mount_points() -> set[str]:
    """Where something is mounted, in the namespace of any process of this machine."""
    found: set[str] = set()
    seen: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        # Gone by now, or somebody else's.
        with contextlib.suppress(OSError):
            namespace = os.readlink(process / "ns" / "mnt")
            if namespace not in seen:
                lines = (process / "mountinfo").read_text().splitlines()
                found |= {line.split()[4] for line in lines}
                seen.add(namespace)
    return found


def _remove_link(name: str, deadline_s: float = 10.0) -> None:
    """Remove a link, which may be going already: the kernel takes a namespace apart later."""
    deadline = time.monotonic() + deadline_s
    while Path("/sys/class/net", name).exists():
        argv = ["ip", "link", "delete", name]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
        if done.returncode != 0 and time.monotonic() > deadline:
            raise BoxError(f"{' '.join(argv)}: {done.stderr.strip()}")


def _remove_folder(folder: Path, deadline_s: float = 5.0) -> None:
    """Remove a folder, into which a process in its last moments may still write a file."""
    deadline = time.monotonic() + deadline_s
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=time.monotonic() < deadline)

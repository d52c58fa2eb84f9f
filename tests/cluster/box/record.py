"""What a cluster has made on this machine, written down before it is made.

The record lies in the cluster's folder. Whoever reads it can remove every trace of the cluster: the
one that started it, the keeper after a crash of that one, or ``make cluster-down`` days later.
"""

import json
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.cluster.box.errors import BoxError
from tests.cluster.box.processes import ProcessId, end_all

_FILE = "cluster.json"


@dataclass(slots=True)
class Record:
    """What there is to remove; `save` after each change."""

    folder: Path
    """All of the cluster's files but its logs; removed last, with the record in it."""
    bridge: str | None = None
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
        return cls(folder, raw["bridge"], processes)

    def save(self) -> None:
        """Replace the file at once, so that a reader sees this record or the one before."""
        processes = {name: asdict(process) for name, process in self.processes.items()}
        text = json.dumps({"bridge": self.bridge, "processes": processes}, indent=2)
        scratch = self.folder / f"{_FILE}.new"
        scratch.write_text(text)
        scratch.rename(self.folder / _FILE)

    def remove_all(self) -> None:
        """End the processes, last started first, then remove the bridge and the folder.

        What it needs not find is fine: it may follow another one that was interrupted.

        Raises:
            BoxError: a process outlived its kill; the record stays.
        """
        left = end_all(reversed(self.processes.values()))
        if left:
            raise BoxError(
                f"processes {[process.pid for process in left]} do not end: {self.folder}"
            )
        if self.bridge is not None and Path("/sys/class/net", self.bridge).exists():
            subprocess.run(["ip", "link", "delete", self.bridge], check=True, timeout=10)
        _remove_folder(self.folder)


def _remove_folder(folder: Path, deadline_s: float = 5.0) -> None:
    """Remove a folder, into which a process in its last moments may still write a file."""
    deadline = time.monotonic() + deadline_s
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=time.monotonic() < deadline)

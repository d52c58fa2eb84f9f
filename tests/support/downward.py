"""A volume of the downward API, written as the kubelet writes it."""

import os
import shutil
from itertools import count
from pathlib import Path


class DownwardVolume:
    """One file; each change makes a new folder and renames a link onto `..data`.

    Source: AtomicWriter in pkg/volume/util/atomic_writer.go of Kubernetes 1.36.
    """

    def __init__(self, folder: Path, name: str = "desired.json") -> None:
        folder.mkdir()
        self.file = folder / name
        self._folder = folder
        self._numbers = count()
        self.write("")
        self.file.symlink_to(f"..data/{name}")

    def write(self, text: str | bytes) -> None:
        """Replace the content."""
        data = text.encode() if isinstance(text, str) else text
        made = self._folder / f"..{next(self._numbers)}"
        made.mkdir()
        (made / self.file.name).write_bytes(data)
        self._swap(made)

    def make_pipe(self) -> None:
        """Put a pipe where the file was."""
        made = self._folder / f"..{next(self._numbers)}"
        made.mkdir()
        os.mkfifo(made / self.file.name)
        self._swap(made)

    def _swap(self, made: Path) -> None:
        data = self._folder / "..data"
        before = data.resolve() if data.is_symlink() else None
        temporary = self._folder / "..data_tmp"
        temporary.symlink_to(made.name)
        temporary.rename(data)
        if before is not None:
            shutil.rmtree(before)

"""A directory of installed libraries: version folders, and a link to the one in use.

What lies in it::

    0.1.0-4f2c...        a version: `kvcellar` and nothing else, complete and never changed
    current              the link that engines have on their PYTHONPATH; its text is a version's name
    .new.<16 hex>        a version or link that is being made
    .old.<16 hex>        a version that is being removed

The directory is a volume that other containers and other uids may write to, so no link in it is ever
followed, and what was not made here is neither used nor removed. Whoever installs holds a lock on the
directory, which a kill gives up; leftovers are therefore nobody's, and the next one removes them.

Invariants: `current` is missing or leads to a complete version at every moment, since a version gets its
name, and the link its place, by rename(2). The version that was replaced stays, since a running engine may
import from it yet; older ones go.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from kvcellar.errors import ConfigurationError, DoesNotFit, LibraryMismatch, NotReady

CURRENT = "current"
VERSION_NAME = re.compile(r"[0-9][0-9A-Za-z.+!_]{0,63}-[0-9a-f]{16}")
_LEFTOVER = re.compile(r"\.(new|old)\.[0-9a-f]{16}")
_DEADLINE_S = 60.0
_PAUSE_S = 0.05
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ANY = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_MODE, _FILE_MODE = 0o755, 0o644
"""Readable by every uid, whatever the umask: engines run under others."""
_MAX_FILE_BYTES = 2**24

Files = Mapping[str, bytes]
"""Contents by path, as in `kvcellar/errors.py`."""


class LibraryDirectory:
    """An open and locked directory of libraries; `locked` gives one."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    @contextlib.contextmanager
    def locked(cls, path: Path, deadline_s: float = _DEADLINE_S) -> "Iterator[LibraryDirectory]":
        """Open the directory, make it if only its last part is missing, and lock it for a block.

        Raises:
            ConfigurationError: it cannot be used.
            DoesNotFit: its volume is full.
            NotReady: another process held the lock for `deadline_s` seconds.
        """
        with _explained(path):
            fd = _open(path)
            try:
                _lock(path, fd, deadline_s)
                yield cls(path, fd)
            finally:
                os.close(fd)

    def install(self, name: str, files: Files) -> None:
        """Have `current` lead to a version of this name with these files.

        Raises:
            LibraryMismatch: something else lies where the version or the link has to be.
        """
        replaced = self._current()
        self._remove_leftovers()
        if self._is_there(name):
            self._check(name, files)
        else:
            self._make(name, files)
        if replaced != name:
            self._point(name)
            if replaced is not None:
                self._remove_older(replaced, {name, replaced})

    # --- versions --------------------------------------------------------------------------------------

    def _is_there(self, name: str) -> bool:
        return self._stat(name) is not None

    def _stat(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _check(self, name: str, files: Files) -> None:
        try:
            fd = os.open(name, _FOLDER, dir_fd=self._fd)
            try:
                found = _read_tree(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._mismatch(name, error.strerror or str(error)) from error
        if found != files:
            raise self._mismatch(name, "its files differ")

    def _mismatch(self, name: str, why: str) -> LibraryMismatch:
        return LibraryMismatch(
            f"{self._path / name} is not as it was installed ({why}): remove it and install again"
        )

    def _make(self, name: str, files: Files) -> None:
        temporary = _temporary("new")
        os.mkdir(temporary, 0o700, dir_fd=self._fd)
        try:
            fd = os.open(temporary, _FOLDER, dir_fd=self._fd)
            try:
                _write_tree(fd, files)
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._remove_tree(temporary)
            raise
        os.fsync(self._fd)

    def _remove_older(self, than: str, kept: set[str]) -> None:
        """Remove versions that were made before a given one, as far as this process may."""
        limit = self._stat(than)
        if limit is None:
            return
        versions = [name for name in os.listdir(self._fd) if VERSION_NAME.fullmatch(name)]
        for name in versions:
            found = None if name in kept else self._stat(name)
            if found and stat.S_ISDIR(found.st_mode) and found.st_mtime_ns < limit.st_mtime_ns:
                hidden = _temporary("old")  # so that no half of it lies under its name
                with contextlib.suppress(OSError):
                    os.rename(name, hidden, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                    self._remove_tree(hidden)

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self._fd):
            if _LEFTOVER.fullmatch(name):
                self._remove_tree(name)

    def _remove_tree(self, name: str) -> None:
        """Remove a folder, file or link, as far as this process may; nothing is followed."""
        with contextlib.suppress(OSError):
            found = self._stat(name)
            if found is not None and stat.S_ISDIR(found.st_mode):
                shutil.rmtree(name, ignore_errors=True, dir_fd=self._fd)
            elif found is not None:
                os.unlink(name, dir_fd=self._fd)

    # --- the link --------------------------------------------------------------------------------------

    def _current(self) -> str | None:
        """The version that the link names; None without a link."""
        try:
            target = os.readlink(CURRENT, dir_fd=self._fd)
        except FileNotFoundError:
            return None
        except OSError as error:  # it is no link
            raise self._no_link() from error
        if not VERSION_NAME.fullmatch(target):
            raise self._no_link()
        return target

    def _no_link(self) -> LibraryMismatch:
        return LibraryMismatch(
            f"{self._path / CURRENT} is no link that kvcellar made, so it is left alone: remove it, or install "
            "into another directory"
        )

    def _point(self, name: str) -> None:
        temporary = _temporary("new")
        os.symlink(name, temporary, dir_fd=self._fd)
        try:
            os.rename(temporary, CURRENT, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            self._remove_tree(temporary)
            raise
        os.fsync(self._fd)


def _temporary(kind: str) -> str:
    return f".{kind}.{secrets.token_hex(8)}"


def _open(path: Path) -> int:
    with contextlib.suppress(FileExistsError):
        path.mkdir(_FOLDER_MODE)
    return os.open(path, _FOLDER)


def _lock(path: Path, fd: int, deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise NotReady(
                    f"another process has been installing into {path} for {deadline_s:g} s: end it, or try again"
                ) from error
            time.sleep(_PAUSE_S)
        else:
            return


_WHY_UNUSABLE = {
    errno.ENOENT: "it or its parent is not there",
    errno.ELOOP: "it is a link or no directory",
    errno.ENOTDIR: "it is a link or no directory",
    errno.EACCES: "this process may not read or write it",
    errno.EPERM: "what lies in it may not be replaced by this process",
    errno.EROFS: "it is mounted read-only",
}


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of the directory into sentences; others pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(
                f"the library does not fit into {path}: {error.strerror}; what was there stays, give its volume "
                "a few MiB more"
            ) from error
        if error.errno in _WHY_UNUSABLE:
            raise ConfigurationError(
                f"{path} cannot hold the library for uid {os.geteuid()}: {_WHY_UNUSABLE[error.errno]}; give a "
                "directory that this uid can write to"
            ) from error
        raise


# --- trees ------------------------------------------------------------------------------------------------


def _write_tree(fd: int, files: Files) -> None:
    """Write files below an open folder of this process's own, and make all of it readable."""
    folders = sorted({parent for path in files for parent in PurePosixPath(path).parents})
    for folder in folders[1:]:  # the first is the open one itself
        os.mkdir(str(folder), _FOLDER_MODE, dir_fd=fd)
    for path, data in files.items():
        with os.fdopen(os.open(path, _NEW_FILE, _FILE_MODE, dir_fd=fd), "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), _FILE_MODE)
            os.fsync(file.fileno())
    for folder in folders:
        opened = os.open(str(folder), _FOLDER, dir_fd=fd)
        try:
            os.fchmod(opened, _FOLDER_MODE)
            os.fsync(opened)
        finally:
            os.close(opened)


def _read_tree(fd: int, prefix: str = "") -> dict[str, bytes]:
    """All files below an open folder, but for byte code that an engine may have left.

    Raises:
        OSError: also for links, pipes, and what not everybody may read.
    """
    found: dict[str, bytes] = {}
    for name in os.listdir(fd):
        if name == "__pycache__":
            continue
        opened = os.open(name, _ANY, dir_fd=fd)
        try:
            status = os.fstat(opened)
            if stat.S_ISDIR(status.st_mode):
                _expect(status, _FOLDER_MODE)
                found |= _read_tree(opened, f"{prefix}{name}/")
            else:
                _expect(status, _FILE_MODE)
                found[prefix + name] = os.read(opened, status.st_size)
        finally:
            os.close(opened)
    return found


def _expect(status: os.stat_result, mode: int) -> None:
    is_file = stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_FILE_BYTES
    if stat.S_IMODE(status.st_mode) & mode != mode or not (is_file or stat.S_ISDIR(status.st_mode)):
        raise OSError(errno.EACCES, "it holds something that is no file, or not readable by all")

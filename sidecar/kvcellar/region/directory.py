"""The directory of regions: the big lock, and opening files without being led astray.

Every container of the pod can write to the tmpfs, so nothing is followed: files are opened relative
to the directory's descriptor, never through a link, and have to be regular with exactly one name.
The directory itself is never renamed or removed, so its descriptor is a lock that all share.
"""

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvcellar.contract import Owner
from kvcellar.errors import ConfigurationError, KVCellarError, NotReady, RegionMismatch
from kvcellar.region import syscalls
from kvcellar.region.forks import close_in_children
from kvcellar.region.permissions import not_permitted

logger = logging.getLogger(__name__)

_LOCK_PAUSE_S = 0.002
_MODES = {Owner.SIDECAR: 0o2750, Owner.ENGINE: 0o2770}
"""Engines read the directory and write the files; they create nothing unless they own the region."""
FILE_MODE = 0o660

_KINDS = {
    stat.S_IFLNK: "symbolic link",
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


class RegionDirectory:
    """An open directory of regions. Make one with `create` or `open`, end it with `close`."""

    def __init__(self, fd: int, path: Path, mode: int | None = None) -> None:
        """Take over an open descriptor of the directory; `mode` is what its owner has set."""
        self.fd = fd
        self.path = path
        self._mode = mode
        self._thread_lock = threading.Lock()
        close_in_children(self)

    @classmethod
    def create(
        cls, path: Path, *, owner: Owner = Owner.SIDECAR, any_filesystem: bool = False
    ) -> "RegionDirectory":
        """Open the directory for an owner of regions; make it if it is missing, and check it.

        Args:
            path: KVCELLAR_DIR; its parent is the mount of the memory-backed volume and has to exist.
            owner: who will own regions in it; decides the mode.
            any_filesystem: accept a file system that is neither tmpfs nor hugetlbfs, with a warning.

        Raises:
            ConfigurationError: it cannot hold regions; the message says why and what to do.
        """
        try:
            parent_fd = _open_parent(path)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{path.parent} does not exist: mount the pod's memory-backed volume there, or set KVCELLAR_ROOT to "
                "where it is"
            ) from error
        try:
            made = _make(path, parent_fd)
            fd = _open_directory(path, parent_fd)
            try:
                _check_owner(path, fd)
                _check_filesystem(path, fd, any_filesystem)
                _set_mode(path, fd, parent_fd, _MODES[owner], made)
                _check_writable(path, fd)
            except (ConfigurationError, OSError) as error:
                os.close(fd)
                if made:
                    with contextlib.suppress(OSError):  # somebody else uses it already
                        os.rmdir(path.name, dir_fd=parent_fd)
                if isinstance(error, ConfigurationError):
                    raise
                raise ConfigurationError(
                    f"{path} cannot be looked at ({error.strerror}): check the volume at KVCELLAR_ROOT"
                ) from error
        finally:
            os.close(parent_fd)
        return cls(fd, path, _MODES[owner])

    @classmethod
    def open(cls, path: Path) -> "RegionDirectory":
        """Open an existing directory, to attach or to look.

        Raises:
            FileNotFoundError: it is not there (yet).
            ConfigurationError: it is a link, no directory, or may not be read.
        """
        parent_fd = _open_parent(path)
        try:
            return cls(_open_directory(path, parent_fd), path)
        finally:
            os.close(parent_fd)

    def is_there(self) -> bool:
        """Whether the path still leads to this very directory."""
        try:
            now = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        ours = os.fstat(self.fd)
        return (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino)

    def has_mode(self) -> bool:
        """Whether the mode is one that an owner sets; of a directory that was only opened nobody asks that.

        Not just this owner's: an engine that owns its region makes it in the same directory, and widens that.
        """
        return self._mode is None or stat.S_IMODE(os.fstat(self.fd).st_mode) in _MODES.values()

    def mend_mode(self) -> None:
        """Set the mode again, if somebody has changed it."""
        if self._mode is not None and not self.has_mode():
            os.fchmod(self.fd, self._mode)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def close_in_child(self) -> None:
        """Close the descriptor: a child that kept it would keep the big lock of a killed parent."""
        self.close()

    @contextmanager
    def lock(self, timeout_s: float = 10.0) -> Iterator[None]:
        """Hold the big lock. Under it only non-blocking work: never reserve, sleep or pin.

        Raises:
            NotReady: another process held it until the deadline.
            ConfigurationError: the kernel gives no lock.
        """
        deadline = time.monotonic() + timeout_s
        if not self._thread_lock.acquire(timeout=timeout_s):
            raise NotReady(self._lock_message(timeout_s))
        try:
            while not self._try_lock():
                if time.monotonic() >= deadline:
                    raise NotReady(self._lock_message(timeout_s))
                time.sleep(_LOCK_PAUSE_S)
            try:
                yield
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConfigurationError(
                f"the lock of {self.path} cannot be taken ({error.strerror}): regions need a file system and a node "
                "with locks to spare; check the volume at KVCELLAR_ROOT"
            ) from error
        return True

    def _lock_message(self, timeout_s: float) -> str:
        return (
            f"the lock of {self.path} was held by another process for {timeout_s:g} s: a process of "
            "this pod is stopped or stuck in it; look for it with `fuser` and restart its container"
        )

    def names(self) -> list[str]:
        """All names in the directory, sorted."""
        return sorted(os.listdir(self.fd))

    def open_file(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open an existing regular file of the directory on a description of its own.

        Raises:
            FileNotFoundError: there is no such name (any more).
            RegionMismatch: it is a link, a directory, a device, a FIFO, or has more than one name.
            ConfigurationError: this process may not open it.
        """
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self.fd)
        except FileNotFoundError:
            raise
        except PermissionError as error:
            raise ConfigurationError(not_permitted(self.path / name, "opened")) from error
        except OSError as error:
            if error.errno == errno.EROFS:
                raise ConfigurationError(
                    f"{self.path} is mounted read-only: mount the volume writable"
                ) from error
            raise RegionMismatch(self._odd_file(name, self._why_not_opened(name, error))) from error
        try:
            status = os.fstat(fd)
        except OSError:
            os.close(fd)
            raise
        if odd := oddity(status):
            os.close(fd)
            if status.st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "removed while it was opened", name)
            raise RegionMismatch(self._odd_file(name, odd))
        return fd

    def _why_not_opened(self, name: str, error: OSError) -> str:
        try:
            odd = oddity(os.stat(name, dir_fd=self.fd, follow_symlinks=False))
        except OSError:
            odd = ""
        return odd or f"cannot be opened ({error.strerror})"

    def _odd_file(self, name: str, why: str) -> str:
        return (
            f"{self.path / name} {why}: kvcellar did not make it so and leaves it alone; remove it, and look for who "
            "writes to this volume"
        )

    def create_file(self, name: str) -> int:
        """Make a file that must not exist yet, of `FILE_MODE` whatever the umask.

        Raises:
            FileExistsError: the name is taken.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, FILE_MODE, dir_fd=self.fd)
        try:
            os.fchmod(fd, FILE_MODE)
        except OSError:
            os.close(fd)
            os.unlink(name, dir_fd=self.fd)
            raise
        return fd

    def identity(self, name: str) -> tuple[int, int] | None:
        """(device, inode) that a name leads to now, without following a link; None if it is gone."""
        return identity_at(self.fd, name)

    def is_plain(self, name: str) -> bool:
        """Whether a name leads to a regular file with no other name, which is all that `open_file` opens."""
        status = status_at(self.fd, name)
        return status is not None and not oddity(status)

    def unlink_if(self, name: str, identity: tuple[int, int]) -> bool:
        """Remove a name if it still leads to this very file. Call it under the lock."""
        if self.identity(name) != identity:
            return False
        os.unlink(name, dir_fd=self.fd)
        return True

    def unlink_regular(self, name: str) -> bool:
        """Remove a name that leads to a regular file with no other name; anything else is not ours."""
        try:
            os.close(self.open_file(name, os.O_RDONLY))
            os.unlink(name, dir_fd=self.fd)
        except (KVCellarError, FileNotFoundError):
            return False
        return True


def status_at(dir_fd: int, name: str) -> os.stat_result | None:
    """What a name leads to now, without following a link; None if it is gone."""
    try:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def identity_at(dir_fd: int, name: str) -> tuple[int, int] | None:
    """(device, inode) of `status_at`; None if the name is gone."""
    status = status_at(dir_fd, name)
    return None if status is None else (status.st_dev, status.st_ino)


def oddity(status: os.stat_result) -> str:
    """What shows that nobody made a file so as a region's; empty for a regular file of one name."""
    if not stat.S_ISREG(status.st_mode):
        return f"is no regular file but a {_KINDS.get(stat.S_IFMT(status.st_mode), 'device')}"
    return "" if status.st_nlink == 1 else "has more than one name"


def _open_parent(path: Path) -> int:
    if path.name in ("", "..", "."):
        raise ConfigurationError(
            f"directory {str(path)!r} has no name of its own: set KVCELLAR_DIR to <volume>/kvcellar"
        )
    try:
        return os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise ConfigurationError(not_permitted(path.parent, "opened")) from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path.parent} cannot be opened ({error}): KVCELLAR_ROOT has to be the mount of the "
            "pod's memory-backed volume"
        ) from error


def _make(path: Path, parent_fd: int) -> bool:
    try:
        # Open to the group at once: an engine that comes before the mode is set has only to wait.
        os.mkdir(path.name, 0o750, dir_fd=parent_fd)
    except FileExistsError:
        return False
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be made ({error.strerror}): mount a memory-backed volume at {path.parent} that uid "
            f"{os.geteuid()} may write to"
        ) from error
    return True


def _open_directory(path: Path, parent_fd: int) -> int:
    try:
        return os.open(
            path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent_fd
        )
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise ConfigurationError(not_permitted(path, "opened")) from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise ConfigurationError(f"{path} cannot be opened: {error.strerror}") from error
        raise ConfigurationError(
            f"{path} is a link or no directory: kvcellar follows no link; set KVCELLAR_DIR to a directory that only "
            "this pod uses"
        ) from error


def _check_owner(path: Path, fd: int) -> None:
    uid = os.fstat(fd).st_uid
    if uid != os.geteuid():
        raise ConfigurationError(
            f"{path} belongs to uid {uid}, this process runs as uid {os.geteuid()}: run the sidecar under the uid that "
            "made it, or set KVCELLAR_DIR to another directory"
        )


def _check_filesystem(path: Path, fd: int, any_filesystem: bool) -> None:
    magic = syscalls.filesystem_magic(fd)
    if magic in syscalls.MEMORY_FILESYSTEMS:
        return
    if not any_filesystem:
        raise ConfigurationError(
            f"{path} is not on tmpfs (file system type {magic:#x}): KV blocks would be written to a disk; mount an "
            "emptyDir with medium: Memory there, or ask for it with --any-filesystem"
        )
    logger.warning(
        "%s is not on tmpfs (file system type %#x): KV blocks may be written to a disk", path, magic
    )


def _set_mode(path: Path, fd: int, parent_fd: int, mode: int, made: bool) -> None:
    found = stat.S_IMODE(os.fstat(fd).st_mode)
    if found & stat.S_ISVTX and not made:
        raise ConfigurationError(
            f"{path} is shared with others (mode {found:o}) and is left as it is: set KVCELLAR_DIR to a directory that "
            f"only kvcellar uses, such as {path / 'kvcellar'}"
        )
    if made or found != mode:
        try:
            # A plain mode without 02000 would drop setgid, and with it the group of the files.
            os.fchmod(fd, mode)
        except OSError as error:
            raise ConfigurationError(
                f"the mode of {path} cannot be set to {mode:o} ({error.strerror}): mount the volume writable"
            ) from error
    status, parent = os.fstat(fd), os.fstat(parent_fd)
    wanted = parent.st_gid if parent.st_mode & stat.S_ISGID else status.st_gid
    if not status.st_mode & stat.S_ISGID or status.st_gid != wanted:
        raise ConfigurationError(
            f"{path} has group {status.st_gid} and mode {stat.S_IMODE(status.st_mode):o}, expected "
            f"group {wanted} and mode {mode:o}: engines of that group could not open a region; put the sidecar "
            "into the volume's group (fsGroup)"
        )


def _check_writable(path: Path, fd: int) -> None:
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=fd):
        raise ConfigurationError(
            f"{path} is not writable for uid {os.geteuid()}: mount the volume writable and give it to this uid or group"
        )

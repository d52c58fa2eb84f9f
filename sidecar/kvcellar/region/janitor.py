"""Files of stock vLLM that no engine has: found, removed or put back.

An engine of vLLM that is killed before all its ranks have met leaves `vllm_offload_<id>.mmap` in the
volume, and one with several tiers leaves it however it ends. Nobody but the kernel knows whether an engine
still has such a file, so each removal goes through a lease and a quarantine (`leases`, `quarantine`): set
aside under the directory's lock, left there for a second, then unlinked or put back.

Left alone, with the reason: what is held or may be, what is empty or a moment old (an engine may be making
it), what is no regular file, has a second name or another owner, and the file of a region of ours.
A kill in between leaves a file aside; whoever comes next finishes that.
"""

import errno
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from kvcellar.region import leases, quarantine, stock
from kvcellar.region.directory import RegionDirectory, oddity
from kvcellar.region.leases import Lease
from kvcellar.region.names import (
    STOCK_FILE,
    engine_of_meta,
    engine_of_part,
    quarantine_name,
    quarantined,
)
from kvcellar.region.quarantine import Place, SetAside

YOUNG_S = 2.0
"""A file that was made, or changed its size, less long ago is left to the next look."""
MOST_ASIDE = 64
"""Files that lie aside at a time: each costs a descriptor, and anybody may leave thousands."""
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NO_WAY_BACK = "its old name is taken, or may not be used: move it by hand"


@dataclass(frozen=True, slots=True)
class StockFile:
    """A file of stock vLLM, or one that only has such a name.

    Attributes:
        size_bytes: what it takes of the volume.
        is_held: an engine has it, so it is nobody's orphan.
        is_new: it was made or changed a moment ago, by an engine that most likely has it: nobody has looked yet.
        reason: why it is left alone; empty for one that nobody holds and that can go.
    """

    name: str
    size_bytes: int
    is_held: bool = False
    is_new: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Waiting:
    file: StockFile
    moved: SetAside
    since_s: float


class Janitor:
    """Looks through the root of one volume. For one thread; end it with `close`."""

    def __init__(
        self, root: Path, *, wait_s: float = quarantine.WAIT_S, young_s: float = YOUNG_S
    ) -> None:
        """Remember where to look; nothing is opened yet.

        Args:
            root: where vLLM puts its files.
            wait_s: how long a file lies aside at least.
            young_s: how old a file has to be.
        """
        self._root = root
        self._wait_s = wait_s
        self._young_s = young_s
        self._root_fd = -1
        self._waiting: list[_Waiting] = []

    @property
    def is_waiting(self) -> bool:
        """Whether files lie aside, for `finish`."""
        return bool(self._waiting)

    def look(self, directory: RegionDirectory) -> list[StockFile]:
        """Every file of vLLM's pattern but those of our regions; nothing is changed.

        Raises:
            NotReady: another process held the directory's lock for too long.
            OSError: the root cannot be read.
        """
        return self._pass(directory, is_dry=True)

    def set_aside(self, directory: RegionDirectory) -> list[StockFile]:
        """Begin to remove what nobody holds, and finish what was interrupted; returns what stays.

        Raises:
            NotReady, OSError: as `look`.
        """
        return self._pass(directory, is_dry=False)

    def finish(self, directory: RegionDirectory) -> list[StockFile]:
        """Remove what has lain aside for long enough and nobody came for; returns what is gone.

        Raises:
            NotReady: as `look`; everything stays aside then.
        """
        now = time.monotonic()
        due = [each for each in self._waiting if now - each.since_s >= self._wait_s]
        with directory.lock():
            gone = [each.file for each in due if each.moved.remove()]
        self._waiting = [each for each in self._waiting if each not in due]
        for each in due:  # frees the pages, which takes a while: not under the lock
            os.close(each.moved.fd)
        return gone

    def put_back(self, directory: RegionDirectory) -> list[StockFile]:
        """Give everything that lies aside its name again, also what was interrupted; returns what cannot.

        Raises:
            NotReady, OSError: as `look`.
        """
        with directory.lock():
            found = self._take_up(directory, self._open_root())
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                if not each.moved.put_back():
                    found.append(_kept(each.moved.aside.name, each.file.size_bytes, _NO_WAY_BACK))
                os.close(each.moved.fd)
        return found

    def close(self) -> None:
        """Close what is open. What lies aside stays there for the next one."""
        for each in self._waiting:
            os.close(each.moved.fd)
        self._waiting = []
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1

    # --- inside --------------------------------------------------------------------------------------

    def _open_root(self) -> int:
        if self._root_fd < 0:
            self._root_fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._root_fd

    def _pass(self, directory: RegionDirectory, *, is_dry: bool) -> list[StockFile]:
        with directory.lock():
            root_fd = self._open_root()
            found = [] if is_dry else self._take_up(directory, root_fd)
            ours, unknown = stock.spoken_for(directory)
            for name in sorted(os.listdir(root_fd)):
                place = Place(root_fd, name)
                if not STOCK_FILE.fullmatch(name) or place.identity() in ours:
                    continue
                if name in unknown:
                    why = "the metadata page of its engine cannot be read, and may name it"
                    found.append(_kept(name, 0, why))
                elif (file := self._examine(directory, place, is_dry=is_dry)) is not None:
                    found.append(file)
        return found

    def _examine(
        self, directory: RegionDirectory, place: Place, *, is_dry: bool
    ) -> StockFile | None:
        """Look at one file, and set it aside unless `is_dry`; None if it lies aside now, or is gone."""
        try:
            status = os.stat(place.name, dir_fd=place.dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        file = StockFile(place.name, status.st_blocks * 512, is_new=self._is_new(status))
        if why := self._unlike_ours(status):
            return replace(file, reason=why)
        try:
            fd = os.open(place.name, _LOOK, dir_fd=place.dir_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            return replace(file, reason=_not_opened(error, status))
        try:
            answer = leases.take(fd)
            if answer is not Lease.TAKEN:
                return replace(file, is_held=answer is Lease.REFUSED, reason=_reason(answer))
            # Once more, now that nobody can change it.
            why = self._unlike_ours(os.fstat(fd))
            if not (why or is_dry):
                why = self._set_aside(directory, place, fd, file)
                if not why:
                    return None
            leases.give_back(fd)
            return replace(file, reason=why)
        finally:
            os.close(fd)

    def _set_aside(self, directory: RegionDirectory, place: Place, fd: int, file: StockFile) -> str:
        """Rename a file whose lease is taken; why it cannot be, or an empty sentence."""
        if len(self._waiting) >= MOST_ASIDE:
            return f"{MOST_ASIDE} others are removed first: it goes at one of the next looks"
        aside = Place(directory.fd, quarantine_name(os.fstat(fd).st_ino, place.name))
        kept_fd = os.dup(fd)  # the same description, and so the same lease
        try:
            moved = quarantine.set_aside(kept_fd, place, aside)
        except OSError as error:
            os.close(kept_fd)
            return f"it cannot be moved to {directory.path}: {error.strerror}"
        if moved is None:
            os.close(kept_fd)
            return "another file had its name for a moment"
        self._waiting.append(_Waiting(file, moved, time.monotonic()))
        return ""

    def _unlike_ours(self, status: os.stat_result) -> str:
        """Why a file is left alone whoever has it, or may have it in a moment."""
        if odd := oddity(status):
            return f"it {odd}"
        if status.st_size == 0:
            return "it is empty: an engine may be about to use it"
        return "it was made or changed a moment ago" if self._is_new(status) else ""

    def _is_new(self, status: os.stat_result) -> bool:
        return 0 <= time.time() - status.st_ctime < self._young_s

    def _take_up(self, directory: RegionDirectory, root_fd: int) -> list[StockFile]:
        """Go on with what lies aside and is nobody's; returns what cannot be gone on with."""
        own = {each.moved.aside.name for each in self._waiting}
        found = []
        for name in directory.names():
            old = quarantined(name)
            if old is None or name in own or engine_of_meta(name) or engine_of_part(name):
                continue
            if len(self._waiting) >= MOST_ASIDE:
                break
            if (
                left := self._resume(Place(directory.fd, name), Place(root_fd, old[1]), old[0])
            ) is not None:
                found.append(left)
        return found

    def _resume(self, aside: Place, home: Place, inode: int) -> StockFile | None:
        try:
            fd = os.open(aside.name, _LOOK, dir_fd=aside.dir_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            return _kept(aside.name, 0, f"it cannot be opened: {error.strerror}")
        try:
            status = os.fstat(fd)
            size_bytes = status.st_blocks * 512
            is_it = not oddity(status) and status.st_ino == inode
            if is_it and leases.take(fd) is Lease.TAKEN:
                file = StockFile(home.name, size_bytes)
                kept_fd = os.dup(fd)  # the same description, and so the same lease
                self._waiting.append(
                    _Waiting(file, SetAside(kept_fd, home, aside), time.monotonic())
                )
                return None
            is_back = is_it and SetAside(fd, home, aside).put_back()
        finally:
            os.close(fd)
        why = _NO_WAY_BACK if is_it else "it is not what was set aside"
        return None if is_back else _kept(aside.name, size_bytes, why)


def _reason(answer: Lease) -> str:
    if answer is Lease.REFUSED:
        return "an engine has it"
    if answer is Lease.UNSUPPORTED:
        return "this file system cannot tell whether an engine has it (no leases)"
    return (
        "only its owner's uid, or a process with CAP_LEASE, can tell whether an engine has it: run this, which is "
        f"uid {os.geteuid()} now, as that uid"
    )


def _not_opened(error: OSError, status: os.stat_result) -> str:
    if isinstance(error, PermissionError):
        return f"it belongs to uid {status.st_uid}; {_reason(Lease.NOT_OURS)}"
    if error.errno == errno.EWOULDBLOCK:
        return "another process is looking whether an engine has it"
    return f"it cannot be opened: {error.strerror}"


def _kept(name: str, size_bytes: int, reason: str) -> StockFile:
    return StockFile(name, size_bytes, reason=reason)

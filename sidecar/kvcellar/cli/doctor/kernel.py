"""Checks of what the kernel gives: locks, leases and huge pages on the volume itself.

They are tried on a file without a name (O_TMPFILE), which is gone with its last descriptor, however this
process ends; nothing of it can be left behind.
"""

import os
from pathlib import Path

from kvcellar.cli.doctor.findings import Finding, fine, problem, warning
from kvcellar.contract import HugePages
from kvcellar.region import leases, locks, memory
from kvcellar.region.file import HugePageMaker
from kvcellar.region.geometry import HUGE_PAGE_BYTES

_SPARE = 8
"""Huge pages that every limit has to leave before one is tried, so that trying can hurt nobody."""


def check_kernel(path: Path) -> list[Finding]:
    """Try it all on the volume.

    Args:
        path: the directory of regions, or its parent where it is not there yet.
    """
    try:
        fd = os.open(path, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        found = f"locks, leases and huge pages cannot be tried on {path}: {error.strerror}"
        return [warning("kernel", found, "run it as the uid of the sidecar")]
    try:
        fits = memory.plan(_SPARE * HUGE_PAGE_BYTES, memory.read_limits(fd)).fits
        return [_check_locks(fd), _check_leases(fd), _check_huge_pages(fd, fits=fits)]
    finally:
        os.close(fd)


def _check_locks(fd: int) -> Finding:
    """An engine's lock has to be seen by another description, as that of the sidecar."""
    try:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            is_taken = locks.try_lock(fd, locks.SLOT_BASE)
            is_seen = locks.is_locked(other, locks.SLOT_BASE)
        finally:
            os.close(other)
    except OSError as error:
        found = f"open-file-description locks cannot be taken: {error.strerror}"
        return problem("locks", found, "use Linux, and a tmpfs of its own kernel")
    if is_taken and is_seen:
        return fine("locks", "open-file-description locks work, and are seen by others")
    found = "a lock of one description is not seen by another"
    return problem("locks", found, "use a tmpfs of this machine's kernel: this sandbox has its own")


def _check_leases(fd: int) -> Finding:
    answer = leases.take(fd)
    if answer is leases.Lease.TAKEN:
        leases.give_back(fd)
        return fine(
            "leases", "write leases work: files that stock vLLM left can be told from used ones"
        )
    found = f"no write lease is given ({answer.name.lower()}): files of stock vLLM are left alone"
    return warning("leases", found, "use a Linux tmpfs, and run as the uid of the engine")


def _check_huge_pages(fd: int, *, fits: bool) -> Finding:
    if not fits:
        found = "huge pages were not tried: a memory limit leaves too little"
        return warning("huge pages", found, "see `kvcellar plan`")
    os.ftruncate(fd, HUGE_PAGE_BYTES)
    try:
        maker = HugePageMaker(fd, HugePages.AUTO)
        maker.make(0, HUGE_PAGE_BYTES)
    except OSError as error:
        found = f"making a huge page failed: {error.strerror}"
        return warning("huge pages", found, "look at the memory limits: see `kvcellar plan`")
    finally:
        os.ftruncate(fd, 0)
    if maker.made_bytes:
        return fine("huge pages", "MADV_COLLAPSE makes huge pages on this volume")
    found = "no huge page could be made here; regions get small ones, and attaching takes longer"
    return warning(
        "huge pages", found, "use Linux 6.1 or newer; a fragmented node may have none free"
    )

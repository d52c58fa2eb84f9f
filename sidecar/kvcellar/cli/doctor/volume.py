"""Checks of the volume, of the directory of regions and of the memory limits. They read, and make nothing."""

import os
import stat
from pathlib import Path

from kvcellar.cli.doctor.findings import Finding, fine, problem, warning
from kvcellar.cli.forecast import forecast
from kvcellar.cli.sizes import mebibytes
from kvcellar.daemon.config import Settings
from kvcellar.errors import DoesNotFit, KVCellarError
from kvcellar.region import memory, syscalls
from kvcellar.region.cgroups import ANCESTOR_PREFIX, CONTAINER, HIERARCHY, memory_version
from kvcellar.region.permissions import not_permitted

_MOUNT = "mount an emptyDir with medium: Memory there, or set KVCELLAR_ROOT to a tmpfs"


def check_volume(path: Path) -> list[Finding]:
    """The file system that regions are, or would be, on: its kind, its size and what is free.

    Args:
        path: the directory of regions, or its parent where it is not there yet.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return [problem("volume", f"{path} cannot be opened: {error.strerror}", _MOUNT)]
    try:
        magic, limit = syscalls.filesystem_magic(fd), memory.tmpfs_limit(fd)
    finally:
        os.close(fd)
    kind = syscalls.MEMORY_FILESYSTEMS.get(magic)
    if kind is None:
        said = f"{path} is not on tmpfs (file system type {magic:#x}): blocks would go to a disk"
        return [problem("volume", said, _MOUNT)]
    if limit is None:
        remedy = "give it a size (sizeLimit): past the node's memory a tmpfs locks up the machine"
        return [warning("volume", f"{path} is on {kind} without a size of its own", remedy)]
    sizes = f"{mebibytes(limit.limit_bytes)}, {mebibytes(limit.free_bytes)} of it free"
    return [fine("volume", f"{path} is on {kind} of {sizes}")]


def check_directory(path: Path) -> list[Finding]:
    """Owner, group and mode of the directory of regions, and whether this process may write to it."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return [_check_parent(path)]
    except OSError as error:
        remedy = "set KVCELLAR_DIR to a directory that this process may reach"
        return [problem("directory", f"{path} cannot be looked at: {error.strerror}", remedy)]
    mode = stat.S_IMODE(status.st_mode)
    what = f"{path} has uid {status.st_uid}, gid {status.st_gid}, mode {mode:o}"
    if not stat.S_ISDIR(status.st_mode):
        return [problem("directory", f"{path} is a link or no directory", "set KVCELLAR_DIR")]
    if mode & stat.S_ISVTX or mode & stat.S_IWOTH:
        remedy = "set KVCELLAR_DIR to a directory that only kvcellar uses"
        return [problem("directory", f"{what}: it is shared with others", remedy)]
    if not mode & stat.S_ISGID:
        remedy = f"start the sidecar, which sets it, or chmod g+s {path}"
        return [
            problem(
                "directory", f"{what}: without setgid engines get files of a wrong group", remedy
            )
        ]
    if not os.access(path, os.R_OK | os.X_OK):
        return [problem("directory", not_permitted(path, "read"), "see the sentence")]
    if status.st_uid != os.geteuid() or not os.access(path, os.W_OK):
        who = f"uid {os.geteuid()} may read and not own regions here"
        return [
            warning(
                "directory",
                f"{what}; {who}",
                f"an engine needs no more; a sidecar has to run as uid {status.st_uid}",
            )
        ]
    return [fine("directory", f"{what}; it is writable")]


def _check_parent(path: Path) -> Finding:
    parent = path.parent
    if not parent.is_dir():
        return problem("directory", f"{parent} does not exist", _MOUNT)
    if os.access(parent, os.W_OK | os.X_OK):
        return fine(
            "directory", f"{path} is not there yet; a sidecar of uid {os.geteuid()} can make it"
        )
    found = f"{path} is not there, and uid {os.geteuid()} may not write to {parent}"
    return warning("directory", found, "run the sidecar as a uid or in a group (fsGroup) that may")


def check_memory(settings: Settings, path: Path) -> list[Finding]:
    """The limits of memory, and whether what these settings ask for would fit.

    Args:
        settings: of this process.
        path: the directory of regions, or its parent where it is not there yet.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return []  # check_volume says so
    try:
        limits = memory.read_limits(fd, pod_limit_bytes=settings.pod_memory_limit_bytes)
    finally:
        os.close(fd)
    chain = [
        limit
        for limit in limits
        if limit.name.startswith((CONTAINER, HIERARCHY, ANCESTOR_PREFIX, memory.POD, memory.NODE))
    ]
    said = ", ".join(
        f"{limit.name} {mebibytes(limit.limit_bytes)} ({mebibytes(limit.free_bytes)} free)"
        for limit in chain
    )
    version = f"memory cgroup version {memory_version()}"
    if said:
        found = [fine("memory", f"{version}; limits: {said}")]
    else:
        remedy = "give the container a memory limit, and the volume a sizeLimit"
        found = [warning("memory", f"{version}; no limit can be read", remedy)]
    return [*found, *_check_plan(settings)]


def _check_plan(settings: Settings) -> list[Finding]:
    if settings.capacity_bytes is None:
        return []
    try:
        told = forecast(settings)
        if not told.plan.fits:
            raise told.plan.refusal(",".join(told.engine_ids))
    except DoesNotFit as error:
        return [problem("plan", str(error), "see `kvcellar plan` for every limit")]
    except KVCellarError as error:
        return [problem("plan", str(error), "see the sentence")]
    if told.n_adopted == len(told.engine_ids):
        return [fine("plan", f"{told.n_adopted} of {told.n_adopted} regions are there, and stay")]
    asked, free = mebibytes(told.plan.asked_bytes), mebibytes(told.plan.free_bytes)
    return [
        fine("plan", f"{asked} would fit: {told.plan.binding_limit or 'no limit'} leaves {free}")
    ]

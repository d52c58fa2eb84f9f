"""The limits that memory cgroups set, versions 1 and 2, as far as this process can see them.

Owns: finding the own cgroup and its ancestors through the mounts, and reading what they say. A limit
that cannot be read is left out and never raises. Everything is looked up below a root, so that recorded
trees can stand in for a machine.
"""

import functools
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

logger = logging.getLogger(__name__)

CONTAINER = "container"
HIERARCHY = "hierarchy"
ANCESTOR_PREFIX = "ancestor:"
HIGH_SUFFIX = ":high"

NO_LIMIT_BYTES = 0x7FFF_FFFF_FFFF_0000
"""A cgroup limit of this many bytes or more is none: version 1 shows the largest multiple of the page
size below 2^63, 0x7FFFFFFFFFFFF000 with 4 KiB pages and this with 64 KiB pages.
Source: Linux, include/linux/page_counter.h, PAGE_COUNTER_MAX."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit on memory and how much of it is in use.

    Attributes:
        name: `tmpfs`, `container`, `pod`, `hierarchy`, `node` or `ancestor:<cgroup>`; with `:high`
            behind it for a cgroup's `memory.high`.
        limit_bytes: the limit.
        usage_bytes: in use; for a cgroup without its inactive page cache, which the kernel gives back
            before it kills (the "working set" that Kubernetes shows).
    """

    name: str
    limit_bytes: int
    usage_bytes: int

    @property
    def free_bytes(self) -> int:
        """What the limit leaves, never below 0."""
        return max(self.limit_bytes - self.usage_bytes, 0)


def cgroup_limits(root: Path = Path("/")) -> list[Limit]:
    """Limits of this process's memory cgroup and of each ancestor that can be seen, own first.

    Version 1 if the memory controller is there (also on hybrid systems), else version 2. In a container
    only its own cgroup is visible; version 1 still tells the smallest limit of the hidden chain, which
    becomes the limit `hierarchy` (its use is at least our own).

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    version, path = _own_cgroup(root)
    levels = _levels(version, path, root)
    limits = [limit for name, top in levels for limit in _limits_of(name, top, version)]
    if levels and version is _V1:
        own = levels[0][1]
        hidden = _limit(HIERARCHY, number(own / "memory.stat", _V1_SMALLEST), own, _V1)
        visible = min((limit.limit_bytes for limit in limits), default=NO_LIMIT_BYTES)
        limits += [limit for limit in hidden if limit.limit_bytes < visible]
    return limits


def memory_version(root: Path = Path("/")) -> int:
    """Version of the hierarchy that has this process's memory controller: 1 or 2."""
    return 1 if _own_cgroup(root)[0] is _V1 else 2


def is_hugetlbfs(fd: int, root: Path) -> bool:
    """Whether `fd` lies on a hugetlbfs."""
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.filesystem == "hugetlbfs" and mount.device == name for mount in _mounts(root))


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of one version of the memory controller; `limits` maps a limit's suffix to its file."""

    filesystem: str
    limits: dict[str, str]
    usage: str
    inactive: str


_V1 = _Version(
    "cgroup", {"": "memory.limit_in_bytes"}, "memory.usage_in_bytes", "total_inactive_file"
)
_V1_SMALLEST = "hierarchical_memory_limit"
_V2 = _Version(
    "cgroup2", {"": "memory.max", HIGH_SUFFIX: "memory.high"}, "memory.current", "inactive_file"
)

_View = tuple[int, list[tuple[str, Path]]]
"""The cgroups seen through one mount, own first, as (limit name, directory), behind how sure it is:
2 the own cgroup was found by its path; 1 the mount's top is taken for it; 0 ancestors or nothing."""


@dataclass(frozen=True, slots=True)
class _Mount:
    """A line of mountinfo: `root` is the directory of the file system that is seen at `point`."""

    device: str
    root: str
    point: str
    filesystem: str
    options: frozenset[str]

    def is_memory_of(self, version: _Version) -> bool:
        is_bound = version is _V2 or "memory" in self.options
        return self.filesystem == version.filesystem and is_bound


def _levels(version: _Version, path: str, root: Path) -> list[tuple[str, Path]]:
    """The own cgroup and its visible ancestors, own first."""
    views = [_view(mount, path, root) for mount in _mounts(root) if mount.is_memory_of(version)]
    return max(views, key=lambda view: (view[0], len(view[1])), default=(0, []))[1]


def _limits_of(name: str, top: Path, version: _Version) -> list[Limit]:
    values = [(name + suffix, number(top / file)) for suffix, file in version.limits.items()]
    return [limit for full, value in values for limit in _limit(full, value, top, version)]


def _limit(name: str, limit_bytes: int | None, top: Path, version: _Version) -> list[Limit]:
    """The limit with the use of cgroup `top`, or nothing if it is none or cannot be read."""
    if limit_bytes is None or limit_bytes >= NO_LIMIT_BYTES:
        return []
    usage = number(top / version.usage)
    if usage is None:
        return []
    inactive = number(top / "memory.stat", version.inactive) or 0
    return [Limit(name, limit_bytes, max(usage - inactive, 0))]


def _own_cgroup(root: Path) -> tuple[_Version, str]:
    unified = "/"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            return _V1, path
        unified = path if line.startswith("0::") else unified
    return _V2, unified


def _mounts(root: Path) -> tuple[_Mount, ...]:
    return _parse_mounts(_text(root / "proc/self/mountinfo"))


@functools.lru_cache(maxsize=4)
def _parse_mounts(mountinfo: str) -> tuple[_Mount, ...]:
    """Mounts by their lines; kept, since limits are read at every step and mounts hardly change.

    Source: man 5 proc_pid_mountinfo; spaces are octal escapes, optional fields end with `-`.
    """
    mounts = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        words = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), w) for w in left.split(" ")]
        kind = right.split(" ")
        if len(words) >= 5 and len(kind) >= 3:
            device, top, point = words[2:5]
            mounts.append(_Mount(device, top, point, kind[0], frozenset(kind[2].split(","))))
    return tuple(mounts)


def _view(mount: _Mount, path: str, root: Path) -> _View:
    top = root / mount.point.lstrip("/")
    prefix = mount.root.rstrip("/") + "/"
    if not f"{path}/".startswith(prefix):
        if not mount.root.startswith("/.."):
            return 1, [(CONTAINER, top)]  # the path is the host's, the mount the container's own
        # Mounted outside our cgroup namespace: above us if at least as many steps up as we are.
        is_up = set(mount.root.split("/")) == {"", ".."}
        is_above = is_up and prefix.count("/..") >= path.count("/..")
        return 0, [(ANCESTOR_PREFIX + mount.root, top)] if is_above else []
    inside = path[len(prefix) :].strip("/")
    if inside.startswith(".."):
        return 0, []  # moved out of our cgroup namespace: what this mount shows does not bind us
    if not os.path.isdir(top / inside):
        return 1, [(CONTAINER, top)]
    levels = {CONTAINER: top / inside}
    for parent in PurePosixPath(inside).parents if inside else ():
        full = PurePosixPath(mount.root, parent)
        name = ANCESTOR_PREFIX + (full.name or "/")
        levels[f"{ANCESTOR_PREFIX}{full}" if name in levels else name] = top / parent
    return 2, list(levels.items())


def _text(path: Path) -> str:
    """The file's text; empty if it cannot be read, as when its cgroup has gone meanwhile."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        _note_skipped(str(path), str(error.strerror))
        return ""


def number(path: Path, key: str = "") -> int | None:
    """The number at the start of the line with `key`, `max` being none; None if not there."""
    found = re.search(rf"^{key}\s*(max|[0-9]+)\b", _text(path), re.MULTILINE)
    if not found:
        _note_skipped(str(path), f"no number {key}")
        return None
    return NO_LIMIT_BYTES if found[1] == "max" else int(found[1])


@functools.lru_cache(maxsize=256)
def _note_skipped(source: str, reason: str) -> None:
    """Log once for each source and reason: the limits are read again at every step."""
    logger.debug("memory limit skipped source=%s reason=%s", source, reason)

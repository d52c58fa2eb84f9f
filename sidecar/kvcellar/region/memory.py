"""Which limits bound the memory that a region may take, and whether a region fits.

Owns reading the limits (tmpfs, memory cgroups, pod, node), the arithmetic of a plan and the sentence
that refuses. Nothing is allocated, and nothing remembered between calls, so the same functions serve
the plan and the check before each step of reserving. Past the size of the tmpfs a call returns
ENOSPC; past a cgroup limit the kernel kills; past the node's memory a tmpfs locks up the machine.

Invariants: a limit that cannot be read is left out and never raises; a plan that fits n bytes fits
every smaller number; the binding limit is the one that leaves least room.

Must not know regions, metadata, environment or HTTP. Reference: docs/reference/memory-limits.md.
"""

import functools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvcellar.contract import MAX_CAPACITY_BYTES, LimitBody, PlanBody
from kvcellar.errors import DoesNotFit

logger = logging.getLogger(__name__)

TMPFS = "tmpfs"
CONTAINER = "container"
POD = "pod"
NODE = "node"
HIERARCHY = "hierarchy"
ANCESTOR_PREFIX = "ancestor:"
HIGH_SUFFIX = ":high"

NO_LIMIT_BYTES = 0x7FFF_FFFF_FFFF_0000
"""A cgroup limit of this many bytes or more is none: version 1 shows the largest multiple of the page
size below 2^63, 0x7FFFFFFFFFFFF000 with 4 KiB pages and this with 64 KiB pages.
Source: Linux, include/linux/page_counter.h, PAGE_COUNTER_MAX."""

OVERHEAD_PER_MILLE = 3
"""Page-cache nodes that a cgroup is charged beside the pages: 0.23 % of the bytes with 4 KiB pages,
measured on tmpfs, Linux 6.18 (docs/reference/memory-limits.md, "Overhead"). A tmpfs does not count them."""


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Whether a region fits. Make one with `plan`.

    Attributes:
        fits: every limit holds what was asked for.
        asked_bytes: what the region still needs.
        free_bytes: the largest region that the binding limit holds, after promises, overhead and
            margin; `MAX_CAPACITY_BYTES` if there is no limit.
        binding_limit: name of the limit that leaves least room; empty if there is no limit.
        limits: all limits, as they were read.
        promised_bytes: what other regions have yet to take, already subtracted from `free_bytes`.
    """

    fits: bool
    asked_bytes: int
    free_bytes: int
    binding_limit: str
    limits: tuple[Limit, ...]
    promised_bytes: int = 0

    def refusal(self, engine_id: str) -> DoesNotFit:
        """The error to raise for a plan that does not fit: one sentence, and the numbers as fields."""
        name = self.binding_limit
        sizes = {limit.name: limit.limit_bytes for limit in self.limits}
        cgroup = name.removeprefix(ANCESTOR_PREFIX)
        other = (f"memory limit of cgroup {cgroup}", "raise the limit of that cgroup")
        what, remedy = _WORDS.get(name, other)
        promised = f" after {_human(self.promised_bytes)} promised to other regions"
        return DoesNotFit(
            f"region {engine_id} needs {self.asked_bytes} bytes ({_human(self.asked_bytes)}), but "
            f"the {what} leaves {self.free_bytes} bytes ({_human(self.free_bytes)}) of "
            f"{_human(sizes.get(name, 0))} free{promised if self.promised_bytes else ''}; "
            f"lower KVCELLAR_CAPACITY or {remedy}",
            asked_bytes=self.asked_bytes,
            free_bytes=self.free_bytes,
            binding_limit=self.binding_limit,
        )


def plan(
    asked_bytes: int,
    limits: Sequence[Limit],
    promised_bytes: int = 0,
    *,
    own_promised_bytes: int | None = None,
    margin_bytes: int = 0,
) -> Plan:
    """Decide whether `asked_bytes` fit under every limit. Pure.

    Args:
        asked_bytes: what the region, or the next step of it, still needs (capacity minus blocks).
        limits: as read just now.
        promised_bytes: what all other regions in the same tmpfs have yet to take. They share its size,
            the pod and the node, so it counts against every limit.
        own_promised_bytes: the part of it that this container will be charged for: against the
            `container` limits only this counts. None means all of it, as for the usual single sidecar.
        margin_bytes: to be left free under every limit but the tmpfs, which never kills.
    """
    own = promised_bytes if own_promised_bytes is None else own_promised_bytes
    shared = {CONTAINER: own, CONTAINER + HIGH_SUFFIX: own}
    rooms = [
        (_room(limit, shared.get(limit.name, promised_bytes), margin_bytes), limit)
        for limit in limits
    ]
    room, binding = min(rooms, key=lambda pair: pair[0], default=(MAX_CAPACITY_BYTES, None))
    return Plan(
        fits=asked_bytes <= room,
        asked_bytes=asked_bytes,
        free_bytes=room,
        binding_limit=binding.name if binding else "",
        limits=tuple(limits),
        promised_bytes=promised_bytes,
    )


def to_body(decided: Plan) -> PlanBody:
    """The plan as `/v1/plan` and `kvcellar plan` show it."""
    return PlanBody(
        fits=decided.fits,
        askedBytes=decided.asked_bytes,
        freeBytes=decided.free_bytes,
        bindingLimit=decided.binding_limit,
        limits=[
            LimitBody(one.name, one.limit_bytes, one.usage_bytes, one.name == decided.binding_limit)
            for one in decided.limits
        ],
    )


def read_limits(
    fd: int, *, pod_limit_bytes: int | None = None, pod_usage_bytes: int = 0, root: Path = Path("/")
) -> list[Limit]:
    """Every limit that bounds a region in the directory of `fd`, read now.

    Args:
        fd: descriptor of the directory that holds the regions.
        pod_limit_bytes: the pod's memory limit, which a container cannot see; None or 0: none known.
        pod_usage_bytes: what the caller knows of the pod's use. At least the use of the container and
            of the tmpfs is assumed.
        root: where `proc` and the mount points are looked up; another one only in tests.

    Returns:
        Limits with distinct names. For a hugetlbfs only its own: its pages come from a pool that the
        memory cgroup and MemAvailable do not count.
    """
    own = tmpfs_limit(fd)
    limits = [own] if own else []
    if _is_hugetlbfs(fd, root):
        return limits
    limits += cgroup_limits(root)
    if pod_limit_bytes:
        seen = [limit.usage_bytes for limit in limits if limit.name in (TMPFS, CONTAINER)]
        limits.append(Limit(POD, pod_limit_bytes, max([pod_usage_bytes, *seen])))
    node = node_limit(root)
    return [*limits, node] if node else limits


def tmpfs_limit(fd: int) -> Limit | None:
    """Size and use of the file system of `fd`; None if it has no size of its own.

    A hugetlbfs or a tmpfs mounted without a size reports 0 blocks.
    """
    stat = os.fstatvfs(fd)
    used_blocks = stat.f_blocks - stat.f_bavail
    limit = Limit(TMPFS, stat.f_blocks * stat.f_frsize, used_blocks * stat.f_frsize)
    return limit if stat.f_blocks else None


def node_limit(root: Path = Path("/")) -> Limit | None:
    """The machine's memory: MemTotal, and in use what is not MemAvailable. None if unreadable.

    Source: Linux, Documentation/filesystems/tmpfs.rst: an oversized tmpfs deadlocks the machine, since
    the OOM handler cannot free it.
    """
    total = _number(root / "proc/meminfo", "MemTotal:")
    available = _number(root / "proc/meminfo", "MemAvailable:")
    if total is None or available is None:
        return None
    return Limit(NODE, total * 1024, max(total - available, 0) * 1024)


def cgroup_limits(root: Path = Path("/")) -> list[Limit]:
    """Limits of this process's memory cgroup and of each ancestor that can be seen, own first.

    Version 1 if the memory controller is there (also on hybrid systems), else version 2. In a container
    only its own cgroup is visible; version 1 still tells the smallest limit of the hidden chain, which
    becomes the limit `hierarchy` (its use is at least our own).

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    version, path = _own_cgroup(root)
    views = [_view(mount, path, root) for mount in _mounts(root) if mount.is_memory_of(version)]
    _, levels = max(views, key=lambda view: (view[0], len(view[1])), default=(0, []))
    limits = [limit for name, top in levels for limit in _limits_of(name, top, version)]
    if levels and version is _V1:
        own = levels[0][1]
        hidden = _limit(HIERARCHY, _number(own / "memory.stat", _V1_SMALLEST), own, _V1)
        visible = min((limit.limit_bytes for limit in limits), default=NO_LIMIT_BYTES)
        limits += [limit for limit in hidden if limit.limit_bytes < visible]
    return limits


# --- cgroups: what they say and where they are


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


def _limits_of(name: str, top: Path, version: _Version) -> list[Limit]:
    values = [(name + suffix, _number(top / file)) for suffix, file in version.limits.items()]
    return [limit for full, value in values for limit in _limit(full, value, top, version)]


def _limit(name: str, limit_bytes: int | None, top: Path, version: _Version) -> list[Limit]:
    """The limit with the use of cgroup `top`, or nothing if it is none or cannot be read."""
    if limit_bytes is None or limit_bytes >= NO_LIMIT_BYTES:
        return []
    usage = _number(top / version.usage)
    if usage is None:
        return []
    inactive = _number(top / "memory.stat", version.inactive) or 0
    return [Limit(name, limit_bytes, max(usage - inactive, 0))]


def _own_cgroup(root: Path) -> tuple[_Version, str]:
    unified = "/"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            return _V1, path
        unified = path if line.startswith("0::") else unified
    return _V2, unified


def _mounts(root: Path) -> list[_Mount]:
    """Source: man 5 proc_pid_mountinfo; spaces are octal escapes, optional fields end with `-`."""
    mounts = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        words = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), w) for w in left.split(" ")]
        kind = right.split(" ")
        if len(words) >= 5 and len(kind) >= 3:
            device, top, point = words[2:5]
            mounts.append(_Mount(device, top, point, kind[0], frozenset(kind[2].split(","))))
    return mounts


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


def _is_hugetlbfs(fd: int, root: Path) -> bool:
    device = os.fstat(fd).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    return any(mount.filesystem == "hugetlbfs" and mount.device == name for mount in _mounts(root))


# --- reading


def _text(path: Path) -> str:
    """The file's text; empty if it cannot be read, as when its cgroup has gone meanwhile."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        _note_skipped(str(path), str(error.strerror))
        return ""


def _number(path: Path, key: str = "") -> int | None:
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


# --- arithmetic and words


def _room(limit: Limit, promised_bytes: int, margin_bytes: int) -> int:
    """The most bytes of a region that the limit still holds."""
    if limit.name == TMPFS:
        return max(limit.free_bytes - promised_bytes, 0)
    free = max(limit.free_bytes - margin_bytes, 0)
    return max(free * 1000 // (1000 + OVERHEAD_PER_MILLE) - promised_bytes, 0)


_WORDS = {
    TMPFS: ("size of the tmpfs", "raise the sizeLimit of its volume and the pod's memory limit"),
    CONTAINER: ("container memory limit", "raise the memory limit of the kvcellar container"),
    CONTAINER + HIGH_SUFFIX: (
        "memory.high of the container",
        "set the memory request of the kvcellar container equal to its limit",
    ),
    POD: ("pod memory limit", "raise the memory limits of the pod"),
    HIERARCHY: ("memory limit above the container", "raise the memory limit of the pod"),
    NODE: ("memory of the node", "use a node with more free memory"),
}
"""What a limit is called in a sentence, and what raises it."""


def _human(size_bytes: int) -> str:
    size, units = float(size_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"

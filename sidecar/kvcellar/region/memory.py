"""Which limits bound the memory that a region may take, and whether a region fits.

Owns reading the limits (tmpfs, memory cgroups, pod, node), the arithmetic of a plan and the sentence
that refuses. Nothing is allocated, and nothing remembered between calls, so the same functions serve
the plan and the check before each step of reserving. Past the size of the tmpfs a call returns
ENOSPC; past a cgroup limit the kernel kills; past the node's memory a tmpfs locks up the machine.

Invariants: a limit that cannot be read is left out and never raises; a plan that fits n bytes fits
every smaller number; the binding limit is the one that leaves least room.

Must not know regions, metadata, environment or HTTP. Reference: docs/reference/memory-limits.md.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcellar.contract import ENV_CAPACITY, MAX_CAPACITY_BYTES, LimitBody, PlanBody
from kvcellar.errors import DoesNotFit
from kvcellar.region.cgroups import (
    ANCESTOR_PREFIX,
    CONTAINER,
    HIERARCHY,
    HIGH_SUFFIX,
    cgroup_limits,
    is_hugetlbfs,
    number,
)
from kvcellar.region.cgroups import Limit as Limit  # the reader's word for it is memory.Limit

TMPFS = "tmpfs"
POD = "pod"
NODE = "node"

OVERHEAD_PER_MILLE = 3
"""Page-cache nodes that a cgroup is charged beside the pages: 0.23 % of the bytes with 4 KiB pages,
measured on tmpfs, Linux 6.18 (docs/reference/memory-limits.md, "Overhead"). A tmpfs does not count them."""


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

    def refusal(self, engine_id: str, capacity_setting: str = ENV_CAPACITY) -> DoesNotFit:
        """The error to raise for a plan that does not fit: one sentence, and the numbers as fields.

        The sentence asks to lower `capacity_setting`, the setting that the capacity came from.
        """
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
            f"lower {capacity_setting} or {remedy}",
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
    if is_hugetlbfs(fd, root):
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
    total = number(root / "proc/meminfo", "MemTotal:")
    available = number(root / "proc/meminfo", "MemAvailable:")
    if total is None or available is None:
        return None
    return Limit(NODE, total * 1024, max(total - available, 0) * 1024)


# --- arithmetic and words


def _room(limit: Limit, promised_bytes: int, margin_bytes: int) -> int:
    """The most bytes of a region that the limit still holds."""
    if limit.name == TMPFS:
        return max(limit.free_bytes - promised_bytes, 0)
    free = max(limit.free_bytes - margin_bytes, 0)
    return max(free * 1000 // (1000 + OVERHEAD_PER_MILLE) - promised_bytes, 0)


_WORDS = {
    TMPFS: ("size of the tmpfs", "raise the sizeLimit of its volume and the pod's memory limit"),
    # Of a container that has none, the kubelet makes the pod's limit its own.
    CONTAINER: (
        "container memory limit",
        "raise the memory limit of the kvcellar container, or of the pod if only that has one",
    ),
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

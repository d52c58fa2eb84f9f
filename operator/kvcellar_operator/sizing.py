"""How much memory a pod's regions need, where it is asked for, and which limit binds. Pure.

The numbers are computed together, since one that is forgotten shows only when an engine starts::

    capacity         of each region, a multiple of 2 MiB
    x regions        engine containers x engines of each
    + index bound    the marks and the journal beside each region
    + head-room      for vLLM's message queues, NCCL and PyTorch
    = sizeLimit      of the memory volume at /dev/shm

    (capacity x regions + index bound) x 1.003 + overhead = memory request and limit of the sidecar

The sidecar pays for the regions: it touches their pages first. 0.3 % more are the kernel's own page-cache
nodes (docs/reference/memory-limits.md). The kubelet makes the volume no larger than the pod's memory
limit. docs/explanation/sizing.md explains it with examples.
"""

from dataclasses import dataclass

from kvcellar.contract import MAX_CAPACITY_BYTES
from kvcellar.region.geometry import HUGE_PAGE_BYTES, round_down, round_up
from kvcellar_operator.profiles import Profile
from kvcellar_operator.quantities import MEBIBYTE, shown_bytes
from kvcellar_operator.reasons import InjectionRefused, Reason

OVERHEAD_PER_MILLE = 3
"""Page-cache nodes of 4 KiB pages, in thousandths of the region; measured 2.3."""
_INDEX_FIXED_BYTES = 128 * 1024
_INDEX_FRACTION = 4096
"""The index file is no larger than 1/4096 of the region and its head, rounded up to pages of up to
64 KiB; a test compares it with `kvcellar.region.index_file`."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The numbers of one pod. Make one with `size`.

    Attributes:
        capacity_bytes: of each region.
        regions: in the pod.
        index_bytes: bound of all regions' index files.
        headroom_bytes: asked for beside the regions.
        sidecar_memory_bytes: request and limit of the sidecar.
    """

    capacity_bytes: int
    regions: int
    index_bytes: int
    headroom_bytes: int
    sidecar_memory_bytes: int

    @property
    def regions_bytes(self) -> int:
        """All regions with their index files: what has to fit, whatever else does."""
        return self.capacity_bytes * self.regions + self.index_bytes

    @property
    def size_limit_bytes(self) -> int:
        """The sizeLimit of the memory volume."""
        return round_up(self.regions_bytes + self.headroom_bytes, MEBIBYTE)


def index_bound_bytes(capacity_bytes: int) -> int:
    """An upper bound of the index file of a region."""
    return _INDEX_FIXED_BYTES + capacity_bytes // _INDEX_FRACTION


def size(profile: Profile, engine_limits_bytes: list[int], pod_limit_bytes: int | None) -> Sizing:
    """Size the regions of a pod.

    Args:
        profile: says capacity, engines, head-room and overhead.
        engine_limits_bytes: memory limit of each engine container; 0 for none.
        pod_limit_bytes: memory limit of the pod level, if it sets one.

    Raises:
        InjectionRefused: `NoMemoryLimit`, `CapacityTooSmall` or `CapacityTooLarge`.
    """
    regions = len(engine_limits_bytes) * profile.engines
    capacity_bytes = _capacity_bytes(profile, engine_limits_bytes, pod_limit_bytes)
    index_bytes = index_bound_bytes(capacity_bytes) * regions
    held_bytes = capacity_bytes * regions + index_bytes
    memory_bytes = held_bytes + -(-held_bytes * OVERHEAD_PER_MILLE // 1000)
    memory_bytes = round_up(memory_bytes + profile.sidecar.memory_overhead_bytes, MEBIBYTE)
    sizing = Sizing(capacity_bytes, regions, index_bytes, profile.shm_headroom_bytes, memory_bytes)
    if max(sizing.size_limit_bytes, memory_bytes) > MAX_CAPACITY_BYTES:
        raise InjectionRefused(
            Reason.CAPACITY_TOO_LARGE,
            f"{regions} regions of {shown_bytes(capacity_bytes)} are 2^63 bytes or more together",
        )
    return sizing


def _capacity_bytes(
    profile: Profile, engine_limits_bytes: list[int], pod_limit_bytes: int | None
) -> int:
    capacity = profile.capacity
    if capacity.size_bytes is not None:
        return round_down(capacity.size_bytes, HUGE_PAGE_BYTES)
    base_bytes = _share_base_bytes(engine_limits_bytes, pod_limit_bytes)
    if not base_bytes:
        raise InjectionRefused(
            Reason.NO_MEMORY_LIMIT,
            f"the capacity is {capacity.text} of the engine containers' memory limits, and "
            f"{engine_limits_bytes.count(0)} of {len(engine_limits_bytes)} set none: set it, or give "
            "the capacity in bytes",
        )
    regions = len(engine_limits_bytes) * profile.engines
    share_bytes = int(base_bytes * (capacity.share or 0))
    capacity_bytes = round_down(share_bytes // regions, HUGE_PAGE_BYTES)
    if not capacity_bytes:
        raise InjectionRefused(
            Reason.CAPACITY_TOO_SMALL,
            f"{capacity.text} of {shown_bytes(base_bytes)} for {regions} regions is less than 2 MiB each",
        )
    return capacity_bytes


def _share_base_bytes(engine_limits_bytes: list[int], pod_limit_bytes: int | None) -> int:
    """The memory that a share is taken of: the engines' limits, or the pod's if one engine sets none."""
    if all(engine_limits_bytes):
        return sum(engine_limits_bytes)
    return pod_limit_bytes or 0


@dataclass(frozen=True, slots=True)
class VolumeSize:
    """What the kubelet makes of a memory volume.

    Attributes:
        size_bytes: of the tmpfs; 0 if only the node bounds it.
        binding_limit: `sizeLimit`, `pod` or `node`.
        headroom_bytes: room beside the regions; None if only the node bounds it.
    """

    size_bytes: int
    binding_limit: str
    headroom_bytes: int | None


def volume_size(sizing: Sizing, size_limit_bytes: int, pod_limit_bytes: int) -> VolumeSize:
    """The size of the tmpfs: the smaller of its sizeLimit and the pod's memory limit, 0 being none.

    Source: calculateEmptyDirMemorySize in pkg/volume/emptydir/empty_dir.go of Kubernetes.
    """
    limits = {"sizeLimit": size_limit_bytes, "pod": pod_limit_bytes}
    known = {name: limit for name, limit in limits.items() if limit}
    if not known:
        return VolumeSize(0, "node", None)
    name = min(known, key=lambda name: known[name])
    return VolumeSize(known[name], name, known[name] - sizing.regions_bytes)

"""The sidecar's metrics: one collector that reads a `Status` at each scrape.

Nothing is counted here: values live in the metadata pages and in the service, so a scrape costs no I/O
and two scrapers see the same. The registry is our own, without the client library's process metrics.
Names and labels: docs/reference/metrics.md; they are part of what other programs rely on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from kvcellar import __version__
from kvcellar.contract import Direction, RegionState, Role
from kvcellar.daemon.status import RegionView, Status
from kvcellar.region.cgroups import Limit
from kvcellar.region.memory import TMPFS

_ENGINE = "engine_id"


@dataclass(frozen=True, slots=True)
class _RegionGauge:
    """A figure of a region: its name, its help text and where it is read."""

    name: str
    documentation: str
    read: Callable[[RegionView], float]


def _settle_ratio(view: RegionView) -> float:
    return view.settled_bytes / view.capacity_bytes if view.capacity_bytes else 0.0


_REGION_GAUGES = (
    _RegionGauge(
        "kvcellar_region_capacity_bytes",
        "Size of the region.",
        lambda view: view.capacity_bytes,
    ),
    _RegionGauge(
        "kvcellar_region_resident_bytes",
        "Bytes that the file system has promised to the region (st_blocks).",
        lambda view: view.reserved_bytes,
    ),
    _RegionGauge(
        "kvcellar_region_used_bytes",
        "Bytes of chunks that hold KV blocks.",
        lambda view: view.used_bytes,
    ),
    _RegionGauge(
        "kvcellar_region_settle_ratio",
        "Part of the region that is zeroed and resident.",
        _settle_ratio,
    ),
    _RegionGauge(
        "kvcellar_region_reserve_seconds",
        "Time that reserving the region took, so far.",
        lambda view: view.owner.reserve_seconds if view.owner else 0.0,
    ),
    _RegionGauge(
        "kvcellar_region_settle_seconds",
        "Time that settling the region took, so far.",
        lambda view: view.owner.settle_seconds if view.owner else 0.0,
    ),
    _RegionGauge(
        "kvcellar_region_generation",
        "Generation of the contents; rises when they stop being valid.",
        lambda view: view.session.generation if view.session else 0,
    ),
)


class StatusCollector(Collector):
    """Turns the status of the moment into metric families."""

    def __init__(self, read_status: Callable[[], Status]) -> None:
        self._read_status = read_status

    @override
    def collect(self) -> Iterator[Metric]:
        """All families, with a sample for each region."""
        status = self._read_status()
        yield from _region_gauges(status.regions)
        yield from _region_sets(status)
        yield from _transfers(status.regions)
        yield from _directory(status)
        yield from _memory(status.limits)
        yield InfoMetricFamily(
            "kvcellar_build", "Version of this sidecar.", value={"version": __version__}
        )


def new_registry(read_status: Callable[[], Status]) -> CollectorRegistry:
    """A registry with the sidecar's metrics and no others."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(read_status))
    return registry


def _region_gauges(views: tuple[RegionView, ...]) -> Iterator[Metric]:
    for gauge in _REGION_GAUGES:
        family = GaugeMetricFamily(gauge.name, gauge.documentation, labels=[_ENGINE])
        for view in views:
            family.add_metric([view.engine_id], gauge.read(view))
        yield family


def _region_sets(status: Status) -> Iterator[Metric]:
    participants = GaugeMetricFamily(
        "kvcellar_region_participants",
        "Processes that are attached to the region.",
        labels=[_ENGINE, "role"],
    )
    unused = GaugeMetricFamily(
        "kvcellar_region_desired_unused",
        "1 while what is desired of the region cannot be used, so that the last good state stays.",
        labels=[_ENGINE],
    )
    states = GaugeMetricFamily(
        "kvcellar_region_state",
        "1 for the state that the region is in, 0 for the others.",
        labels=[_ENGINE, "state"],
    )
    for view in status.regions:
        for role in Role:
            count = sum(row.role is role for row in view.participants)
            participants.add_metric([view.engine_id, role], count)
        for state in RegionState:
            states.add_metric([view.engine_id, state], float(view.state is state))
        is_unused = bool(status.desired_problems.get(view.engine_id))
        unused.add_metric([view.engine_id], float(is_unused))
    yield from (participants, states, unused)


def _transfers(views: tuple[RegionView, ...]) -> Iterator[Metric]:
    moved = CounterMetricFamily(
        "kvcellar_transfer_bytes",
        "Bytes copied between device and host.",
        labels=[_ENGINE, "direction"],
    )
    transfers = CounterMetricFamily(
        "kvcellar_transfers",
        "Transfers between device and host.",
        labels=[_ENGINE, "direction", "outcome"],
    )
    lookups = CounterMetricFamily(
        "kvcellar_lookup_chunks", "Chunks looked up in the index.", labels=[_ENGINE, "outcome"]
    )
    for view in views:
        engine, totals = view.engine_id, view.totals
        moved.add_metric([engine, Direction.STORE], totals.store_bytes)
        moved.add_metric([engine, Direction.LOAD], totals.load_bytes)
        transfers.add_metric([engine, Direction.STORE, "ok"], totals.stores_ok)
        transfers.add_metric([engine, Direction.STORE, "failed"], totals.stores_failed)
        transfers.add_metric([engine, Direction.LOAD, "ok"], totals.loads_ok)
        transfers.add_metric([engine, Direction.LOAD, "failed"], totals.loads_failed)
        lookups.add_metric([engine, "hit"], totals.lookup_hit)
        lookups.add_metric([engine, "miss"], totals.lookup_miss)
        lookups.add_metric([engine, "pending"], totals.lookup_pending)
    yield from (moved, transfers, lookups)


def _directory(status: Status) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "kvcellar_orphans_reclaimed",
        "Files without an owner that were removed.",
        value=status.reclaimed_files,
    )
    yield CounterMetricFamily(
        "kvcellar_orphans_reclaimed_bytes",
        "Bytes of the files without an owner that were removed.",
        value=status.reclaimed_bytes,
    )
    yield GaugeMetricFamily(
        "kvcellar_foreign_bytes",
        "Bytes of files in the directory that kvcellar did not make.",
        value=status.foreign_bytes,
    )


def _memory(limits: tuple[Limit, ...]) -> Iterator[Metric]:
    for limit in limits:
        if limit.name == TMPFS:
            yield GaugeMetricFamily(
                "kvcellar_tmpfs_size_bytes", "Size of the tmpfs.", value=limit.limit_bytes
            )
            yield GaugeMetricFamily(
                "kvcellar_tmpfs_free_bytes", "Free bytes of the tmpfs.", value=limit.free_bytes
            )
    size = GaugeMetricFamily(
        "kvcellar_memory_limit_bytes", "A limit on memory other than the tmpfs.", labels=["scope"]
    )
    usage = GaugeMetricFamily(
        "kvcellar_memory_usage_bytes", "What counts against that limit.", labels=["scope"]
    )
    for limit in limits:
        if limit.name != TMPFS:
            size.add_metric([limit.name], limit.limit_bytes)
            usage.add_metric([limit.name], limit.usage_bytes)
    yield from (size, usage)

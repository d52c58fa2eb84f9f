"""The operator's metrics in Prometheus' words. docs/reference/operator.md lists them all.

Each program has a registry of its own, so nothing is shared through globals, and a test can make many.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from kvcellar import __version__

_REVIEW_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_POLL_BUCKETS_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

ReadGauges = Callable[[], Iterable[tuple[str, str, Mapping[str, str], float]]]
"""Gives (name, help, labels, value) of gauges that are read only when they are scraped."""


class Common:
    """What both programs have."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        build = Gauge("kvcellar_operator_build_info", "1", ["version"], registry=self.registry)
        build.labels(__version__).set(1)
        self.missing_permissions = Gauge(
            "kvcellar_operator_missing_permissions",
            "API verbs that the ServiceAccount needs and may not use; the log names them",
            registry=self.registry,
        )

    def read_from(self, read: ReadGauges) -> None:
        """Show what `read` gives at each scrape."""
        self.registry.register(_ReadOnScrape(read))


class WebhookMetrics(Common):
    """What the webhook counts."""

    def __init__(self) -> None:
        super().__init__()
        self._reviews = Counter(
            "kvcellar_webhook_reviews_total",
            "Pods that were looked at",
            ["outcome", "reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "kvcellar_webhook_bad_requests_total",
            "Requests that are no AdmissionReview, or too large",
            registry=self.registry,
        )
        self._seconds = Histogram(
            "kvcellar_webhook_review_seconds",
            "Time from the request's last byte to the answer",
            buckets=_REVIEW_BUCKETS_S,
            registry=self.registry,
        )

    def reviewed(self, outcome: str, reason: str, seconds: float) -> None:
        """A review was answered."""
        self._reviews.labels(outcome, reason).inc()
        self._seconds.observe(seconds)

    def refused(self) -> None:
        """A request was no review."""
        self._refused.inc()


class ControllerMetrics(Common):
    """What the controller counts."""

    def __init__(self) -> None:
        super().__init__()
        self._polls = Counter(
            "kvcellar_controller_polls_total",
            "Questions to sidecars",
            ["result"],
            registry=self.registry,
        )
        self._poll_seconds = Histogram(
            "kvcellar_controller_poll_seconds",
            "Time until a sidecar answered, or did not",
            buckets=_POLL_BUCKETS_S,
            registry=self.registry,
        )
        self._writes = Counter(
            "kvcellar_controller_api_writes_total",
            "Writes to the API server",
            ["kind", "result"],
            registry=self.registry,
        )
        self._events = Counter(
            "kvcellar_controller_events_total",
            "Transitions that were told by Events",
            ["reason"],
            registry=self.registry,
        )

    def polled(self, result: str, seconds: float) -> None:
        """A sidecar answered ("ok"), or did not (the reason)."""
        self._polls.labels(result).inc()
        self._poll_seconds.observe(seconds)

    def wrote(self, kind: str, result: str) -> None:
        """An object of this kind was written ("ok"), or not (why)."""
        self._writes.labels(kind, result).inc()

    def told(self, reason: str) -> None:
        """A transition was told."""
        self._events.labels(reason).inc()


class _ReadOnScrape(Collector):
    def __init__(self, read: ReadGauges) -> None:
        self._read = read

    @override
    def collect(self) -> Iterable[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, text, labels, value in self._read():
            if name not in families:
                families[name] = GaugeMetricFamily(name, text, labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        return families.values()


class Age:
    """How long ago something last went well.

    Attributes:
        newest_s: `time.monotonic` of then.
    """

    def __init__(self) -> None:
        self.newest_s = time.monotonic()

    def now(self) -> None:
        """It went well."""
        self.newest_s = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since then."""
        return time.monotonic() - self.newest_s

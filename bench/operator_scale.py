"""The operator at scale: a real API server, simulated pods and sidecars, the real programs.

Printed for the controller, with the bounds that it has to keep: what it writes to the API server for one
pod, from its creation to its end, its memory, and the time from a change in a sidecar until the
OffloadRegion says so. For the webhook: how long a review takes, and how many two replicas answer. Exit
status 1 if a bound is not kept. Run it on a quiet machine:

    make bench-operator
"""

import argparse
import contextlib
import random
import resource
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.operator_pods import Engines
from bench.operator_reviews import ReviewFigures, measure_reviews
from bench.operator_watch import StatusWatch
from kvcellar_operator.config import ControllerSettings, parse
from kvcellar_operator.controller import needs
from tests.cluster.box import simulated
from tests.cluster.box.access import until
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.settings import Settings
from tests.cluster.operators import (
    OperatorProcess,
    granted,
    install_crds,
    own_namespace,
    user_of,
)
from tests.support.fake_sidecars import FakeSidecars

MAX_OBJECT_WRITES = 4.0
MAX_MEMORY_MIB = 150.0
MAX_P99_S = 15.0
_WRITES = ("create", "update", "patch", "delete")
_TOLD = ("offloadregions", "pods", "events")
_DEADLINE_S = 600.0
_DELETE_PAUSE_S = 0.2
"""The garbage collector's own limit is 20 requests a second."""
_RECOVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How much.

    Attributes:
        n_pods: pods, each with one engine.
        load_s: how long an engine loads: longer than the poll interval, so that each step is seen by itself.
        n_rounds: how often each engine restarts.
        spread_s: the time over which the restarts of one round are spread.
        held_s: after the restarts, until the Events that were held back are written.
        n_deleted: pods that are deleted in the end.
        reviews_s: seconds of each of the two loads on the webhook.
    """

    n_pods: int = 1000
    load_s: float = 20.0
    n_rounds: int = 3
    spread_s: float = 60.0
    n_deleted: int = 200
    held_s: float = 75.0
    reviews_s: float = 20.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured.

    Attributes:
        object_writes: of a pod's life, on objects of its own: OffloadRegion and Pod.
        events: Events that were written in a pod's life.
        restart_writes: all writes for one engine restart.
        change_s: from a change in a sidecar to the status, of each change.
        memory_mib: the controller's largest resident memory.
        restarted_s: from the start of a new controller until it was ready.
        reviews: the webhook's.
    """

    object_writes: float
    events: float
    restart_writes: float
    change_s: list[float]
    memory_mib: float
    restarted_s: float
    reviews: ReviewFigures

    def is_within(self) -> bool:
        """Whether every bound is kept."""
        return (
            self.object_writes <= MAX_OBJECT_WRITES
            and self.memory_mib < MAX_MEMORY_MIB
            and percentile(self.change_s, 99) < MAX_P99_S
        )


def percentile(values: Sequence[float], percent: int) -> float:
    """A percentile of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(cluster: Cluster, scale: Scale, folder: Path) -> Figures:
    """Measure on a cluster; everything but the CRDs is gone afterwards.

    Raises:
        BoxError: something did not come true in time.
        RuntimeError: a review was answered without a patch.
    """
    install_crds(cluster)
    node = f"kvc-node-{secrets.token_hex(4)}"
    simulated.create_node(cluster, node)
    with own_namespace(cluster) as namespace:
        with _controller(cluster, namespace, folder) as process, FakeSidecars.running() as sidecars:
            run = _Run(cluster, process, Engines(cluster, namespace, node, sidecars), namespace)
            measured = run.all(scale)
        reviews = measure_reviews(cluster, namespace, folder, scale.reviews_s)
    simulated.delete_node(cluster, node)
    return Figures(*measured, reviews=reviews)


@contextlib.contextmanager
def _controller(cluster: Cluster, namespace: str, folder: Path) -> Iterator[OperatorProcess]:
    """A controller with its default settings, which looks at all namespaces."""
    argv = ("controller", "--namespace", namespace)
    settings = parse(argv)
    if not isinstance(settings, ControllerSettings):
        raise TypeError("the arguments are not the controller's")
    with granted(cluster, namespace, needs(settings)) as account:
        process = OperatorProcess(account, folder / "controller.log", *argv)
        with process.running():
            yield process


class _Run:
    """One run of the controller over the lives of all pods."""

    def __init__(
        self, cluster: Cluster, process: OperatorProcess, engines: Engines, namespace: str
    ) -> None:
        self._cluster = cluster
        self._process = process
        self._engines = engines
        self._regions = f"/apis/kvcellar.dev/v1alpha1/namespaces/{namespace}/offloadregions"
        self._user = user_of(process.access)
        self._chance = random.Random(1)  # noqa: S311 - spreads load, no secret

    def all(self, scale: Scale) -> tuple[float, float, float, list[float], float, float]:
        """The figures of the controller, in the order of `Figures`."""
        with StatusWatch(self._cluster, self._regions).running() as watch:
            with self._engines.growing(scale.load_s):
                self._engines.create(scale.n_pods)
                until(
                    lambda: watch.count(1) >= scale.n_pods, "every engine is attached", _DEADLINE_S
                )
            started = self._writes()
            change_s = self._restart_engines(watch, scale)
            time.sleep(scale.held_s)
            restarted = self._writes()
            gone = self._engines.delete(scale.n_deleted, _DELETE_PAUSE_S)
            until(
                lambda: all(watch.when(name, "DELETED") for name in gone),
                "the objects go with their pods",
                _DEADLINE_S,
            )
            ended = self._writes()
        peak_mib = self._process.peak_rss_bytes() / 2**20
        restarted_s = self._restart_controller()
        peak_mib = max(peak_mib, self._process.peak_rss_bytes() / 2**20)
        life = {
            kind: started[kind] / scale.n_pods + (ended - restarted)[kind] / scale.n_deleted
            for kind in _TOLD
        }
        n_restarts = scale.n_pods * scale.n_rounds
        return (
            life["offloadregions"] + life["pods"],
            life["events"],
            (restarted - started).total() / n_restarts,
            change_s,
            peak_mib,
            restarted_s,
        )

    def _restart_engines(self, watch: StatusWatch, scale: Scale) -> list[float]:
        """Restart every engine so many times, at random moments; returns the delays until it was said."""
        delays_s: list[float] = []
        for _ in range(scale.n_rounds):
            order = self._chance.sample(self._engines.all, len(self._engines.all))
            changed_s = {}
            for engine in order:
                time.sleep(scale.spread_s / len(order))
                engine.start()
                changed_s[engine.region_name, engine.starts] = time.monotonic()
            until(
                lambda shown=changed_s: all(watch.when(*key) for key in shown),  # type: ignore[misc] # mypy infers no lambda with defaults
                "every restart is said",
                _DEADLINE_S,
            )
            delays_s += [(watch.when(*key) or 0.0) - at_s for key, at_s in changed_s.items()]
        return delays_s

    def _restart_controller(self) -> float:
        """Seconds until a new controller is ready; it then looks at all pods at its own pace."""
        self._process.end()
        began_s = time.monotonic()
        self._process.start()
        self._process.until_ready()
        ready_s = time.monotonic() - began_s
        n_pods = len(self._engines.all)
        until(
            lambda: self._process.metric('kvcellar_controller_polls_total{result="ok"}') >= n_pods,
            "every sidecar was asked",
            _RECOVERY_S + _DEADLINE_S,
        )
        return ready_s

    def _writes(self) -> Counter[str]:
        """What the controller wrote so far, by resource."""
        return Counter(
            event["objectRef"]["resource"]
            for event in self._cluster.audit(self._user)
            if event["verb"] in _WRITES and event["objectRef"]["resource"] in _TOLD
        )


def table(figures: Figures, scale: Scale) -> list[str]:
    """The figures as rows of Markdown."""
    reviews = figures.reviews

    def millis(values: Sequence[float]) -> str:
        return f"{percentile(values, 50) * 1000:.0f} / {percentile(values, 99) * 1000:.0f} ms"

    rows = [
        ("pods", f"{scale.n_pods}", ""),
        (
            "writes of a pod's life: OffloadRegion and Pod",
            f"{figures.object_writes:.2f}",
            f"<= {MAX_OBJECT_WRITES:g}",
        ),
        ("Events of a pod's life", f"{figures.events:.2f}", ""),
        ("writes for one engine restart, its Event included", f"{figures.restart_writes:.2f}", ""),
        (
            "change in a sidecar until the status says so, p50 / p99",
            f"{percentile(figures.change_s, 50):.1f} / {percentile(figures.change_s, 99):.1f} s",
            f"p99 < {MAX_P99_S:g} s",
        ),
        (
            "largest memory of the controller",
            f"{figures.memory_mib:.0f} MiB",
            f"< {MAX_MEMORY_MIB:g} MiB",
        ),
        ("a new controller is ready after", f"{figures.restarted_s:.1f} s", ""),
        ("review at 40 a second, p50 / p99", millis(reviews.paced_s), ""),
        ("review under full load, p50 / p99", millis(reviews.busy_s), ""),
        ("reviews a second, 2 replicas", f"{reviews.per_s:.0f}", ""),
    ]
    lines = ["| what | measured | bound |", "|---|---|---|"]
    return lines + [f"| {what} | {measured} | {bound} |" for what, measured, bound in rows]


def main() -> int:
    """Measure on a cluster of its own, and print the table."""
    usual = Scale()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pods", type=int, default=usual.n_pods)
    parser.add_argument("--rounds", type=int, default=usual.n_rounds)
    arguments = parser.parse_args()
    scale = Scale(arguments.pods, n_rounds=arguments.rounds, n_deleted=min(200, arguments.pods))
    # A listening socket for each sidecar.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Cluster.running(Settings.choose(folder / "cluster", folder / "logs")) as cluster:
            figures = measure(cluster, scale, folder)
    sys.stdout.write("\n".join(table(figures, scale)) + "\n")
    return 0 if figures.is_within() else 1


if __name__ == "__main__":
    sys.exit(main())

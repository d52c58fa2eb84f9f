"""What the tests of the stories measure: kept per test, and written as JSON lines if the run asks for it.

With ``KVCELLAR_TEST_FIGURES`` naming a file, as `tests/run.py` sets it, each test that passed appends one line:
its id, the date, the commit, and what it has measured. `tests.cluster.stories` makes docs/reference/stories.md
of them.

Kills and recoveries are counted where all tests kill (`node_pods`), by the namespace of the test.
"""

import datetime
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.cluster.box.cgroups import memory_of_pod
from tests.cluster.box.cluster import ROOT, Cluster

VARIABLE = "KVCELLAR_TEST_FIGURES"
"""Names the variable with the file; without it nothing is written."""

RecordFigure = Callable[[str, str], None]
"""What the fixture `record_figure` is: takes a name and what was measured, in words."""

_Place = tuple[str, str, str]
"""Namespace, pod and container."""


@dataclass(slots=True)
class Figures:
    """What one test has measured.

    Attributes:
        restarts: how often containers were started again, by their names.
        recovery_s: the longest time from a kill to the next start of that container.
        pod_bytes: the most that one pod was charged for when the test ended.
        more: what else it says of itself, in words, by name.
    """

    restarts: dict[str, int] = field(default_factory=dict)
    recovery_s: float | None = None
    pod_bytes: int | None = None
    more: dict[str, str] = field(default_factory=dict)

    def add_pods(self, cluster: Cluster, namespace: str) -> None:
        """Read the pods of a namespace, which are still there; of several, restarts add up."""
        counted: Counter[str] = Counter()
        for pod in cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]:
            status = pod.get("status", {})
            for state in (
                *status.get("initContainerStatuses", []),
                *status.get("containerStatuses", []),
            ):
                counted[state["name"]] += state["restartCount"]
            group = memory_of_pod(cluster.node.place.name, pod["metadata"]["uid"])
            if group is not None:
                self.pod_bytes = max(self.pod_bytes or 0, group.usage_bytes)
        took_s = _took_s.pop(namespace, [])
        # Of pods that are gone by now, only the kills are known.
        seen = Counter(container for container, _ in took_s)
        self.restarts = dict(Counter(self.restarts) + (counted | seen))
        before = () if self.recovery_s is None else (self.recovery_s,)
        self.recovery_s = max((*before, *(each for _, each in took_s)), default=None)

    def write(self, test: str) -> None:
        """Append them to the run's file, if it has one."""
        path = os.environ.get(VARIABLE)
        if path:
            today = datetime.datetime.now(datetime.UTC).date()
            line = {"test": test, "date": str(today), "commit": _commit(), **asdict(self)}
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with Path(path).open("a") as lines:
                lines.write(json.dumps(line) + "\n")


# ---- from a kill to the next start

_killed_at: dict[_Place, float] = {}
_took_s: dict[str, list[tuple[str, float]]] = {}
"""Container and time, by namespace."""


def killed(place: _Place) -> None:
    """A test kills a container now."""
    _killed_at[place] = time.monotonic()


def is_back(place: _Place) -> None:
    """The container that was killed has been started again."""
    if place in _killed_at:
        took_s = time.monotonic() - _killed_at.pop(place)
        _took_s.setdefault(place[0], []).append((place[2], round(took_s, 1)))


def _commit() -> str:
    argv = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"

"""Pods of two releases on the real node: what new ones would become, and how those that run fare meanwhile."""

import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from kvcellar.contract import ANNOTATION_DESIRED, ANNOTATION_INJECTED, ANNOTATION_SKIPPED
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.images import bumped
from tests.cluster.images.recipes import KVCELLAR_IMAGE
from tests.cluster.node_pods import (
    REGIONS,
    START_S,
    condition,
    container_group,
    create_pod,
    engine_pod,
    read_pod,
    region_of,
    until_checked,
)
from tests.cluster.node_sidecars import NodeSidecar

NOT_ASKED = "no webhook was asked"

# ---- new pods meanwhile


def what_becomes_of_a_pod(cluster: Cluster, namespace: str) -> tuple[str, JsonObject]:
    """The image that a new pod's sidecar would have, or why it would have none; and what it is told."""
    made = cluster.api.create(
        f"/api/v1/namespaces/{namespace}/pods", engine_pod("tried"), dryRun="All"
    )
    marks = made["metadata"].get("annotations") or {}
    stamp: JsonObject = json.loads(marks.get(ANNOTATION_INJECTED, "{}"))
    return stamp.get("image") or marks.get(ANNOTATION_SKIPPED, NOT_ASKED), stamp


class PodsMeanwhile:
    """Asks the API server again and again, for the length of a block, what a new pod would become."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self._stop = threading.Event()
        self._executor = ThreadPoolExecutor(1)
        self.became: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.took_s = 0.0

    def __enter__(self) -> "PodsMeanwhile":
        self._began = time.monotonic()
        self._asked = self._executor.submit(self._ask)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.took_s = time.monotonic() - self._began
        self._stop.set()
        self._executor.shutdown()
        self._asked.result()

    def _ask(self) -> None:
        while not self._stop.wait(0.05):
            became, stamp = what_becomes_of_a_pod(self._cluster, self._namespace)
            self.became[became] += 1
            self.told.update(stamp.get("notices", []))

    def until_by(self, image: str) -> None:
        """Wait until a release's webhook has been asked more than once."""
        until(lambda: self.became[image] > 1, f"new pods would have {image}", START_S)

    def assert_all_are_injected(self) -> None:
        """By one release or the other, and by each of them at least once."""
        assert self.became.keys() == {KVCELLAR_IMAGE, bumped.IMAGE}, (self.became, self._failures())

    def _failures(self) -> list[str]:
        """What the API server says of reviews that it had to do without."""
        log = (self._cluster.settings.logs / "kube-apiserver.log").read_text(errors="replace")
        return [line for line in log.splitlines() if "failing open" in line]

    def in_words(self) -> str:
        """For the table of stories."""
        newer = self.told["ProfileNewer"]
        return (
            f"{self.took_s:.0f} s, {self.became.total()} pods asked for meanwhile, all injected; "
            f"{newer} of them by a webhook that did not know a field"
        )


# ---- what is seen of pods of two releases


def reason_of(cluster: Cluster, namespace: str, name: str, kind: str) -> str:
    return str(condition(cluster, namespace, kind, name).get("reason", ""))


def until_reason(cluster: Cluster, namespace: str, name: str, kind: str, reason: str) -> str:
    """Wait until a condition of a pod's region has a reason; returns its message."""
    until(
        lambda: reason_of(cluster, namespace, name, kind) == reason,
        f"{kind} of the region of {name} has the reason {reason}",
        START_S,
    )
    return str(condition(cluster, namespace, kind, name)["message"])


def start_engine(cluster: Cluster, namespace: str, name: str) -> NodeSidecar:
    """Returns when it has loaded what it stored, and its object says that all is well."""
    create_pod(cluster, namespace, engine_pod(name))
    until_checked(cluster, namespace, name)
    until_reason(cluster, namespace, name, "Attached", "EngineAttached")
    until_reason(cluster, namespace, name, "Degraded", "AsExpected")
    return NodeSidecar.of(cluster, namespace, name)


def image_of(cluster: Cluster, namespace: str, name: str) -> str:
    init = read_pod(cluster, namespace, name)["spec"]["initContainers"]
    return str(next(each["image"] for each in init if each["name"] == "kvcellar"))


def desired_of(cluster: Cluster, namespace: str, name: str) -> str:
    marks = read_pod(cluster, namespace, name)["metadata"]["annotations"]
    return str(marks.get(ANNOTATION_DESIRED, ""))


def wish(cluster: Cluster, namespace: str, name: str, **spec: str) -> None:
    region = region_of(cluster, namespace, name)["metadata"]["name"]
    cluster.api.patch(f"{REGIONS.format(namespace)}/{region}", {"spec": spec})


def until_relayed(cluster: Cluster, namespace: str, name: str) -> None:
    until(lambda: desired_of(cluster, namespace, name), f"the wish is with {name}", START_S)


class Undisturbed:
    """The engine and the sidecar of a pod, which are the same processes at the end of a block."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name

    def __enter__(self) -> None:
        self._pids = self._read()

    def __exit__(self, *exception: object) -> None:
        if exception == (None, None, None):
            assert self._read() == self._pids
            NodeSidecar.of(self._cluster, self._namespace, self._name).until_more_is_loaded()

    def _read(self) -> list[list[int]]:
        containers = ("engine", "kvcellar")
        groups = [
            container_group(self._cluster, self._namespace, self._name, each) for each in containers
        ]
        assert all(group.pids for group in groups)
        return [sorted(group.pids) for group in groups]

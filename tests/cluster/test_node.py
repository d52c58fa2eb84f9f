"""A real kubelet with the chart and the image that are shipped: injected pods, from helm to the last file."""

import json
import os
import signal
from pathlib import Path

import pytest

from kvcellar.contract import ANNOTATION_INJECTED, LABEL_INJECT
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cgroups import MemoryGroup
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.node_files import PAUSE_IMAGE
from tests.cluster.box.settings import Settings
from tests.cluster.conftest import OPERATOR_NAMESPACE
from tests.cluster.images import recipes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MIB = 1 << 20
CAPACITY_BYTES = 64 * MIB
START_S = 90.0
"""Measured on a quiet machine: 4 s."""


def restricted_container(**more: object) -> JsonObject:
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    return {"image": recipes.ENGINE_IMAGE, "securityContext": security, **more}


def pod(name: str, container: JsonObject, labels: dict[str, str] | None = None) -> JsonObject:
    security = {
        "fsGroup": 2000,
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "securityContext": security,
        "terminationGracePeriodSeconds": 5,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
    }


def engine_pod(name: str) -> JsonObject:
    resources = {"limits": {"memory": "128Mi"}, "requests": {"cpu": "50m", "memory": "128Mi"}}
    engine = restricted_container(
        name="engine", command=["python3", "/engines/pattern_engine.py"], resources=resources
    )
    return pod(name, engine, {LABEL_INJECT: "true"})


def make_profile(cluster: Cluster, namespace: str) -> None:
    cluster.apply(
        {
            "apiVersion": "kvcellar.dev/v1alpha1",
            "kind": "OffloadProfile",
            "metadata": {"name": "default", "namespace": namespace},
            "spec": {"capacity": str(CAPACITY_BYTES)},
        }
    )


def read_pod(cluster: Cluster, namespace: str, name: str) -> JsonObject:
    return cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")


def container_status(cluster: Cluster, namespace: str, name: str, container: str) -> JsonObject:
    status = read_pod(cluster, namespace, name)["status"]
    states = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    found: JsonObject = next((each for each in states if each["name"] == container), {})
    return found


def said(cluster: Cluster, namespace: str, name: str) -> list[JsonObject]:
    """What the engine's present run has written."""
    done = cluster.kubectl("logs", name, "-c", "engine", "-n", namespace, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def until_checked(cluster: Cluster, namespace: str, name: str) -> JsonObject:
    """Wait until the engine has loaded what it stored; returns what it said when it attached."""
    until(
        lambda: any(line["event"] == "checked" for line in said(cluster, namespace, name)),
        f"the engine of {name} has checked a pattern",
        START_S,
    )
    return said(cluster, namespace, name)[0]


def region_of(cluster: Cluster, namespace: str) -> JsonObject:
    items = cluster.api.get(f"/apis/kvcellar.dev/v1alpha1/namespaces/{namespace}/offloadregions")
    found: JsonObject = next(iter(items["items"]), {})
    return found


def memory(cluster: Cluster, made: JsonObject) -> MemoryGroup:
    group = cluster.node.memory_of_pod(made["metadata"]["uid"])
    assert group is not None
    return group


def kill_engine(cluster: Cluster, namespace: str, name: str) -> None:
    made = read_pod(cluster, namespace, name)
    state = container_status(cluster, namespace, name, "engine")
    for pid in memory(cluster, made).container(state["containerID"]).pids:
        os.kill(pid, signal.SIGKILL)


def until_restarted(cluster: Cluster, namespace: str, name: str, times: int) -> None:
    def is_back() -> bool:
        state = container_status(cluster, namespace, name, "engine")
        return state["restartCount"] == times and "running" in state["state"]

    until(is_back, f"the engine of {name} is started again for the time {times}", START_S)


# ---- the story


def test_a_labelled_pod_is_injected_uses_its_region_survives_kills_and_leaves_nothing(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    made = cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", engine_pod("engine"))
    assert ANNOTATION_INJECTED in made["metadata"]["annotations"]

    attached = until_checked(cluster, namespace, "engine")
    assert attached["owner"] == "sidecar"
    assert attached["chunks"] == CAPACITY_BYTES // MIB

    def is_attached() -> bool:
        status = region_of(cluster, namespace).get("status", {})
        conditions = {each["type"]: each["status"] for each in status.get("conditions", [])}
        return status.get("phase") == "Ready" and conditions.get("Attached") == "True"

    until(is_attached, "the OffloadRegion is Ready and attached", START_S)
    assert region_of(cluster, namespace)["status"]["capacityBytes"] == CAPACITY_BYTES
    shown = cluster.kubectl("get", "kvreg", "--namespace", namespace).stdout.splitlines()
    assert len(shown) == 2
    assert "Ready" in shown[1]

    # The sidecar pays for the region, the engine does not.
    sidecar = container_status(cluster, namespace, "engine", "kvcellar")
    engine = container_status(cluster, namespace, "engine", "engine")
    pays = memory(cluster, made)
    assert pays.container(sidecar["containerID"]).usage_bytes > CAPACITY_BYTES
    assert pays.container(engine["containerID"]).usage_bytes < CAPACITY_BYTES

    before = pays.usage_bytes
    for number in range(1, 4):
        kill_engine(cluster, namespace, "engine")
        until_restarted(cluster, namespace, "engine", number)
        until_checked(cluster, namespace, "engine")
    assert pays.usage_bytes < before + 16 * MIB
    until(
        lambda: region_of(cluster, namespace)["status"].get("engineRestarts") == 3,
        "the object counts the restarts",
        START_S,
    )

    operator = cluster.api.get(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods")["items"]
    states = [state for each in operator for state in each["status"]["containerStatuses"]]
    assert {state["name"]: state["restartCount"] for state in states} == {
        "controller": 0,
        "webhook": 0,
    }

    cluster.kubectl("delete", "pod", "engine", "--namespace", namespace, timeout_s=90)
    assert_nothing_is_left(cluster, made)
    until(lambda: not region_of(cluster, namespace), "the object went with its pod")


def assert_nothing_is_left(cluster: Cluster, made: JsonObject) -> None:
    """Of a pod that is deleted: no cgroup, no mount, no folder, no container."""
    uid = made["metadata"]["uid"]
    until(lambda: cluster.node.memory_of_pod(uid) is None, "the pod's cgroup is gone")
    until(
        lambda: uid not in cluster.node.run("cat", "/proc/self/mounts").stdout, "no mount is left"
    )
    pods = cluster.node.folder / "kubelet" / "pods"
    until(lambda: not (pods / uid).exists(), "the kubelet's folder of the pod is gone")


# ---- the node itself


def test_a_second_node_beside_the_first_runs_a_pod_and_leaves_nothing(
    node_box: Cluster, images: dict[str, Path], tmp_path: Path
) -> None:
    settings = Settings.choose(tmp_path / "state", tmp_path / "logs", node=True)
    with Cluster.running(settings) as second:
        for name in (PAUSE_IMAGE, recipes.ENGINE_IMAGE):
            second.node.import_image(images[name])
        until(
            lambda: second.kubectl("get", "sa", "default", check=False).returncode == 0,
            "the namespace takes pods",
        )
        waits = restricted_container(name="waits", command=["sleep", "600"])
        made = second.api.create("/api/v1/namespaces/default/pods", pod("waits", waits))
        second.kubectl("wait", "--for=condition=Ready", "pod/waits", "--timeout=60s", timeout_s=70)
        done = second.kubectl("exec", "waits", "--", "id", "-u")
        assert done.stdout.strip() == "1000"
        assert memory(second, made).pids
        assert second.traces()
        assert node_box.kubectl("get", "pods", "-n", "default", "-o", "name").stdout == ""

    assert second.traces() == []


def test_the_machine_sees_no_mount_and_no_setting_of_the_node(node_box: Cluster) -> None:
    folder = str(node_box.settings.folder)
    assert folder not in Path("/proc/self/mounts").read_text()
    chains = Path("/proc/net/ip_tables_names")
    assert not chains.exists() or "KUBE" not in chains.read_text()

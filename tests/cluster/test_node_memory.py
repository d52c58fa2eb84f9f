"""Memory on a real kubelet: what an OOM kill takes, and what a region that does not fit does."""

import json
import signal

import pytest

from kvcellar.contract import ANNOTATION_SKIPPED
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.node_pods import (
    START_S,
    container_status,
    create_pod,
    engine_pod,
    events,
    kill_container,
    make_profile,
    region_of,
    until_checked,
    until_condition,
    until_restarted,
    until_said,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def test_an_engine_beyond_its_own_limit_is_killed_and_comes_back_beside_a_sidecar_that_stays(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    create_pod(cluster, namespace, engine_pod("engine"))
    until_checked(cluster, namespace, "engine")

    kill_container(cluster, namespace, "engine", number=signal.SIGUSR1)

    until_restarted(cluster, namespace, "engine", 1)
    ended = container_status(cluster, namespace, "engine", "engine")["lastState"]["terminated"]
    assert ended["reason"] == "OOMKilled"
    until_checked(cluster, namespace, "engine")
    assert container_status(cluster, namespace, "engine", "kvcellar")["restartCount"] == 0


# ---- a region that does not fit


def injected_with_less(cluster: Cluster, namespace: str, limit: str) -> JsonObject:
    """What the webhook makes of a pod, but with less memory than the region where `limit` says."""
    create = ("create", "--dry-run=server", "--output=json", "-n", namespace, "-f", "-")
    made: JsonObject = json.loads(
        cluster.kubectl(*create, stdin=json.dumps(engine_pod("engine"))).stdout
    )
    for key in ("uid", "creationTimestamp", "managedFields"):
        made["metadata"].pop(key, None)
    made.pop("status", None)
    spec = made["spec"]
    if limit == "tmpfs":
        volume = next(each for each in spec["volumes"] if each["name"] == "kvcellar-shm")
        volume["emptyDir"]["sizeLimit"] = "48Mi"
    else:
        sidecar = next(each for each in spec["initContainers"] if each["name"] == "kvcellar")
        for each in ("limits", "requests"):
            sidecar["resources"][each]["memory"] = "60Mi"
    return made


def test_a_volume_of_the_users_that_is_too_small_leaves_the_pod_as_it_is_and_says_so(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    made = engine_pod("engine")
    volume = {"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "48Mi"}}
    made["spec"]["volumes"] = [volume]
    made["spec"]["containers"][0]["volumeMounts"] = [{"name": "mine", "mountPath": "/dev/shm"}]

    created = create_pod(cluster, namespace, made)

    assert "initContainers" not in created["spec"]
    assert "48" in created["metadata"]["annotations"][ANNOTATION_SKIPPED]


@pytest.mark.parametrize("limit", ["tmpfs", "container"])
def test_a_region_that_does_not_fit_leaves_the_engine_serving_and_the_reason_everywhere(
    installed: Cluster, pod_namespace: str, limit: str
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    create_pod(cluster, namespace, injected_with_less(cluster, namespace, limit))

    told = until_said(cluster, namespace, "engine", "without")
    assert limit in told["reason"]
    degraded = until_condition(cluster, namespace, "Degraded", "True")
    assert degraded["reason"] == "DoesNotFit"
    assert limit in degraded["message"]
    assert region_of(cluster, namespace)["status"]["phase"] == "Failed"
    until(lambda: events(cluster, namespace, "RegionDoesNotFit"), "an Event says why", START_S)
    for container in ("engine", "kvcellar"):
        state = container_status(cluster, namespace, "engine", container)
        assert state["restartCount"] == 0
        assert "running" in state["state"]


@pytest.mark.parametrize("limit", ["tmpfs", "container"])
def test_with_fail_an_engine_whose_region_does_not_fit_is_not_started_and_the_pod_says_why(
    installed: Cluster, pod_namespace: str, limit: str
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace, onFailure="fail")
    create_pod(cluster, namespace, injected_with_less(cluster, namespace, limit))

    def ended() -> JsonObject:
        state = container_status(cluster, namespace, "engine", "kvcellar")
        found: JsonObject = state.get("lastState", {}).get("terminated", {})
        return found

    until(ended, "the sidecar has ended", START_S)
    assert ended()["exitCode"] == 3
    assert ended()["reason"] == "Error"
    assert limit in ended().get("message", "") or limit in until_previous(cluster, namespace)
    engine = container_status(cluster, namespace, "engine", "engine")
    assert "waiting" in engine["state"]
    assert region_of(cluster, namespace)["metadata"]["namespace"] == namespace


def until_previous(cluster: Cluster, namespace: str) -> str:
    command = ("logs", "engine", "-c", "kvcellar", "--previous", "-n", namespace)
    return cluster.kubectl(*command, check=False).stdout

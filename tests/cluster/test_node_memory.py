"""Memory on a real kubelet: what an OOM kill takes, and what a region that does not fit does."""

import signal

import pytest

from kvcellar.contract import ANNOTATION_SKIPPED
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.node_pods import (
    CAPACITY_BYTES,
    MIB,
    START_S,
    as_admitted,
    condition,
    container_status,
    create_pod,
    engine_pod,
    events,
    kill_container,
    make_profile,
    memory,
    read_pod,
    region_of,
    run_in,
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


LIMITS = ("tmpfs", "container", "pod")
"""Where a region does not fit: the volume, the sidecar's limit, and the pod's own, to which the kubelet cuts
the volume. Each word is in the reason."""
POD_LIMIT_BYTES = 200 * MIB


def pod_with_less(cluster: Cluster, namespace: str, limit: str, on_failure: str) -> None:
    """Create a pod as the webhook makes it, but with less memory than the region where `limit` says."""
    # What is cut to the pod's limit has to leave room for the processes.
    capacity_bytes = 256 * MIB if limit == "pod" else CAPACITY_BYTES
    make_profile(cluster, namespace, onFailure=on_failure, capacity=str(capacity_bytes))
    made = as_admitted(cluster, namespace, engine_pod("engine"))
    spec = made["spec"]
    sidecar = next(each for each in spec["initContainers"] if each["name"] == "kvcellar")
    if limit == "tmpfs":
        volume = next(each for each in spec["volumes"] if each["name"] == "kvcellar-shm")
        volume["emptyDir"]["sizeLimit"] = "48Mi"
    elif limit == "container":
        for each in ("limits", "requests"):
            sidecar["resources"][each]["memory"] = "60Mi"
    else:
        spec["resources"] = {"limits": {"memory": str(POD_LIMIT_BYTES)}}
        sidecar["resources"] = {"requests": {"memory": "60Mi"}}
    create_pod(cluster, namespace, made)


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


@pytest.mark.parametrize("limit", LIMITS)
def test_a_region_that_does_not_fit_leaves_the_engine_serving_and_the_reason_everywhere(
    installed: Cluster, pod_namespace: str, limit: str
) -> None:
    cluster, namespace = installed, pod_namespace
    pod_with_less(cluster, namespace, limit, "degrade")

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


def test_the_kubelet_cuts_the_volume_to_the_pods_own_limit_and_nothing_is_taken_of_it(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    pod_with_less(cluster, namespace, "pod", "degrade")
    until_said(cluster, namespace, "engine", "without")

    look = (
        "import os\nshm = os.statvfs('/dev/shm')\n"
        "print(shm.f_blocks * shm.f_frsize, (shm.f_blocks - shm.f_bfree) * shm.f_frsize)"
    )
    size, used = map(int, run_in(cluster, namespace, "engine", "engine", look).split())
    pays = memory(cluster, read_pod(cluster, namespace, "engine"))
    assert size == pays.limit_bytes == POD_LIMIT_BYTES
    assert used < MIB
    assert pays.usage_bytes < POD_LIMIT_BYTES


@pytest.mark.parametrize("limit", LIMITS)
def test_with_fail_an_engine_whose_region_does_not_fit_is_not_started_and_pod_object_and_event_say_why(
    installed: Cluster, pod_namespace: str, limit: str
) -> None:
    cluster, namespace = installed, pod_namespace
    pod_with_less(cluster, namespace, limit, "fail")

    def ended() -> JsonObject:
        state = container_status(cluster, namespace, "engine", "kvcellar")
        found: JsonObject = state.get("lastState", {}).get("terminated", {})
        return found

    until(ended, "the sidecar has ended", START_S)
    assert ended()["exitCode"] == 3
    assert ended()["reason"] == "Error"
    assert limit in ended()["message"]
    engine = container_status(cluster, namespace, "engine", "engine")
    assert "waiting" in engine["state"]

    def says_why() -> bool:
        told = condition(cluster, namespace, "Degraded")
        return told.get("status") == "True" and "leaves" in told["message"]

    until(says_why, "the object says which limit leaves how much", START_S)
    until(
        lambda: [
            each
            for reason in ("SidecarUnreachable", "RegionDoesNotFit")
            for each in events(cluster, namespace, reason)
            if "leaves" in each["message"]
        ],
        "an Event says which limit leaves how much",
        START_S,
    )

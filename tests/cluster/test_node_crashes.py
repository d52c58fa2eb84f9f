"""The crash loop on a real kubelet, cured and not: an engine is killed at random moments, again and again."""

import random
import time

import pytest

from kvcellar.contract import LABEL_INJECT
from tests.cluster import vllm_pods
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.figures import RecordFigure
from tests.cluster.node_pods import (
    MIB,
    START_S,
    container_status,
    create_pod,
    engine_pod,
    files_of,
    kill_container,
    make_profile,
    memory,
    region_of,
    until_checked,
    until_restarted,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NOISE_BYTES = 8 * MIB
"""What an engine's own memory differs by from start to start; a leaked region would be eight times this."""

VLLM_REGION = """\
import os, time, uuid
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
region = SharedOffloadRegion(uuid.uuid4().hex, 48, 0, 1 << 20, 1 << 20)
region.mmap_obj.madvise(23)
print('{"event": "has its region"}', flush=True)
time.sleep(3600)
"""
"""What a rank of vLLM does for its region, by vLLM's own class: a new engine id at each start, so a new
file of 48 MiB, all of whose pages it takes (23 is MADV_POPULATE_WRITE)."""


@pytest.mark.parametrize(
    "kills", [3, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_an_engine_that_is_killed_at_random_moments_comes_back_each_time_in_the_same_memory(
    installed: Cluster, pod_namespace: str, kills: int, record_figure: RecordFigure
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    made = create_pod(cluster, namespace, engine_pod("engine"))
    until_checked(cluster, namespace, "engine")
    until(
        lambda: region_of(cluster, namespace).get("status", {}).get("phase") == "Ready",
        "the region is settled",
        START_S,
    )
    pays = memory(cluster, made)
    files = files_of(cluster, namespace, "engine")
    before = pays.lasting_bytes
    chance = random.Random(kills)
    peak = before
    for number in range(1, kills + 1):
        # From before it attaches to long after: an engine of Python attaches within a second.
        time.sleep(chance.uniform(0.0, 2.0))
        kill_container(cluster, namespace, "engine")
        until_restarted(cluster, namespace, "engine", number)
        peak = max(peak, pays.lasting_bytes)
    until_checked(cluster, namespace, "engine")

    assert peak < before + NOISE_BYTES
    assert files_of(cluster, namespace, "engine") == files
    assert container_status(cluster, namespace, "engine", "kvcellar")["restartCount"] == 0
    until(
        lambda: region_of(cluster, namespace)["status"].get("engineRestarts") == kills,
        "the object counts every restart",
        START_S,
    )
    record_figure(f"growth of the pod over {kills} kills", f"{peak - before} bytes")


def without_kvcellar(claim: str) -> JsonObject:
    """A pod whose container makes vLLM's region in a volume that has room for one, and 16 MiB."""
    made = vllm_pods.program_pod(claim, VLLM_REGION, {LABEL_INJECT: "false"})
    made["spec"]["containers"][0]["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    made["spec"]["volumes"].append(
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}}
    )
    return made


def test_without_kvcellar_a_killed_vllm_leaves_its_region_and_never_starts_again(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    for each in vllm_pods.volume("vllm", namespace):
        cluster.apply(each)
    made = create_pod(cluster, namespace, without_kvcellar("vllm"))

    def log() -> str:
        command = ("logs", "engine", "-n", namespace)
        return cluster.kubectl(*command, check=False).stdout

    until(lambda: "has its region" in log(), "vLLM's class has made its region", 150.0)
    assert memory(cluster, made).usage_bytes > 48 * MIB
    kill_container(cluster, namespace, "engine")

    def has_failed_twice() -> bool:
        state = container_status(cluster, namespace, "engine", "engine")
        ended = state.get("lastState", {}).get("terminated", {})
        return bool(state["restartCount"] >= 2 and ended.get("exitCode") == 1)

    until(has_failed_twice, "the engine fails at its own start, again and again", 300.0)
    # Nobody holds the first file, and it is there for as long as the pod.
    assert memory(cluster, made).usage_bytes > 48 * MIB
    previous = cluster.kubectl("logs", "engine", "--previous", "-n", namespace, check=False).stdout
    assert "has its region" not in previous
    assert "/dev/shm" in previous

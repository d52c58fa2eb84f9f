"""``make cluster-demo``: a real vLLM that kvcellar is injected into and, in a soak, killed and asked again."""

import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest

from tests.cluster import demo, evidence
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.vllm_clients import START_S, answer, prompt

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def the_pod(cluster: Cluster) -> JsonObject:
    (found,) = cluster.api.get(f"/api/v1/namespaces/{demo.NAMESPACE}/pods")["items"]
    return dict(found)


def used_bytes(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}:9785/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("kvcellar_region_used_bytes{")
    )


@pytest.fixture
def demonstrated(
    installed: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, str]]:
    """The cluster with the demo in it, and the address of its vLLM; the demo is gone afterwards."""
    try:
        yield installed, demo.run(installed)
    finally:
        evidence.save(installed, demo.NAMESPACE, tmp_path_factory.mktemp("demo"))
        remove(installed)


def test_the_demo_runs_a_vllm_that_offloads(demonstrated: tuple[Cluster, str]) -> None:
    _, address = demonstrated
    assert answer(address, prompt())
    until(lambda: used_bytes(address) > 0, "vLLM has offloaded blocks")


# In CI it is test_node_vllm.py that kills a vLLM in a pod.
@pytest.mark.soak
def test_the_demo_s_vllm_answers_alike_after_a_kill(demonstrated: tuple[Cluster, str]) -> None:
    cluster, address = demonstrated
    first = answer(address, prompt())
    assert first
    kill_vllm(cluster)
    until(lambda: restarts(cluster) == 1, "vLLM is started again")
    assert until(lambda: answer(address, prompt()), "vLLM serves again", START_S) == first


def restarts(cluster: Cluster) -> int:
    count: int = the_pod(cluster)["status"]["containerStatuses"][0]["restartCount"]
    return count


def kill_vllm(cluster: Cluster) -> None:
    made = the_pod(cluster)
    state = made["status"]["containerStatuses"][0]
    group = cluster.node.memory_of_pod(made["metadata"]["uid"])
    assert group is not None
    for pid in group.container(state["containerID"]).pids:
        os.kill(pid, signal.SIGKILL)


def remove(cluster: Cluster) -> None:
    # At once: with all the time that its pod gives it, vLLM takes ten seconds to end.
    workload = ("deployment,pod", "--all", "--namespace", demo.NAMESPACE)
    cluster.kubectl("delete", *workload, "--grace-period=1", timeout_s=90)
    namespace = ("delete", "namespace", demo.NAMESPACE, "--ignore-not-found")
    cluster.kubectl(*namespace, "--wait=false")
    volume = ("delete", "pv", f"{demo.NAMESPACE}-vllm", "--ignore-not-found")
    cluster.kubectl(*volume, "--wait=false")

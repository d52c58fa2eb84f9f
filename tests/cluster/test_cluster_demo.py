"""``make cluster-demo``: a real vLLM that kvcellar is injected into, killed and asked again."""

import os
import signal
import urllib.request

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


def test_the_demo_runs_a_vllm_that_offloads_and_answers_alike_after_a_kill(
    installed: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("demo")
    request.addfinalizer(lambda: remove(installed))
    request.addfinalizer(lambda: evidence.save(installed, demo.NAMESPACE, folder))

    address = demo.run(installed)
    first = answer(address, prompt())
    assert first
    until(lambda: used_bytes(address) > 0, "vLLM has offloaded blocks")

    made = the_pod(installed)
    state = made["status"]["containerStatuses"][0]
    group = installed.node.memory_of_pod(made["metadata"]["uid"])
    assert group is not None
    for pid in group.container(state["containerID"]).pids:
        os.kill(pid, signal.SIGKILL)

    until(
        lambda: the_pod(installed)["status"]["containerStatuses"][0]["restartCount"] == 1,
        "vLLM is started again",
    )
    assert until(lambda: answer(address, prompt()), "vLLM serves again", START_S) == first


def remove(cluster: Cluster) -> None:
    # At once: with all the time that its pod gives it, vLLM takes ten seconds to end.
    workload = ("deployment,pod", "--all", "--namespace", demo.NAMESPACE)
    cluster.kubectl("delete", *workload, "--grace-period=1", timeout_s=90)
    namespace = ("delete", "namespace", demo.NAMESPACE, "--ignore-not-found")
    cluster.kubectl(*namespace, "--wait=false")
    volume = ("delete", "pv", f"{demo.NAMESPACE}-vllm", "--ignore-not-found")
    cluster.kubectl(*volume, "--wait=false")

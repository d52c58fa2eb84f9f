"""Everything beside the engine fails once: the sidecar, the kubelet, the container runtime, the operator, the API."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tests.cluster import charts
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.node_pods import (
    MIB,
    START_S,
    assert_nothing_is_left,
    condition,
    container_group,
    container_status,
    create_pod,
    engine_pod,
    files_of,
    kill_container,
    make_profile,
    memory,
    pod,
    region_of,
    restricted_container,
    until_checked,
    until_condition,
    until_restarted,
)
from tests.cluster.node_sidecars import NodeSidecar

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SAME_MEMORY_BYTES = 4 * MIB
"""What the sum of a pod may move by while nothing changes: the heaps of Python processes come and go."""


@pytest.fixture
def running(installed: Cluster, pod_namespace: str) -> JsonObject:
    """A pod with an engine that stores and loads, in a region that is ready."""
    make_profile(installed, pod_namespace)
    made = create_pod(installed, pod_namespace, engine_pod("engine"))
    until_checked(installed, pod_namespace, "engine")
    sidecar = NodeSidecar.of(installed, pod_namespace, "engine")
    sidecar.until_ready()
    sidecar.until_more_is_loaded()
    return made


def restarts(cluster: Cluster, namespace: str, container: str) -> int:
    count: int = container_status(cluster, namespace, "engine", container)["restartCount"]
    return count


# ---- the sidecar


def test_a_sidecar_that_is_killed_adopts_the_region_and_the_engine_does_not_notice(
    installed: Cluster, pod_namespace: str, running: JsonObject
) -> None:
    cluster, namespace = installed, pod_namespace
    sidecar = NodeSidecar.of(cluster, namespace, "engine")
    before, pays = sidecar.until_ready(), memory(cluster, running)
    files, used = files_of(cluster, namespace, "engine"), pays.lasting_bytes

    for number in range(1, 4):
        kill_container(cluster, namespace, "engine", "kvcellar")
        until_restarted(cluster, namespace, "engine", number, "kvcellar")
        sidecar.until_ready()
        sidecar.until_more_is_loaded()

    after = sidecar.until_ready()
    for same in ("generation", "session", "reservedBytes", "settledBytes", "capacityBytes"):
        assert after[same] == before[same], same
    assert after["engineStarts"] == 1
    assert abs(pays.lasting_bytes - used) < SAME_MEMORY_BYTES
    assert files_of(cluster, namespace, "engine") == files
    assert restarts(cluster, namespace, "engine") == 0
    until_condition(cluster, namespace, "Reachable", "True")


class HeldDown:
    """Kills a container whenever it runs, for the length of a block; counts how often."""

    def __init__(self, cluster: Cluster, namespace: str, container: str) -> None:
        self._cluster, self._namespace, self._container = cluster, namespace, container
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._kill)
        self.kills = 0

    def __enter__(self) -> "HeldDown":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _kill(self) -> None:
        killed: set[int] = set()
        while not self._stop.wait(0.1):
            try:
                group = container_group(self._cluster, self._namespace, "engine", self._container)
                if new := set(group.pids) - killed:
                    kill_container(self._cluster, self._namespace, "engine", self._container)
                    killed |= new
                    self.kills += 1
            except (KeyError, ProcessLookupError, FileNotFoundError):
                continue  # it is just gone, or just coming


def test_a_sidecar_that_crash_loops_does_not_keep_a_crashed_engine_from_restarting(
    installed: Cluster, pod_namespace: str, running: JsonObject
) -> None:
    cluster, namespace = installed, pod_namespace
    with HeldDown(cluster, namespace, "kvcellar") as held:
        until(lambda: held.kills >= 2, "the sidecar was killed again", START_S)
        for number in (1, 2):
            kill_container(cluster, namespace, "engine")
            until_restarted(cluster, namespace, "engine", number)
            until_checked(cluster, namespace, "engine")
        until(lambda: held.kills >= 4, "the sidecar crash-loops still", START_S)

    sidecar = NodeSidecar.of(cluster, namespace, "engine")
    assert sidecar.until_ready()["engineStarts"] == 3
    sidecar.until_more_is_loaded()


def test_sidecar_and_engine_that_are_killed_together_come_back_in_the_same_memory(
    installed: Cluster, pod_namespace: str, running: JsonObject
) -> None:
    cluster, namespace = installed, pod_namespace
    pays = memory(cluster, running)
    used, files = pays.lasting_bytes, files_of(cluster, namespace, "engine")
    sidecar = NodeSidecar.of(cluster, namespace, "engine")

    for number in (1, 2):
        groups = [
            container_group(cluster, namespace, "engine", name) for name in ("kvcellar", "engine")
        ]
        pids = [pid for group in groups for pid in group.pids]
        assert len(pids) >= 2
        kill_container(cluster, namespace, "engine", "kvcellar")
        kill_container(cluster, namespace, "engine", "engine")
        for name in ("kvcellar", "engine"):
            until_restarted(cluster, namespace, "engine", number, name)
        until_checked(cluster, namespace, "engine")
        sidecar.until_ready()
        sidecar.until_more_is_loaded()

    assert abs(pays.lasting_bytes - used) < 2 * SAME_MEMORY_BYTES
    assert files_of(cluster, namespace, "engine") == files


# ---- the end of a pod


@pytest.mark.parametrize("grace_s", [1, 30])
def test_of_a_pod_that_is_deleted_nothing_is_left_on_the_node(
    installed: Cluster, pod_namespace: str, running: JsonObject, grace_s: int
) -> None:
    cluster, namespace = installed, pod_namespace
    uid = running["metadata"]["uid"]
    known = set(cluster.node.containers_of_pod(uid))
    began = time.monotonic()
    cluster.kubectl(
        *("delete", "pod", "engine", "--namespace", namespace, f"--grace-period={grace_s}"),
        timeout_s=90,
    )
    # Both end on SIGTERM: a grace period is for those that do not.
    assert time.monotonic() - began < 25.0
    assert_nothing_is_left(cluster, running)
    until(lambda: not region_of(cluster, namespace), "the object went with its pod")
    # The gate's and the library's containers among them; what is left then, the kubelet removes once a minute.
    until(
        lambda: len(known - set(cluster.node.containers_of_pod(uid))) >= 3,
        "its containers are gone",
        START_S,
    )


# ---- the node


def end_and_start(cluster: Cluster, program: str) -> None:
    cluster.end_program(program, signal.SIGTERM)
    cluster.start_program(program)


@pytest.mark.parametrize("program", ["kubelet", "containerd"])
def test_an_engine_goes_on_while_a_program_of_the_node_restarts_and_comes_back_afterwards(
    installed: Cluster, pod_namespace: str, running: JsonObject, program: str
) -> None:
    cluster, namespace = installed, pod_namespace
    sidecar = NodeSidecar.of(cluster, namespace, "engine")
    group = container_group(cluster, namespace, "engine")
    pids = group.pids

    cluster.end_program(program, signal.SIGTERM)
    sidecar.until_more_is_loaded()
    cluster.start_program(program)

    until(cluster.node.runtime_answers, "the container runtime answers", START_S)
    sidecar.until_more_is_loaded()
    assert group.pids == pids
    kill_container(cluster, namespace, "engine")
    until_restarted(cluster, namespace, "engine", 1)
    until_checked(cluster, namespace, "engine")
    assert restarts(cluster, namespace, "kvcellar") == 0


# ---- the operator


@pytest.fixture
def reinstalled(installed: Cluster) -> Iterator[Cluster]:
    """The chart is in again afterwards, whatever the test did."""
    yield installed
    listed = installed.helm("list", "--namespace", charts.OPERATOR_NAMESPACE, "--short").stdout
    if not listed.split():
        charts.install(installed)


def test_engines_go_on_without_an_operator_and_the_next_one_finds_them(
    reinstalled: Cluster, pod_namespace: str, running: JsonObject
) -> None:
    cluster, namespace = reinstalled, pod_namespace
    until_condition(cluster, namespace, "Attached", "True")
    uid = region_of(cluster, namespace)["metadata"]["uid"]
    sidecar = NodeSidecar.of(cluster, namespace, "engine")
    cluster.helm(
        "uninstall", "kvcellar", "--namespace", charts.OPERATOR_NAMESPACE, "--wait", timeout_s=120
    )
    sidecar.until_more_is_loaded()
    kill_container(cluster, namespace, "engine")
    until_restarted(cluster, namespace, "engine", 1)
    until_checked(cluster, namespace, "engine")
    # Nothing keeps a pod from being made meanwhile.
    plain = restricted_container(name="plain", command=["sleep", "600"])
    create_pod(cluster, namespace, pod("plain", plain))

    charts.install(cluster)

    until(
        lambda: region_of(cluster, namespace)["status"].get("engineRestarts") == 1,
        "the object counts the restart that nobody watched",
        START_S,
    )
    assert region_of(cluster, namespace)["metadata"]["uid"] == uid
    until_condition(cluster, namespace, "Attached", "True")
    assert restarts(cluster, namespace, "kvcellar") == 0


# ---- the API server


@pytest.fixture
def restored(installed: Cluster, pod_namespace: str) -> Iterator[Cluster]:
    """Its programs watch the API server again afterwards: the next tests find none that still waits to try."""
    yield installed
    installed.restart_clients()


@pytest.mark.parametrize(
    "away_s", [20, pytest.param(120, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_engines_crash_and_come_back_while_the_api_server_is_away(
    restored: Cluster, pod_namespace: str, running: JsonObject, away_s: int
) -> None:
    cluster, namespace = restored, pod_namespace
    until_condition(cluster, namespace, "Attached", "True")
    sidecar = NodeSidecar.of(cluster, namespace, "engine")
    engine = container_group(cluster, namespace, "engine")
    starts = sidecar.until_ready()["engineStarts"]

    cluster.end_program("kube-apiserver")
    back_at = time.monotonic() + away_s
    try:
        for pid in engine.pids:
            os.kill(pid, signal.SIGKILL)
        until(
            lambda: sidecar.region().get("engineStarts") == starts + 1,
            "the engine is back without the API server",
            START_S,
        )
        sidecar.until_more_is_loaded()
        while time.monotonic() < back_at:
            time.sleep(0.5)
            assert sidecar.region()["state"] == "Ready"
    finally:
        cluster.start_program("kube-apiserver")
        cluster.wait_until_ready()

    until(
        lambda: region_of(cluster, namespace)["status"].get("engineRestarts") == 1,
        "the object counts the restart",
        START_S,
    )
    assert condition(cluster, namespace, "Degraded")["status"] == "False"
    until_condition(cluster, namespace, "Attached", "True")
    assert restarts(cluster, namespace, "kvcellar") == 0

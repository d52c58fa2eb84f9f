"""A real kubelet with the chart and the image that are shipped: injected pods, from helm to the last file."""

from pathlib import Path

import pytest

from kvcellar.contract import ANNOTATION_INJECTED
from tests.cluster.box.access import until
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.node_files import PAUSE_IMAGE
from tests.cluster.box.settings import Settings
from tests.cluster.charts import OPERATOR_NAMESPACE
from tests.cluster.images import recipes
from tests.cluster.node_pods import (
    CAPACITY_BYTES,
    MIB,
    START_S,
    assert_nothing_is_left,
    container_status,
    create_pod,
    engine_pod,
    kill_container,
    make_profile,
    memory,
    pod,
    region_of,
    restricted_container,
    until_checked,
    until_restarted,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# ---- the story


def test_a_labelled_pod_is_injected_uses_its_region_survives_kills_and_leaves_nothing(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    made = create_pod(cluster, namespace, engine_pod("engine"))
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

    before = pays.lasting_bytes
    for number in range(1, 4):
        kill_container(cluster, namespace, "engine")
        until_restarted(cluster, namespace, "engine", number)
        until_checked(cluster, namespace, "engine")
    assert pays.lasting_bytes < before + 16 * MIB
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

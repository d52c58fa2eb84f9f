"""Stock mode and the janitor on a real kubelet: vLLM's own region class in the pod, killed again and again."""

import json
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
    CAPACITY_BYTES,
    MIB,
    container_group,
    container_status,
    create_pod,
    events,
    kill_container,
    make_profile,
    region_of,
    run_in,
    until_condition,
    until_restarted,
    until_said,
)
from tests.cluster.node_sidecars import NodeSidecar

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

NOISE_BYTES = 8 * MIB
FILE_BYTES = 48 * MIB
"""Of vLLM's region: less than the sidecar's file has."""
CHUNKS = FILE_BYTES // MIB

STOCK_ENGINE = f"""\
import json, os, sys, time
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
text = sys.argv[sys.argv.index("--kv-transfer-config") + 1]
region = SharedOffloadRegion(KVTransferConfig(**json.loads(text)).engine_id, {CHUNKS}, 0, 1 << 20, 1 << 20)
view = region.create_next_worker_view(1 << 20)
view.fill_(7)
print(json.dumps({{"event": "has its region", "inode": os.fstat(region.fd).st_ino}}), flush=True)
time.sleep(3600)
"""
"""A rank of an unmodified vLLM, as far as its region goes: told its engine id as vLLM is, it writes every page."""

OTHER_NAME_ENGINE = f"""\
import json, os, time, uuid
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
region = SharedOffloadRegion(uuid.uuid4().hex, {CHUNKS}, 0, 1 << 20, 1 << 20)
print(json.dumps({{"event": "has its region", "file": os.path.basename(region.mmap_path)}}), flush=True)
time.sleep(3600)
"""
"""The same of a vLLM that nobody told its engine id: a new file at each start."""

FILES = """\
import json, os
root = "/dev/shm"
found = {}
for file in os.scandir(root):
    try:
        if file.is_file(follow_symlinks=False):
            found[file.name] = file.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:  # the janitor has moved it meanwhile
        pass
print(json.dumps(found))
"""

TRANSFER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "engine_id": "$(KVCELLAR_ENGINE_ID)",
    "kv_connector_extra_config": {"cpu_bytes_to_use": FILE_BYTES},
}


def start(cluster: Cluster, namespace: str, program: str, *arguments: str) -> JsonObject:
    for each in vllm_pods.volume("vllm", namespace):
        cluster.apply(each)
    labels = {LABEL_INJECT: "true"}
    return create_pod(cluster, namespace, vllm_pods.program_pod("vllm", program, labels, arguments))


def until_it_has_its_region(cluster: Cluster, namespace: str) -> JsonObject:
    return until_said(cluster, namespace, "engine", "has its region")


def files(cluster: Cluster, namespace: str) -> dict[str, int]:
    """What lies in the root of the pod's volume, where vLLM makes its files: bytes by name."""
    found: dict[str, int] = json.loads(run_in(cluster, namespace, "engine", "kvcellar", FILES))
    return found


def actions(cluster: Cluster, namespace: str) -> set[str]:
    """What was done with the files that the object shows."""
    return {each["action"] for each in region_of(cluster, namespace)["status"]["orphans"]}


def until_it_is_gone(cluster: Cluster, namespace: str, file: str) -> None:
    until(lambda: file not in files(cluster, namespace), f"{file} is reclaimed", 30.0)


@pytest.mark.parametrize(
    "kills", [3, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_an_unmodified_vllm_joins_the_sidecar_s_file_and_leaves_nothing_when_it_is_killed(
    installed: Cluster, pod_namespace: str, kills: int, record_figure: RecordFigure
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace, mode="stock", containers=["engine"])
    start(cluster, namespace, STOCK_ENGINE, "--kv-transfer-config", json.dumps(TRANSFER))
    inode = until_it_has_its_region(cluster, namespace)["inode"]
    until_condition(cluster, namespace, "Attached", "True")
    region = region_of(cluster, namespace)
    engine_id = region["spec"]["engineID"]
    assert region["status"]["mode"] == "stock"
    assert files(cluster, namespace) == {f"vllm_offload_{engine_id}.mmap": CAPACITY_BYTES}
    # Every page that vLLM wrote was there: the engine is charged for none.
    assert container_group(cluster, namespace, "engine").stat["shmem"] < MIB
    sidecar = container_group(cluster, namespace, "engine", "kvcellar")
    paid = sidecar.lasting_bytes
    assert paid > CAPACITY_BYTES

    chance = random.Random(kills)
    for number in range(1, kills + 1):
        # From before it has imported vLLM to after it has written its pages.
        time.sleep(chance.uniform(0.0, 10.0))
        kill_container(cluster, namespace, "engine")
        until_restarted(cluster, namespace, "engine", number)

    assert until_it_has_its_region(cluster, namespace)["inode"] == inode
    assert files(cluster, namespace) == {f"vllm_offload_{engine_id}.mmap": CAPACITY_BYTES}
    assert abs(sidecar.lasting_bytes - paid) < NOISE_BYTES
    assert container_group(cluster, namespace, "engine").stat["shmem"] < MIB
    status = region_of(cluster, namespace)["status"]
    assert (status["phase"], status["orphans"]) == ("Ready", [])
    assert container_status(cluster, namespace, "engine", "kvcellar")["restartCount"] == 0
    record_figure(
        f"growth of the sidecar over {kills} kills of a stock vLLM",
        f"{sidecar.lasting_bytes - paid} bytes",
    )


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_the_janitor_with_the_engine_s_user_removes_each_file_that_a_killed_vllm_left(
    installed: Cluster, pod_namespace: str, kills: int
) -> None:
    cluster, namespace = installed, pod_namespace
    # Room for two files: an engine that comes back before the janitor has looked starts at the first try.
    make_profile(cluster, namespace, containers=["engine"], shmHeadroom="128Mi")
    start(cluster, namespace, OTHER_NAME_ENGINE)
    first = until_it_has_its_region(cluster, namespace)["file"]
    # A file that a process has is nobody's orphan, however often the janitor looks.
    assert first in files(cluster, namespace)
    for number in range(1, kills + 1):
        left = until_it_has_its_region(cluster, namespace)["file"]
        kill_container(cluster, namespace, "engine")
        until_restarted(cluster, namespace, "engine", number)
        until_it_is_gone(cluster, namespace, left)
    until_it_has_its_region(cluster, namespace)

    # It is gone from the root a second before it is gone for good.
    sidecar = NodeSidecar.of(cluster, namespace, "engine")
    until(
        lambda: sidecar.metrics().get("kvcellar_orphans_reclaimed_total") == kills,
        "each file is counted",
        30.0,
    )
    assert len(files(cluster, namespace)) == 1
    until(lambda: events(cluster, namespace, "OrphanReclaimed"), "an Event says so", 30.0)
    until(
        lambda: actions(cluster, namespace) == {"reclaimed"},
        "the object names what went, and not the file of the engine that runs",
        30.0,
    )


def test_the_janitor_with_another_user_reports_the_file_and_leaves_it(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    other = {"securityContext": {"runAsUser": 3000}}
    make_profile(cluster, namespace, containers=["engine"], shmHeadroom="128Mi", sidecar=other)
    start(cluster, namespace, OTHER_NAME_ENGINE)
    left = until_it_has_its_region(cluster, namespace)["file"]
    kill_container(cluster, namespace, "engine")
    until_restarted(cluster, namespace, "engine", 1)

    def reported() -> bool:
        orphans = region_of(cluster, namespace)["status"].get("orphans", [])
        return any(
            (each["name"], each["action"]) == (left, "kept") and "uid 1000" in each["reason"]
            for each in orphans
        )

    until(reported, "the object names the file and its user", 60.0)
    until_it_has_its_region(cluster, namespace)
    assert files(cluster, namespace)[left] == FILE_BYTES

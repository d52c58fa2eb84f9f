"""Who pays for a region, from the cgroup files of a real kubelet's pods: docs/explanation/sizing.md."""

import pytest

from kvcellar.contract import LABEL_INJECT
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cgroups import MemoryGroup
from tests.cluster.box.cluster import Cluster
from tests.cluster.figures import RecordFigure
from tests.cluster.node_pods import (
    MIB,
    START_S,
    as_admitted,
    container_group,
    container_status,
    create_pod,
    engine_pod,
    kill_container,
    make_profile,
    memory,
    run_in,
    until_checked,
    until_restarted,
)
from tests.cluster.node_sidecars import NodeSidecar

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ENGINE_LIMIT_BYTES = 96 * MIB
LARGE_BYTES = 768 * MIB
"""A region eight times as large as the engine may become."""
OVERHEAD_BYTES = 64 * MIB
"""What the sidecar may take beside its region; the injector adds 96 MiB for it (`memoryOverhead`)."""
NOISE_BYTES = 4 * MIB
"""What a process of Python differs by from start to start."""

TOUCH = """\
import mmap, os
folder = "/dev/shm/kvcellar/"
name = next(each for each in os.listdir(folder) if each.endswith(".data"))
fd = os.open(folder + name, os.O_RDWR)
size = os.fstat(fd).st_size
view = mmap.mmap(fd, size)
def tables():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmPTE"))
before = tables()
for offset in range(16 << 20, size, 4096):
    view[offset] = 1
print(size, tables() - before)
"""
"""Writes to every page of the region, as an engine would that uses all of it, but for those chunks that the
small engine uses."""

FILE_OF_ITS_OWN = """\
with open("/dev/shm/own", "wb") as file:
    file.write(bytes(16 << 20))
"""


def start(cluster: Cluster, namespace: str, capacity_bytes: int) -> JsonObject:
    """A pod whose engine is limited to 96 MiB, and has used all its chunks by now."""
    make_profile(cluster, namespace, capacity=str(capacity_bytes))
    made = create_pod(cluster, namespace, engine_pod("engine", memory=str(ENGINE_LIMIT_BYTES)))
    until_checked(cluster, namespace, "engine")
    sidecar = NodeSidecar.of(cluster, namespace, "engine")
    sidecar.until_ready()
    until(lambda: sidecar.loaded_bytes() > 32 * MIB, "the engine has used all its chunks", START_S)
    return made


def beside_the_region(group: MemoryGroup, capacity_bytes: int) -> int:
    """What a group is charged beside a region and its page-cache nodes."""
    return group.usage_bytes - capacity_bytes * 1003 // 1000


@pytest.mark.parametrize("capacity_bytes", [64 * MIB, LARGE_BYTES])
def test_the_sidecar_pays_for_the_region_and_the_engine_for_its_page_tables(
    installed: Cluster, pod_namespace: str, capacity_bytes: int, record_figure: RecordFigure
) -> None:
    cluster, namespace = installed, pod_namespace
    start(cluster, namespace, capacity_bytes)
    sidecar = container_group(cluster, namespace, "engine", "kvcellar")
    engine = container_group(cluster, namespace, "engine")
    paid, alone = sidecar.lasting_bytes, engine.lasting_bytes
    assert paid > capacity_bytes
    assert beside_the_region(sidecar, capacity_bytes) < OVERHEAD_BYTES

    size, tables = map(int, run_in(cluster, namespace, "engine", "engine", TOUCH).split())

    assert size == capacity_bytes
    # 2 MiB for each GiB in small pages, and one page for the tables' own.
    assert tables <= capacity_bytes // 512 + 64 * 1024
    assert abs(sidecar.lasting_bytes - paid) < NOISE_BYTES
    assert engine.limit_bytes == ENGINE_LIMIT_BYTES
    assert engine.stat["shmem"] < MIB
    assert engine.lasting_bytes < alone + NOISE_BYTES
    assert container_status(cluster, namespace, "engine", "engine")["restartCount"] == 0
    record_figure(
        f"a region of {capacity_bytes // MIB} MiB",
        f"sidecar {paid / MIB:.1f} MiB, of which {beside_the_region(sidecar, capacity_bytes) / MIB:.1f} beside it, "
        f"engine {alone / MIB:.1f}, then {engine.lasting_bytes / MIB:.1f}, page tables {tables / MIB:.1f}",
    )
    # What the engine itself is first to write is its own: so these figures do tell whose a page is.
    run_in(cluster, namespace, "engine", "engine", FILE_OF_ITS_OWN)
    # The kernel sums up its figures of a group every two seconds.
    until(lambda: engine.stat["shmem"] >= 16 * MIB, "the engine pays for it", START_S)


def test_after_a_restart_of_the_sidecar_the_pod_has_the_same_sum_and_no_container_pays(
    installed: Cluster, pod_namespace: str, record_figure: RecordFigure
) -> None:
    cluster, namespace = installed, pod_namespace
    made = start(cluster, namespace, LARGE_BYTES)
    pays = memory(cluster, made)
    before = pays.lasting_bytes

    kill_container(cluster, namespace, "engine", "kvcellar")
    until_restarted(cluster, namespace, "engine", 1, "kvcellar")
    NodeSidecar.of(cluster, namespace, "engine").until_ready()

    sidecar = container_group(cluster, namespace, "engine", "kvcellar")
    assert abs(pays.lasting_bytes - before) < NOISE_BYTES
    assert sidecar.usage_bytes < OVERHEAD_BYTES
    assert sum(each.usage_bytes for each in pays.children()) < pays.usage_bytes - LARGE_BYTES
    record_figure(
        "after a restart of the sidecar",
        f"pod {(pays.lasting_bytes - before) / MIB:+.1f} MiB, new sidecar {sidecar.usage_bytes / MIB:.1f} MiB",
    )


# ---- the QoS class


def of_class(name: str) -> JsonObject:
    """A pod of a QoS class by what its containers, or the pod itself, ask for."""
    made = engine_pod("engine")
    (container,) = made["spec"]["containers"]
    all_of_it = {"cpu": "200m", "memory": "128Mi"}
    asked = {
        "Guaranteed": {"limits": all_of_it, "requests": all_of_it},
        "Burstable": {"limits": {"memory": "128Mi"}, "requests": {"cpu": "10m"}},
        "BestEffort": {},
    }
    kind, _, level = name.partition(" ")
    if level:
        made["spec"]["resources"] = asked[kind]
    container["resources"] = {} if level else asked[kind]
    return made


@pytest.mark.parametrize(
    "name",
    ["Guaranteed", "Burstable", "BestEffort", "Guaranteed by its pod", "Burstable by its pod"],
)
def test_the_pod_keeps_its_qos_class(installed: Cluster, pod_namespace: str, name: str) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    plain = of_class(name)
    plain["metadata"]["labels"] = {LABEL_INJECT: "false"}

    without = as_admitted(cluster, namespace, plain)
    with_it = as_admitted(cluster, namespace, of_class(name))

    assert "initContainers" not in without["spec"]
    assert with_it["spec"]["initContainers"][0]["name"] == "kvcellar"
    assert without["status"]["qosClass"] == with_it["status"]["qosClass"] == name.split()[0]

"""A hostile container in the engine's pod, with the engine's user and group: the worst that it can do."""

import pytest

from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.node_pods import (
    START_S,
    container_status,
    create_pod,
    engine_container,
    engine_pod,
    kill_container,
    make_profile,
    region_of,
    restricted_container,
    run_in,
    until_checked,
    until_condition,
    until_restarted,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PLANT = """\
import os, time
root, inside = "/dev/shm/", "/dev/shm/kvcellar/"
with open("/scratch/precious", "w") as file:
    file.write("precious" * 1000)
open(root + "kept", "w").write("kept" * 1000)
for folder in (root, inside):
    for number, name in enumerate(("vllm_offload_a.mmap", "b.meta", "c.0123456789abcdef.data")):
        def plant(make, mark):
            try:
                make(folder + mark + name)
            except OSError as error:
                print(folder, mark, name, error)
        plant(lambda path: os.symlink("/scratch/precious", path), "")
        plant(lambda path: os.symlink("/etc/passwd", path), "vllm_offload_s")
        plant(os.mkfifo, "vllm_offload_f")
        plant(lambda path: os.link(root + "kept", path), "vllm_offload_h")
        plant(lambda path: os.mkdir(path), "vllm_offload_d")
        plant(lambda path: os.symlink(path, path), "vllm_offload_l")
"""

UNTOUCHED = """\
print(open("/scratch/precious").read() == "precious" * 1000)
print(open("/dev/shm/kept").read() == "kept" * 1000)
"""

FILL = """\
import os
fd = os.open("/dev/shm/full", os.O_CREAT | os.O_RDWR)
try:
    while True:
        os.write(fd, b"x" * (1 << 20))
except OSError as error:
    print(error.errno)
"""


def pod_with_a_hostile(size_limit: str = "128Mi") -> JsonObject:
    mounts = [
        {"name": "mine", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": "/scratch"},
    ]
    hostile = restricted_container(
        name="hostile",
        command=["sleep", "3600"],
        resources={"limits": {"memory": "160Mi"}, "requests": {"cpu": "10m"}},
        volumeMounts=mounts,
    )
    made = engine_pod("engine")
    made["spec"]["containers"] = [engine_container(volumeMounts=mounts), hostile]
    made["spec"]["volumes"] = [
        {"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": size_limit}},
        {"name": "scratch", "emptyDir": {}},
    ]
    return made


def start(cluster: Cluster, namespace: str) -> None:
    make_profile(cluster, namespace, containers=["engine"], shmHeadroom="16Mi")
    create_pod(cluster, namespace, pod_with_a_hostile())
    until_checked(cluster, namespace, "engine")
    until_condition(cluster, namespace, "Attached", "True")
    until(
        lambda: region_of(cluster, namespace)["status"]["phase"] == "Ready",
        "the region is settled",
        START_S,
    )


def restarts_of_the_sidecar(cluster: Cluster, namespace: str) -> int:
    count: int = container_status(cluster, namespace, "engine", "kvcellar")["restartCount"]
    return count


def test_links_pipes_and_folders_under_our_names_change_nothing_and_nothing_outside_is_touched(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    start(cluster, namespace)

    run_in(cluster, namespace, "engine", "hostile", PLANT)
    for number, container in enumerate(("engine", "kvcellar", "engine")):
        kill_container(cluster, namespace, "engine", container)
        until_restarted(cluster, namespace, "engine", 1 + number // 2, container)
        until_checked(cluster, namespace, "engine")

    until_condition(cluster, namespace, "Reachable", "True")
    assert restarts_of_the_sidecar(cluster, namespace) == 1
    assert run_in(cluster, namespace, "engine", "hostile", UNTOUCHED).split() == ["True"] * 2


def test_a_full_volume_takes_nothing_from_a_region_that_is_reserved(
    installed: Cluster, pod_namespace: str
) -> None:
    cluster, namespace = installed, pod_namespace
    start(cluster, namespace)

    assert run_in(cluster, namespace, "engine", "hostile", FILL).strip() == "28"
    kill_container(cluster, namespace, "engine")
    until_restarted(cluster, namespace, "engine", 1)

    until_checked(cluster, namespace, "engine")
    assert restarts_of_the_sidecar(cluster, namespace) == 0
    assert region_of(cluster, namespace)["status"]["phase"] == "Ready"

"""A real vLLM in an injected pod of a real kubelet: what its region costs and shows, and how it survives kills."""

import contextlib
import itertools
import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster import vllm_pods
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cgroups import MemoryGroup
from tests.cluster.box.cluster import Cluster
from tests.cluster.figures import RecordFigure
from tests.cluster.node_pods import (
    CAPACITY_BYTES,
    MIB,
    container_group,
    container_status,
    create_pod,
    files_of,
    kill_container,
    make_profile,
    memory,
    region_of,
    until_condition,
    until_restarted,
)
from tests.cluster.node_sidecars import NodeSidecar
from tests.cluster.vllm_clients import START_S, answer, prompt

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME = "engine"
CONTAINER = "vllm"
OVERHEAD_BYTES = 64 * MIB
"""What the sidecar may take beside its region; the injector adds 96 MiB for it (`memoryOverhead`)."""
NOISE_BYTES = 8 * MIB
"""What a sidecar's own memory differs by; a leaked region would be eight times this."""
INDEX_BYTES = MIB
"""More than the metadata page, the index and the names of one region take."""
PROCESS_NOISE_BYTES = 128 * MIB
"""What the memory of vLLM's processes, more than 1 GiB, differs by from start to start."""
LEFT_BYTES = MIB
"""More than the pages of the queues between vLLM's own processes, which each kill leaves in the volume."""
LEFT_NAMES = ("/dev/shm/psm_", "/dev/shm/sem.")
"""What Python names them; kvcellar touches nobody's but its own and the region files of stock vLLM."""
EARLY_S = 5.0
"""By then vLLM has not attached, and does not serve."""
OTHERS = 8
"""Prompts that together need more blocks than vLLM has, so that it drops those of the first."""


@dataclass(frozen=True, slots=True)
class Vllm:
    """A pod with a vLLM that serves.

    Attributes:
        region_while_loading: what the region's object showed when it was Ready, which vLLM was not.
        phases: what the object went through until vLLM served, while somebody had the region freed and made again.
        start_s: what vLLM took from the start of its container.
    """

    cluster: Cluster
    namespace: str
    made: JsonObject
    region_while_loading: JsonObject
    phases: list[str]
    start_s: float

    @property
    def sidecar(self) -> NodeSidecar:
        return NodeSidecar.of(self.cluster, self.namespace, NAME)

    def status(self) -> JsonObject:
        return container_status(self.cluster, self.namespace, NAME, CONTAINER)

    def answer(self, asked: str) -> str:
        return answer(self.sidecar.address, asked)

    def files(self) -> list[str]:
        """What lies in the volume, but for what Python's shared memory and semaphores are named."""
        found = files_of(self.cluster, self.namespace, NAME)
        return sorted(each for each in found if not each.startswith(LEFT_NAMES))

    def group(self, container: str) -> MemoryGroup:
        return container_group(self.cluster, self.namespace, NAME, container)


@contextlib.contextmanager
def watched_phases(cluster: Cluster, namespace: str, folder: Path) -> Iterator[list[str]]:
    """The phases, one after another, that a watch of the namespace's only region sees; known at the end."""
    path, seen = folder / "phases", list[str]()
    argv = ["kubectl", "get", "kvreg", "--namespace", namespace, "--watch", "--output"]
    with path.open("w") as output:
        watch = subprocess.Popen(
            [*argv, r'jsonpath={.status.phase}{"\n"}'],
            env=cluster.environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
        )
        try:
            yield seen
        finally:
            watch.terminate()
            watch.wait(timeout=30)
    seen += [phase for phase, _ in itertools.groupby(path.read_text().split())]


def ask_for_retention(cluster: Cluster, namespace: str, retention: str, phase: str) -> None:
    """Edit the region's object, and wait until it shows the phase."""
    wanted = json.dumps({"spec": {"retention": retention}})
    name = region_of(cluster, namespace)["metadata"]["name"]
    cluster.kubectl("patch", "kvreg", name, "-n", namespace, "--type=merge", f"--patch={wanted}")
    until(
        lambda: region_of(cluster, namespace)["status"]["phase"] == phase,
        f"the region is {phase} with retention {retention}",
    )


@pytest.fixture(scope="module")
def vllm(
    installed: Cluster, shared_namespace: str, tmp_path_factory: pytest.TempPathFactory
) -> Vllm:
    """One for all tests of this module, as a start takes vLLM half a minute."""
    cluster, namespace = installed, shared_namespace
    vllm_pods.write_model()
    cluster.apply(*vllm_pods.volume("vllm", namespace))
    make_profile(cluster, namespace)
    template = vllm_pods.template("vllm", {})
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = {"name": NAME, **template["metadata"]}
    with watched_phases(cluster, namespace, tmp_path_factory.mktemp("watch")) as phases:
        made = create_pod(cluster, namespace, pod)

        def status() -> JsonObject:
            return container_status(cluster, namespace, NAME, CONTAINER)

        until(lambda: "running" in status().get("state", {}), "vLLM's container is started", 60.0)
        began = time.monotonic()
        until(
            lambda: region_of(cluster, namespace).get("status", {}).get("phase") == "Ready",
            "the region is ready",
            60.0,
        )
        early = region_of(cluster, namespace)
        ask_for_retention(cluster, namespace, "now", "Released")
        ask_for_retention(cluster, namespace, "keep", "Ready")
        assert not status()["ready"]
        assert region_of(cluster, namespace)["status"]["participants"] == []
        until(lambda: status()["ready"], "vLLM serves", START_S)
        start_s = time.monotonic() - began
        until_condition(cluster, namespace, "Attached", "True")
    return Vllm(cluster, namespace, made, early, phases, start_s)


@pytest.fixture
def recorded(vllm: Vllm, record_pods: None) -> Vllm:
    """The same; how its pod fared is kept with the test's figures."""
    return vllm


# ---- it is reserved, used, shown and charged


def test_the_region_is_there_while_vllm_still_loads_and_its_object_goes_through_its_phases(
    recorded: Vllm, record_figure: RecordFigure
) -> None:
    early = recorded.region_while_loading["status"]

    assert early["reservedBytes"] == early["residentBytes"] == CAPACITY_BYTES
    assert early["usedBytes"] == 0
    assert early["participants"] == []
    # A sidecar is looked at every 3 s: of what it goes through before Ready most is over by then.
    lasting = [phase for phase in recorded.phases if phase in {"Ready", "Released"}]
    assert lasting == ["Ready", "Released", "Ready"]
    assert set(recorded.phases) <= {"Planned", "Reserving", "Reserved", *lasting}
    record_figure("vLLM's start", f"{recorded.start_s:.0f} s")


def test_vllm_loads_back_what_it_dropped_and_the_object_shows_what_is_used(recorded: Vllm) -> None:
    sidecar = recorded.sidecar
    first = until(lambda: recorded.answer(prompt()), "vLLM answers")
    assert recorded.answer(prompt()) == first
    # Its own cache had them.
    assert sidecar.loaded_bytes() == 0

    others = [recorded.answer(prompt(number)) for number in range(1, OTHERS + 1)]

    assert recorded.answer(prompt()) == first
    assert first not in others
    until(lambda: sidecar.loaded_bytes() > 0, "the sidecar shows what was loaded")

    def shown() -> dict[str, str]:
        table = recorded.cluster.kubectl("get", "kvreg", "-n", recorded.namespace).stdout
        header, row = (line.split() for line in table.splitlines())
        return dict(zip(header, row, strict=True))

    until(lambda: int(shown()["USED"]) > 0, "kubectl shows used bytes", 70.0)
    now = shown()
    assert (now["PHASE"], now["ATTACHED"], now["CAPACITY"]) == (
        "Ready",
        "True",
        "64Mi",
    )
    assert 0 < int(now["USED"]) <= int(now["RESIDENT"]) == CAPACITY_BYTES


def test_metrics_du_and_cgroups_say_the_same_of_the_region(
    recorded: Vllm, record_figure: RecordFigure
) -> None:
    resident = metric(recorded, "kvcellar_region_resident_bytes{")
    data, volume = (disk_usage(recorded, path) for path in ("*.data", ""))

    assert resident == metric(recorded, "kvcellar_region_capacity_bytes{") == CAPACITY_BYTES
    assert data == resident
    assert resident < volume < resident + INDEX_BYTES
    sidecar, engine = recorded.group("kvcellar"), recorded.group(CONTAINER)
    shmem = {"pod": pod_group(recorded).shared_bytes, "sidecar": sidecar.shared_bytes}
    assert resident <= shmem["sidecar"] < resident + INDEX_BYTES
    assert shmem["sidecar"] <= shmem["pod"] < resident + NOISE_BYTES
    assert resident < sidecar.usage_bytes < resident * 1003 // 1000 + OVERHEAD_BYTES
    assert engine.shared_bytes < NOISE_BYTES
    record_figure(
        "a region of 64 MiB with vLLM",
        f"du {volume} bytes, the sidecar's shared pages {shmem['sidecar']}, the pod's {shmem['pod']}; "
        f"sidecar {sidecar.usage_bytes / MIB:.1f} MiB, vLLM {engine.usage_bytes / MIB:.0f}",
    )


def metric(vllm: Vllm, beginning: str) -> float:
    """The only sample whose name and labels begin so."""
    (found,) = (
        value for name, value in vllm.sidecar.metrics().items() if name.startswith(beginning)
    )
    return found


def disk_usage(vllm: Vllm, pattern: str) -> int:
    """What `du` in vLLM's container says of the volume's files."""
    command = f"du --block-size=1 --summarize --total /dev/shm/kvcellar/{pattern}"
    inside = ("exec", NAME, "-c", CONTAINER, "-n", vllm.namespace, "--", "sh", "-c", command)
    *_, total = vllm.cluster.kubectl(*inside).stdout.splitlines()
    return int(total.split()[0])


def pod_group(vllm: Vllm) -> MemoryGroup:
    return memory(vllm.cluster, vllm.made)


# ---- it is killed


def wait_for_a_moment(vllm: Vllm, chance: random.Random, number: int) -> None:
    """Of four kills one comes amid a request, one soon after the start, two at any time of a start."""
    if number % 4 == 1:
        until(lambda: vllm.status()["ready"], "vLLM serves", START_S)
        threading.Thread(target=vllm.answer, args=[prompt(100 + number)]).start()
        time.sleep(chance.uniform(0.0, 0.3))
    else:
        time.sleep(chance.uniform(0.0, EARLY_S if number % 4 == 2 else vllm.start_s))


@pytest.mark.parametrize(
    "kills", [3, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_a_vllm_that_is_killed_at_random_moments_comes_back_in_the_same_memory(
    recorded: Vllm, kills: int, record_figure: RecordFigure
) -> None:
    vllm, chance = recorded, random.Random(kills)
    first = until(lambda: vllm.answer(prompt()), "vLLM answers")
    ours = vllm.files(), disk_usage(vllm, "")
    sidecar, sidecar_bytes = vllm.group("kvcellar"), vllm.group("kvcellar").lasting_bytes
    pays, region_bytes = pod_group(vllm), pod_group(vllm).shared_bytes
    processes_bytes = pays.process_bytes
    done: int = vllm.status()["restartCount"]
    grown, served = [0], 0
    for number in range(1, kills + 1):
        wait_for_a_moment(vllm, chance, number)
        served += vllm.status()["ready"]
        kill_container(vllm.cluster, vllm.namespace, NAME, CONTAINER)
        until_restarted(vllm.cluster, vllm.namespace, NAME, done + number, CONTAINER)
        grown.append(sidecar.lasting_bytes - sidecar_bytes)
        assert pays.shared_bytes - region_bytes < number * LEFT_BYTES
    back_at = time.monotonic()
    again = until(lambda: vllm.answer(prompt()), "vLLM serves again", START_S)
    loading_s = time.monotonic() - back_at

    processes_grew = pays.process_bytes - processes_bytes
    assert again == first
    assert 0 < served < kills
    assert processes_grew < PROCESS_NOISE_BYTES
    assert max(grown) < NOISE_BYTES
    assert (vllm.files(), disk_usage(vllm, "")) == ours
    assert container_status(vllm.cluster, vllm.namespace, NAME, "kvcellar")["restartCount"] == 0
    until(
        lambda: (
            region_of(vllm.cluster, vllm.namespace)["status"].get("engineRestarts") == done + kills
        ),
        "the object counts every restart",
    )
    record_figure(
        f"vLLM over {kills} kills, {served} of them while it served",
        f"sidecar {max(grown):+} bytes, the pod's shared pages {pays.shared_bytes - region_bytes:+}, "
        f"its processes {processes_grew:+}; "
        f"{loading_s:.0f} s from the last restart to the same tokens",
    )

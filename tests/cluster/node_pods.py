"""Pods with the small engine on the real node: how they are made, looked at, hurt, and gone."""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress

from kvcellar.contract import LABEL_INJECT
from tests.cluster import figures
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cgroups import MemoryGroup
from tests.cluster.box.cluster import Cluster
from tests.cluster.images import recipes

REGIONS = "/apis/kvcellar.dev/v1alpha1/namespaces/{}/offloadregions"
MIB = 1 << 20
CAPACITY_BYTES = 64 * MIB
START_S = 90.0
"""Measured on a quiet machine: 4 s."""


def restricted_container(**more: object) -> JsonObject:
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    return {"image": recipes.ENGINE_IMAGE, "securityContext": security, **more}


def pod(name: str, container: JsonObject, labels: dict[str, str] | None = None) -> JsonObject:
    security = {
        "fsGroup": 2000,
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "securityContext": security,
        "terminationGracePeriodSeconds": 5,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels or {}},
        "spec": spec,
    }


def engine_container(name: str = "engine", memory: str = "128Mi", **more: object) -> JsonObject:
    resources = {"limits": {"memory": memory}, "requests": {"cpu": "50m", "memory": memory}}
    own = {"command": ["python3", "/engines/pattern_engine.py"], "resources": resources}
    return restricted_container(name=name, **(own | more))


def engine_pod(name: str, **more: object) -> JsonObject:
    """A pod that has opted in; `more` goes into its engine's container."""
    return pod(name, engine_container(**more), {LABEL_INJECT: "true"})  # type: ignore[arg-type]


def make_profile(cluster: Cluster, namespace: str, name: str = "default", **more: object) -> None:
    spec: JsonObject = {"capacity": str(CAPACITY_BYTES), **more}
    cluster.apply(
        {
            "apiVersion": "kvcellar.dev/v1alpha1",
            "kind": "OffloadProfile",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }
    )


def create_pod(cluster: Cluster, namespace: str, made: JsonObject) -> JsonObject:
    return cluster.api.create(f"/api/v1/namespaces/{namespace}/pods", made)


def as_admitted(cluster: Cluster, namespace: str, made: JsonObject) -> JsonObject:
    """What the webhook and the API server make of a pod, which is not created."""
    create = ("create", "--dry-run=server", "--output=json", "-n", namespace, "-f", "-")
    admitted: JsonObject = json.loads(cluster.kubectl(*create, stdin=json.dumps(made)).stdout)
    for key in ("uid", "creationTimestamp", "managedFields"):
        admitted["metadata"].pop(key, None)
    return admitted


def read_pod(cluster: Cluster, namespace: str, name: str) -> JsonObject:
    return cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")


def container_status(cluster: Cluster, namespace: str, name: str, container: str) -> JsonObject:
    status = read_pod(cluster, namespace, name)["status"]
    states = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    found: JsonObject = next((each for each in states if each["name"] == container), {})
    return found


def said(
    cluster: Cluster, namespace: str, name: str, container: str = "engine"
) -> list[JsonObject]:
    """What the engine's present run has written."""
    done = cluster.kubectl("logs", name, "-c", container, "-n", namespace, check=False)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def until_said(
    cluster: Cluster, namespace: str, name: str, event: str, container: str = "engine"
) -> JsonObject:
    """Wait until the engine's present run says that something happened; returns its newest word of it."""

    def look() -> list[JsonObject]:
        lines = said(cluster, namespace, name, container)
        return [line for line in lines if line["event"] == event]

    return until(look, f"{container} of {name} says: {event}", START_S)[-1]


def until_checked(
    cluster: Cluster, namespace: str, name: str, container: str = "engine"
) -> JsonObject:
    """Wait until the engine has loaded what it stored; returns what it said when it attached."""
    until_said(cluster, namespace, name, "checked", container)
    return said(cluster, namespace, name, container)[0]


def region_of(cluster: Cluster, namespace: str, name: str = "") -> JsonObject:
    """The region's object of a pod, or of any pod; empty if there is none."""
    items = cluster.api.get(REGIONS.format(namespace))["items"]
    of_it = (each for each in items if name in ("", each["spec"]["podName"]))
    found: JsonObject = next(of_it, {})
    return found


def memory(cluster: Cluster, made: JsonObject) -> MemoryGroup:
    group = cluster.node.memory_of_pod(made["metadata"]["uid"])
    assert group is not None
    return group


def container_group(
    cluster: Cluster, namespace: str, name: str, container: str = "engine"
) -> MemoryGroup:
    made = read_pod(cluster, namespace, name)
    state = container_status(cluster, namespace, name, container)
    return memory(cluster, made).container(state["containerID"])


def kill_container(
    cluster: Cluster,
    namespace: str,
    name: str,
    container: str = "engine",
    number: signal.Signals = signal.SIGKILL,
) -> None:
    pids = container_group(cluster, namespace, name, container).pids
    figures.killed((namespace, name, container))
    for pid in pids:
        # Those of one engine end with each other.
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def until_restarted(
    cluster: Cluster, namespace: str, name: str, times: int, container: str = "engine"
) -> None:
    def is_back() -> bool:
        state = container_status(cluster, namespace, name, container)
        return state["restartCount"] == times and "running" in state["state"]

    until(is_back, f"the {container} of {name} is started again for the time {times}", START_S)
    figures.is_back((namespace, name, container))


def files_of(cluster: Cluster, namespace: str, name: str, container: str = "kvcellar") -> list[str]:
    """What lies in the pod's memory volume, as a container of it sees it."""
    listing = (
        "import os\nfor top, _, names in os.walk('/dev/shm'):\n"
        "    [print(os.path.join(top, each)) for each in names]"
    )
    return run_in(cluster, namespace, name, container, listing).splitlines()


def run_in(
    cluster: Cluster, namespace: str, name: str, container: str, program: str, *arguments: str
) -> str:
    """Run a Python program in a container; returns what it prints."""
    command = ("exec", name, "-i", "-c", container, "-n", namespace, "--", "python3", "-")
    return cluster.kubectl(*command, *arguments, stdin=program, timeout_s=120).stdout


def condition(cluster: Cluster, namespace: str, kind: str, name: str = "") -> JsonObject:
    """A condition of the region's object; empty until there is one."""
    listed = region_of(cluster, namespace, name).get("status", {}).get("conditions", [])
    found: JsonObject = next((each for each in listed if each["type"] == kind), {})
    return found


def until_condition(cluster: Cluster, namespace: str, kind: str, status: str) -> JsonObject:
    until(
        lambda: condition(cluster, namespace, kind).get("status") == status,
        f"{kind} of the region is {status}",
        START_S,
    )
    return condition(cluster, namespace, kind)


def events(cluster: Cluster, namespace: str, reason: str) -> Sequence[JsonObject]:
    listed = cluster.api.get(f"/api/v1/namespaces/{namespace}/events")["items"]
    return [each for each in listed if each["reason"] == reason]


def assert_nothing_is_left(cluster: Cluster, made: JsonObject) -> None:
    """Of a pod that is deleted: no cgroup, no mount, no folder."""
    uid = made["metadata"]["uid"]
    until(lambda: cluster.node.memory_of_pod(uid) is None, "the pod's cgroup is gone")
    until(
        lambda: uid not in cluster.node.run("cat", "/proc/self/mounts").stdout, "no mount is left"
    )
    pods = cluster.node.folder / "kubelet" / "pods"
    until(lambda: not (pods / uid).exists(), "the kubelet's folder of the pod is gone")

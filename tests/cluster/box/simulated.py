"""Nodes without a machine and pods without containers: what a kubelet would say, tests say.

The scheduler binds pods to these nodes as to any others; from then on `set_pod_status` is all that
happens to them. A deleted pod stays, terminating, until `finish_deletion`.
"""

from datetime import UTC, datetime
from typing import Any

from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.errors import ApiError

STATUS_PATCH = "application/strategic-merge-patch+json"

NODE_CAPACITY = {"cpu": "64", "memory": "1Ti", "pods": "10000", "ephemeral-storage": "1Ti"}
"""What a simulated node offers unless a test says otherwise: room for any test's pods."""


def node(
    name: str, labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None
) -> JsonObject:
    """A ready node. Resources in `capacity`, such as ``nvidia.com/gpu``, come on top of the usual."""
    resources = NODE_CAPACITY | (capacity or {})
    ready = _condition("Ready", "KubeletReady") | {"lastHeartbeatTime": _now()}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name} | (labels or {})},
        "status": {"capacity": resources, "allocatable": resources, "conditions": [ready]},
    }


def create_node(
    access: Access,
    name: str,
    labels: dict[str, str] | None = None,
    capacity: dict[str, str] | None = None,
) -> None:
    """Add a simulated node and wait until the scheduler may use it."""
    access.api.create("/api/v1/nodes", node(name, labels, capacity))

    def is_untainted() -> bool:
        return not access.api.get(f"/api/v1/nodes/{name}")["spec"].get("taints")

    # Every new node is tainted as not ready; the node controller takes that back.
    until(is_untainted, f"node {name} has no taint")


def delete_node(access: Access, name: str) -> None:
    """Remove a node; the garbage collector of pods removes what was bound to it."""
    access.api.delete(f"/api/v1/nodes/{name}")


def pod_path(namespace: str, name: str) -> str:
    """The path of a pod in the API."""
    return f"/api/v1/namespaces/{namespace}/pods/{name}"


def until_bound(access: Access, namespace: str, name: str) -> JsonObject:
    """Wait until the scheduler has given a pod a node; returns the pod."""

    def bound() -> JsonObject | None:
        pod = access.api.get(pod_path(namespace, name))
        return pod if pod["spec"].get("nodeName") else None

    pod = until(bound, f"pod {namespace}/{name} is bound to a node")
    assert pod is not None
    return pod


def set_pod_status(access: Access, namespace: str, name: str, status: JsonObject) -> JsonObject:
    """Merge `status` into a pod's; conditions merge by their type, as a kubelet's do.

    Container statuses are a list that is replaced as a whole. Returns the pod.
    """
    path = f"{pod_path(namespace, name)}/status"
    return access.api.patch(path, {"status": status}, STATUS_PATCH)


def mark_running(
    access: Access, namespace: str, name: str, pod_ip: str | None = None, restarts: int = 0
) -> JsonObject:
    """Let every container of a bound pod run and be ready.

    Init containers that restart always are sidecars and run; the others have completed. Only from now on
    a Service has the pod as an endpoint: neither an unbound pod nor one that is not ready is one.

    Args:
        access: the cluster.
        namespace: the pod's.
        name: the pod's.
        pod_ip: where the pod is reached; an address of this machine that a test's server listens on.
        restarts: the restart count of each container.
    """
    spec = access.api.get(pod_path(namespace, name))["spec"]
    running = {"running": {"startedAt": _now()}}
    completed = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": _now()}}

    def container(spec: JsonObject, state: JsonObject) -> JsonObject:
        return {
            "name": spec["name"],
            "image": spec["image"],
            "imageID": "",
            "containerID": f"simulated://{spec['name']}-{restarts}",
            "ready": True,
            "started": "running" in state,
            "restartCount": restarts,
            "state": state,
        }

    status: JsonObject = {
        "phase": "Running",
        "startTime": _now(),
        "conditions": [
            _condition(kind) for kind in ("Initialized", "ContainersReady", "Ready", "PodScheduled")
        ],
        "containerStatuses": [container(each, running) for each in spec["containers"]],
        "initContainerStatuses": [
            container(each, running if each.get("restartPolicy") == "Always" else completed)
            for each in spec.get("initContainers", [])
        ],
    }
    if pod_ip is not None:
        status |= {"podIP": pod_ip, "podIPs": [{"ip": pod_ip}], "hostIP": pod_ip}
    return set_pod_status(access, namespace, name, status)


def finish_deletion(access: Access, namespace: str, name: str) -> None:
    """Remove a pod at once, as a kubelet does when its containers are gone."""
    try:
        access.api.delete(pod_path(namespace, name), {"gracePeriodSeconds": 0})
    except ApiError as error:
        if error.reason != "NotFound":
            raise


def delete_pods(access: Access, namespace: str) -> None:
    """Remove all pods of a namespace at once; no kubelet would confirm their end."""
    access.api.delete(f"/api/v1/namespaces/{namespace}/pods", {"gracePeriodSeconds": 0})


def _condition(kind: str, reason: str = "Simulated") -> dict[str, Any]:
    return {"type": kind, "status": "True", "reason": reason, "lastTransitionTime": _now()}


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""What the controller needs of a pod, taken out of the object once, so that a thousand fit in memory. Pure."""

from dataclasses import dataclass
from typing import Any

from kvcellar.contract import (
    ANNOTATION_DESIRED,
    ANNOTATION_SKIPPED,
    CONTAINER_PATH,
    CONTAINER_SIDECAR,
    CONTAINER_WAIT,
    PORT_NAME,
)
from kvcellar_operator.engines import engine_ids_of, read_injected
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.pods import annotations, child, items

_ENDED = ("Succeeded", "Failed")
_STARTING = ("PodInitializing", "ContainerCreating")
"""Why a container waits that has nothing wrong with it. Source: pkg/kubelet of Kubernetes."""
_MIRROR = "kubernetes.io/config.mirror"
_MAX_LAST_WORDS = 600
"""Of a container's message, which may be its log: the end, where it says why it ended."""


@dataclass(frozen=True, slots=True)
class InjectedMemory:
    """How the pod's memory was sized at injection; zeros where the annotation does not say.

    Attributes:
        sidecar_bytes: request and limit of the sidecar.
        volume_bytes: size of the volume at /dev/shm.
        pod_limit_bytes: memory limit of the pod.
        binding_limit: which of them leaves least.
    """

    sidecar_bytes: int
    volume_bytes: int
    pod_limit_bytes: int
    binding_limit: str


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod that has opted in.

    Attributes:
        namespace: of the pod.
        name: of the pod.
        uid: of the pod.
        version: resourceVersion that this was read from.
        node: where it runs; "" before it is scheduled.
        ip: its address; "" before it has one.
        phase: as Kubernetes says.
        is_ending: it is being deleted, or its containers have ended for good.
        is_mirror: it is a static pod's copy in the API, which the webhook lets be.
        is_injected: it carries the annotation and the container.
        skipped: why the webhook did nothing; "" if it did, or was not asked.
        profile: name of the profile that it was injected by; "" for the chart's.
        engine_ids: of its regions.
        capacity_bytes: of each region, as injected; 0 if unknown.
        memory: of the pod, as injected.
        sidecar_port: TCP port of the sidecar.
        is_sidecar_running: as the kubelet says.
        sidecar_message: why the sidecar does not run, in the kubelet's words; "" if it does, or starts.
        sidecar_restarts: how often the kubelet has started it again.
        start_message: why the engine is not started: which init container of ours fails, and how; "" if none does.
        engine_restarts: restarts of the engine containers, summed.
        desired: the annotation that relays the desired state; "" without.
    """

    namespace: str
    name: str
    uid: str
    version: str
    node: str
    ip: str
    phase: str
    is_ending: bool
    is_mirror: bool
    is_injected: bool
    skipped: str
    profile: str
    engine_ids: tuple[str, ...]
    capacity_bytes: int
    memory: InjectedMemory
    sidecar_port: int
    is_sidecar_running: bool
    sidecar_message: str
    sidecar_restarts: int
    start_message: str
    engine_restarts: int
    desired: str

    @classmethod
    def unknown(cls, namespace: str, name: str, uid: str) -> "PodView":
        """A pod of which nothing but its name is known any more."""
        metadata = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": ""}
        return view_pod({"metadata": metadata})


def view_pod(body: JsonObject) -> PodView:
    """Take what is needed out of a Pod object."""
    metadata, spec, status = body["metadata"], child(body, "spec"), child(body, "status")
    stamp = read_injected(body)
    sidecar = _named(items(spec, "initContainers"), CONTAINER_SIDECAR)
    states = items(status, "initContainerStatuses")
    state = _named(states, CONTAINER_SIDECAR) or {}
    phase = str(status.get("phase", ""))
    return PodView(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        node=str(spec.get("nodeName") or ""),
        ip=str(status.get("podIP") or ""),
        phase=phase,
        is_ending=bool(metadata.get("deletionTimestamp")) or phase in _ENDED,
        is_mirror=_MIRROR in annotations(body),
        is_injected=bool(stamp) and sidecar is not None,
        skipped=annotations(body).get(ANNOTATION_SKIPPED, ""),
        profile=str(stamp.get("profile") or ""),
        engine_ids=tuple(engine_ids_of(body)),
        capacity_bytes=_number(stamp, "capacityBytes"),
        memory=InjectedMemory(
            sidecar_bytes=_number(stamp, "sidecarMemoryBytes"),
            volume_bytes=_number(stamp, "volumeBytes"),
            pod_limit_bytes=_number(stamp, "podMemoryLimitBytes"),
            binding_limit=str(stamp.get("bindingLimit") or ""),
        ),
        sidecar_port=_port(sidecar or {}),
        is_sidecar_running="running" in child(state, "state"),
        sidecar_message=_why_not(state),
        sidecar_restarts=int(state.get("restartCount") or 0),
        start_message=_why_no_start(states),
        engine_restarts=_restarts(stamp, items(status, "containerStatuses")),
        desired=annotations(body).get(ANNOTATION_DESIRED, ""),
    )


def _number(stamp: dict[str, Any], key: str) -> int:
    """A number of the annotation, which is anybody's to write."""
    value = stamp.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    return 0


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    return next((entry for entry in entries if entry.get("name") == name), None)


def _port(container: dict[str, Any]) -> int:
    port = _named(items(container, "ports"), PORT_NAME)
    number = (port or {}).get("containerPort")
    return number if isinstance(number, int) else 0


def _why_not(status: dict[str, Any]) -> str:
    """Why a container does not run. That it waits says less than what it ended with."""
    state = child(status, "state")
    waiting, ended = child(state, "waiting"), _end(status)
    if "running" in state or waiting.get("reason") in _STARTING:
        return ""
    if ended and waiting:
        return f"{waiting.get('reason')}, {_words(ended)}"
    return _words(ended or waiting) if ended or waiting else ""


def _why_no_start(statuses: list[dict[str, Any]]) -> str:
    """What an init container of ours, which should end well, ended with instead."""
    for status in statuses:
        name = str(status.get("name"))
        is_ours = name == CONTAINER_WAIT or name.startswith(CONTAINER_PATH)
        if is_ours and (ended := _end(status)).get("exitCode"):
            return f"init container {name} failed: {_words(ended)}"
    return ""


def _end(status: dict[str, Any]) -> dict[str, Any]:
    """How a container's last run ended; empty if none did."""
    found = child(child(status, "state"), "terminated")
    return found or child(child(status, "lastState"), "terminated")


def _words(detail: dict[str, Any]) -> str:
    """Reason and message, of which the last lines."""
    message = str(detail.get("message") or "").strip()
    if len(message) > _MAX_LAST_WORDS:
        message = message[-_MAX_LAST_WORDS:].partition("\n")[2] or message[-_MAX_LAST_WORDS:]
    parts = [str(part) for part in (detail.get("reason"), message) if part]
    return ": ".join(parts) or "the kubelet gives no reason"


def _restarts(stamp: dict[str, Any], statuses: list[dict[str, Any]]) -> int:
    named = stamp.get("containers")
    engines = set(map(str, named)) if isinstance(named, list) else None
    return sum(
        int(status.get("restartCount") or 0)
        for status in statuses
        if engines is None or status.get("name") in engines
    )

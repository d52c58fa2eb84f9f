"""The OffloadRegion object as the controller makes it, and what it relays of the wishes in it. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvcellar.contract import (
    API_GROUP,
    API_VERSION,
    LABEL_PROFILE,
    REGION_KIND,
    REGION_PLURAL,
    DesiredRegion,
    DesiredState,
    desired_text,
)
from kvcellar_operator.engines import region_object_name
from kvcellar_operator.events import Subject
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.podview import PodView
from kvcellar_operator.quantities import format_bytes

GROUP_PATH = f"/apis/{API_GROUP}/{API_VERSION}"
_WISHES = ("contents", "retention")


def collection(namespace: str) -> str:
    """Path of the OffloadRegions of a namespace."""
    return f"{GROUP_PATH}/namespaces/{namespace}/{REGION_PLURAL}"


def new_region(pod: PodView, engine_id: str) -> JsonObject:
    """The object of one engine. Its pod owns it, so it goes with the pod, without a finalizer."""
    owner = {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod.name,
        "uid": pod.uid,
        "controller": True,
        # Else a foreground deletion of the pod would wait for us.
        "blockOwnerDeletion": False,
    }
    metadata: JsonObject = {
        "name": region_object_name(pod.name, engine_id),
        "namespace": pod.namespace,
        "ownerReferences": [owner],
    }
    if pod.profile:
        metadata["labels"] = {LABEL_PROFILE: pod.profile}
    spec = {"engineID": engine_id, "podName": pod.name, "podUID": pod.uid}
    if pod.capacity_bytes:
        spec["capacity"] = format_bytes(pod.capacity_bytes)
    return {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": REGION_KIND,
        "metadata": metadata,
        "spec": spec,
    }


def slim(body: Mapping[str, Any]) -> JsonObject:
    """The object without what is never looked at, so that a thousand fit in memory."""
    metadata = body["metadata"]
    names = ("name", "namespace", "uid", "resourceVersion", "generation")
    return {
        "metadata": {name: metadata[name] for name in names if name in metadata},
        "spec": body.get("spec") or {},
        "status": body.get("status") or {},
    }


def is_newer(body: Mapping[str, Any], than: Mapping[str, Any] | None) -> bool:
    """Whether an object is at least as new as another, or takes its place.

    Source: resource versions of one kind are comparable as integers (Kubernetes API concepts, 1.35).
    """
    if than is None or body["metadata"].get("uid") != than["metadata"].get("uid"):
        return True
    return _version(body) >= _version(than)


def _version(body: Mapping[str, Any]) -> int:
    text = str(body["metadata"].get("resourceVersion", "0"))
    return int(text) if text.isdecimal() else 0


def is_of(body: Mapping[str, Any], pod: PodView) -> bool:
    """Whether an object belongs to this very pod, and not to an earlier one of its name."""
    return bool((body.get("spec") or {}).get("podUID") == pod.uid)


def subject_of(body: Mapping[str, Any]) -> Subject:
    """The object, as an Event names it."""
    metadata = body["metadata"]
    version = f"{API_GROUP}/{API_VERSION}"
    return Subject(
        version, REGION_KIND, metadata["namespace"], metadata["name"], metadata.get("uid", "")
    )


def desired(pod: PodView, regions: Iterable[Mapping[str, Any]]) -> str | None:
    """The annotation `kvcellar.dev/desired` that a pod should have; None for none.

    Only regions whose spec wishes something are in it: for the others the pod's own settings hold.
    """
    wishes = {}
    for body in regions:
        spec = body.get("spec") or {}
        if any(name in spec for name in _WISHES):
            generation = body["metadata"].get("generation", 1)
            wish = {name: spec.get(name) for name in _WISHES}
            wishes[spec["engineID"]] = DesiredRegion(generation, **wish)
    return desired_text(DesiredState(pod.uid, wishes)) if wishes else None

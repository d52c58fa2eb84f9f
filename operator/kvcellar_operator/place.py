"""Puts the parts into a pod. It only adds: entries to lists, keys to maps, words behind arguments. Pure.

The one value that is changed is an engine's own PYTHONPATH, which gets the library in front. The pod that
is given here is a copy that the caller owns; a fresh list is made for each list that is touched.
"""

from typing import Any

from kvcellar.contract import DEFAULT_ROOT, ENV_POD_MEMORY_LIMIT, LIBRARY_CURRENT
from kvcellar_operator import resources, variables
from kvcellar_operator.demands import (
    RESOURCES,
    Resource,
    aggregate,
    container_amount,
    has_pod_level,
    memory_limit_bytes,
    pod_amount,
    pod_request,
)
from kvcellar_operator.parts import Parts
from kvcellar_operator.pods import Container, Pod, child, env_entry, items, mount_at, spec_of
from kvcellar_operator.profiles import ImagePythonPath
from kvcellar_operator.quantities import format_bytes, format_millicpus

_PYTHONPATH = "PYTHONPATH"
_AFTER = "istio-proxy"
"""A native sidecar of the mesh that its own webhook insists on having first."""


def add_parts(pod: Pod, engines: list[Container], parts: Parts, words: list[list[str]]) -> None:
    """Add everything to a pod.

    Args:
        pod: is changed.
        engines: the engine containers, which are in the pod.
        parts: what to add.
        words: arguments to append, for each engine.
    """
    spec = spec_of(pod)
    before = {resource: pod_request(pod, resource) for resource in RESOURCES}
    links: list[Container] = []
    for position, engine in enumerate(engines):
        links += _extend_engine(engine, parts, position)
        if words[position]:
            engine["args"] = [*(engine.get("args") or []), *words[position]]
    spec["volumes"] = [*items(spec, "volumes"), *resources.volumes(parts)]
    owner = resources.sidecar(parts)
    _insert_first(spec, [owner, *links, resources.wait(parts)])
    _add_group(spec, parts.identity.added_group)
    _raise_pod_level(pod, owner, before)
    limit = {"name": ENV_POD_MEMORY_LIMIT, "value": str(memory_limit_bytes(pod))}
    owner["env"] = [*owner["env"], limit]


def _extend_engine(engine: Container, parts: Parts, position: int) -> list[Container]:
    """Add mounts and variables to an engine; returns the init container that it needs, if any."""
    mounts = [] if mount_at(engine, DEFAULT_ROOT) else [dict(parts.shm.mount)]
    env = [
        entry
        for entry in variables.engine_env(parts, parts.engine_ids[position])
        if env_entry(engine, entry["name"]) is None
    ]
    links: list[Container] = []
    if parts.has_library:
        mounts.append(resources.library_mount())
        links = _add_python_path(engine, parts, position)
    engine["volumeMounts"] = [*items(engine, "volumeMounts"), *mounts]
    # In front, since an entry can refer only to those before it.
    engine["env"] = [*env, *items(engine, "env")]
    return links


def _add_python_path(engine: Container, parts: Parts, position: int) -> list[Container]:
    """Put the library on the engine's path, before what the pod or the image has there."""
    own = env_entry(engine, _PYTHONPATH)
    if own is not None:
        _prepend_python_path(engine, own)
        return []
    entries = [LIBRARY_CURRENT]
    if engine.get("envFrom"):
        # Expands if one of those sources has it; else it stays as a folder that does not exist.
        entries.append(f"$({_PYTHONPATH})")
    links: list[Container] = []
    if parts.profile.image_python_path is ImagePythonPath.PRESERVE:
        links = [resources.link_python_path(parts, engine, position)]
        entries += resources.linked_entries(position)
    engine["env"] = [*items(engine, "env"), {"name": _PYTHONPATH, "value": ":".join(entries)}]
    return links


def _prepend_python_path(engine: Container, own: dict[str, Any]) -> None:
    if not own.get("valueFrom"):
        value = str(own.get("value") or "")
        own["value"] = f"{LIBRARY_CURRENT}:{value}" if value else LIBRARY_CURRENT
        return
    # A reference cannot be extended, but a later entry of the same name can refer to it.
    env = items(engine, "env")
    # By identity: an equal entry may stand before it, and the last one of a name counts.
    position = next(i for i, entry in enumerate(env) if entry is own) + 1
    later = {"name": _PYTHONPATH, "value": f"{LIBRARY_CURRENT}:$({_PYTHONPATH})"}
    engine["env"] = [*env[:position], later, *env[position:]]


def _insert_first(spec: dict[str, Any], containers: list[Container]) -> None:
    """Insert init containers at the front, or right after the mesh's proxy."""
    init = items(spec, "initContainers")
    names = [container["name"] for container in init]
    position = names.index(_AFTER) + 1 if _AFTER in names else 0
    spec["initContainers"] = [*init[:position], *containers, *init[position:]]


def _add_group(spec: dict[str, Any], group: int | None) -> None:
    if group is not None:
        security = child(spec, "securityContext")
        groups = [*(security.get("supplementalGroups") or []), group]
        spec["securityContext"] = {**security, "supplementalGroups": groups}


def _raise_pod_level(pod: Pod, owner: Container, before: dict[Resource, int | None]) -> None:
    """Raise what the pod level sets by the sidecar's share, so that the pod is not refused.

    Args:
        pod: with everything in it.
        owner: the sidecar.
        before: the pod level's requests without it. One that the API server would have derived is
            written down, or it would be derived from the sidecar alone.
    """
    if not has_pod_level(pod):
        return
    spec = spec_of(pod)
    levels = {kind: dict(child(spec["resources"], kind)) for kind in ("requests", "limits")}
    for resource in RESOURCES:
        request = before[resource]
        if request is not None:
            share = container_amount(owner, "requests", resource)
            request = max(request + share, aggregate(pod, "requests", resource))
            levels["requests"][resource] = _text(resource, request)
        limit = pod_amount(pod, "limits", resource)
        if limit is not None:
            share = container_amount(owner, "limits", resource)
            levels["limits"][resource] = _text(resource, max(limit + share, request or 0))
    filled = {kind: level for kind, level in levels.items() if level}
    spec["resources"] = {**spec["resources"], **filled}


def _text(resource: Resource, value: int) -> str:
    return format_bytes(value) if resource == "memory" else format_millicpus(value)

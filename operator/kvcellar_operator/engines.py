"""Which containers of a pod are engines, and how their regions are named. Pure.

An engine id is the pod's UID, followed by the container's name if there are several. A webhook does not
know the UID yet, so ids are texts with a reference that the kubelet resolves; `engine_ids_of` resolves it
for the controller.
"""

import hashlib
import json
import re
from fnmatch import fnmatchcase
from typing import Any

from kvcellar.contract import (
    ANNOTATION_INJECTED,
    DEFAULT_ROOT,
    ENV_DIR,
    ENV_ENGINE_ID,
    ENV_ENGINES,
    ENV_OWNER,
    ENV_POD_UID,
    ENV_ROOT,
    Owner,
    expand_engine_ids,
    parse_engine_id,
)
from kvcellar.errors import InvalidEngineId
from kvcellar_operator.pods import Container, Pod, annotations, child, env_entry, items, spec_of
from kvcellar_operator.profiles import MAX_ENGINE_CONTAINERS, MAX_ENGINES, Profile
from kvcellar_operator.reasons import InjectionRefused, Reason

UID_REFERENCE = f"$({ENV_POD_UID})"
"""Stands for the pod's UID in an engine id until the kubelet, or `engine_ids_of`, puts it in."""

_SOME_UID = "00000000-0000-0000-0000-000000000000"
_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
_PROXIES = ("istio-proxy", "linkerd-proxy")
"""Main containers of service meshes, which some put first."""
_MAX_OBJECT_NAME = 253
_HASH_DIGITS = 8
_MAX_ENGINE_IDS = MAX_ENGINES * MAX_ENGINE_CONTAINERS


def engine_containers(
    pod: Pod, profile: Profile, gpu_resources: tuple[str, ...]
) -> list[Container]:
    """The engine containers: those the profile names; else those that ask for a GPU; else the main one.

    Raises:
        InjectionRefused: `EngineMissing`, the pod has no container of a name that the profile gives.
    """
    containers = items(spec_of(pod), "containers")
    if profile.containers:
        by_name = {container["name"]: container for container in containers}
        missing = [name for name in profile.containers if name not in by_name]
        if missing:
            raise InjectionRefused(
                Reason.ENGINE_MISSING,
                f"the profile names container {missing[0]}, and the pod has {', '.join(by_name)[:300]}",
            )
        return [container for container in containers if container["name"] in profile.containers]
    return [c for c in containers if asks_for_gpu(c, gpu_resources)] or [_main(pod, containers)]


def asks_for_gpu(container: Container, gpu_resources: tuple[str, ...]) -> bool:
    """Whether a container asks for a GPU, by an extended resource or by a claim."""
    resources = child(container, "resources")
    names = {*child(resources, "limits"), *child(resources, "requests")}
    return bool(resources.get("claims")) or any(
        fnmatchcase(name, pattern) for name in names for pattern in gpu_resources
    )


def _main(pod: Pod, containers: list[Container]) -> Container:
    named = annotations(pod).get(_DEFAULT_CONTAINER)
    for container in containers:
        if container["name"] == named:
            return container
    return next((c for c in containers if c["name"] not in _PROXIES), containers[0])


def check_engine_env(container: Container, engines: int) -> None:
    """Refuse variables of the user's that no sidecar can go with; others win over the profile.

    Raises:
        InjectionRefused: `EngineSetting`, with the variable.
    """
    needed = {
        ENV_ROOT: DEFAULT_ROOT,
        ENV_OWNER: str(Owner.SIDECAR),
        ENV_ENGINES: str(engines),
    }
    for name, value in needed.items():
        entry = env_entry(container, name)
        if entry is not None and entry.get("value") != value:
            raise _setting(container, name, f"beside a sidecar it has to be {value}")
    if env_entry(container, ENV_DIR) is not None:
        raise _setting(container, ENV_DIR, "the sidecar decides where its regions are")
    if env_entry(container, ENV_POD_UID) is not None:
        raise _setting(container, ENV_POD_UID, "the injector sets it")


def engine_id(container: Container, *, is_alone: bool) -> str:
    """The id of a container's region, or of its regions without their `_dp` suffix.

    The user's own KVCELLAR_ENGINE_ID, or else the pod's UID, with the container's name if it is not
    alone; the UID stands as `UID_REFERENCE`.

    Raises:
        InjectionRefused: `EngineSetting`, the user's id is no literal, or cannot be used.
    """
    entry = env_entry(container, ENV_ENGINE_ID)
    if entry is None:
        return UID_REFERENCE if is_alone else f"{UID_REFERENCE}-{container['name']}"
    value = entry.get("value")
    if not isinstance(value, str):
        raise _setting(container, ENV_ENGINE_ID, "the sidecar has to know it, so give a literal")
    try:
        return parse_engine_id(value)
    except InvalidEngineId as error:
        raise _setting(container, ENV_ENGINE_ID, str(error)) from error


def expand_ids(ids: list[str], engines: int) -> list[str]:
    """The ids of all regions, as `kvcellar.contract.expand_engine_ids` names them.

    Raises:
        InjectionRefused: `EngineSetting`, two are the same, or one becomes too long.
    """
    named = ",".join(ids).replace(UID_REFERENCE, _SOME_UID)
    try:
        expanded = expand_engine_ids(named, engines)
    except InvalidEngineId as error:
        raise InjectionRefused(Reason.ENGINE_SETTING, f"{ENV_ENGINE_ID}: {error}") from error
    return [text.replace(_SOME_UID, UID_REFERENCE) for text in expanded]


def engine_ids_of(pod: Pod) -> list[str]:
    """The engine ids of an injected pod that has a UID; none if it was not injected.

    The annotation is anybody's to write, so what is no engine id is left out, and so is what is more than the
    webhook ever writes.
    """
    stamp = read_injected(pod)
    uid = child(pod, "metadata").get("uid")
    if not isinstance(uid, str) or not isinstance(stamp.get("engineIds"), list):
        return []
    ids: list[str] = []
    for text in stamp["engineIds"]:
        try:
            ids.append(parse_engine_id(str(text).replace(UID_REFERENCE, uid)))
        except InvalidEngineId:
            continue
    return [*dict.fromkeys(ids)][:_MAX_ENGINE_IDS]


def read_injected(pod: Pod) -> dict[str, Any]:
    """The annotation `kvcellar.dev/injected`; empty if it is missing or damaged."""
    try:
        stamp = json.loads(annotations(pod).get(ANNOTATION_INJECTED, "{}"))
    except (ValueError, RecursionError):  # the latter: thousands of brackets
        return {}
    return stamp if isinstance(stamp, dict) else {}


def region_object_name(pod_name: str, engine_id_text: str) -> str:
    """Name of an OffloadRegion: `<pod>-<8 hex of sha256(engine_id)>`, a legal and unique object name.

    Of a pod's name that is too long the end is cut, and the hash then covers the name as well.
    """
    room = _MAX_OBJECT_NAME - _HASH_DIGITS - 1
    hashed = engine_id_text if len(pod_name) <= room else f"{pod_name}/{engine_id_text}"
    digest = hashlib.sha256(hashed.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{re.sub('[-.]+$', '', pod_name[:room])}-{digest}"


def _setting(container: Container, name: str, why: str) -> InjectionRefused:
    return InjectionRefused(
        Reason.ENGINE_SETTING, f"container {container['name']} sets {name}: {why}"
    )

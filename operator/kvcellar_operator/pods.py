"""A pod as plain dicts and lists: is it well-formed, and what does it ask for. Pure.

Pods stay plain JSON from end to end, because a typed copy would lose the fields that it does not know.
After `check_shape` the readers below may rely on the types of what they read.
"""

import posixpath
from collections.abc import Iterator
from typing import Any

from kvcellar_operator.reasons import InjectionRefused, Reason

Pod = dict[str, Any]
"""A Pod object as the API server sends it."""
Container = dict[str, Any]
"""One entry of containers or initContainers."""

_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")

_LEVELS: dict[str, object] = {"requests": {}, "limits": {}}
_CONTAINER: dict[str, object] = {
    "name": str,
    "image": str,
    "workingDir": str,
    "imagePullPolicy": str,
    "restartPolicy": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {}}}],
    "envFrom": [{}],
    "ports": [{}],
    "volumeMounts": [{"name": str, "mountPath": str, "subPath": str, "subPathExpr": str}],
    "resources": _LEVELS,
    "securityContext": {},
}
_POD: dict[str, object] = {
    "metadata": {"labels": {"*": str}, "annotations": {"*": str}},
    "spec": {
        **{key: [_CONTAINER] for key in _CONTAINER_LISTS},
        "volumes": [{"name": str, "emptyDir": {"medium": str}}],
        "resources": _LEVELS,
        "securityContext": {"supplementalGroups": [int]},
        "nodeSelector": {"*": str},
        "os": {},
        "overhead": {},
    },
}
"""The shape of what is read here, below and in the other steps: a map of known fields (`*` for all), a
list of one shape, or a type. Null passes for all, and fields that are not named are nobody's business."""


def items(owner: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The entries of a list; none if it is missing or null."""
    entries: list[dict[str, Any]] = owner.get(key) or []
    return entries


def child(owner: dict[str, Any], key: str) -> dict[str, Any]:
    """A nested map; an empty one if it is missing or null."""
    nested: dict[str, Any] = owner.get(key) or {}
    return nested


def labels(pod: Pod) -> dict[str, str]:
    """The labels of a pod."""
    return child(child(pod, "metadata"), "labels")


def annotations(pod: Pod) -> dict[str, str]:
    """The annotations of a pod."""
    return child(child(pod, "metadata"), "annotations")


def spec_of(pod: Pod) -> dict[str, Any]:
    """The spec of a pod that `check_shape` has passed."""
    return child(pod, "spec")


def all_containers(pod: Pod) -> Iterator[Container]:
    """Every container of a pod, of all three lists."""
    for key in _CONTAINER_LISTS:
        yield from items(spec_of(pod), key)


def is_native_sidecar(container: Container) -> bool:
    """Whether an init container goes on running beside the main ones."""
    return container.get("restartPolicy") == "Always"


def mount_at(container: Container, path: str) -> dict[str, Any] | None:
    """The volume mount of a container at exactly this path."""
    for mount in items(container, "volumeMounts"):
        if mount_path(mount) == path:
            return mount
    return None


def mount_path(mount: dict[str, Any]) -> str:
    """Where a mount is, as a runtime reads it: `/dev//shm/` is `/dev/shm`."""
    # The API server compares mere texts, and a container runtime takes relative ones from the root.
    return posixpath.normpath("/" + str(mount.get("mountPath") or "").lstrip("/"))


def env_entry(container: Container, name: str) -> dict[str, Any] | None:
    """The entry of a variable that counts: the last of its name."""
    named = [entry for entry in items(container, "env") if entry.get("name") == name]
    return named[-1] if named else None


def run_as_user(pod: Pod, container: Container) -> int | None:
    """The uid that the pod gives a container; None if the image says."""
    return _identity(pod, container, "runAsUser")


def run_as_group(pod: Pod, container: Container) -> int | None:
    """The primary group that the pod gives a container; None if the image says."""
    return _identity(pod, container, "runAsGroup")


def _identity(pod: Pod, container: Container, key: str) -> int | None:
    for owner in (container, spec_of(pod)):
        value = child(owner, "securityContext").get(key)
        if isinstance(value, int):
            return value
    return None


def check_shape(pod: object) -> None:
    """Refuse what is no Pod, so that nothing below has to look at types again.

    Raises:
        InjectionRefused: `InvalidPod`, with the path of the field.
    """
    _check(pod, _POD, "")
    if not isinstance(pod, dict) or not items(spec_of(pod), "containers"):
        raise _invalid("spec.containers", "a list with at least one container")
    for container in all_containers(pod):
        if not container.get("name"):
            raise _invalid("the name of a container", "a text")


def _check(value: object, shape: object, path: str) -> None:
    if value is None:
        return
    if isinstance(shape, dict):
        _check_map(value, shape, path)
    elif isinstance(shape, list):
        if not isinstance(value, list) or None in value:
            raise _invalid(path, "a list without nulls")
        for position, entry in enumerate(value):
            _check(entry, shape[0], f"{path}[{position}]")
    elif isinstance(shape, type) and (not isinstance(value, shape) or isinstance(value, bool)):
        raise _invalid(path, "a text" if shape is str else "a whole number")


def _check_map(value: object, shape: dict[str, object], path: str) -> None:
    if not isinstance(value, dict):
        raise _invalid(path or "the object", "a map")
    for key, inner in shape.items():
        for name in value if key == "*" else (key,):
            _check(value.get(name), inner, f"{path}.{name}".lstrip("."))


def _invalid(path: str, wanted: str) -> InjectionRefused:
    return InjectionRefused(Reason.INVALID_POD, f"{path} of the pod has to be {wanted}")

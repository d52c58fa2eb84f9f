"""A pod as plain dicts and lists: is it well-formed, and what does it ask for. Pure.

Pods stay plain JSON from end to end, because a typed copy would lose the fields that it does not know.
After `check_shape` the readers below may rely on the types of what they read.
"""

from collections.abc import Iterator
from typing import Any

from kvcellar_operator.reasons import InjectionRefused, Reason

Pod = dict[str, Any]
"""A Pod object as the API server sends it."""
Container = dict[str, Any]
"""One entry of containers or initContainers."""

_CONTAINER_LISTS = ("containers", "initContainers", "ephemeralContainers")
_LISTS_OF_MAPS = ("volumeMounts", "env", "envFrom", "ports")
_LISTS_OF_TEXTS = ("command", "args")


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
        if str(mount.get("mountPath", "")).rstrip("/") == path:
            return mount
    return None


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
    if not isinstance(pod, dict):
        raise _invalid("the object", "a map")
    metadata = _map(pod, "metadata", "metadata")
    for key in ("labels", "annotations"):
        for name, value in _map(metadata, key, f"metadata.{key}").items():
            if not isinstance(value, str):
                raise _invalid(f"metadata.{key}[{name}]", "a text")
    spec = _map(pod, "spec", "spec")
    _map(spec, "resources", "spec.resources")
    _map(spec, "securityContext", "spec.securityContext")
    _check_volumes(spec)
    if not items(spec, "containers"):
        raise _invalid("spec.containers", "a list with at least one container")
    for key in _CONTAINER_LISTS:
        for container in _maps(spec, key, f"spec.{key}"):
            _check_container(container, f"spec.{key}")


def _check_volumes(spec: dict[str, Any]) -> None:
    for volume in _maps(spec, "volumes", "spec.volumes"):
        _map(volume, "emptyDir", "spec.volumes[].emptyDir")


def _check_container(container: dict[str, Any], path: str) -> None:
    name = container.get("name")
    if not isinstance(name, str) or not name:
        raise _invalid(f"{path}[].name", "a text")
    where = f"{path}[{name}]"
    for key in _LISTS_OF_MAPS:
        _maps(container, key, f"{where}.{key}")
    for key in _LISTS_OF_TEXTS:
        value = container.get(key)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(text, str) for text in value)
        ):
            raise _invalid(f"{where}.{key}", "a list of texts")
    _map(container, "securityContext", f"{where}.securityContext")
    resources = _map(container, "resources", f"{where}.resources")
    for key in ("requests", "limits"):
        _map(resources, key, f"{where}.resources.{key}")


def _map(owner: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    value = owner.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid(path, "a map")
    return value


def _maps(owner: dict[str, Any], key: str, path: str) -> list[dict[str, Any]]:
    value = owner.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise _invalid(path, "a list of maps")
    return value


def _invalid(path: str, wanted: str) -> InjectionRefused:
    return InjectionRefused(Reason.INVALID_POD, f"{path} of the pod has to be {wanted}")

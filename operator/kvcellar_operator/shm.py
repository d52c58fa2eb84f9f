"""The memory volume at /dev/shm: the pod's own, which is reused as it is, or one that is added. Pure.

A second mount at one path makes a pod invalid, and another subPath is another directory. So where an
engine mounts a memory volume of its own, the sidecar mounts the same part of it.
"""

import re
from dataclasses import dataclass
from typing import Any

from kvcellar.contract import DEFAULT_ROOT, ENV_PREFIX, VOLUME_SHM
from kvcellar_operator.demands import amount
from kvcellar_operator.pods import Container, Pod, child, env_entry, items, mount_at, spec_of
from kvcellar_operator.quantities import format_bytes, shown_bytes
from kvcellar_operator.reasons import InjectionRefused, Reason
from kvcellar_operator.sizing import Sizing

_REFERENCE = re.compile(r"\$\(([^)]*)\)")
_PARTS = ("subPath", "subPathExpr")


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """What every engine and the sidecar mount at /dev/shm.

    Attributes:
        mount: the volume mount, as a container lists it.
        volume: the volume to add; None if the pod has it.
        env: variables that the mount's subPathExpr needs, for the sidecar.
        size_limit_bytes: of the volume; 0 for none.
    """

    mount: dict[str, Any]
    volume: dict[str, Any] | None
    env: tuple[dict[str, Any], ...]
    size_limit_bytes: int


def shared_memory(pod: Pod, engines: list[Container], sizing: Sizing) -> SharedMemory:
    """Find the memory volume of the engines, or make one.

    Raises:
        InjectionRefused: `HostIPC`, or a reason that begins with `Shm`.
    """
    mounts = [
        (container, mount)
        for container in engines
        if (mount := mount_at(container, DEFAULT_ROOT)) is not None
    ]
    if not mounts:
        return _own_volume(pod, sizing)
    container, mount = mounts[0]
    for other, other_mount in mounts[1:]:
        _check_same(container, mount, other, other_mount)
    for each, each_mount in mounts:
        if each_mount.get("readOnly"):
            raise InjectionRefused(
                Reason.SHM_READ_ONLY, f"container {each['name']} mounts /dev/shm read-only"
            )
    size_limit_bytes = _reused_size_limit(pod, container, mount, sizing)
    parts = {key: mount[key] for key in _PARTS if mount.get(key)}
    reused = {"name": mount["name"], "mountPath": DEFAULT_ROOT, **parts}
    env = _env_of_subpath(container, str(mount.get("subPathExpr") or ""))
    return SharedMemory(reused, None, env, size_limit_bytes)


def _own_volume(pod: Pod, sizing: Sizing) -> SharedMemory:
    if spec_of(pod).get("hostIPC"):
        raise InjectionRefused(
            Reason.HOST_IPC,
            "the pod has hostIPC, so /dev/shm is the node's, and it mounts no volume of its own there",
        )
    size_limit = format_bytes(sizing.size_limit_bytes)
    volume = {"name": VOLUME_SHM, "emptyDir": {"medium": "Memory", "sizeLimit": size_limit}}
    mount = {"name": VOLUME_SHM, "mountPath": DEFAULT_ROOT}
    return SharedMemory(mount, volume, (), sizing.size_limit_bytes)


def _check_same(
    container: Container, mount: dict[str, Any], other: Container, other_mount: dict[str, Any]
) -> None:
    for key in ("name", *_PARTS):
        if (mount.get(key) or "") != (other_mount.get(key) or ""):
            raise InjectionRefused(
                Reason.SHM_DIFFERS,
                f"containers {container['name']} and {other['name']} mount different things at /dev/shm: "
                f"{key} {mount.get(key)!r} and {other_mount.get(key)!r}",
            )


def _reused_size_limit(
    pod: Pod, container: Container, mount: dict[str, Any], sizing: Sizing
) -> int:
    volumes = {volume.get("name"): volume for volume in items(spec_of(pod), "volumes")}
    volume = volumes.get(mount.get("name"), {})
    empty_dir = child(volume, "emptyDir")
    if empty_dir.get("medium") != "Memory":
        kind = next((key for key in volume if key != "name"), "nothing that the pod has")
        medium = empty_dir.get("medium") or "the node's disk"
        what = f"an emptyDir on {medium}" if kind == "emptyDir" else f"a volume of kind {kind}"
        raise InjectionRefused(
            Reason.SHM_NOT_MEMORY,
            f"container {container['name']} mounts {what} at /dev/shm (volume {mount.get('name')})",
        )
    value = empty_dir.get("sizeLimit")
    size_limit_bytes = 0 if value is None else amount(value, "memory")
    if 0 < size_limit_bytes < sizing.size_limit_bytes:
        raise InjectionRefused(
            Reason.SHM_TOO_SMALL,
            f"volume {mount['name']} at /dev/shm has sizeLimit {value}, and {sizing.regions} regions of "
            f"{shown_bytes(sizing.capacity_bytes)} with the head-room need "
            f"{format_bytes(sizing.size_limit_bytes)}",
        )
    return size_limit_bytes


def _env_of_subpath(container: Container, expression: str) -> tuple[dict[str, Any], ...]:
    """The variables of a subPathExpr, as the sidecar can have them too."""
    entries = []
    for name in dict.fromkeys(_REFERENCE.findall(expression)):
        entry = env_entry(container, name) or {}
        is_literal = isinstance(entry.get("value"), str) and "$" not in entry["value"]
        if name.startswith(ENV_PREFIX) or not (
            is_literal or child(child(entry, "valueFrom"), "fieldRef")
        ):
            raise InjectionRefused(
                Reason.SHM_SUBPATH,
                f"the mount at /dev/shm of container {container['name']} has subPathExpr {expression!r}, "
                f"and {name} is neither a literal nor a fieldRef",
            )
        entries.append(dict(entry))
    return tuple(entries)

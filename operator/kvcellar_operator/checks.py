"""What speaks against injecting a pod, before anything is built. Pure.

Each check passes, or raises `InjectionRefused` with a reason of its own.
"""

import json
import re
from typing import Any

from kvcellar.contract import LABEL_INJECT, LIBRARY_DIR, Mode
from kvcellar_operator.pods import (
    Container,
    Pod,
    all_containers,
    annotations,
    child,
    items,
    labels,
    mount_path,
    spec_of,
)
from kvcellar_operator.profiles import Profile
from kvcellar_operator.reasons import InjectionRefused, Reason
from kvcellar_operator.settings import InjectSettings

_MIRROR = "kubernetes.io/config.mirror"
_SOURCE = "kubernetes.io/config.source"
_OUR_CONTAINERS = re.compile(r"kvcellar(-wait|-path(-[0-9]+)?)?")
MAX_OBJECT_BYTES = 1_500_000
"""etcd takes requests of 1.5 MiB, and the API server adds managedFields of its own."""
MAX_ANNOTATION_BYTES = 256 * 1024
"""Source: TotalAnnotationSizeLimitB in k8s.io/apimachinery/pkg/api/validation."""


def check_opted_in(pod: Pod) -> None:
    """Refuse a pod that does not ask for a sidecar.

    Raises:
        InjectionRefused: `NotOptedIn`.
    """
    if labels(pod).get(LABEL_INJECT) != "true":
        raise InjectionRefused(Reason.NOT_OPTED_IN, f'the pod has no label {LABEL_INJECT}: "true"')


def check_mirror(pod: Pod) -> None:
    """Refuse a pod that a kubelet shows to the API server, and that has to stay as it is.

    Raises:
        InjectionRefused: `MirrorPod`.
    """
    if _MIRROR in annotations(pod) or annotations(pod).get(_SOURCE, "api") != "api":
        raise InjectionRefused(Reason.MIRROR_POD, "the pod mirrors a static pod of its node")


def check_kind(pod: Pod, profile: Profile, settings: InjectSettings) -> None:
    """Refuse pods of kinds that cannot have a sidecar.

    Raises:
        InjectionRefused: `SidecarsUnsupported`, `WindowsPod` or `HostNetwork`.
    """
    spec = spec_of(pod)
    if not settings.has_native_sidecars:
        raise InjectionRefused(
            Reason.SIDECARS_UNSUPPORTED, "a kubelet of this cluster is older than 1.29"
        )
    named_os = {
        child(spec, "os").get("name"),
        child(spec, "nodeSelector").get("kubernetes.io/os"),
    }
    if "windows" in named_os:
        raise InjectionRefused(Reason.WINDOWS_POD, "the pod runs on Windows")
    if spec.get("hostNetwork") and not profile.sidecar.is_host_network_allowed:
        raise InjectionRefused(
            Reason.HOST_NETWORK,
            f"the pod has hostNetwork, and port {profile.sidecar.port} would be open on the node; the "
            "profile does not allow that",
        )


def check_port(pod: Pod, profile: Profile) -> None:
    """Refuse a pod in which another container declares the sidecar's port.

    Raises:
        InjectionRefused: `PortTaken`.
    """
    for container in all_containers(pod):
        for port in items(container, "ports"):
            if port.get("containerPort") == profile.sidecar.port:
                raise InjectionRefused(
                    Reason.PORT_TAKEN,
                    f"container {container['name']} declares port {profile.sidecar.port}",
                )


def check_mounts(engines: list[Container], profile: Profile) -> None:
    """Refuse engines that mount something of their own where the library goes.

    Raises:
        InjectionRefused: `MountPathTaken`.
    """
    if profile.mode is Mode.STOCK:
        return
    for engine in engines:
        for mount in items(engine, "volumeMounts"):
            path = mount_path(mount)
            if path == LIBRARY_DIR or path.startswith(f"{LIBRARY_DIR}/"):
                raise InjectionRefused(
                    Reason.MOUNT_PATH_TAKEN,
                    f"container {engine['name']} mounts volume {mount.get('name')} at {path}",
                )


def check_containers(pod: Pod) -> None:
    """Refuse a pod that has containers of the names that are to be added.

    Raises:
        InjectionRefused: `ContainerNameTaken`.
    """
    for container in all_containers(pod):
        if _OUR_CONTAINERS.fullmatch(container["name"]):
            raise InjectionRefused(
                Reason.CONTAINER_NAME_TAKEN,
                f"the pod has a container {container['name']} that was not injected",
            )


def check_volumes(pod: Pod, added: list[dict[str, Any]]) -> None:
    """Refuse a pod that has volumes of the names that are to be added.

    Raises:
        InjectionRefused: `VolumeNameTaken`.
    """
    names = {volume["name"] for volume in added}
    for volume in items(spec_of(pod), "volumes"):
        if volume.get("name") in names:
            raise InjectionRefused(
                Reason.VOLUME_NAME_TAKEN, f"the pod has a volume {volume['name']} of its own"
            )


def check_size(pod: Pod) -> None:
    """Refuse to make a pod that the API server would not take.

    Raises:
        InjectionRefused: `PodTooLarge`.
    """
    noted = sum(len(key.encode()) + len(value.encode()) for key, value in annotations(pod).items())
    if noted > MAX_ANNOTATION_BYTES:
        raise InjectionRefused(
            Reason.POD_TOO_LARGE,
            f"the pod's annotations would be {noted} bytes, above {MAX_ANNOTATION_BYTES}",
        )
    size_bytes = len(json.dumps(pod, ensure_ascii=False, separators=(",", ":")).encode())
    if size_bytes > MAX_OBJECT_BYTES:
        raise InjectionRefused(
            Reason.POD_TOO_LARGE, f"the pod would be {size_bytes} bytes, above {MAX_OBJECT_BYTES}"
        )

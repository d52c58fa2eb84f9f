"""What a pod asks for and what bounds it: requests, limits, QoS class, the kubelet's memory limit. Pure.

The rules are Kubernetes' own. Source: k8s.io/component-helpers/resource/helpers.go (sums),
pkg/apis/core/v1/helper/qos/qos.go (QoS class), pkg/kubelet/cm/helpers_linux.go (limit of the pod's
cgroup) and pkg/volume/emptydir/empty_dir.go (size of a memory volume), release 1.36.
"""

from enum import StrEnum
from typing import Literal

from kvcellar_operator.pods import Container, Pod, child, is_native_sidecar, items, spec_of
from kvcellar_operator.quantities import InvalidQuantity, parse_bytes, parse_millicpus
from kvcellar_operator.reasons import InjectionRefused, Reason

Kind = Literal["requests", "limits"]
Resource = Literal["cpu", "memory"]


class QosClass(StrEnum):
    """Quality of service, as the kubelet derives it."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BEST_EFFORT = "BestEffort"


def amount(value: object, resource: Resource) -> int:
    """Bytes of memory, or thousandths of a CPU.

    Raises:
        InjectionRefused: `InvalidPod`, it is no quantity.
    """
    try:
        return parse_bytes(value) if resource == "memory" else parse_millicpus(value)
    except InvalidQuantity as error:
        raise InjectionRefused(Reason.INVALID_POD, f"{resource} of the pod: {error}") from error


def container_amount(container: Container, kind: Kind, resource: Resource) -> int:
    """What a container requests or is limited to; 0 if nothing. A request defaults to the limit.

    Raises:
        InjectionRefused: `InvalidPod`, it is no quantity.
    """
    resources = child(container, "resources")
    value = child(resources, kind).get(resource)
    if value is None and kind == "requests":
        value = child(resources, "limits").get(resource)
    return 0 if value is None else amount(value, resource)


def pod_amount(pod: Pod, kind: Kind, resource: Resource) -> int | None:
    """What the pod level says; None if it says nothing.

    Raises:
        InjectionRefused: `InvalidPod`, it is no quantity.
    """
    value = child(child(spec_of(pod), "resources"), kind).get(resource)
    return None if value is None else amount(value, resource)


def aggregate(pod: Pod, kind: Kind, resource: Resource) -> int:
    """The most that the containers use at once.

    Those are the main ones and the native sidecars, or an init container and the sidecars before it.
    """
    spec = spec_of(pod)
    sidecars = peak = 0
    for container in items(spec, "initContainers"):
        own = container_amount(container, kind, resource)
        if is_native_sidecar(container):
            sidecars += own
            peak = max(peak, sidecars)
        else:
            peak = max(peak, sidecars + own)
    mains = sum(container_amount(c, kind, resource) for c in items(spec, "containers"))
    return max(peak, mains + sidecars)


def memory_limit_bytes(pod: Pod) -> int:
    """Limit of the pod's memory cgroup; 0 if it has none, which one container without a limit brings."""
    limit = pod_amount(pod, "limits", "memory")
    if limit is None or limit == 0:
        spec = spec_of(pod)
        containers = items(spec, "initContainers") + items(spec, "containers")
        if not all(container_amount(c, "limits", "memory") for c in containers):
            return 0
        limit = aggregate(pod, "limits", "memory")
    overhead = child(spec_of(pod), "overhead").get("memory")
    return limit + (amount(overhead, "memory") if overhead is not None else 0)


def qos_class(pod: Pod) -> QosClass:
    """The QoS class of a pod."""
    if has_pod_level(pod):
        return _class_of([_pod_level(pod)])
    spec = spec_of(pod)
    containers = items(spec, "containers") + items(spec, "initContainers")
    return _class_of([_demand(container) for container in containers])


def has_pod_level(pod: Pod) -> bool:
    """Whether the pod level sets requests or limits of CPU or memory."""
    resources = child(spec_of(pod), "resources")
    levels = (child(resources, "requests"), child(resources, "limits"))
    return any(name in level for level in levels for name in ("cpu", "memory"))


_Demand = tuple[int, int, int, int]
"""cpu request, cpu limit, memory request, memory limit."""


def _demand(container: Container) -> _Demand:
    return (
        container_amount(container, "requests", "cpu"),
        container_amount(container, "limits", "cpu"),
        container_amount(container, "requests", "memory"),
        container_amount(container, "limits", "memory"),
    )


def pod_request(pod: Pod, resource: Resource) -> int | None:
    """The request of the pod level, as it is or as the API server derives it; None for none.

    Where the pod level sets any limit, a request that it lacks becomes that of the containers, or, if
    none of them has one, the limit. Source: defaultPodRequests in pkg/apis/core/v1/defaults.go.
    """
    asked = pod_amount(pod, "requests", resource)
    if asked is not None or not child(child(spec_of(pod), "resources"), "limits"):
        return asked
    spec = spec_of(pod)
    for container in items(spec, "initContainers") + items(spec, "containers"):
        resources = child(container, "resources")
        if any(resource in child(resources, kind) for kind in ("requests", "limits")):
            return aggregate(pod, "requests", resource)
    return pod_amount(pod, "limits", resource)


def _pod_level(pod: Pod) -> _Demand:
    return (
        pod_request(pod, "cpu") or 0,
        pod_amount(pod, "limits", "cpu") or 0,
        pod_request(pod, "memory") or 0,
        pod_amount(pod, "limits", "memory") or 0,
    )


RESOURCES: tuple[Resource, ...] = ("cpu", "memory")
"""The resources that count for QoS."""


def _class_of(demands: list[_Demand]) -> QosClass:
    if not any(any(demand) for demand in demands):
        return QosClass.BEST_EFFORT
    has_all_limits = all(demand[1] and demand[3] for demand in demands)
    cpu_request, cpu_limit, memory_request, memory_limit = map(sum, zip(*demands, strict=True))
    if has_all_limits and (cpu_request, memory_request) == (cpu_limit, memory_limit):
        return QosClass.GUARANTEED
    return QosClass.BURSTABLE

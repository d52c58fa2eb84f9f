"""The annotation `kvcellar.dev/injected`: what was done with a pod, and what to know of it. Pure.

The controller reads it to know which regions a pod has; people read it too. Its keys are a contract
(docs/reference/injection.md).
"""

import json
from typing import Any

from kvcellar import contract
from kvcellar_operator import engines
from kvcellar_operator.arguments import Argument
from kvcellar_operator.demands import QosClass, memory_limit_bytes
from kvcellar_operator.parts import Parts
from kvcellar_operator.pods import Container, Pod
from kvcellar_operator.reasons import Notice
from kvcellar_operator.sizing import volume_size


def notices(
    pod: Pod, chosen: list[Container], parts: Parts, decided: dict[str, Argument]
) -> tuple[Notice, ...]:
    """What somebody should know of a pod that was injected.

    Args:
        pod: with everything in it.
        chosen: its engine containers.
        parts: what was added.
        decided: the argument of each engine container.
    """
    volume = volume_size(parts.sizing, parts.shm.size_limit_bytes, memory_limit_bytes(pod))
    headroom = volume.headroom_bytes
    gpu_resources = parts.settings.gpu_resources
    has_gpu = any(engines.asks_for_gpu(engine, gpu_resources) for engine in chosen)
    found = {
        Notice.NO_GPU: not has_gpu and not parts.profile.containers,
        Notice.BEST_EFFORT: parts.qos is QosClass.BEST_EFFORT,
        Notice.SHM_CLAMPED: headroom is not None and headroom < parts.sizing.headroom_bytes,
        Notice.HOST_NETWORK_PORT: parts.is_host_network,
        Notice.SUPPLEMENTAL_GROUP: parts.identity.added_group is not None,
        Notice.PROFILE_NEWER: bool(parts.profile.unknown_fields),
    }
    told = [argument.notice for argument in decided.values() if argument.notice is not None]
    return tuple(dict.fromkeys([*told, *(notice for notice, holds in found.items() if holds)]))


def injected_stamp(
    pod: Pod, parts: Parts, decided: dict[str, Argument], noticed: tuple[Notice, ...]
) -> str:
    """The annotation: what was done, for the controller and for people (docs/reference/injection.md)."""
    sizing = parts.sizing
    pod_limit_bytes = memory_limit_bytes(pod)
    volume = volume_size(sizing, parts.shm.size_limit_bytes, pod_limit_bytes)
    stamp: dict[str, Any] = {
        "version": parts.settings.version,
        "contractVersion": contract.CONTRACT_VERSION,
        "profile": parts.profile.name,
        "engineIds": engines.expand_ids(list(parts.engine_ids), parts.profile.engines),
        "containers": list(decided),
        "capacityBytes": sizing.capacity_bytes,
        "image": parts.image,
        "mode": parts.profile.mode,
        "port": parts.profile.sidecar.port,
        "sizeLimitBytes": parts.shm.size_limit_bytes,
        "volumeBytes": volume.size_bytes,
        "sidecarMemoryBytes": sizing.sidecar_memory_bytes,
        "podMemoryLimitBytes": pod_limit_bytes,
        "bindingLimit": volume.binding_limit,
        "notices": list(noticed),
        "kvTransferConfig": {
            name: {"status": argument.notice or "Added", "config": argument.config}
            for name, argument in decided.items()
        },
    }
    if parts.profile.unknown_fields:
        stamp["unknownFields"] = list(parts.profile.unknown_fields)
    return json.dumps(stamp, separators=(",", ":"))

"""Puts the sidecar into a pod, or says why not: the whole decision, without I/O.

`inject` is what the webhook calls for each pod that is created and what `kvcellar inject` calls for a
file. Invariants:

- twice is once: a pod that was injected is let be;
- nothing that the user wrote is lost or overwritten, and unknown fields survive;
- the QoS class of the pod stays;
- no outcome without a reason, and a pod is never refused: what cannot be injected passes as it is, with
  the reason in an annotation.

Other modules of this package are its steps: `engines` (which containers), `sizing`, `shm`, `identity`,
`arguments`, `resources` (build), `place`. What their callers need is exported from here.
"""

import copy
import json
from dataclasses import dataclass, field

from kvcellar import contract
from kvcellar_operator import arguments, engines, identity, resources
from kvcellar_operator.arguments import Argument
from kvcellar_operator.checks import (
    check_containers,
    check_kind,
    check_mirror,
    check_mounts,
    check_opted_in,
    check_port,
    check_size,
    check_volumes,
)
from kvcellar_operator.demands import container_amount, pod_amount, qos_class
from kvcellar_operator.parts import Parts
from kvcellar_operator.patch import json_patch
from kvcellar_operator.place import add_parts
from kvcellar_operator.pods import (
    Container,
    Pod,
    annotations,
    check_shape,
    is_native_sidecar,
    items,
    labels,
    spec_of,
)
from kvcellar_operator.profile_reader import (
    InvalidProfile,
    parse_profile,
    parse_profile_spec,
    parse_served_profile,
)
from kvcellar_operator.profiles import Profile
from kvcellar_operator.quantities import format_bytes
from kvcellar_operator.reasons import REASONS, InjectionRefused, Notice, Outcome, Reason
from kvcellar_operator.settings import InjectSettings
from kvcellar_operator.shm import shared_memory
from kvcellar_operator.sizing import size
from kvcellar_operator.stamp import injected_stamp, notices

__all__ = [
    "REASONS",
    "InjectSettings",
    "Injection",
    "InvalidProfile",
    "Notice",
    "Outcome",
    "Pod",
    "Profile",
    "Reason",
    "inject",
    "json_patch",
    "parse_profile",
    "parse_profile_spec",
    "parse_served_profile",
    "skip",
    "wanted_profile",
]

_UNMARKED = {
    Reason.NOT_OPTED_IN,
    Reason.MIRROR_POD,
    Reason.INVALID_POD,
    Reason.POD_TOO_LARGE,
}
"""Reasons whose pods stay as they are to the byte: they are not ours to mark, or cannot be."""
_MAX_MESSAGE = 1000


@dataclass(frozen=True, slots=True)
class Injection:
    """What became of a pod.

    Attributes:
        pod: the pod to go on with; the one that was given if nothing changed.
        outcome: injected, skipped, or already injected.
        reason: why, for machines.
        message: why, for people.
        annotations: what was stamped on the pod.
        notices: what somebody should know of an injected pod, for machines.
    """

    pod: Pod
    outcome: Outcome
    reason: Reason
    message: str
    annotations: dict[str, str] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()


def wanted_profile(pod: Pod) -> str | None:
    """Name of the OffloadProfile that a pod asks for by its label; None if it names none.

    Without a name the caller looks for `default` in the pod's namespace.

    Raises:
        InjectionRefused: `InvalidPod`.
    """
    check_shape(pod)
    return labels(pod).get(contract.LABEL_PROFILE) or None


def inject(
    pod: Pod, namespace: str, profile: Profile | None, settings: InjectSettings
) -> Injection:
    """Decide on a pod and, if it is to be, put the sidecar into a copy of it.

    Args:
        pod: a Pod object; is not changed.
        namespace: where it is created, for messages.
        profile: the one that the pod names, or `default` of its namespace; None if there is none.
        settings: the injector's own.
    """
    try:
        check_shape(pod)
        check_opted_in(pod)
        check_mirror(pod)
        if engines.read_injected(pod) and (owner := _sidecar_of(pod)) is not None:
            return _already(pod, owner)
        return _inject(pod, _choose_profile(pod, namespace, profile, settings), settings)
    except InjectionRefused as refusal:
        return skip(pod, refusal.reason, str(refusal))


def skip(pod: Pod, reason: Reason, message: str) -> Injection:
    """Let a pod pass as it is, with the reason in an annotation where that is possible."""
    message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}..."
    stamped = {contract.ANNOTATION_SKIPPED: f"{reason}: {message}"}
    marked = pod if reason in _UNMARKED else _stamp(pod, stamped, contract.ANNOTATION_INJECTED)
    if marked is pod:
        stamped = {}
    return Injection(marked, Outcome.SKIPPED, reason, message, stamped)


def _sidecar_of(pod: Pod) -> Container | None:
    for container in items(spec_of(pod), "initContainers"):
        if container["name"] == contract.CONTAINER_SIDECAR:
            return container
    return None


def _already(pod: Pod, owner: Container) -> Injection:
    message = "the pod carries the sidecar already"
    if not is_native_sidecar(owner):
        # Webhooks built on an old Kubernetes API drop the field, and the pod would hang for ever.
        message = "the pod carries the sidecar already; its restartPolicy, which something had dropped, is back"
        pod = copy.deepcopy(pod)
        restored = _sidecar_of(pod)
        if restored is not None:
            restored["restartPolicy"] = "Always"
    return Injection(pod, Outcome.ALREADY, Reason.ALREADY_INJECTED, message)


def _choose_profile(
    pod: Pod, namespace: str, profile: Profile | None, settings: InjectSettings
) -> Profile:
    wanted = wanted_profile(pod)
    if profile is None and wanted is not None:
        raise InjectionRefused(
            Reason.PROFILE_MISSING,
            f"there is no OffloadProfile {wanted} in namespace {namespace}",
        )
    chosen = settings.default_profile if profile is None else profile
    if not chosen.is_enabled:
        raise InjectionRefused(
            Reason.PROFILE_DISABLED,
            f"{f'OffloadProfile {chosen.name}' if chosen.name else 'the default profile'} is not enabled",
        )
    return chosen


def _inject(pod: Pod, profile: Profile, settings: InjectSettings) -> Injection:
    check_kind(pod, profile, settings)
    check_containers(pod)
    check_port(pod, profile)
    new = copy.deepcopy(pod)
    chosen = engines.engine_containers(new, profile, settings.gpu_resources)
    check_mounts(chosen, profile)
    parts = _parts(new, chosen, profile, settings)
    check_volumes(new, resources.volumes(parts))
    decided = {c["name"]: _argument(c, parts) for c in chosen}
    add_parts(new, chosen, parts, [argument.words for argument in decided.values()])
    noticed = notices(new, chosen, parts, decided)
    stamped = {contract.ANNOTATION_INJECTED: injected_stamp(new, parts, decided, noticed)}
    new = _stamp(new, stamped, contract.ANNOTATION_SKIPPED)
    check_size(new)
    message = (
        f"{parts.sizing.regions} region(s) of {format_bytes(parts.sizing.capacity_bytes)} for "
        f"{', '.join(decided)}"
    )
    return Injection(new, Outcome.INJECTED, Reason.INJECTED, message, stamped, noticed)


def _parts(pod: Pod, chosen: list[Container], profile: Profile, settings: InjectSettings) -> Parts:
    ids = []
    for engine in chosen:
        engines.check_engine_env(engine, profile.engines)
        ids.append(engines.engine_id(engine, is_alone=len(chosen) == 1))
    engines.expand_ids(ids, profile.engines)
    limits = [container_amount(engine, "limits", "memory") for engine in chosen]
    sizing = size(profile, limits, pod_amount(pod, "limits", "memory"))
    return Parts(
        profile=profile,
        settings=settings,
        sizing=sizing,
        shm=shared_memory(pod, chosen, sizing),
        identity=identity.decide(pod, chosen, profile, settings),
        engine_ids=tuple(ids),
        qos=qos_class(pod),
        is_host_network=bool(spec_of(pod).get("hostNetwork")),
    )


def _argument(engine: Container, parts: Parts) -> Argument:
    profile = parts.profile
    decided = arguments.decide(
        engine, profile.mode, profile.vllm_argument, parts.sizing.capacity_bytes
    )
    is_told = decided.notice in (None, Notice.ARGUMENT_PRESENT)
    if profile.mode is contract.Mode.STOCK and not is_told:
        raise InjectionRefused(
            Reason.STOCK_ARGUMENT,
            f"an unmodified vLLM in container {engine['name']} has to be given {arguments.FLAG} "
            f"{json.dumps(decided.config)}, which cannot be added: {decided.notice}",
        )
    return decided


def _stamp(pod: Pod, stamped: dict[str, str], stale: str) -> Pod:
    """A copy of the pod with the annotations set and the stale one gone."""
    kept = {key: value for key, value in annotations(pod).items() if key != stale}
    metadata = {**(pod.get("metadata") or {}), "annotations": {**kept, **stamped}}
    return {**pod, "metadata": metadata}

"""Says in words what became of a pod, for `kvcellar inject --explain` and `kubectl kvcellar`. Pure."""

import json

from kvcellar.contract import ANNOTATION_INJECTED, ANNOTATION_SKIPPED
from kvcellar_operator.arguments import FLAG
from kvcellar_operator.engines import engine_ids_of, read_injected
from kvcellar_operator.inject import Injection
from kvcellar_operator.pods import Pod, annotations
from kvcellar_operator.quantities import shown_bytes
from kvcellar_operator.reasons import REASONS, Notice, Reason
from kvcellar_operator.sizing import index_bound_bytes

_PROFILE_REASONS = frozenset(
    {
        Reason.PROFILE_MISSING,
        Reason.PROFILE_DISABLED,
        Reason.PROFILE_INVALID,
        Reason.PROFILE_UNAVAILABLE,
    }
)
_QUESTIONS: tuple[tuple[str, frozenset[Reason]], ...] = (
    ("has the shape of a pod", frozenset({Reason.INVALID_POD})),
    ('label kvcellar.dev/inject is "true"', frozenset({Reason.NOT_OPTED_IN})),
    ("mirrors no static pod", frozenset({Reason.MIRROR_POD})),
    ("carries no sidecar yet", frozenset({Reason.ALREADY_INJECTED})),
    ("has a profile that is enabled", _PROFILE_REASONS),
    ("nothing of the pod is in the way", frozenset()),
    ("small enough for the API server", frozenset({Reason.POD_TOO_LARGE})),
)
"""What is asked of a pod, in this order, and the reasons of a no. The one without any has all others."""


def explain(injection: Injection) -> str:
    """What was done with a pod and why, what to know and what to do about it."""
    meaning = REASONS[injection.reason]
    lines = [f"{injection.outcome}: {injection.reason}", f"  {injection.message}"]
    if injection.reason not in (Reason.INJECTED, Reason.ALREADY_INJECTED):
        lines += [f"  meaning: {meaning.meaning}", f"  remedy: {meaning.remedy}"]
    return "\n".join([*lines, *_stamped_lines(injection.pod)]) + "\n"


def decision_table(reason: Reason) -> str:
    """What was asked of a pod until it was decided, one question a line; `-` was not asked any more."""
    named = frozenset().union(*(reasons for _, reasons in _QUESTIONS))
    answer, lines = "yes", []
    for question, reasons in _QUESTIONS:
        decides = reason in reasons if reasons else reason not in named | {Reason.INJECTED}
        lines.append(f"  {'no' if decides else answer:<4} {question}")
        answer = "-" if decides else answer
    return "\n".join(lines) + "\n"


def sizing_sums(pod: Pod) -> str:
    """The sums behind the numbers of an injected pod's annotation; empty if it has none."""
    stamp = read_injected(pod)
    ids, capacity = stamp.get("engineIds"), stamp.get("capacityBytes")
    sums = {key: stamp.get(key) for key in ("volumeBytes", "sizeLimitBytes", "sidecarMemoryBytes")}
    if not isinstance(ids, list) or not isinstance(capacity, int):
        return ""
    if not all(isinstance(number, int) for number in sums.values()):
        return ""
    regions, index = capacity * len(ids), index_bound_bytes(capacity) * len(ids)
    volume = int(sums["volumeBytes"] or 0)
    room = f"{shown_bytes(volume - regions - index)}" if volume else "as the node has"
    return (
        f"  regions         {len(ids)} x {shown_bytes(capacity)} = {shown_bytes(regions)}\n"
        f"  + index bound   {shown_bytes(index)}\n"
        f"  + head-room     {room}\n"
        f"  = volume        {_bytes(volume)}, bound by {stamp.get('bindingLimit')}; its sizeLimit: "
        f"{_bytes(sums['sizeLimitBytes'])}, the pod's memory limit: {_bytes(stamp.get('podMemoryLimitBytes'))}\n"
        f"  sidecar memory  (regions + index bound) x 1.003 + overhead = {_bytes(sums['sidecarMemoryBytes'])}\n"
    )


def explain_pod(pod: Pod) -> str:
    """What the annotations of a pod in the cluster say, for people."""
    skipped = annotations(pod).get(ANNOTATION_SKIPPED)
    if read_injected(pod):
        return "\n".join(["injected", *_stamped_lines(pod)]) + "\n"
    if skipped is None:
        return (
            "neither injected nor skipped: the webhook was not called. The label has to be there when the "
            "pod is created; look at the webhook's Deployment and its configuration too\n"
        )
    reason, message = parse_skipped(skipped)
    lines = [f"skipped: {reason or 'unknown reason'}", f"  {message}"]
    if reason is not None:
        lines += [f"  meaning: {REASONS[reason].meaning}", f"  remedy: {REASONS[reason].remedy}"]
    return "\n".join(lines) + "\n"


def parse_skipped(text: str) -> tuple[Reason | None, str]:
    """Reason and sentence of the annotation `kvcellar.dev/skipped`; None for a reason of another version."""
    reason, colon, message = text.partition(": ")
    if colon and reason in tuple(Reason):
        return Reason(reason), message
    return None, text


def _stamped_lines(pod: Pod) -> list[str]:
    """The lines for the annotation `kvcellar.dev/injected`, which anybody may have written."""
    if ANNOTATION_INJECTED not in annotations(pod):
        return []
    stamp = read_injected(pod)
    ids = engine_ids_of(pod) or stamp.get("engineIds")
    lines = [
        f"  engines: {_joined(stamp.get('containers'))}; engine ids: {_joined(ids)}",
        f"  region: {_bytes(stamp.get('capacityBytes'))} each",
        f"  sidecar memory: {_bytes(stamp.get('sidecarMemoryBytes'))}",
        f"  volume at /dev/shm: {_bytes(stamp.get('volumeBytes'))}, bound by {stamp.get('bindingLimit')}",
    ]
    for text in stamp.get("notices") or []:
        if text in tuple(Notice):
            explanation = REASONS[Notice(text)]
            lines += [f"  {text}: {explanation.meaning}", f"    remedy: {explanation.remedy}"]
    if stamp.get("unknownFields"):
        lines.append(f"  unknown fields of the profile: {_joined(stamp['unknownFields'])}")
    transfer = stamp.get("kvTransferConfig")
    for name, entry in (transfer if isinstance(transfer, dict) else {}).items():
        if isinstance(entry, dict) and entry.get("status") != "Added" and entry.get("config"):
            lines.append(f"  give {name}: {FLAG} '{json.dumps(entry['config'])}'")
    return lines


def _bytes(value: object) -> str:
    if not isinstance(value, int):
        return "unknown"
    return shown_bytes(value) if value else "no limit"


def _joined(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) and value else "unknown"

"""What an OffloadRegion should say after a look at its pod and its sidecar, and what to tell. Pure.

`observe` is the whole decision: (pod, what was heard, what the object says) -> (status, transitions).
The same look twice gives the same status, and tells nothing the second time.

What is told comes from comparing with the status that the object bears, not from a memory of ours, so a
controller that was killed goes on where it was. A status stays what was last heard while a sidecar is
silent; its conditions then are Unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.contract import RegionBody, RegionState, Role
from kvcellar_operator import status as body_of
from kvcellar_operator.crd_region import Condition
from kvcellar_operator.heard import QUIET, UNINJECTED, Heard, Silence, condition, failure
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.podview import PodView
from kvcellar_operator.transitions import Transition, transitions
from kvcellar_operator.words import Why

_MAX_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class Observation:
    """What the object should say, and what to tell."""

    status: JsonObject
    transitions: tuple[Transition, ...]


@dataclass(frozen=True, slots=True)
class _Holds:
    """A condition without its times."""

    status: str
    why: Why
    message: str = ""


def observe(
    pod: PodView,
    heard: Heard | Silence,
    region: Mapping[str, Any],
    now: str,
) -> Observation:
    """Decide on one region.

    Args:
        pod: the region's pod.
        heard: of its sidecar.
        region: the OffloadRegion object as it is.
        now: a timestamp of the API, for conditions that change.
    """
    previous: JsonObject = region.get("status") or {}
    generation = int(region["metadata"].get("generation", 1))
    if isinstance(heard, Silence):
        status, holds = _of_silence(pod, heard, previous)
    else:
        status = body_of.of_region(pod, heard.region)
        holds = _conditions(pod, heard)
    applied = _applied(region, heard, previous, generation)
    if applied is not None:
        status["observedGeneration"] = applied
    status["conditions"] = [
        _condition(kind, holds[kind], generation, previous, now) for kind in Condition
    ]
    return Observation(status, tuple(transitions(pod, previous, status, heard)))


def _applied(
    region: Mapping[str, Any], heard: Heard | Silence, previous: JsonObject, generation: int
) -> int | None:
    """Generation of the spec that is in force: without wishes in it there is nothing to apply."""
    spec = region.get("spec") or {}
    if "contents" not in spec and "retention" not in spec:
        return generation
    before: int | None = previous.get("observedGeneration")
    if not isinstance(heard, Heard):
        return before
    # A sidecar that has not heard of a first wish yet says 0, and what was in force before still is.
    return max(heard.region.observedGeneration, before or 0)


# --- status and conditions ------------------------------------------------------------------------------


def _of_silence(
    pod: PodView, silence: Silence, previous: JsonObject
) -> tuple[JsonObject, dict[Condition, _Holds]]:
    """What was heard last, with what the pod alone tells; nothing is left of an ended pod's memory."""
    kept = {name: value for name, value in previous.items() if name != "conditions"}
    # The sidecar's own limits are newer than what was planned at injection.
    known = body_of.of_pod(pod)
    memory = {**known.get("memory", {}), **kept.get("memory", {})}
    status = {**kept, **known, **({"memory": memory} if memory else {})}
    open_question = _Holds("Unknown", silence.why, silence.message)
    holds = dict.fromkeys(Condition, open_question)
    # A pod that is not looked at any more may have lost its label only: its memory is as it was.
    is_over = silence.why is Why.POD_ENDED
    is_asked = silence.why not in (Why.POD_PENDING, Why.POD_GONE)
    reachable = "False" if is_asked else "Unknown"
    holds[Condition.REACHABLE] = _Holds(reachable, silence.why, silence.message)
    if silence.why in QUIET:
        holds[Condition.DEGRADED] = _Holds("False", Why.AS_EXPECTED)
    else:
        holds[Condition.DEGRADED] = _Holds("True", silence.why, silence.message)
    if is_over or silence.why in UNINJECTED:
        gone = _Holds("False", silence.why, silence.message)
        holds |= dict.fromkeys((Condition.RESERVED, Condition.SETTLED, Condition.ATTACHED), gone)
        phase = RegionState.RELEASED if is_over else RegionState.FAILED
        status |= {"phase": phase.value, "reason": silence.message[:_MAX_MESSAGE]}
    if is_over:
        status |= {"participants": [], "orphans": [], "settleProgress": 0}
        for name in ("reservedBytes", "residentBytes", "usedBytes", "hugePageBytes"):
            status[name] = 0
    return status, holds


def _conditions(pod: PodView, heard: Heard) -> dict[Condition, _Holds]:
    region = heard.region
    return {
        Condition.RESERVED: _reserved(heard),
        Condition.SETTLED: _settled(region),
        Condition.ATTACHED: _attached(region),
        Condition.REACHABLE: _Holds("True", Why.ANSWERED),
        Condition.DEGRADED: _degraded(pod, heard),
    }


def _reserved(heard: Heard) -> _Holds:
    match heard.region.state:
        case RegionState.RESERVED | RegionState.READY:
            return _Holds("True", Why.RESERVED)
        case RegionState.FAILED:
            return _Holds("False", failure(heard), heard.region.reason)
        case RegionState.RELEASED:
            return _Holds("False", Why.RELEASED)
        case _:
            return _Holds("False", Why.RESERVING)


def _settled(region: RegionBody) -> _Holds:
    if region.state == RegionState.READY:
        return _Holds("True", Why.SETTLED)
    if region.state == RegionState.FAILED:
        return _Holds("False", Why.REGION_FAILED)
    if region.state == RegionState.RELEASED:
        return _Holds("False", Why.RELEASED)
    return _Holds("False", Why.SETTLING)


def _attached(region: RegionBody) -> _Holds:
    if not region.participants:
        return _Holds("False", Why.NO_ENGINE)
    n_workers = sum(each.role == Role.WORKER for each in region.participants)
    n_others = len(region.participants) - n_workers
    return _Holds("True", Why.ENGINE_ATTACHED, f"{n_workers} worker(s), {n_others} scheduler(s)")


def _degraded(pod: PodView, heard: Heard) -> _Holds:
    if heard.region.state == RegionState.FAILED:
        return _Holds("True", failure(heard), heard.region.reason)
    if pod.start_message:
        return _Holds("True", Why.START_FAILED, pod.start_message)
    return _Holds("False", Why.AS_EXPECTED)


def _condition(
    kind: Condition, holds: _Holds, generation: int, previous: JsonObject, now: str
) -> JsonObject:
    before = condition(previous, kind)
    is_same = before.get("status") == holds.status
    return {
        "type": kind.value,
        "status": holds.status,
        "observedGeneration": generation,
        "lastTransitionTime": before["lastTransitionTime"] if is_same else now,
        "reason": holds.why.value,
        # A kubelet's or an annotation's, and the API server takes no more than 32 KiB.
        "message": holds.message[:_MAX_MESSAGE],
    }

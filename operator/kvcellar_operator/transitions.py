"""What happened between two statuses of a region, for people to be told. Pure.

Compared is with the status that the object bears, not with a memory of ours. Each transition has a mark
made of what it is about, so the same one, found again after a kill, is known to be the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.contract import RegionState
from kvcellar_operator.crd_region import Condition
from kvcellar_operator.events import EventType
from kvcellar_operator.heard import QUIET, UNINJECTED, Heard, Silence, condition, failure
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.podview import PodView
from kvcellar_operator.quantities import format_bytes, shown_bytes
from kvcellar_operator.status import RECLAIMED
from kvcellar_operator.words import Told, Why

_ATTACHABLE = (RegionState.RESERVED, RegionState.READY)


@dataclass(frozen=True, slots=True)
class Transition:
    """Something that happened to a region, to be told by an Event.

    Attributes:
        told: the Event's reason.
        type: whether somebody should look.
        message: for people.
        mark: the same if the same transition is found again (`events`).
    """

    told: Told
    type: EventType
    message: str
    mark: str


def transitions(
    pod: PodView, previous: JsonObject, status: JsonObject, heard: Heard | Silence
) -> list[Transition]:
    """What to tell of a region that said `previous` and now says `status`."""
    if isinstance(heard, Silence):
        return _of_reachability(previous, status, heard)
    found = _of_reachability(previous, status, None)
    found += _of_state(previous, status, heard)
    found += _of_start(previous, status)
    found += _of_engine(pod, previous, status)
    found += _of_orphans(previous, status)
    return found


def _of_reachability(
    previous: JsonObject, status: JsonObject, silence: Silence | None
) -> list[Transition]:
    before, after = (condition(each, Condition.REACHABLE) for each in (previous, status))
    if before.get("status") == after["status"]:
        return []
    mark = f"reachable-since-{before.get('lastTransitionTime', 'never')}"
    if silence is None:
        if before.get("status") != "False":
            return []
        return [_normal(Told.SIDECAR_REACHABLE, "the sidecar answers again", mark)]
    if silence.why in (*QUIET, *UNINJECTED):
        return []
    return [_warning(Told.SIDECAR_UNREACHABLE, f"{silence.why}: {silence.message}", mark)]


def _of_state(previous: JsonObject, status: JsonObject, heard: Heard) -> list[Transition]:
    before, state = previous.get("phase"), heard.region.state
    mark = f"{state}-since-{_since(previous, Condition.RESERVED)}"
    capacity_bytes = heard.region.capacityBytes
    if state == RegionState.FAILED and before != state:
        return [_of_failure(heard, mark)]
    if state == RegionState.RELEASED and before not in (state, None):
        freed = shown_bytes(previous.get("reservedBytes", 0))
        return [_normal(Told.REGION_RELEASED, f"the region was freed: {freed}", mark)]
    if state in _ATTACHABLE and before not in _ATTACHABLE:
        told = Told.REGION_RECOVERED if before == RegionState.FAILED else Told.REGION_RESERVED
        return [_normal(told, f"{format_bytes(capacity_bytes)} are reserved", mark)]
    return []


def _since(previous: JsonObject, kind: Condition) -> str:
    return str(condition(previous, kind).get("lastTransitionTime", "never"))


def _of_failure(heard: Heard, mark: str) -> Transition:
    reason = heard.region.reason or "the sidecar does not say why"
    if failure(heard) is Why.REGION_FAILED or heard.plan is None:
        return _warning(Told.REGION_FAILED, reason, mark)
    plan = heard.plan
    numbers = (
        f"asked {shown_bytes(plan.askedBytes)}, free {shown_bytes(plan.freeBytes)} "
        f"by {plan.bindingLimit}"
    )
    return _warning(Told.DOES_NOT_FIT, f"{reason} ({numbers})", mark)


def _of_start(previous: JsonObject, status: JsonObject) -> list[Transition]:
    before, after = (condition(each, Condition.DEGRADED) for each in (previous, status))
    if after["reason"] != Why.START_FAILED or before.get("reason") == after["reason"]:
        return []
    mark = f"start-failed-since-{before.get('lastTransitionTime', 'never')}"
    return [_warning(Told.START_FAILED, after["message"], mark)]


def _of_engine(pod: PodView, previous: JsonObject, status: JsonObject) -> list[Transition]:
    starts, starts_before = status["engineStarts"], previous.get("engineStarts", 0)
    if starts > starts_before:
        mark = f"start-{starts}"
        if not starts_before:
            return [_normal(Told.ENGINE_ATTACHED, "the engine has its region", mark)]
        kept = status["generation"] == previous.get("generation")
        what = "its contents are kept" if kept else "its contents are new"
        message = f"engine start {starts} has the region again; {what}"
        return [_normal(Told.ENGINE_RESTARTED, message, mark)]
    if previous.get("participants") and not status["participants"] and not pod.is_ending:
        message = f"no process of engine start {starts} holds the region any more"
        return [_warning(Told.ENGINE_DETACHED, message, f"end-{starts}")]
    return []


def _of_orphans(previous: JsonObject, status: JsonObject) -> list[Transition]:
    before = {each["name"] for each in previous.get("orphans") or () if _is_reclaimed(each)}
    reclaimed = [
        each for each in status["orphans"] if _is_reclaimed(each) and each["name"] not in before
    ]
    if not reclaimed:
        return []
    total_bytes = sum(each["bytes"] for each in reclaimed)
    names = ", ".join(each["name"] for each in reclaimed[:3])
    message = f"{len(reclaimed)} file(s) of {shown_bytes(total_bytes)} that nobody held: {names}"
    return [_normal(Told.ORPHAN_RECLAIMED, message, f"orphan-{reclaimed[-1]['name']}")]


def _is_reclaimed(orphan: Mapping[str, Any]) -> bool:
    return orphan.get("action") == RECLAIMED


def _normal(told: Told, message: str, mark: str) -> Transition:
    return Transition(told, EventType.NORMAL, message, mark)


def _warning(told: Told, message: str, mark: str) -> Transition:
    return Transition(told, EventType.WARNING, message, mark)

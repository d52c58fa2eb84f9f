"""What an OffloadRegion's status says of a region, in the shape that the CRD asks for. Pure.

A sidecar's answer comes from somebody else's pod. Whatever it holds, the status made of it is one that
the API server takes: texts are cut, words that the schema does not know are left out, lists are bounded.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from kvcellar.contract import Contents, Mode, RegionBody, Role
from kvcellar_operator.crd_region import Layouts
from kvcellar_operator.objects import JsonObject, timestamp
from kvcellar_operator.podview import PodView

_MAX_REASON = 1024
_MAX_HASH = 128
_MAX_RETENTION = 64
_MAX_LIMIT_NAME = 512
_MAX_PARTICIPANTS = 1024
_MAX_LIMITS = 64
_MAX_ORPHANS = 128
_MAX_FILE_NAME = 255
_MAX_ACTION = 64
_MAX_TIME_S = 253402300799
"""The last second of the year 9999, which a timestamp can hold."""

RECLAIMED = "reclaimed"
"""The sidecar's word for an orphan that it removed."""


def of_pod(pod: PodView) -> JsonObject:
    """What is known from the pod alone."""
    memory = {
        "sumBytes": pod.capacity_bytes * len(pod.engine_ids),
        "sidecarBytes": pod.memory.sidecar_bytes,
        "volumeBytes": pod.memory.volume_bytes,
        "podLimitBytes": pod.memory.pod_limit_bytes,
        "bindingLimit": pod.memory.binding_limit[:_MAX_LIMIT_NAME],
    }
    status: JsonObject = {"engineRestarts": pod.engine_restarts}
    if pod.node:
        status["node"] = pod.node
    if pod.is_injected:
        status["memory"] = {name: value for name, value in memory.items() if value != ""}
    return status


def of_region(pod: PodView, region: RegionBody) -> JsonObject:
    """Everything but the conditions and the observed generation."""
    status = {
        **of_pod(pod),
        "phase": region.state,
        "generation": region.generation,
        "engineStarts": region.engineStarts,
        "capacityBytes": region.capacityBytes,
        "reservedBytes": region.reservedBytes,
        # A page of a tmpfs that is promised is there: the sidecar's metric of this name says the same.
        "residentBytes": region.reservedBytes,
        "usedBytes": region.usedBytes,
        "hugePageBytes": region.hugePageBytes,
        "unusedTailBytes": region.unusedTailBytes,
        "settleProgress": _percent(region.settledBytes, region.capacityBytes),
        "participants": _participants(region),
        "orphans": _orphans(region),
        **_words(region),
    }
    if region.geometry is not None:
        status["geometry"] = _geometry(region)
    if "memory" in status:
        status["memory"] = {**status["memory"], **_limits(region)}
    return status


def _words(region: RegionBody) -> JsonObject:
    """The texts that are not empty, and the words that the schema knows."""
    texts = {
        "reason": region.reason[:_MAX_REASON],
        "retention": region.retention[:_MAX_RETENTION],
        "session": region.session[:_MAX_HASH],
        "fingerprint": region.fingerprint[:_MAX_HASH],
        "mode": _known(region.mode, Mode),
        "contents": _known(region.contents, Contents),
    }
    return {name: text for name, text in texts.items() if text}


def _known(word: str, kind: type[StrEnum]) -> str:
    return word if word in tuple(kind) else ""


def _percent(part: int, whole: int) -> int:
    return min(100, part * 100 // whole) if whole else 0


def _participants(region: RegionBody) -> list[JsonObject]:
    """By role and rank, each pair once: the schema's key."""
    by_key = {
        (each.role, each.rank): each for each in region.participants if _known(each.role, Role)
    }
    return [
        {
            "role": each.role,
            "rank": each.rank,
            "since": timestamp(min(each.since, _MAX_TIME_S)),
            "pinned": each.pinned,
        }
        for _, each in sorted(by_key.items())[:_MAX_PARTICIPANTS]
    ]


def _geometry(region: RegionBody) -> JsonObject:
    geometry = region.geometry
    if geometry is None:
        return {}
    numbers: JsonObject = {
        "worldSize": geometry.worldSize,
        "copies": geometry.copies,
        "rankBytes": geometry.rankBytes,
        "chunkStrideBytes": geometry.chunkStrideBytes,
        "numChunks": geometry.numChunks,
    }
    if _known(geometry.layout, Layouts):
        numbers["layout"] = geometry.layout
    return numbers


def _limits(region: RegionBody) -> JsonObject:
    by_name = {each.name[:_MAX_LIMIT_NAME]: each for each in region.limits}
    shown = [
        {
            "name": name,
            "limitBytes": each.limitBytes,
            "usageBytes": each.usageBytes,
            "binding": each.binding,
        }
        for name, each in list(by_name.items())[:_MAX_LIMITS]
    ]
    binding = next((each["name"] for each in shown if each["binding"]), None)
    return {"limits": shown, **({} if binding is None else {"bindingLimit": binding})}


def _orphans(region: RegionBody) -> list[JsonObject]:
    return [
        {
            "name": each.name[:_MAX_FILE_NAME],
            "bytes": min(max(each.bytes, 0), 2**63 - 1),
            "action": each.action[:_MAX_ACTION],
            "reason": each.reason[:_MAX_REASON],
        }
        for each in region.orphans[:_MAX_ORPHANS]
    ]


# --- whether to write -----------------------------------------------------------------------------------

_DRIFTING = ("reservedBytes", "residentBytes", "usedBytes", "hugePageBytes", "settleProgress")
"""Numbers that move all the time while nothing happens."""
LARGE_STEP = 0.1
"""A number that moved by this part of the capacity is written at once."""


def is_due(previous: JsonObject, status: JsonObject, since_s: float, small_change_s: float) -> bool:
    """Whether a status should be written over the previous one.

    Args:
        previous: what the object says.
        status: what it should say.
        since_s: seconds since this controller wrote it.
        small_change_s: seconds between writes of numbers that hardly moved.
    """
    if previous == status:
        return False
    if _steady(previous) != _steady(status):
        return True
    step = status.get("capacityBytes", 0) * LARGE_STEP
    moved = max(abs(status.get(name, 0) - previous.get(name, 0)) for name in _DRIFTING[:-1])
    return moved >= step or since_s >= small_change_s


def _steady(status: JsonObject) -> JsonObject:
    """A status without the numbers that move all the time."""
    steady = {name: value for name, value in status.items() if name not in _DRIFTING}
    memory = steady.get("memory")
    if isinstance(memory, dict) and "limits" in memory:
        limits: Iterable[dict[str, Any]] = memory["limits"]
        kept = [{**limit, "usageBytes": 0} for limit in limits]
        steady["memory"] = {**memory, "limits": kept}
    return steady


def merge_patch(previous: JsonObject, status: JsonObject) -> JsonObject:
    """The merge patch (RFC 7386) that makes the one of the other; lists are replaced whole."""
    patch: JsonObject = {name: None for name in previous if name not in status}
    for name, value in status.items():
        old = previous.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            if inner := merge_patch(old, value):
                patch[name] = inner
        elif value != old or name not in previous:
            patch[name] = value
    return patch

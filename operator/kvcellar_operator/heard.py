"""What was heard of a sidecar about one region, or why nothing was. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.contract import PlanBody, RegionBody
from kvcellar_operator.crd_region import Condition
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.words import Why

QUIET = (Why.POD_PENDING, Why.POD_ENDED, Why.POD_GONE)
"""Reasons for silence that are no trouble."""
UNINJECTED = (Why.NOT_INJECTED, Why.CAPACITY_UNKNOWN)
"""Reasons why there is no sidecar that could ever answer."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A sidecar's answer about one region; `plan` if the region failed and the plan was asked for."""

    region: RegionBody
    plan: PlanBody | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer, and why: one of the reasons of `Reachable`, with a sentence."""

    why: Why
    message: str


def failure(heard: Heard) -> Why:
    """Why a region has failed."""
    return Why.REGION_FAILED if heard.plan is None or heard.plan.fits else Why.DOES_NOT_FIT


def condition(status: Mapping[str, Any], kind: Condition) -> JsonObject:
    """A condition of a status; empty if it is not there."""
    for entry in status.get("conditions") or ():
        if entry.get("type") == kind:
            return dict(entry)
    return {}

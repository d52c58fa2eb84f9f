"""Hears what one pod's sidecar says, or decides that it is silent, and why.

A question that is lost now and then is no silence: of a sidecar that was reachable, it takes two. A sidecar
that has just started does not listen yet, which is no silence either.
One that was started again begins anew, however long it was silent before: pauses that have grown to
half a minute must not hide that it answers now.
"""

import time
from dataclasses import dataclass

from kvcellar.contract import RegionBody, RegionState
from kvcellar_operator.heard import Heard, Silence
from kvcellar_operator.metrics import ControllerMetrics
from kvcellar_operator.objects import Key
from kvcellar_operator.podview import PodView
from kvcellar_operator.sidecars import NoAnswer, Sidecars
from kvcellar_operator.words import Why

_ENOUGH = 2
"""Failures in a row after which a sidecar that was reachable is not."""
_STARTED = 5
"""Failures to connect after which a sidecar that was not should listen: with a second between two, more than
an interpreter takes to start on a busy node."""


@dataclass(slots=True)
class _Row:
    """Failures in a row of one life of a sidecar."""

    restarts: int
    failures: int = 0
    silences: int = 0


class Listener:
    """Asks sidecars and counts their failures."""

    def __init__(self, sidecars: Sidecars, metrics: ControllerMetrics) -> None:
        self._sidecars = sidecars
        self._metrics = metrics
        self._rows: dict[Key, _Row] = {}

    def silences(self, key: Key) -> int:
        """How many looks in a row have found a silence: the pauses grow by them, not by lost questions."""
        row = self._rows.get(key)
        return row.silences if row else 0

    def forget(self, key: Key) -> None:
        """The pod is gone."""
        self._rows.pop(key, None)

    async def hear(
        self, key: Key, pod: PodView, *, was_reachable: bool
    ) -> dict[str, Heard | Silence] | None:
        """What is known of each of the pod's regions; None if the question should first be repeated."""
        silence = _known_silence(pod)
        if silence is not None:
            self._rows.pop(key, None)
            return _all(pod, silence)
        began_s = time.perf_counter()
        try:
            regions = await self._sidecars.ask_regions(pod)
        except NoAnswer as error:
            self._metrics.polled(error.why, time.perf_counter() - began_s)
            if not self._is_silence(key, pod, _patience(error.why, was_reachable=was_reachable)):
                return None
            return _all(pod, Silence(error.why, str(error)))
        self._metrics.polled("ok", time.perf_counter() - began_s)
        self._rows.pop(key, None)
        return await self._of_each(pod, regions)

    def _is_silence(self, key: Key, pod: PodView, patience: int) -> bool:
        """Count a failure; whether it is more than one to be patient with. A silence stays one."""
        row = self._rows.get(key)
        if row is None or row.restarts != pod.sidecar_restarts:
            row = self._rows[key] = _Row(pod.sidecar_restarts)
        row.failures += 1
        if row.silences or row.failures >= patience:
            row.silences += 1
        return row.silences > 0

    async def _of_each(
        self, pod: PodView, regions: dict[str, RegionBody]
    ) -> dict[str, Heard | Silence]:
        plan = None
        if any(region.state == RegionState.FAILED for region in regions.values()):
            try:
                plan = await self._sidecars.ask_plan(pod)
            except NoAnswer:
                plan = None
        heard: dict[str, Heard | Silence] = {}
        for engine_id in pod.engine_ids:
            if engine_id in regions:
                heard[engine_id] = Heard(regions[engine_id], plan)
            else:
                others = ", ".join(sorted(regions))[:200] or "none"
                message = f"the sidecar at {pod.ip} has regions of other engines: {others}"
                heard[engine_id] = Silence(Why.WRONG_SIDECAR, message)
        return heard


def _patience(why: Why, *, was_reachable: bool) -> int:
    """How many failures in a row make a silence."""
    if was_reachable:
        return _ENOUGH
    return _STARTED if why is Why.CONNECTION_FAILED else 1


def _known_silence(pod: PodView) -> Silence | None:
    """Why there is nobody to ask, as the kubelet says."""
    if pod.phase in ("Succeeded", "Failed"):
        return Silence(Why.POD_ENDED, f"the pod has ended: {pod.phase}")
    if pod.is_sidecar_running and pod.ip:
        return None
    if pod.sidecar_message:
        return Silence(Why.SIDECAR_NOT_RUNNING, pod.sidecar_message)
    return Silence(Why.POD_PENDING, "the pod's sidecar has not started yet")


def _all(pod: PodView, silence: Silence) -> dict[str, Heard | Silence]:
    return dict.fromkeys(pod.engine_ids, silence)

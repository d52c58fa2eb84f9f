"""Brings the OffloadRegions of one pod up to what its sidecar says. Level-triggered: each visit starts anew.

Order of a visit, so that a kill at any point is made good by the next one: make what is missing, tell what
happened, write the status that says so, relay what is wished. What was told bears a mark, so it is not told
again if the status was not written; every write names the version that it was made from, so of two
controllers one is refused and looks again.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvcellar.contract import ANNOTATION_DESIRED, LABEL_INJECT, RegionState
from kvcellar_operator import regions
from kvcellar_operator.cluster import Api, ApiFailure, Conflict, Forbidden, NotFound, Unreachable
from kvcellar_operator.config import ControllerSettings
from kvcellar_operator.crd_region import Condition
from kvcellar_operator.events import Occurrence
from kvcellar_operator.heard import Heard, Silence, condition
from kvcellar_operator.listening import Listener
from kvcellar_operator.metrics import ControllerMetrics
from kvcellar_operator.objects import JsonObject, Key, timestamp
from kvcellar_operator.observe import observe
from kvcellar_operator.podview import PodView
from kvcellar_operator.posting import EventPoster
from kvcellar_operator.status import is_due, merge_patch
from kvcellar_operator.uninjected import occurrence_of, silence_of
from kvcellar_operator.words import Why
from kvcellar_operator.world import World

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""After a first lost question, a conflict, or an object of an earlier pod that is on its way out."""
_WAITING_S = 60.0
"""Of pods that are not asked: their changes wake the visit, and this is for one that was missed."""
_REFUSED_S = 10.0
"""An API server that starts refuses everything until it has read its rules."""
_GONE_S = 15.0
"""A pod that is gone takes its regions with it; what is left of them after this is told so."""
_PENDING_S = 10.0
"""A pod that has not started by then is shown as such; most have, and their first status is one with figures."""


_BEGINNING = (RegionState.PLANNED, RegionState.RESERVING)


class Reconciler:
    """Visits pods; `visit` is what the poll loop calls."""

    def __init__(
        self,
        api: Api,
        world: World,
        listener: Listener,
        poster: EventPoster,
        metrics: ControllerMetrics,
        settings: ControllerSettings,
    ) -> None:
        self._api = api
        self._world = world
        self._listener = listener
        self._poster = poster
        self._metrics = metrics
        self._settings = settings
        self._written_s: dict[Key, float] = {}
        self._missing_s: dict[Key, float] = {}
        self._answered: set[Key] = set()
        self._pending_s: dict[Key, float] = {}

    async def visit(self, key: Key) -> float | None:
        """Look at a pod; returns the seconds until the next look, or None if only a change matters."""
        try:
            return await self._visit(key)
        except Conflict as error:
            logger.debug("pod %s/%s changed meanwhile: %s", key.namespace, key.name, error)
            return _AGAIN_S
        except Unreachable as error:
            logger.warning("pod %s/%s: %s", key.namespace, key.name, error)
            return self._settings.poll_s
        except ApiFailure as error:
            logger.error("pod %s/%s: %s", key.namespace, key.name, error)  # noqa: TRY400 - a refusal, no bug
            return _REFUSED_S

    async def _visit(self, key: Key) -> float | None:
        pod = self._world.pods.get(key)
        if pod is None:
            return await self._without_pod(key)
        self._missing_s.pop(key, None)
        if not pod.is_injected:
            return await self._uninjected(pod)
        was_reachable = any(map(_is_reachable, await self._regions(key, pod)))
        heard = await self._listener.hear(key, pod, was_reachable=was_reachable)
        if heard is None:
            return _AGAIN_S
        # Listening took time, in which they may have changed.
        for body in await self._regions(key, pod):
            if (about := heard.get(body["spec"]["engineID"])) is not None:
                await self._keep(pod, body, about)
        if _is_understood(heard):
            await self._relay(pod)
        return self._next_s(key, heard)

    def _next_s(self, key: Key, heard: Mapping[str, Heard | Silence]) -> float:
        n_silences = self._listener.silences(key)
        if n_silences:
            return float(
                min(
                    self._settings.poll_s * 2 ** min(n_silences - 1, 8),
                    self._settings.poll_backoff_s,
                )
            )
        is_asked = any(
            isinstance(each, Heard) or each.why is Why.WRONG_SIDECAR for each in heard.values()
        )
        if is_asked:
            return self._settings.poll_s
        is_unsaid = any(not each.get("status") for each in self._world.regions_of(key))
        return _PENDING_S if is_unsaid else _WAITING_S

    # --- pods without a sidecar ---------------------------------------------------------------------

    async def _uninjected(self, pod: PodView) -> float | None:
        """Say of a pod without a sidecar why it has none."""
        if (occurrence := occurrence_of(pod)) is not None:
            await self._poster.post(occurrence)
        silence = silence_of(pod)
        if silence is None:
            return None
        key = Key(pod.namespace, pod.name)
        bodies = self._world.regions_of(key, pod.uid)
        if not bodies and not pod.is_ending:
            bodies = [await self._region(pod, pod.uid)]
        for body in bodies:
            await self._keep(pod, body, silence)
        return None

    async def _without_pod(self, key: Key) -> float | None:
        """Regions whose pod is not, or no longer, looked at; normally they are about to go with it."""
        left = self._world.regions_of(key)
        if not left:
            self._missing_s.pop(key, None)
            self._listener.forget(key)
            return None
        now_s = time.monotonic()
        since_s = self._missing_s.setdefault(key, now_s)
        if now_s - since_s < _GONE_S:
            return _GONE_S - (now_s - since_s)
        gone = Silence(
            Why.POD_GONE,
            f"the pod was deleted, or has lost the label {LABEL_INJECT}: what its region holds is not known",
        )
        for body in left:
            await self._keep(_view_of_gone(body), body, gone)
        return None

    # --- regions ------------------------------------------------------------------------------------

    async def _regions(self, key: Key, pod: PodView) -> list[JsonObject]:
        """The objects of a pod, made if they are missing and the pod is there to stay."""
        if pod.is_ending:
            return self._world.regions_of(key, pod.uid)
        return [await self._region(pod, engine_id) for engine_id in pod.engine_ids]

    async def _region(self, pod: PodView, engine_id: str) -> JsonObject:
        """The object of an engine, made if it is missing.

        Raises:
            Conflict: one of an earlier pod of the same name is in its place, and about to go; or it is not
                known yet.
        """
        wanted = regions.new_region(pod, engine_id)
        key = Key(pod.namespace, wanted["metadata"]["name"])
        body = self._world.regions.get(key)
        if body is None:
            body = await self._make(pod, wanted)
        if not regions.is_of(body, pod):
            raise Conflict(f"OffloadRegion {key.name} belongs to an earlier pod", 409)
        return body

    async def _make(self, pod: PodView, wanted: JsonObject) -> JsonObject:
        # One that is there already, made before a kill or by another controller, comes by the watch; the
        # conflict has the visit repeated until then.
        made = await self._api.create(regions.collection(pod.namespace), wanted)
        self._metrics.wrote("OffloadRegion", "created")
        return self._world.take_region(made)

    async def _keep(self, pod: PodView, body: JsonObject, heard: Heard | Silence) -> None:
        """Tell what happened, then write the status that says so."""
        previous: JsonObject = body.get("status") or {}
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        if not previous and self._can_wait(key, heard):
            return
        seen = observe(pod, heard, body, timestamp(time.time()))
        since_s = time.monotonic() - self._written_s.get(key, float("-inf"))
        if not is_due(previous, seen.status, since_s, self._settings.small_change_s):
            return
        subject = regions.subject_of(body)
        for each in seen.transitions:
            occurrence = Occurrence(subject, each.type, each.told, each.message, each.mark)
            try:
                await self._poster.post(occurrence)
            except Forbidden as error:
                # A quota or a policy refuses it for good: the status has to stay true all the same.
                logger.warning("an Event of region %s is refused: %s", key, error)
        await self._write_status(key, body, merge_patch(previous, seen.status))

    def _can_wait(self, key: Key, heard: Heard | Silence) -> bool:
        """Whether a first status can wait for the next look, which often saves a write."""
        if isinstance(heard, Silence):
            now_s = time.monotonic()
            since_s = self._pending_s.setdefault(key, now_s)
            return heard.why is Why.POD_PENDING and now_s - since_s < _PENDING_S
        is_first = key not in self._answered
        self._answered.add(key)
        # Most regions are reserved before the next look.
        return is_first and heard.region.state in _BEGINNING

    async def _write_status(self, key: Key, body: JsonObject, patch: JsonObject) -> None:
        metadata = {
            "uid": body["metadata"]["uid"],
            "resourceVersion": body["metadata"]["resourceVersion"],
        }
        path = f"{regions.collection(key.namespace)}/{key.name}/status"
        try:
            written = await self._api.patch(path, {"metadata": metadata, "status": patch})
        except NotFound:
            # It went with its pod, or somebody deleted it; the watch says so, and it is made anew.
            self._world.drop_region(body)
            return
        except Conflict:
            self._metrics.wrote("OffloadRegion", "conflict")
            raise
        self._metrics.wrote("OffloadRegion", "ok")
        self._written_s[key] = time.monotonic()
        self._world.take_region(written)

    # --- wishes -------------------------------------------------------------------------------------

    async def _relay(self, pod: PodView) -> None:
        """Have the pod's annotation say what the regions' specs wish."""
        key = Key(pod.namespace, pod.name)
        wished = regions.desired(pod, self._world.regions_of(key, pod.uid))
        if wished == (pod.desired or None) or pod.is_ending:
            return
        # With another UID than this pod's the API server refuses the patch.
        metadata: dict[str, Any] = {"uid": pod.uid, "annotations": {ANNOTATION_DESIRED: wished}}
        path = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
        try:
            await self._api.patch(path, {"metadata": metadata})
        except NotFound:
            return
        self._metrics.wrote("Pod", "ok")
        if self._world.pods.get(key) is pod:
            self._world.pods[key] = replace(pod, desired=wished or "")

    def forget_region(self, key: Key) -> None:
        """An object is gone."""
        self._written_s.pop(key, None)
        self._answered.discard(key)
        self._pending_s.pop(key, None)


def _is_reachable(body: JsonObject) -> bool:
    found = condition(body.get("status") or {}, Condition.REACHABLE)
    return bool(found.get("status") == "True")


def _is_understood(heard: Mapping[str, Heard | Silence]) -> bool:
    """Whether the pod's sidecar means by a wish what we mean."""
    silences = (each for each in heard.values() if isinstance(each, Silence))
    return all(each.why is not Why.OTHER_CONTRACT for each in silences)


def _view_of_gone(body: Mapping[str, Any]) -> PodView:
    """What is left to know of a pod that is not there: what its region says."""
    spec, metadata = body["spec"], body["metadata"]
    return PodView.unknown(metadata["namespace"], spec["podName"], spec["podUID"])

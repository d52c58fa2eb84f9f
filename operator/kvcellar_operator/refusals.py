"""Tells of opted-in pods that never came to be: what creates them was refused, and we may be why.

The API server refuses such a pod to its ReplicaSet or StatefulSet, which says so in an Event. The sidecar
counts in quotas and LimitRanges like any container, which that Event does not mention.
"""

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NoReturn

from kvcellar.contract import LABEL_INJECT
from kvcellar_operator.cluster import Api, ApiFailure, NotFound
from kvcellar_operator.events import EventType, Occurrence, Subject
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.posting import EventPoster
from kvcellar_operator.words import Told

logger = logging.getLogger(__name__)

FIELD_SELECTOR = "reason=FailedCreate"
"""Of the Events that are watched."""

OWNERS = {"ReplicaSet": "replicasets", "StatefulSet": "statefulsets"}
"""Kinds that create pods, with their plurals; their Events name them."""

_WAITING = 256
_REMEMBERED = 4096
_MAX_CAUSE = 600
_OBJECT_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")


class Refusals:
    """Looks at Events of refused pods, and tells of those that had opted in."""

    def __init__(self, api: Api, poster: EventPoster) -> None:
        self._api = api
        self._poster = poster
        self._queue: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue(_WAITING)
        self._seen: OrderedDict[str, None] = OrderedDict()

    def note(self, event: Mapping[str, Any]) -> None:
        """Look at an Event later; in a flood some are not, and come again."""
        owner = event.get("involvedObject") or {}
        is_new = _is_named(owner) and owner["uid"] not in self._seen
        if is_new and not self._queue.full():
            self._queue.put_nowait({"owner": owner, "message": event.get("message", "")})

    async def run(self) -> NoReturn:
        """Look until cancelled."""
        while True:
            noted = await self._queue.get()
            try:
                await self._look(noted["owner"], str(noted["message"]))
            except ApiFailure as error:
                logger.warning("a refused pod cannot be looked at: %s", error)
            except Exception:
                # The border: one that trips over a mistake of ours must not end the controller.
                logger.exception("a refused pod of %s cannot be looked at", noted["owner"]["name"])

    async def _look(self, owner: Mapping[str, Any], message: str) -> None:
        uid = str(owner.get("uid"))
        if uid in self._seen:
            return
        namespace, name = owner["namespace"], owner["name"]
        plural = OWNERS[owner["kind"]]
        try:
            body = await self._api.get(f"/apis/apps/v1/namespaces/{namespace}/{plural}/{name}")
        except NotFound:
            return
        if _has_opted_in(body):
            subject = Subject("apps/v1", owner["kind"], namespace, name, uid)
            await self._poster.post(_told(subject, message))
        self._seen[uid] = None
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)


def _is_named(owner: Mapping[str, Any]) -> bool:
    """Whether an owner can be asked for. Events are anybody's to write, and their names become a path."""
    names = (owner.get("namespace") or "", owner.get("name") or "")
    return bool(
        owner.get("kind") in OWNERS
        and owner.get("uid")
        and all(_OBJECT_NAME.fullmatch(name) for name in names)
    )


def _has_opted_in(owner: JsonObject) -> bool:
    template = (owner.get("spec") or {}).get("template") or {}
    labels = (template.get("metadata") or {}).get("labels") or {}
    return bool(labels.get(LABEL_INJECT) == "true")


def _told(subject: Subject, cause: str) -> Occurrence:
    message = (
        "a pod that has opted in to kvcellar was refused; the sidecar's requests and limits count in quotas "
        f"and LimitRanges as well: {cause[:_MAX_CAUSE]}"
    )
    return Occurrence(subject, EventType.WARNING, Told.POD_REFUSED, message, "refused")

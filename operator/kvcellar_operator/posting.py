"""Writes Events, once for each transition, whoever else writes them and whenever it is killed."""

import asyncio
import logging
import time
from http import HTTPStatus
from typing import NoReturn

from kvcellar_operator.cluster import Api, ApiFailure, Conflict, Forbidden, NotFound
from kvcellar_operator.events import (
    EventLedger,
    Occurrence,
    count_of,
    event_name,
    new_event,
    raised_event,
)
from kvcellar_operator.metrics import ControllerMetrics
from kvcellar_operator.objects import timestamp

logger = logging.getLogger(__name__)

_LOOK_S = 10.0
_TRIES = 3


class EventPoster:
    """Posts what the ledger admits."""

    def __init__(self, api: Api, metrics: ControllerMetrics) -> None:
        self._api = api
        self._metrics = metrics
        self._ledger = EventLedger()

    async def post(self, occurrence: Occurrence) -> None:
        """Tell an occurrence, unless it was told or is to wait.

        Raises:
            ApiFailure: it could not be written, or others were first again and again; the caller comes again.
        """
        if n_times := self._ledger.admit(occurrence, time.monotonic()):
            await self._write(occurrence, n_times)

    async def run(self) -> NoReturn:
        """Write what was held back long enough, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for occurrence, n_times in self._ledger.due(time.monotonic()):
                try:
                    await self._write(occurrence, n_times)
                except (Forbidden, NotFound) as error:
                    # Of a namespace that is gone, or goes: it would be tried for ever.
                    self._ledger.forget(occurrence)
                    logger.info("an Event of %s is dropped: %s", occurrence.subject.name, error)
                except ApiFailure as error:
                    logger.warning("an Event cannot be written yet: %s", error)
                except Exception:
                    # The border: an Event that trips over a mistake of ours must not end the controller.
                    logger.exception("an Event of %s cannot be written", occurrence.subject.name)

    async def _write(self, occurrence: Occurrence, n_times: int) -> None:
        path = f"/api/v1/namespaces/{occurrence.subject.namespace}/events"
        now = timestamp(time.time())
        # One that is remembered is there, unless its hour is over; to create it would be a write for nothing.
        may_be_new = not self._ledger.remembers(occurrence)
        for _ in range(_TRIES):
            if may_be_new and await self._create(path, occurrence, now):
                return
            if await self._raise(path, occurrence, now, n_times):
                return
            may_be_new = True
        self._metrics.wrote("Event", "conflict")
        # To go on would drop it: the status that is written next says the same, and no Event follows it.
        raise Conflict(
            f"{path}/{event_name(occurrence)}: changed by others {_TRIES} times meanwhile",
            HTTPStatus.CONFLICT,
        )

    async def _create(self, path: str, occurrence: Occurrence, now: str) -> bool:
        """Write a first Event; False if there is one."""
        try:
            body = await self._api.create(path, new_event(occurrence, now))
        except Conflict:
            return False
        self._told(occurrence, count_of(body))
        return True

    async def _raise(self, path: str, occurrence: Occurrence, now: str, n_times: int) -> bool:
        """Count on the Event that is there; False if it changed, or went, meanwhile."""
        path = f"{path}/{event_name(occurrence)}"
        try:
            present = await self._api.get(path)
            patch = raised_event(present, occurrence, now, n_times)
            if patch is None:
                self._ledger.written(occurrence, count_of(present), time.monotonic())
                return True
            present = await self._api.patch(path, patch)
        except (Conflict, NotFound):
            return False
        self._told(occurrence, count_of(present))
        return True

    def _told(self, occurrence: Occurrence, count: int) -> None:
        self._ledger.written(occurrence, count, time.monotonic())
        self._metrics.wrote("Event", "ok")
        self._metrics.told(occurrence.reason)

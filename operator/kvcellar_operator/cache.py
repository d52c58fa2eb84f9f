"""A copy in memory of a collection of the API, kept up by list and watch.

It goes on through everything that ends a watch: its time limit, a restart of the API server, a version
that is too old (410), a missing permission. Until the first list it is not synced; afterwards it may be
old, and says since when, but it is never emptied because the API server is away.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Generic, NoReturn, TypeVar

from kvcellar_operator.cluster import Api, ApiFailure, Expired
from kvcellar_operator.objects import JsonObject, Key, key_of

logger = logging.getLogger(__name__)

_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 3.0)
"""Short to the end: an API server that comes back should be noticed within seconds."""

_LEAST_WATCH_S = 1.0
"""From one watch to the next, and so to the next list: an API server, or a proxy before it, that ends each at
once, well or badly, would be asked as fast as it answers."""

_T = TypeVar("_T")


class Cache(Generic[_T]):
    """The objects of one collection, each reduced to what is needed of it.

    Attributes:
        objects: by key; what `keep` made of them.
        is_synced: the first list is complete.
        answered_s: `time.monotonic` of the last successful list or change.
    """

    def __init__(
        self,
        path: str,
        keep: Callable[[JsonObject], _T],
        *,
        query: Mapping[str, str] | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.objects: dict[Key, _T] = {}
        self.is_synced = False
        self.answered_s = time.monotonic()
        self._path = path
        self._keep = keep
        self._query = dict(query or {})
        self._on_change = on_change
        self._failures = 0

    async def run(self, api: Api) -> NoReturn:
        """Keep the copy up until cancelled."""
        next_s = 0.0
        while True:
            try:
                version: str | None = await self._list(api)
                while version is not None:
                    next_s = time.monotonic() + _LEAST_WATCH_S
                    version = await self._follow(api, version)
                    await asyncio.sleep(next_s - time.monotonic())
            except ApiFailure as error:
                self._failures += 1
                logger.warning("%s: %s; the copy in memory may be old", self._path, error)
                await asyncio.sleep(max(self._pause_s(), next_s - time.monotonic()))

    async def _list(self, api: Api) -> str:
        listed: dict[Key, _T] = {}
        version = ""
        async for page in api.pages(self._path, self._query):
            for body in page.get("items") or ():
                listed[key_of(body)] = self._keep(body)
            version = page["metadata"]["resourceVersion"]
        self.objects = listed
        self.is_synced = True
        self._answered()
        return version

    async def _follow(self, api: Api, version: str) -> str | None:
        """Apply one watch's changes; returns the version to go on from, None to list anew."""
        try:
            async for kind, body in api.watch(self._path, self._query, version):
                version = body["metadata"]["resourceVersion"]
                if kind in ("ADDED", "MODIFIED"):
                    self.objects[key_of(body)] = self._keep(body)
                elif kind == "DELETED":
                    self.objects.pop(key_of(body), None)
                self._failures = 0
                self._answered(is_change=kind != "BOOKMARK")
        except Expired:
            logger.info("%s: the version is too old to go on from, listing anew", self._path)
            return None
        # Not after a list: one works before every watch that fails.
        self._failures = 0
        return version

    def _answered(self, *, is_change: bool = True) -> None:
        self.answered_s = time.monotonic()
        if is_change and self._on_change is not None:
            self._on_change()

    def _pause_s(self) -> float:
        longest_s = _BACKOFF_S[min(self._failures, len(_BACKOFF_S)) - 1]
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, no secret

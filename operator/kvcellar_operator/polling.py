"""One loop that visits every pod when its time has come, so many at once and no more.

A visit says when the next one is due. A pod that changes is visited at once; a pod that is being visited
is visited again afterwards. Pods wait in a heap, so a thousand of them cost nothing between visits.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from kvcellar_operator.objects import Key

logger = logging.getLogger(__name__)

Visit = Callable[[Key], Awaitable[float | None]]
"""Visits one pod; returns the seconds until the next visit, or None if there is none."""

_AFTER_BUG_S = 30.0


class PollLoop:
    """Visits pods, `n_at_once` at a time."""

    def __init__(self, visit: Visit, n_at_once: int) -> None:
        self._visit = visit
        self._free = asyncio.Semaphore(n_at_once)
        self._due_s: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._visited: set[Key] = set()
        self._woken: set[Key] = set()
        self._changed = asyncio.Event()
        self.lag_s = 0.0
        """How late the newest visit began."""

    def __len__(self) -> int:
        """Pods that wait or are visited."""
        return len(self._due_s.keys() | self._visited)

    def wake(self, key: Key, delay_s: float = 0.0) -> None:
        """Visit a pod after `delay_s`, or before if it is due earlier."""
        if key in self._visited:
            self._woken.add(key)
        else:
            self._schedule(key, time.monotonic() + delay_s)

    async def run(self) -> NoReturn:
        """Visit until cancelled."""
        async with asyncio.TaskGroup() as visits:
            while True:
                key = await self._next()
                await self._free.acquire()
                self._visited.add(key)
                visits.create_task(self._turn(key))

    async def _next(self) -> Key:
        while True:
            self._changed.clear()
            if self._heap:
                due_s, key = self._heap[0]
                wait_s = due_s - time.monotonic()
                if wait_s <= 0:
                    heapq.heappop(self._heap)
                    # An entry that was overtaken by an earlier one has another time by now.
                    if self._due_s.get(key) == due_s:
                        del self._due_s[key]
                        self.lag_s = -wait_s
                        return key
                    continue
            else:
                wait_s = None
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _turn(self, key: Key) -> None:
        delay_s: float | None = _AFTER_BUG_S
        try:
            delay_s = await self._visit(key)
        except Exception:
            # The border: a pod that trips over a mistake of ours must not stop all the others.
            logger.exception("visiting pod %s/%s failed", key.namespace, key.name)
        finally:
            self._visited.discard(key)
            self._free.release()
        if key in self._woken:
            self._woken.discard(key)
            delay_s = 0.0
        if delay_s is not None:
            self._schedule(key, time.monotonic() + delay_s)

    def _schedule(self, key: Key, due_s: float) -> None:
        if due_s < self._due_s.get(key, float("inf")):
            self._due_s[key] = due_s
            heapq.heappush(self._heap, (due_s, key))
            self._changed.set()

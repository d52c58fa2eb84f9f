"""The operator's endless loops: what goes wrong in one turn ends none of them, and none runs without a pause."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from kvcellar_operator.cache import Cache
from kvcellar_operator.cluster import (
    Api,
    ApiFailure,
    Conflict,
    Expired,
    Forbidden,
    NotFound,
    Unreachable,
)
from kvcellar_operator.events import EventType, Occurrence, Subject
from kvcellar_operator.metrics import ControllerMetrics
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.posting import EventPoster
from kvcellar_operator.refusals import Refusals
from kvcellar_operator.words import Told

REPLICA_SET = {"kind": "ReplicaSet", "namespace": "ns", "name": "engine-5d", "uid": "7b0d"}
OCCURRENCE = Occurrence(
    Subject("v1", "Pod", "ns", "engine-0", "7b0c"),
    EventType.WARNING,
    Told.NOT_INJECTED,
    "nobody was asked",
    "created",
)


def run_for(seconds: float, work: Coroutine[Any, Any, object]) -> None:
    """Run what has no end, for a while."""

    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await work

    asyncio.run(run())


# ---- Events


class Contended:
    """An API server on which another writer is always first, for so many times."""

    def __init__(self, n_conflicts: int) -> None:
        self.n_conflicts = n_conflicts
        self.created: list[JsonObject] = []

    async def create(self, _path: str, body: JsonObject) -> JsonObject:
        if self.n_conflicts > 0:
            raise Conflict("it exists already", 409)
        self.created.append(body)
        return body

    async def get(self, _path: str) -> JsonObject:
        self.n_conflicts -= 1
        raise Conflict("it was changed meanwhile", 409)


def test_an_event_that_others_change_again_and_again_is_not_dropped_in_silence() -> None:
    api = Contended(n_conflicts=3)
    poster = EventPoster(cast("Api", api), ControllerMetrics())

    # Whoever tells it comes again: a status that says the same must not be written before.
    with pytest.raises(Conflict, match="engine-0"):
        asyncio.run(poster.post(OCCURRENCE))
    assert api.created == []

    asyncio.run(poster.post(OCCURRENCE))
    (body,) = api.created
    assert body["reason"] == Told.NOT_INJECTED


class Vanishing:
    """An API server whose namespace cannot be written to after the first Event, for a reason or another."""

    def __init__(self, error: ApiFailure) -> None:
        self.error = error
        self.n_created = 0
        self.asked: asyncio.Queue[str] = asyncio.Queue()

    async def create(self, _path: str, body: JsonObject) -> JsonObject:
        self.n_created += 1
        if self.n_created > 1:
            raise self.error
        return body

    async def get(self, path: str) -> JsonObject:
        self.asked.put_nowait(path)
        raise NotFound(f"{path}: there is none", 404)


def is_tried_again(api: Vanishing, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> bool:
    """Whether an Event that was held back, and could not be written, is tried once more."""
    monkeypatch.setattr("kvcellar_operator.events.HOLD_S", 0.01)
    monkeypatch.setattr("kvcellar_operator.posting._LOOK_S", 0.02)
    poster = EventPoster(cast("Api", api), ControllerMetrics())

    async def post() -> bool:
        await poster.post(OCCURRENCE)
        await poster.post(replace(OCCURRENCE, mark="again"))
        task = asyncio.create_task(poster.run())
        await asyncio.wait_for(api.asked.get(), 60)
        try:
            await asyncio.wait_for(api.asked.get(), patience_s)
        except TimeoutError:
            return False
        finally:
            task.cancel()
        return True

    return asyncio.run(post())


@pytest.mark.parametrize(
    "error",
    [
        NotFound("there is no such namespace", 404),
        Forbidden("the namespace is being terminated", 403),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_event_that_was_held_back_is_dropped_when_its_namespace_is_gone(
    error: ApiFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_tried_again(Vanishing(error), monkeypatch, patience_s=0.3)


def test_an_event_that_was_held_back_is_kept_while_the_api_server_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = Vanishing(Unreachable("the connection was closed"))
    assert is_tried_again(away, monkeypatch, patience_s=60)


# ---- refused pods


class Strange:
    """An API server that answers about the first object what no code expects."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def get(self, path: str) -> JsonObject:
        self.asked.append(path)
        return {"spec": ["no", "object"]} if len(self.asked) == 1 else {"spec": {}}


def test_an_answer_that_nobody_expects_does_not_end_the_look_at_refused_pods(
    caplog: pytest.LogCaptureFixture,
) -> None:
    api = Strange()

    async def look() -> None:
        refused = Refusals(cast("Api", api), EventPoster(cast("Api", api), ControllerMetrics()))
        for number in (1, 2):
            owner = REPLICA_SET | {"name": f"engine-{number}", "uid": f"{number}"}
            refused.note({"involvedObject": owner, "message": "exceeded quota"})
        await refused.run()

    run_for(0.2, look())
    assert [path.rpartition("/")[2] for path in api.asked] == ["engine-1", "engine-2"]
    assert "engine-1" in caplog.text


# ---- copies in memory


class Closing:
    """An API server that ends each watch at once, in one way or another, until the third, which goes on."""

    def __init__(self, error: Exception | None, *, is_change_first: bool = False) -> None:
        self.error = error
        self.is_change_first = is_change_first
        self.n_lists = 0
        self.n_watches = 0
        self.is_enough = asyncio.Event()

    async def pages(self, _path: str, _query: Mapping[str, str]) -> AsyncIterator[JsonObject]:
        self.n_lists += 1
        yield {"metadata": {"resourceVersion": "5"}, "items": []}

    async def watch(
        self, _path: str, _query: Mapping[str, str], since: str
    ) -> AsyncIterator[tuple[str, JsonObject]]:
        self.n_watches += 1
        if self.n_watches == 3:
            self.is_enough.set()
            await asyncio.Event().wait()
        if self.is_change_first:
            yield "BOOKMARK", {"metadata": {"resourceVersion": since}}
        if self.error is not None:
            raise self.error


def until_the_third_watch(api: Closing) -> float:
    """Have a copy kept up; returns how long it took."""
    cache: Cache[JsonObject] = Cache("/apis/any", lambda body: body)

    async def follow() -> None:
        task = asyncio.create_task(cache.run(cast("Api", api)))
        async with asyncio.timeout(60):
            await api.is_enough.wait()
        task.cancel()

    began_s = time.monotonic()
    asyncio.run(follow())
    assert cache.is_synced
    return time.monotonic() - began_s


WATCH_ENDS = [
    None,
    Expired("it is too old", 410),
    Forbidden("it may not watch", 403),
    Unreachable("the connection was closed"),
]


@pytest.mark.parametrize("is_change_first", [False, True], ids=["at once", "after a change"])
@pytest.mark.parametrize("error", WATCH_ENDS, ids=lambda error: type(error).__name__)
def test_an_api_server_that_ends_each_watch_at_once_is_asked_again_after_a_pause(
    error: Exception | None, is_change_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcellar_operator.cache._LEAST_WATCH_S", 0.3)
    monkeypatch.setattr("kvcellar_operator.cache._BACKOFF_S", (0.01,))
    api = Closing(error, is_change_first=is_change_first)

    assert until_the_third_watch(api) > 0.59
    assert api.n_lists == (1 if error is None else 3)


def test_watches_that_fail_again_and_again_are_tried_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcellar_operator.cache._LEAST_WATCH_S", 0.0)
    monkeypatch.setattr("kvcellar_operator.cache._BACKOFF_S", (0.01, 1.0))

    assert until_the_third_watch(Closing(Forbidden("it may not watch", 403))) > 0.49


def test_a_watch_that_followed_before_it_failed_is_tried_again_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvcellar_operator.cache._LEAST_WATCH_S", 0.0)
    monkeypatch.setattr("kvcellar_operator.cache._BACKOFF_S", (0.01, 30.0))

    broken = Closing(Unreachable("the connection was closed"), is_change_first=True)
    assert until_the_third_watch(broken) < 15

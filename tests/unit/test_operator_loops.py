"""The operator's endless loops: what goes wrong in one turn ends none of them, and none runs without a pause."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, cast

import pytest

from kvcellar_operator.cache import Cache
from kvcellar_operator.cluster import Api, Conflict, Expired
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
    """An API server that ends each watch at once, in one way or another."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.n_lists = 0
        self.n_watches = 0

    async def pages(self, _path: str, _query: Mapping[str, str]) -> AsyncIterator[JsonObject]:
        self.n_lists += 1
        yield {"metadata": {"resourceVersion": "5"}, "items": []}

    async def watch(
        self, _path: str, _query: Mapping[str, str], since: str
    ) -> AsyncIterator[tuple[str, JsonObject]]:
        self.n_watches += 1
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        yield "BOOKMARK", {"metadata": {"resourceVersion": since}}


@pytest.mark.parametrize("error", [None, Expired("it is too old", 410)])
def test_an_api_server_that_ends_each_watch_at_once_is_asked_again_after_a_pause(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcellar_operator.cache._LEAST_WATCH_S", 0.1)
    api = Closing(error)
    cache: Cache[JsonObject] = Cache("/apis/any", lambda body: body)

    run_for(0.55, cache.run(cast("Api", api)))

    assert cache.is_synced
    assert 2 <= api.n_watches <= 6
    assert api.n_lists == (1 if error is None else api.n_watches)

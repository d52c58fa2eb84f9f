"""The controller's parts, each by itself: the loop, what sidecars may answer, Events, wishes."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from kvcellar import __version__
from kvcellar.contract import CONTRACT_VERSION, PlanBody, RegionState
from kvcellar_operator.cluster import Api, NotFound
from kvcellar_operator.events import (
    EventLedger,
    EventType,
    Occurrence,
    Subject,
    count_of,
    event_name,
    new_event,
    raised_event,
)
from kvcellar_operator.heard import Heard, Silence
from kvcellar_operator.listening import Listener
from kvcellar_operator.metrics import ControllerMetrics
from kvcellar_operator.objects import Key, key_of
from kvcellar_operator.podview import PodView, view_pod
from kvcellar_operator.polling import PollLoop
from kvcellar_operator.posting import EventPoster
from kvcellar_operator.refusals import Refusals
from kvcellar_operator.regions import desired, is_newer, new_region
from kvcellar_operator.sidecars import AskLimits, NoAnswer, Sidecars, pod_address
from kvcellar_operator.words import TOLD, WHYS, Told, Why
from kvcellar_operator.world import World
from tests.support.fake_sidecars import FakeSidecar, FakeSidecars, Manner, attached, region

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "events.md"


def pod(ip: str = "10.0.0.7", name: str = "engine-0", **status: object) -> PodView:
    """An injected pod, of which the kubelet says that the sidecar runs."""
    stamp = json.dumps({"engineIds": ["$(KVCELLAR_POD_UID)"], "capacityBytes": 2**30})
    ports = [{"name": "kvcellar", "containerPort": 9785}]
    return view_pod(
        {
            "metadata": {
                "namespace": "ns",
                "name": name,
                "uid": "7b0c",
                "resourceVersion": "5",
                "annotations": {"kvcellar.dev/injected": stamp},
            },
            "spec": {"initContainers": [{"name": "kvcellar", "ports": ports}]},
            "status": {
                "phase": "Running",
                "podIP": ip,
                "initContainerStatuses": [{"name": "kvcellar", "state": {"running": {}}}],
                **status,
            },
        }
    )


# --- the loop -------------------------------------------------------------------------------------------


async def settled(loop: PollLoop, seconds: float) -> None:
    """Let the loop work for a while."""
    task = asyncio.create_task(loop.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_no_more_are_visited_at_once_than_allowed_and_each_comes_again() -> None:
    at_once: list[int] = []
    visits: list[Key] = []
    inside = 0

    async def visit(key: Key) -> float:
        nonlocal inside
        inside += 1
        at_once.append(inside)
        await asyncio.sleep(0)
        visits.append(key)
        inside -= 1
        return 0.01

    async def run() -> None:
        loop = PollLoop(visit, 4)
        for number in range(20):
            loop.wake(Key("ns", str(number)))
        await settled(loop, 0.3)

    asyncio.run(run())
    assert max(at_once) == 4
    assert all(visits.count(Key("ns", str(number))) >= 2 for number in range(20))


def test_a_pod_that_is_woken_during_its_visit_is_visited_again() -> None:
    visits: list[Key] = []

    async def run() -> None:
        async def visit(key: Key) -> None:
            visits.append(key)
            if len(visits) == 1:
                loop.wake(key)

        loop = PollLoop(visit, 2)
        loop.wake(Key("ns", "a"))
        loop.wake(Key("ns", "a"))
        await settled(loop, 0.1)

    asyncio.run(run())
    assert len(visits) == 2


def test_a_mistake_in_one_visit_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    visits: list[str] = []

    async def visit(key: Key) -> None:
        visits.append(key.name)
        if key.name == "bad":
            raise RuntimeError("a mistake of ours")

    async def run() -> None:
        loop = PollLoop(visit, 1)
        for name in ("bad", "good"):
            loop.wake(Key("ns", name))
        await settled(loop, 0.1)

    asyncio.run(run())
    assert sorted(visits) == ["bad", "good"]
    assert "visiting pod ns/bad failed" in caplog.text


# --- sidecars -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def servers() -> Iterator[FakeSidecars]:
    with FakeSidecars.running(port=19785) as running:
        yield running


@pytest.fixture
def fake(servers: FakeSidecars) -> FakeSidecar:
    return servers.add()


def asking(work: Any, timeout_s: float = 30.0) -> Any:  # noqa: ANN401 - whatever the test asks for
    """Run `work` with something that asks; only for one that never answers is the time short."""

    async def run() -> object:
        sidecars = Sidecars(
            AskLimits(timeout_s, body_bytes=100_000), lambda p: f"http://{p.ip}:19785"
        )
        try:
            return await work(sidecars)
        finally:
            await sidecars.close()

    return asyncio.run(run())


def test_an_answer_is_read(fake: FakeSidecar) -> None:
    fake.regions = [attached("7b0c", workers=2)]
    view = pod(fake.ip)
    assert asking(lambda sidecars: sidecars.ask_regions(view)) == {"7b0c": fake.regions[0]}


def test_keys_of_a_later_release_of_the_same_contract_are_let_be(fake: FakeSidecar) -> None:
    fake.regions = [attached("7b0c", workers=2)]
    fake.more = {"ofTheNextRelease": {"any": 1}}
    view = pod(fake.ip)
    assert asking(lambda sidecars: sidecars.ask_regions(view)) == {"7b0c": fake.regions[0]}


@pytest.mark.parametrize(
    ("manner", "why"),
    [
        (Manner.SLOW, Why.TIMEOUT),
        (Manner.GARBAGE, Why.BAD_ANSWER),
        (Manner.ERROR, Why.BAD_STATUS),
        (Manner.HUGE, Why.BAD_ANSWER),
        (Manner.REDIRECT, Why.BAD_STATUS),
        (Manner.HANGUP, Why.CONNECTION_FAILED),
    ],
)
def test_a_sidecar_that_misbehaves_is_named(fake: FakeSidecar, manner: Manner, why: Why) -> None:
    fake.manner = manner
    timeout_s = 0.1 if why is Why.TIMEOUT else 30.0
    with pytest.raises(NoAnswer) as error:
        asking(lambda sidecars: sidecars.ask_regions(pod(fake.ip)), timeout_s)
    assert error.value.why is why


def test_nobody_at_the_address_is_named() -> None:
    with pytest.raises(NoAnswer) as error:
        asking(lambda sidecars: sidecars.ask_regions(pod("127.9.255.254")))
    assert error.value.why is Why.CONNECTION_FAILED


@pytest.mark.parametrize(
    "change", [{"usedBytes": -1}, {"generation": 2**63}, {"state": "Tomorrow"}, {"usedBytes": 0.5}]
)
def test_what_no_api_server_would_store_is_refused(
    fake: FakeSidecar, change: dict[str, Any]
) -> None:
    fake.regions = [replace(attached("7b0c"), **change)]
    with pytest.raises(NoAnswer) as error:
        asking(lambda sidecars: sidecars.ask_regions(pod(fake.ip)))
    assert error.value.why is Why.BAD_ANSWER


def test_a_sidecar_of_another_contract_is_not_believed_and_both_versions_are_named(
    fake: FakeSidecar,
) -> None:
    fake.regions = [attached("7b0c")]
    fake.contract_version, fake.version = CONTRACT_VERSION + 1, "9.9\x1b[31m" + "9" * 500
    with pytest.raises(NoAnswer) as error:
        asking(lambda sidecars: sidecars.ask_regions(pod(fake.ip)))
    assert error.value.why is Why.OTHER_CONTRACT
    said = str(error.value)
    assert f"contract version {CONTRACT_VERSION + 1} (kvcellar 9.9" in said
    assert f"contract version {CONTRACT_VERSION} (kvcellar {__version__})" in said
    assert said.isprintable()
    assert len(said) < 400


def test_of_another_contract_nothing_but_its_version_has_to_be_readable(fake: FakeSidecar) -> None:
    fake.regions = [replace(attached("7b0c"), usedBytes="much")]  # type: ignore[arg-type]
    with pytest.raises(NoAnswer) as error:
        asking(lambda sidecars: sidecars.ask_regions(pod(fake.ip)))
    assert error.value.why is Why.BAD_ANSWER
    fake.contract_version = CONTRACT_VERSION - 1
    with pytest.raises(NoAnswer) as error:
        asking(lambda sidecars: sidecars.ask_regions(pod(fake.ip)))
    assert error.value.why is Why.OTHER_CONTRACT


def test_a_sidecar_that_tells_no_contract_speaks_the_first(
    fake: FakeSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.regions = [attached("7b0c")]
    fake.contract_version = None
    assert set(asking(lambda sidecars: sidecars.ask_regions(pod(fake.ip)))) == {"7b0c"}
    monkeypatch.setattr("kvcellar_operator.sidecars.CONTRACT_VERSION", CONTRACT_VERSION + 1)
    with pytest.raises(NoAnswer, match=r"speaks contract version 1 \(an early release"):
        asking(lambda sidecars: sidecars.ask_regions(pod(fake.ip)))


def hear(fake_ip: str, view: PodView, *, was_reachable: bool, times: int = 1) -> Any:  # noqa: ANN401
    async def work(sidecars: Sidecars) -> object:
        listener = Listener(sidecars, ControllerMetrics())
        heard = None
        for _ in range(times):
            heard = await listener.hear(Key("ns", view.name), view, was_reachable=was_reachable)
        return heard

    return asking(work)


def test_one_lost_question_is_no_silence_of_a_sidecar_that_was_reachable(fake: FakeSidecar) -> None:
    fake.manner = Manner.ERROR
    view = pod(fake.ip)
    assert hear(fake.ip, view, was_reachable=True) is None
    assert hear(fake.ip, view, was_reachable=True, times=2)["7b0c"].why is Why.BAD_STATUS
    assert hear(fake.ip, view, was_reachable=False)["7b0c"].why is Why.BAD_STATUS


def test_the_region_of_another_pod_is_not_taken_for_this_ones(fake: FakeSidecar) -> None:
    fake.regions = [attached("another")]
    heard = hear(fake.ip, pod(fake.ip), was_reachable=True)["7b0c"]
    assert isinstance(heard, Silence)
    assert heard.why is Why.WRONG_SIDECAR
    assert "another" in heard.message


def test_a_failed_region_comes_with_its_plan(fake: FakeSidecar) -> None:
    fake.regions = [region("7b0c", RegionState.FAILED)]
    fake.plan = PlanBody(False, 2, 1, "tmpfs", [])
    heard = hear(fake.ip, pod(fake.ip), was_reachable=True)["7b0c"]
    assert isinstance(heard, Heard)
    assert heard.plan == fake.plan


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"phase": "Succeeded"}, Why.POD_ENDED),
        ({"phase": "Failed"}, Why.POD_ENDED),
        ({"podIP": "", "initContainerStatuses": []}, Why.POD_PENDING),
        (
            {
                "initContainerStatuses": [
                    {"name": "kvcellar", "state": {"waiting": {"reason": "PodInitializing"}}}
                ]
            },
            Why.POD_PENDING,
        ),
        (
            {
                "initContainerStatuses": [
                    {"name": "kvcellar", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
                ]
            },
            Why.SIDECAR_NOT_RUNNING,
        ),
    ],
)
def test_who_does_not_run_is_not_asked(fake: FakeSidecar, status: dict[str, Any], why: Why) -> None:
    view = pod(fake.ip, **status)
    assert hear(fake.ip, view, was_reachable=True)["7b0c"].why is why
    assert fake.n_asked == 0


def test_addresses_of_both_families_make_urls() -> None:
    assert pod_address(pod("10.0.0.7")) == "http://10.0.0.7:9785"
    assert pod_address(pod("fd00::7")) == "http://[fd00::7]:9785"
    assert pod_address(pod("")) is None


# --- Events ---------------------------------------------------------------------------------------------

SUBJECT = Subject("kvcellar.dev/v1alpha1", "OffloadRegion", "ns", "engine-0-1", "u1")


def happened(mark: str, reason: str = "EngineDetached", subject: Subject = SUBJECT) -> Occurrence:
    return Occurrence(subject, EventType.WARNING, reason, "gone", mark)


def test_the_same_transition_is_written_once() -> None:
    ledger = EventLedger()
    assert ledger.admit(happened("a"), 0.0) == 1
    ledger.written(happened("a"), 1, 0.0)
    assert ledger.admit(happened("a"), 1000.0) == 0


def test_what_comes_too_often_is_held_and_counted() -> None:
    ledger = EventLedger()
    ledger.written(happened("a"), 1, 0.0)
    assert [ledger.admit(happened(mark), 10.0) for mark in ("b", "b", "c")] == [0, 0, 0]
    assert ledger.due(59.0) == []
    assert ledger.due(60.0) == [(happened("c"), 2)]
    ledger.written(happened("c"), 3, 60.0)
    assert ledger.due(1000.0) == []
    assert ledger.admit(happened("d"), 121.0) == 1


def test_an_event_that_was_written_is_remembered() -> None:
    ledger = EventLedger()
    first = happened("a")
    assert not ledger.remembers(first)
    ledger.written(first, 1, 0.0)
    assert ledger.remembers(replace(first, mark="b"))
    assert not ledger.remembers(replace(first, reason="Other"))


def test_the_ledger_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcellar_operator.events.MEMORY", 2)
    ledger = EventLedger()
    for reason in ("A", "B", "C"):
        ledger.written(happened("a", reason), 1, 0.0)
    assert [ledger.admit(happened("a", reason), 0.0) for reason in ("A", "B", "C")] == [1, 0, 0]


def test_an_event_that_is_there_is_counted_on_unless_it_tells_the_same() -> None:
    present = new_event(happened("a"), "2030-01-01T00:00:00Z")
    present["metadata"]["resourceVersion"] = "9"
    assert raised_event(present, happened("a"), "2030-01-01T00:01:00Z") is None
    raised = raised_event(present, happened("b"), "2030-01-01T00:01:00Z", 3)
    assert raised is not None
    assert raised["count"] == 4
    assert raised["metadata"]["resourceVersion"] == "9"
    assert count_of({}) == 1


def test_names_of_events_are_legal_and_differ() -> None:
    long = Subject("v1", "Pod", "ns", "p" * 250 + ".a", "u1")
    other = Subject("v1", "Pod", "ns", "p" * 250 + ".a", "u2")
    names = {event_name(happened("a", reason, s)) for reason in ("A", "B") for s in (long, other)}
    assert len(names) == 4
    assert all(
        len(name) <= 253 and re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) for name in names
    )


# --- objects --------------------------------------------------------------------------------------------


def made(view: PodView, version: str = "1", uid: str = "r1", **spec: object) -> dict[str, Any]:
    """The region as the API server would hold it."""
    body = new_region(view, "7b0c")
    body["metadata"] |= {"uid": uid, "resourceVersion": version, "generation": 2}
    body["spec"] |= spec
    return body


def test_a_region_is_owned_by_its_pod_and_has_no_finalizer() -> None:
    body = new_region(pod(), "7b0c")
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["blockOwnerDeletion"]) == ("Pod", "7b0c", False)
    assert "finalizers" not in body["metadata"]
    assert body["spec"] == {
        "engineID": "7b0c",
        "podName": "engine-0",
        "podUID": "7b0c",
        "capacity": "1Gi",
    }


def test_wishes_are_relayed_with_their_generation_and_only_if_there_are_any() -> None:
    view = pod()
    assert desired(view, [made(view)]) is None
    text = desired(view, [made(view, retention="now")])
    assert text is not None
    assert json.loads(text) == {
        "podUID": "7b0c",
        "regions": {"7b0c": {"generation": 2, "retention": "now"}},
    }


def test_of_a_region_the_newest_version_counts() -> None:
    world, view = World(), pod()
    world.take_region(made(view, "10"))
    assert (
        world.take_region(made(view, "9", contents="keep"))["metadata"]["resourceVersion"] == "10"
    )
    assert is_newer(made(view, "2", uid="r2"), made(view, "10"))
    key = Key("ns", "engine-0")
    assert len(world.regions_of(key)) == 1
    world.drop_region(made(view, "11", uid="other"))
    assert len(world.regions_of(key)) == 1
    world.drop_region(made(view, "11"))
    assert world.regions_of(key) == []
    assert key_of(made(view)).namespace == "ns"


class NothingThere:
    """An API server without any object; it notes what it is asked for."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def get(self, path: str) -> dict[str, Any]:
        """404."""
        self.paths.append(path)
        raise NotFound("there is none", 404)


def test_an_event_that_names_no_owner_does_not_end_the_look_at_refused_pods() -> None:
    api = NothingThere()
    good = {"kind": "ReplicaSet", "namespace": "ns", "name": "engine-5d", "uid": "7b0d"}
    # The API server takes each of these from whoever may write Events.
    bad = [
        *({name: value for name, value in good.items() if name != left_out} for left_out in good),
        good | {"name": "x/../../../../../v1/secrets"},
        good | {"name": "x?limit=1"},
    ]

    async def look() -> None:
        poster = EventPoster(cast("Api", api), ControllerMetrics())
        refused = Refusals(cast("Api", api), poster)
        for owner in [*bad, good]:
            refused.note({"involvedObject": owner, "message": "exceeded quota"})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await refused.run()

    asyncio.run(look())
    assert api.paths == ["/apis/apps/v1/namespaces/ns/replicasets/engine-5d"]


def test_a_damaged_annotation_makes_no_pod_trip() -> None:
    for text in (
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"engineIds": 7}',
        '{"engineIds": ["/etc"], "capacityBytes": -1}',
    ):
        body = {
            "metadata": {
                "namespace": "ns",
                "name": "n",
                "uid": "u",
                "resourceVersion": "1",
                "annotations": {"kvcellar.dev/injected": text},
            }
        }
        assert view_pod(body).engine_ids == ()
        assert view_pod(body).capacity_bytes == 0


def test_a_forged_annotation_makes_no_more_regions_than_the_webhook_would() -> None:
    stamp = json.dumps({"engineIds": [f"e{number}" for number in range(5000)]})
    body = {
        "metadata": {
            "namespace": "ns",
            "name": "n",
            "uid": "u",
            "resourceVersion": "1",
            "annotations": {"kvcellar.dev/injected": stamp},
        }
    }
    assert len(view_pod(body).engine_ids) == 64 * 16


# --- documents ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [WHYS, TOLD])
def test_every_reason_is_explained_and_documented(words: dict[Any, Any]) -> None:
    assert set(words) in (set(Why), set(Told))
    text = DOCUMENT.read_text()
    for word, explanation in words.items():
        row = f"| `{word}` | {explanation.meaning} | {explanation.remedy} |"
        assert row in text

"""What the controller makes of an answer: true, stable, told once, and taken by the API server's schema."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.contract import (
    GeometryBody,
    LimitBody,
    OrphanBody,
    ParticipantBody,
    PlanBody,
    RegionBody,
    RegionState,
)
from kvcellar_operator.crd_region import Condition, status_schema
from kvcellar_operator.engines import region_object_name
from kvcellar_operator.heard import UNINJECTED, Heard, Silence, condition
from kvcellar_operator.observe import observe
from kvcellar_operator.podview import PodView, view_pod
from kvcellar_operator.status import is_due, merge_patch
from kvcellar_operator.uninjected import NOT_INJECTED, occurrence_of, silence_of
from kvcellar_operator.words import Told, Why
from tests.support.fake_sidecars import GIB, attached, orphan, region

NOW = "2030-01-01T00:00:00Z"
LATER = "2030-01-01T01:00:00Z"
ENGINE = "7b0c"


def pod(**status: object) -> PodView:
    """An injected pod of one engine."""
    stamp = (
        '{"engineIds":["7b0c"],"containers":["engine"],"capacityBytes":1073741824,'
        '"sidecarMemoryBytes":1200000000,"volumeBytes":2147483648,"podMemoryLimitBytes":9000000000,'
        '"bindingLimit":"sizeLimit"}'
    )
    return view_pod(
        {
            "metadata": {
                "namespace": "ns",
                "name": "engine-0",
                "uid": "7b0c",
                "resourceVersion": "5",
                "annotations": {"kvcellar.dev/injected": stamp},
            },
            "spec": {
                "nodeName": "node-1",
                "initContainers": [
                    {"name": "kvcellar", "ports": [{"name": "kvcellar", "containerPort": 9785}]}
                ],
            },
            "status": {"phase": "Running", "podIP": "10.0.0.7", **status},
        }
    )


POD = pod()


def an_object(status: dict[str, Any] | None = None, **spec: object) -> dict[str, Any]:
    """An OffloadRegion of it."""
    return {
        "metadata": {"name": "engine-0-1", "generation": 3},
        "spec": {"engineID": ENGINE, **spec},
        "status": status or {},
    }


def follow(
    *heard: RegionBody | Heard | Silence, view: PodView = POD
) -> tuple[dict[str, Any], list[Told]]:
    """The status after a row of looks, and everything that was told."""
    status: dict[str, Any] = {}
    told: list[Told] = []
    for each in heard:
        what = Heard(each) if isinstance(each, RegionBody) else each
        seen = observe(view, what, an_object(status), NOW)
        told += [transition.told for transition in seen.transitions]
        status = seen.status
    return status, told


def holds(status: dict[str, Any], kind: Condition) -> tuple[str, str]:
    found = condition(status, kind)
    return found["status"], found["reason"]


UNREACHABLE = Silence(Why.TIMEOUT, "no answer")
PENDING = Silence(Why.POD_PENDING, "not started")


def test_resident_is_what_the_sidecar_s_metric_of_that_name_says() -> None:
    status, _ = follow(region(ENGINE, RegionState.RESERVED, settledBytes=GIB // 4))
    assert status["residentBytes"] == status["reservedBytes"] == GIB
    assert status["settleProgress"] == 25


def test_a_life_is_told_once_and_in_order() -> None:
    status, told = follow(
        PENDING,
        region(ENGINE, RegionState.PLANNED),
        region(ENGINE, RegionState.RESERVING),
        region(ENGINE, RegionState.RESERVED),
        region(ENGINE),
        attached(ENGINE),
        attached(ENGINE, usedBytes=GIB // 2),
    )
    assert told == [Told.REGION_RESERVED, Told.ENGINE_ATTACHED]
    assert status["phase"] == "Ready"
    assert status["capacityBytes"] == status["reservedBytes"] == status["residentBytes"] == GIB
    assert status["usedBytes"] == GIB // 2
    assert status["settleProgress"] == 100
    assert status["node"] == "node-1"
    assert status["memory"]["sidecarBytes"] == 1_200_000_000
    assert status["memory"]["bindingLimit"] == "tmpfs"
    assert holds(status, Condition.RESERVED) == ("True", "Reserved")
    assert holds(status, Condition.SETTLED) == ("True", "Settled")
    assert holds(status, Condition.ATTACHED) == ("True", "EngineAttached")
    assert holds(status, Condition.REACHABLE) == ("True", "Answered")
    assert holds(status, Condition.DEGRADED) == ("False", "AsExpected")


def test_a_crash_is_told_whether_or_not_the_gap_was_seen() -> None:
    seen = follow(attached(ENGINE), region(ENGINE, engineStarts=1), attached(ENGINE, starts=2))
    assert seen[1] == [
        Told.REGION_RESERVED,
        Told.ENGINE_ATTACHED,
        Told.ENGINE_DETACHED,
        Told.ENGINE_RESTARTED,
    ]
    missed = follow(attached(ENGINE), attached(ENGINE, starts=2))
    assert missed[1][2:] == [Told.ENGINE_RESTARTED]


def test_an_engine_that_leaves_with_its_pod_is_not_told() -> None:
    ending = view_pod(
        {
            "metadata": {
                "namespace": "ns",
                "name": "engine-0",
                "uid": ENGINE,
                "resourceVersion": "6",
                "deletionTimestamp": NOW,
            }
        }
    )
    _, told = follow(attached(ENGINE), region(ENGINE, engineStarts=1), view=ending)
    assert Told.ENGINE_DETACHED not in told


def test_silence_leaves_the_numbers_and_makes_the_conditions_unknown() -> None:
    status, told = follow(attached(ENGINE, usedBytes=7), UNREACHABLE)
    assert status["usedBytes"] == 7
    assert status["phase"] == "Ready"
    assert holds(status, Condition.REACHABLE) == ("False", "Timeout")
    assert holds(status, Condition.RESERVED) == ("Unknown", "Timeout")
    assert holds(status, Condition.DEGRADED) == ("True", "Timeout")
    assert told[-1] is Told.SIDECAR_UNREACHABLE

    status, told = follow(attached(ENGINE), UNREACHABLE, UNREACHABLE, attached(ENGINE))
    assert told[2:] == [Told.SIDECAR_UNREACHABLE, Told.SIDECAR_REACHABLE]
    assert holds(status, Condition.RESERVED) == ("True", "Reserved")


def test_a_region_that_does_not_fit_says_by_which_limit() -> None:
    failed = region(ENGINE, RegionState.FAILED, reason="it does not fit")
    plan = PlanBody(False, 10 * GIB, GIB, "pod memory limit", [])
    seen = observe(POD, Heard(failed, plan), an_object(), NOW)
    assert holds(seen.status, Condition.DEGRADED) == ("True", "DoesNotFit")
    assert [each.told for each in seen.transitions] == [Told.DOES_NOT_FIT]
    assert "pod memory limit" in seen.transitions[0].message

    status, told = follow(failed, failed, region(ENGINE))
    assert told == [Told.REGION_FAILED, Told.REGION_RECOVERED]
    assert holds(status, Condition.DEGRADED) == ("False", "AsExpected")


def test_what_ends_leaves_nothing() -> None:
    status, told = follow(attached(ENGINE), Silence(Why.POD_ENDED, "the pod has ended"))
    assert status["phase"] == "Released"
    assert status["participants"] == []
    assert status["residentBytes"] == status["usedBytes"] == 0
    assert holds(status, Condition.DEGRADED) == ("False", "AsExpected")
    assert told[2:] == []

    _, told = follow(attached(ENGINE), region(ENGINE, RegionState.RELEASED, engineStarts=1))
    assert told[2:] == [Told.REGION_RELEASED, Told.ENGINE_DETACHED]


def test_a_pod_that_lost_its_label_keeps_what_was_heard_of_it() -> None:
    gone = Silence(Why.POD_GONE, "the pod was deleted, or has lost the label")
    status, told = follow(attached(ENGINE, usedBytes=7), gone, attached(ENGINE, usedBytes=7))
    before, _ = follow(attached(ENGINE, usedBytes=7))
    assert told == follow(attached(ENGINE, usedBytes=7))[1]
    assert status["residentBytes"] == before["residentBytes"] > 0

    status, _ = follow(attached(ENGINE, usedBytes=7), gone)
    assert (status["phase"], status["usedBytes"]) == ("Ready", 7)
    for kind in (Condition.RESERVED, Condition.ATTACHED, Condition.REACHABLE):
        assert holds(status, kind) == ("Unknown", "PodGone")


@pytest.mark.parametrize("why", UNINJECTED)
def test_a_pod_without_its_sidecar_is_degraded(why: Why) -> None:
    status, told = follow(Silence(why, "the webhook was not asked"))
    assert status["phase"] == "Failed"
    assert status["reason"] == "the webhook was not asked"
    assert holds(status, Condition.DEGRADED) == ("True", why.value)
    assert holds(status, Condition.RESERVED) == ("False", why.value)
    # The Event is about the pod, and posted by whoever saw it.
    assert told == []


def bare(skipped: str = "", **more: Any) -> PodView:  # noqa: ANN401 - parts of a pod
    """A pod that has opted in and has no sidecar."""
    marks = {"kvcellar.dev/skipped": skipped} if skipped else {}
    marks |= more.pop("annotations", {})
    metadata = {
        "namespace": "ns",
        "name": "engine-0",
        "uid": ENGINE,
        "resourceVersion": "6",
        "annotations": marks,
    }
    return view_pod({"metadata": metadata, "status": more})


@pytest.mark.parametrize(
    ("view", "why"),
    [
        (bare(), Why.NOT_INJECTED),
        (bare("NoMemoryLimit: there is none"), Why.CAPACITY_UNKNOWN),
        (bare("CapacityTooSmall: 1%"), Why.CAPACITY_UNKNOWN),
        (bare("CapacityTooLarge: 7E"), Why.CAPACITY_UNKNOWN),
        (bare("ProfileDisabled: it is off"), None),
        (bare("anything"), None),
        (bare(annotations={"kubernetes.io/config.mirror": "x"}), None),
        (bare(phase="Succeeded"), Why.POD_ENDED),
    ],
)
def test_what_is_said_of_a_pod_without_a_sidecar(view: PodView, why: Why | None) -> None:
    silence = silence_of(view)
    assert (silence.why if silence else None) is why


@pytest.mark.parametrize(
    ("view", "told"),
    [
        (bare(), (Told.NOT_INJECTED, NOT_INJECTED)),
        (
            bare("ProfileMissing: there is no `fats`"),
            (
                Told.INJECTION_SKIPPED,
                "the pod has opted in to kvcellar and was not injected: "
                "ProfileMissing: there is no `fats`",
            ),
        ),
        (
            bare("OfALaterRelease: a\nb"),
            (
                Told.INJECTION_SKIPPED,
                "the pod has opted in to kvcellar and was not injected: OfALaterRelease: a\\nb",
            ),
        ),
        (bare("ProfileDisabled: it is off"), None),
        (bare("HostIPC: it is", annotations={"kubernetes.io/config.mirror": "x"}), None),
        (bare("HostIPC: it is", phase="Succeeded"), None),
    ],
)
def test_the_event_of_a_pod_without_a_sidecar(view: PodView, told: tuple[Told, str] | None) -> None:
    occurrence = occurrence_of(view)
    assert ((occurrence.reason, occurrence.message) if occurrence else None) == told


def test_reclaimed_orphans_are_told_once() -> None:
    first = attached(ENGINE, orphans=[orphan("a.data"), orphan("b.data", "kept")])
    second = attached(ENGINE, orphans=[orphan("a.data"), orphan("c.data")])
    _, told = follow(first, first, second, second)
    assert told.count(Told.ORPHAN_RECLAIMED) == 2


def test_the_generation_that_is_in_force_is_shown() -> None:
    answer = Heard(attached(ENGINE, observedGeneration=2))
    plain = observe(POD, answer, an_object(), NOW).status
    assert plain["observedGeneration"] == 3
    wished = observe(POD, answer, an_object(contents="keep"), NOW).status
    assert wished["observedGeneration"] == 2
    assert all(each["observedGeneration"] == 3 for each in wished["conditions"])
    # The sidecar has not heard of it yet; what was in force without a wish still is.
    unheard = Heard(attached(ENGINE, observedGeneration=0))
    early = observe(POD, unheard, an_object({"observedGeneration": 2}, contents="keep"), NOW)
    assert early.status["observedGeneration"] == 2


def test_times_of_conditions_move_with_their_status_only() -> None:
    first = observe(POD, Heard(region(ENGINE)), an_object(), NOW).status
    second = observe(POD, Heard(attached(ENGINE)), an_object(first), LATER).status
    assert condition(second, Condition.RESERVED)["lastTransitionTime"] == NOW
    assert condition(second, Condition.ATTACHED)["lastTransitionTime"] == LATER


# --- properties -----------------------------------------------------------------------------------------

counts = st.integers(0, 2**63 - 1)
words = st.text(max_size=40)
bodies = st.builds(
    RegionBody,
    engineId=st.just(ENGINE),
    mode=st.sampled_from(["plugin", "stock", "tomorrow's"]),
    state=st.sampled_from([state.value for state in RegionState]),
    reason=st.one_of(st.just(""), st.just("x" * 5000), words),
    contents=st.sampled_from(["discard", "keep", "odd"]),
    retention=st.one_of(st.just("keep"), st.text(max_size=100)),
    observedGeneration=counts,
    generation=counts,
    session=words,
    fingerprint=words,
    capacityBytes=counts,
    reservedBytes=counts,
    settledBytes=counts,
    hugePageBytes=counts,
    usedBytes=counts,
    unusedTailBytes=counts,
    geometry=st.one_of(
        st.none(),
        st.builds(
            GeometryBody,
            st.sampled_from(["sharded", "replicated", "stock", "odd"]),
            *[counts] * 5,
        ),
    ),
    participants=st.lists(
        st.builds(
            ParticipantBody,
            st.sampled_from(["scheduler", "worker", "odd"]),
            st.integers(0, 3),
            st.floats(0, 1e300),
            st.booleans(),
        ),
        max_size=6,
    ),
    engineStarts=st.integers(0, 4),
    limits=st.lists(
        st.builds(LimitBody, st.one_of(words, st.just("n" * 600)), counts, counts, st.booleans()),
        max_size=70,
    ),
    orphans=st.lists(
        st.builds(
            OrphanBody,
            st.text(max_size=300),
            st.integers(-1, 2**70),
            st.sampled_from(["reclaimed", "kept", "a" * 100]),
            words,
        ),
        max_size=130,
    ),
)
plans = st.one_of(st.none(), st.builds(PlanBody, st.booleans(), counts, counts, words, st.just([])))
looks = st.one_of(
    st.builds(Heard, bodies, plans),
    st.builds(Silence, st.sampled_from(Why), st.one_of(words, st.just("m" * 40_000))),
)


@given(st.lists(looks, min_size=1, max_size=5), st.sampled_from([{}, {"contents": "keep"}]))
def test_the_same_look_twice_changes_nothing_and_tells_nothing(
    row: list[Heard | Silence], spec: dict[str, str]
) -> None:
    status: dict[str, Any] = {}
    for look in row:
        seen = observe(POD, look, an_object(status, **spec), NOW)
        again = observe(POD, look, an_object(seen.status, **spec), LATER)
        assert again.status == seen.status
        assert again.transitions == ()
        if seen.status == status:
            assert seen.transitions == ()
        assert len({each.told for each in seen.transitions}) == len(seen.transitions)
        status = seen.status


@given(st.lists(looks, min_size=1, max_size=3))
def test_whatever_a_sidecar_says_the_status_fits_the_schema(row: list[Heard | Silence]) -> None:
    status: dict[str, Any] = {}
    for look in row:
        status = observe(POD, look, an_object(status), NOW).status
        check(status, status_schema(), "status")


def check(value: object, schema: dict[str, Any], path: str) -> None:
    """Compare a value with a structural schema, as the API server does."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    assert isinstance(value, kinds[schema["type"]]), path
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= value.keys(), path
        for name, inner in value.items():
            assert name in schema["properties"], f"{path}.{name} would be pruned"
            check(inner, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        check_list(value, schema, path)
    elif isinstance(value, str):
        assert len(value) <= schema.get("maxLength", 2**20), path
        assert value in schema.get("enum", [value]), path
    elif isinstance(value, int):
        assert schema.get("minimum", 0) <= value <= schema.get("maximum", 2**63 - 1), path


def check_list(value: list[Any], schema: dict[str, Any], path: str) -> None:
    """Compare a list and its entries."""
    assert len(value) <= schema["maxItems"], path
    for entry in value:
        check(entry, schema["items"], f"{path}[]")
    keys = schema.get("x-kubernetes-list-map-keys", [])
    found = [tuple(entry.get(key) for key in keys) for entry in value]
    assert not keys or len(found) == len(set(found)), f"{path}: a key twice"


@given(st.lists(looks, min_size=2, max_size=4))
def test_the_patch_makes_the_one_status_of_the_other(row: list[Heard | Silence]) -> None:
    status: dict[str, Any] = {}
    for look in row:
        seen = observe(POD, look, an_object(status), NOW).status
        assert merged(status, merge_patch(status, seen)) == seen
        assert merge_patch(seen, seen) == {}
        status = seen


def merged(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7386."""
    result = dict(target)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            old = result.get(name)
            result[name] = merged(old if isinstance(old, dict) else {}, value)
        else:
            result[name] = value
    return result


# --- when to write --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "since_s", "due"),
    [
        ({}, 1e9, False),
        ({"usedBytes": GIB // 100}, 0.0, False),
        ({"usedBytes": GIB // 100}, 61.0, True),
        ({"usedBytes": GIB // 8}, 0.0, True),
        ({"phase": "Failed"}, 0.0, True),
        ({"settleProgress": 1}, 0.0, False),
        ({"participants": []}, 0.0, True),
        ({"memory": {"limits": [{"name": "a", "usageBytes": 9}]}}, 0.0, False),
        ({"memory": {"limits": [{"name": "b", "usageBytes": 1}]}}, 0.0, True),
    ],
)
def test_numbers_that_hardly_move_wait(change: dict[str, Any], since_s: float, due: bool) -> None:
    before = {
        "phase": "Ready",
        "capacityBytes": GIB,
        "usedBytes": 0,
        "participants": [{"role": "worker", "rank": 0}],
        "memory": {"limits": [{"name": "a", "usageBytes": 1}]},
    }
    assert is_due(before, {**before, **change}, since_s, 60.0) is due


# --- names ----------------------------------------------------------------------------------------------

pod_names = st.from_regex(
    r"[a-z0-9]([-a-z0-9]{0,60}(\.[a-z0-9]{1,60}){0,3}[a-z0-9])?", fullmatch=True
)
engine_ids = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", fullmatch=True)


@given(pod_names.filter(lambda name: len(name) <= 253), st.sets(engine_ids, min_size=2, max_size=5))
def test_names_of_regions_are_legal_and_differ(name: str, ids: set[str]) -> None:

    names = {region_object_name(name, each) for each in ids}
    assert len(names) == len(ids)
    for each in names:
        assert len(each) <= 253
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", each)

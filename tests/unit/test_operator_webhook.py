"""The webhook in process: what it answers to reviews, good and bad; pods are never refused."""

import asyncio
import base64
import copy
import json
from typing import Any

import httpx
import jsonpatch
import pytest
from fastapi import FastAPI

from kvcellar.contract import ANNOTATION_INJECTED, ANNOTATION_SKIPPED, CONTAINER_SIDECAR
from kvcellar_operator import admission
from kvcellar_operator.admission import ProfileUnavailable, answer
from kvcellar_operator.explain import explain_pod
from kvcellar_operator.inject import InjectSettings, InvalidProfile, Profile, parse_profile
from kvcellar_operator.metrics import WebhookMetrics
from kvcellar_operator.objects import key_of
from kvcellar_operator.reasons import Outcome, Reason
from kvcellar_operator.versions import parse_version
from kvcellar_operator.webhook import PATH, Profiles, create_app

SETTINGS = InjectSettings(image="kvcellar:test", version="0")
MAX_BODY_BYTES = 200_000


def pod(**labels: str) -> dict[str, Any]:
    """A pod that has opted in."""
    engine = {
        "name": "engine",
        "image": "engine:1",
        "command": ["vllm", "serve", "m"],
        "resources": {"limits": {"nvidia.com/gpu": "1", "memory": "8Gi", "cpu": "2"}},
        "aFieldOfTomorrow": {"kept": True},
    }
    labels = {"kvcellar.dev/inject": "true", **labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "engine-", "labels": labels},
        "spec": {"containers": [engine]},
    }


def review(body: object, **fields: object) -> dict[str, Any]:
    """An AdmissionReview as the API server sends it."""
    request = {
        "uid": "4f2a",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": "engines",
        "operation": "CREATE",
        "object": body,
        **fields,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def no_profile(_namespace: str, _name: str) -> Profile | None:
    return None


def patched(body: dict[str, Any], response: dict[str, Any]) -> dict[str, Any]:
    """The pod that the API server makes of the answer, by another implementation of RFC 6902."""
    assert response["patchType"] == "JSONPatch"
    operations = json.loads(base64.b64decode(response["patch"]))
    result: dict[str, Any] = jsonpatch.apply_patch(copy.deepcopy(body), operations)
    return result


def test_an_opted_in_pod_gets_the_sidecar_by_a_patch_that_keeps_everything_else() -> None:
    before = pod()
    decided = answer(review(before), no_profile, SETTINGS)
    response = decided.body["response"]
    assert response["uid"] == "4f2a"
    assert response["allowed"] is True
    assert "warnings" not in response
    after = patched(before, response)
    assert after["spec"]["initContainers"][0]["name"] == CONTAINER_SIDECAR
    assert after["spec"]["containers"][0]["aFieldOfTomorrow"] == {"kept": True}
    assert ANNOTATION_INJECTED in after["metadata"]["annotations"]
    assert (decided.outcome, decided.reason) == (Outcome.INJECTED, Reason.INJECTED)

    again = answer(review(after), no_profile, SETTINGS)
    assert "patch" not in again.body["response"]
    assert again.outcome is Outcome.ALREADY


def test_the_profile_comes_from_the_label_and_else_from_default() -> None:
    asked: list[tuple[str, str]] = []

    def find(namespace: str, name: str) -> Profile | None:
        asked.append((namespace, name))
        return Profile(name=name)

    for labels in ({}, {"kvcellar.dev/profile": "big"}):
        answer(review(pod(**labels)), find, SETTINGS)
    assert asked == [("engines", "default"), ("engines", "big")]


def invalid(_namespace: str, _name: str) -> Profile | None:
    raise InvalidProfile("spec.engines is wrong")


def unavailable(_namespace: str, _name: str) -> Profile | None:
    raise ProfileUnavailable("not yet")


def broken(_namespace: str, _name: str) -> Profile | None:
    raise RuntimeError("a mistake of ours")


@pytest.mark.parametrize(
    ("find", "labels", "reason"),
    [
        (no_profile, {"kvcellar.dev/profile": "missing"}, Reason.PROFILE_MISSING),
        (invalid, {}, Reason.PROFILE_INVALID),
        (unavailable, {}, Reason.PROFILE_UNAVAILABLE),
        (broken, {}, Reason.INTERNAL_ERROR),
    ],
)
def test_whatever_goes_wrong_lets_the_pod_pass_and_says_so(
    find: admission.FindProfile, labels: dict[str, str], reason: Reason
) -> None:
    before = pod(**labels)
    decided = answer(review(before), find, SETTINGS)
    response = decided.body["response"]
    assert response["allowed"] is True
    assert decided.reason is reason
    assert response["warnings"][0].startswith(f"kvcellar: not injected ({reason})")
    assert len(response["warnings"][0]) <= 256
    after = patched(before, response)
    assert after["metadata"]["annotations"][ANNOTATION_SKIPPED].startswith(f"{reason}: ")
    assert after["spec"] == before["spec"]


def test_a_mistake_inside_the_injection_lets_the_pod_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(admission, "inject", fail)
    decided = answer(review(pod()), no_profile, SETTINGS)
    assert decided.body["response"]["allowed"] is True
    assert decided.reason is Reason.INTERNAL_ERROR


@pytest.mark.parametrize(
    "fields",
    [
        {"operation": "UPDATE"},
        {"kind": {"group": "apps", "kind": "Deployment"}},
        {"kind": None},
        {"subResource": "ephemeralcontainers"},
        {"object": None},
        {"object": []},
        {"object": {"metadata": {}, "spec": {"containers": "no list"}}},
        {"namespace": None},
    ],
)
def test_odd_reviews_are_allowed(fields: dict[str, object]) -> None:
    response = answer(review(pod(), **fields), no_profile, SETTINGS).body["response"]
    assert response["allowed"] is True
    assert response["uid"] == "4f2a"


# --- over HTTP ------------------------------------------------------------------------------------------


def post(app: FastAPI, content: bytes, path: str = PATH) -> httpx.Response:
    """One request in process."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="https://webhook") as client:
            return await client.post(path, content=content)

    return asyncio.run(send())


@pytest.fixture
def metrics() -> WebhookMetrics:
    return WebhookMetrics()


@pytest.fixture
def app(metrics: WebhookMetrics) -> FastAPI:
    return app_of(metrics, is_leaving=False)


def app_of(metrics: WebhookMetrics, *, is_leaving: bool) -> FastAPI:
    return create_app(
        lambda body: answer(body, no_profile, SETTINGS),
        MAX_BODY_BYTES,
        metrics,
        lambda: is_leaving,
    )


def test_reviews_are_answered_and_counted(app: FastAPI, metrics: WebhookMetrics) -> None:
    response = post(app, json.dumps(review(pod())).encode())
    assert response.status_code == 200
    assert response.json()["response"]["allowed"] is True
    labels = {"outcome": "injected", "reason": "Injected"}
    value = metrics.registry.get_sample_value
    assert value("kvcellar_webhook_reviews_total", labels) == 1
    assert value("kvcellar_webhook_review_seconds_count") == 1


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"no json", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}', 400),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}', 400),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_what_is_no_review_is_refused_and_counted(
    app: FastAPI, metrics: WebhookMetrics, content: bytes, status: int
) -> None:
    response = post(app, content)
    assert response.status_code == status
    assert response.json()["detail"]
    assert metrics.registry.get_sample_value("kvcellar_webhook_bad_requests_total") == 1


@pytest.mark.parametrize("is_leaving", [False, True])
@pytest.mark.parametrize("content", [json.dumps(review(pod())).encode(), b"no json"])
def test_each_answer_of_a_webhook_that_leaves_closes_its_connection(
    metrics: WebhookMetrics, content: bytes, is_leaving: bool
) -> None:
    response = post(app_of(metrics, is_leaving=is_leaving), content)
    assert (response.headers.get("Connection") == "close") is is_leaving


def test_there_is_one_path(app: FastAPI) -> None:
    assert post(app, b"{}", "/").status_code == 404


# --- profiles -------------------------------------------------------------------------------------------


def profile_object(name: str, **spec: object) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "engines"}, "spec": spec}


def test_profiles_are_unavailable_until_they_are_known() -> None:
    profiles = Profiles(["engines"])
    with pytest.raises(ProfileUnavailable):
        profiles.find("engines", "default")


def test_a_bad_profile_does_not_hide_a_good_one() -> None:
    profiles = Profiles([])
    cache = profiles.caches[0]
    cache.is_synced = True
    for body in (profile_object("good", engines=2), profile_object("bad", engines="two")):
        cache.objects[key_of(body)] = cache._keep(body)
    assert profiles.find("engines", "good") == parse_profile(profile_object("good", engines=2))
    assert profiles.find("engines", "other") is None
    assert profiles.find("elsewhere", "good") is None
    with pytest.raises(InvalidProfile, match="engines"):
        profiles.find("engines", "bad")


@pytest.mark.parametrize(
    ("spec", "other", "words"),
    [
        ({"engines": "two"}, {"engines": "three"}, "cannot be used: spec.engines"),
        ({"newer": 1}, {"newest": 1}, "is of a newer CRD: its pods are injected without spec.new"),
    ],
)
def test_what_is_wrong_with_a_profile_is_said_once_however_often_all_are_listed(
    spec: dict[str, Any], other: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    profiles = Profiles([])
    cache = profiles.caches[0]

    def said_of(body: dict[str, Any]) -> int:
        caplog.clear()
        cache.objects = {key_of(body): cache._keep(body)}
        return caplog.text.count(f"OffloadProfile engines/a {words}")

    # A restart of the API server lists them all anew; an edit says something else.
    assert [said_of(profile_object("a", **each)) for each in (spec, spec, other)] == [1, 0, 1]
    assert said_of(profile_object("a")) == 0
    assert said_of(profile_object("a", **spec)) == 1


def test_a_pod_is_injected_by_a_profile_with_a_field_of_a_newer_crd_and_says_which() -> None:
    profiles = Profiles([])
    cache = profiles.caches[0]
    cache.is_synced = True
    body = profile_object("default", engines=2, ofTheNextRelease="usual")
    cache.objects[key_of(body)] = cache._keep(body)

    before = pod()
    decided = answer(review(before), profiles.find, SETTINGS)

    assert (decided.outcome, decided.reason) == (Outcome.INJECTED, Reason.INJECTED)
    after = patched(before, decided.body["response"])
    stamp = json.loads(after["metadata"]["annotations"][ANNOTATION_INJECTED])
    assert "ProfileNewer" in stamp["notices"]
    assert stamp["unknownFields"] == ["spec.ofTheNextRelease"]
    told = explain_pod(after)
    assert "spec.ofTheNextRelease" in told
    assert "Upgrade the operator" in told


@pytest.mark.parametrize(
    ("text", "version"),
    [("v1.36.3", (1, 36)), ("1.29+", (1, 29)), ("v1.31.5-gke.100", (1, 31)), ("", (0, 0))],
)
def test_versions_are_read_as_clouds_write_them(text: str, version: tuple[int, int]) -> None:
    assert parse_version(text) == version

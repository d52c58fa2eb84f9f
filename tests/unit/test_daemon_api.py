"""The sidecar's HTTP in process: routes, verbs, bodies, and the shape of errors."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest

from kvcellar import contract
from kvcellar.contract import (
    Contents,
    EngineId,
    Mode,
    OnFailure,
    PlanBody,
    RegionState,
)
from kvcellar.daemon.api import create_app
from kvcellar.daemon.status import RegionView, Status

PLAN = PlanBody(True, 10, 20, "tmpfs", [])
VIEW = RegionView(
    EngineId("a"), Mode.PLUGIN, RegionState.READY, "", 2**21, plan=PLAN, plan_decided=True
)
STATUS = Status((VIEW,), Contents.DISCARD, "keep", OnFailure.DEGRADE)
PATHS = [
    "/",
    "/livez",
    "/startupz",
    "/readyz",
    "/metrics",
    "/v1/regions",
    "/v1/regions/a",
    "/v1/plan",
]
PATHS += ["/openapi.json"]


def ask(
    path: str,
    status: Status = STATUS,
    method: str = "GET",
    read: Callable[[], Status] | None = None,
) -> httpx.Response:
    app = create_app(read or (lambda: status))

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://sidecar") as client:
            return await client.request(method, path)

    return asyncio.run(request())


def assert_problem(response: httpx.Response, status: int, detail: str) -> None:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert sorted(body) == ["detail", "instance", "status", "title", "type"]
    assert body["type"] == "about:blank"
    assert body["status"] == status
    assert detail in body["detail"]
    assert body["instance"] == response.request.url.path


@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_the_reference_answers_get(path: str) -> None:
    assert ask(path).status_code == 200


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/openapi.json"])
def test_every_path_answers_head(path: str) -> None:
    assert ask(path, method="HEAD").status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_there_is_no_other_verb(path: str, method: str) -> None:
    response = ask(path, method=method)
    assert_problem(response, 405, "Method Not Allowed")
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize(
    "path",
    [
        "/docs",
        "/redoc",
        "/docs/oauth2-redirect",
        "/livez/",
        "/v1",
        "/v1/regions/",
        "/v2/plan",
        "/v1/regions/a/b",
    ],
)
def test_everything_else_is_not_found(path: str) -> None:
    response = ask(path)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


def test_regions_are_the_bodies_of_the_contract() -> None:
    assert ask("/v1/regions").json() == contract.to_json(STATUS.regions_body())
    assert ask("/v1/regions/a").json() == contract.to_json(STATUS.regions_body().regions[0])
    assert ask("/v1/plan").json() == contract.to_json(PLAN)


def test_an_unknown_region_is_named() -> None:
    assert_problem(ask("/v1/regions/b"), 404, "no region of engine 'b'")


def test_a_plan_that_is_not_made_yet_says_so() -> None:
    undecided = replace(STATUS, regions=(replace(VIEW, plan=None, plan_decided=False),))
    assert_problem(ask("/v1/plan", undecided), 503, "has not been decided yet")
    assert_problem(ask("/startupz", undecided), 503, "has not been decided yet")


def test_a_plan_that_could_not_be_made_says_why() -> None:
    failed = replace(VIEW, plan=None, state=RegionState.FAILED, reason="no tmpfs")
    assert_problem(ask("/v1/plan", replace(STATUS, regions=(failed,))), 503, "no tmpfs")


def test_health_says_why_not() -> None:
    failed = replace(STATUS, regions=(replace(VIEW, state=RegionState.FAILED, reason="full"),))
    assert ask("/startupz", failed).status_code == 200
    assert_problem(ask("/readyz", failed), 503, "region a is Failed: full")
    assert ask("/livez", failed).status_code == 200
    assert_problem(ask("/livez", replace(STATUS, is_alive=False)), 503, "restart the container")


def test_metrics_are_text_with_the_version_of_the_format() -> None:
    response = ask("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert 'kvcellar_region_capacity_bytes{engine_id="a"}' in response.text


def test_the_page_escapes_what_it_shows_and_loads_nothing() -> None:
    nasty = replace(VIEW, state=RegionState.FAILED, reason="<script>alert('x')</script>")
    response = ask("/", replace(STATUS, regions=(nasty,)))
    assert "<script" not in response.text
    assert "&lt;script&gt;" in response.text
    assert "http:" not in response.text
    assert "https:" not in response.text
    assert response.headers["content-security-policy"].startswith("default-src 'none'")


def test_the_schema_has_the_paths_and_no_mutating_verb() -> None:
    schema = json.loads(ask("/openapi.json").text)
    expected = {path for path in PATHS if path != "/openapi.json"} - {"/v1/regions/a"}
    assert set(schema["paths"]) == expected | {"/v1/regions/{engine_id}"}
    assert {verb for verbs in schema["paths"].values() for verb in verbs} == {"get"}


def test_a_mistake_of_ours_is_a_problem_too() -> None:
    def broken() -> Status:
        raise ZeroDivisionError

    assert_problem(ask("/livez", read=broken), 500, "its log says why")

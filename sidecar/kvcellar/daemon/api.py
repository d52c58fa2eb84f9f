"""The sidecar's read-only HTTP: health, metrics, regions, plan and a status page.

Owns: the routes and the shape of errors (RFC 9457). It does no I/O and changes nothing: every handler
reads one `Status`. There is no mutating verb, and no page loads anything from elsewhere.
Reference: docs/reference/http.md; the bodies are the dataclasses of `kvcellar.contract`.
"""

import html
import http
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Lifespan

from kvcellar import __version__
from kvcellar.contract import PlanBody, RegionBody, RegionsBody
from kvcellar.daemon import metrics
from kvcellar.daemon.status import Status

PROBLEM_TYPE = "application/problem+json"
_PROBLEM: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "content": {PROBLEM_TYPE: {"schema": {"type": "object"}}}}
    for code, text in ((404, "No such thing."), (503, "Not yet; `detail` says why."))
}


def create_app(
    read_status: Callable[[], Status], lifespan: Lifespan[FastAPI] | None = None
) -> FastAPI:
    """The application over one source of status.

    Args:
        read_status: returns the status of the moment; called in the event loop, so it must not block.
        lifespan: starts and ends the work behind it, if there is any.
    """
    app = FastAPI(
        title="kvcellar sidecar",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.add_exception_handler(StarletteHTTPException, _http_problem)
    app.add_exception_handler(Exception, _bug_problem)
    _add_health(app, read_status)
    _add_regions(app, read_status)
    _add_pages(app, read_status)
    return app


def _get(app: FastAPI, path: str, handler: Callable[..., Any], **options: Any) -> None:  # noqa: ANN401 - FastAPI's own options
    """Serve GET, and HEAD as RFC 9110 asks of whatever serves GET."""
    app.add_api_route(path, handler, methods=["GET"], **options)
    app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False, **options)


def _add_health(app: FastAPI, read_status: Callable[[], Status]) -> None:
    async def livez() -> PlainTextResponse:
        """The loop runs, and so do the threads that do the work."""
        if not read_status().is_alive:
            raise HTTPException(503, "a thread of the sidecar ended: restart the container")
        return PlainTextResponse("ok\n")

    async def startupz() -> PlainTextResponse:
        """The start gate is open."""
        return _ok_unless(read_status().not_started())

    async def readyz() -> PlainTextResponse:
        """Every region is reserved, so an engine can attach."""
        return _ok_unless(read_status().not_ready())

    for handler in (livez, startupz, readyz):
        _get(
            app,
            f"/{handler.__name__}",
            handler,
            response_class=PlainTextResponse,
            responses={503: _PROBLEM[503]},
        )


def _add_regions(app: FastAPI, read_status: Callable[[], Status]) -> None:
    async def regions() -> RegionsBody:
        """All regions of this sidecar."""
        return read_status().regions_body()

    async def region(engine_id: str) -> RegionBody:
        """The region of one engine."""
        body = read_status().region_body(engine_id)
        if body is None:
            raise HTTPException(404, f"this sidecar has no region of engine {engine_id!r}")
        return body

    async def plan() -> PlanBody:
        """Whether the regions fit, and which limit binds."""
        status = read_status()
        combined = status.plan()
        if combined is None:
            raise HTTPException(503, status.not_started() or status.not_ready())
        return combined

    _get(app, "/v1/regions", regions)
    _get(app, "/v1/regions/{engine_id}", region, responses={404: _PROBLEM[404]})
    _get(app, "/v1/plan", plan, responses={503: _PROBLEM[503]})


def _add_pages(app: FastAPI, read_status: Callable[[], Status]) -> None:
    registry = metrics.new_registry(read_status)

    async def scrape() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def page() -> HTMLResponse:
        """A page for people."""
        return HTMLResponse(
            _status_page(read_status()),
            headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    _get(app, "/metrics", scrape, response_class=PlainTextResponse)
    _get(app, "/", page, response_class=HTMLResponse)


def _ok_unless(reason: str) -> PlainTextResponse:
    if reason:
        raise HTTPException(503, reason)
    return PlainTextResponse("ok\n")


async def _http_problem(request: Request, error: Exception) -> Response:
    if not isinstance(error, StarletteHTTPException):
        return await _bug_problem(request, error)
    headers = dict(error.headers or {})
    if error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = "GET, HEAD"
    return _problem(request, error.status_code, str(error.detail), headers)


async def _bug_problem(request: Request, _error: Exception) -> Response:
    """A mistake of ours; the server logs it with its traceback."""
    return _problem(request, 500, "the sidecar could not answer: its log says why", {})


def _problem(
    request: Request, status: int, detail: str, headers: Mapping[str, str]
) -> JSONResponse:
    title = http.HTTPStatus(status).phrase
    body = {
        "type": "about:blank",
        "title": title,
        "status": status,
        "detail": f"{request.method} {request.url.path}: {title}" if detail == title else detail,
        "instance": request.url.path,
    }
    return JSONResponse(body, status, headers=headers, media_type=PROBLEM_TYPE)


# --- the page for people ------------------------------------------------------------------------------

_COLUMNS = ("engine", "state", "capacity", "reserved", "settled", "used", "attached", "reason")
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>kvcellar</title><style>
body {{ font-family: sans-serif; margin: 2em }} td, th {{ padding: .3em .8em; text-align: left }}
table {{ border-collapse: collapse }} tr {{ border-bottom: 1px solid #ccc }}
</style></head><body><h1>kvcellar {version}</h1><p>{summary}</p>
<table><tr>{head}</tr>
{rows}
</table></body></html>
"""


def _status_page(status: Status) -> str:
    return _PAGE.format(
        version=html.escape(__version__),
        summary=html.escape(status.not_ready() or "every region is reserved: engines can attach"),
        head="".join(f"<th>{column}</th>" for column in _COLUMNS),
        rows="\n".join(_page_row(body) for body in status.regions_body().regions),
    )


def _page_row(body: RegionBody) -> str:
    cells = (
        body.engineId,
        body.state,
        _mebibytes(body.capacityBytes),
        _mebibytes(body.reservedBytes),
        _mebibytes(body.settledBytes),
        _mebibytes(body.usedBytes),
        str(len(body.participants)),
        body.reason,
    )
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"

"""HTTP servers that live in one event loop with everything else: health for both programs, TLS for one.

uvicorn would take the signals for each server; here the program takes them, and stops the servers when
it is their turn.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator

import uvicorn
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from typing_extensions import override

from kvcellar.errors import ConfigurationError

_BACKLOG = 512
_GRACE_S = 5
_KEEP_ALIVE_S = 75
"""Longer than the API server's own connections idle between two pods."""

Complaint = Callable[[], str]
"""Gives what is wrong in one sentence; "" if nothing."""


def health_app(is_alive: Complaint, is_ready: Complaint, registry: CollectorRegistry) -> FastAPI:
    """`/livez`, `/readyz` and `/metrics`: each answers 503 with the reason, or 200."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def livez() -> PlainTextResponse:
        return _health(is_alive())

    async def readyz() -> PlainTextResponse:
        return _health(is_ready())

    async def metrics() -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    for handler in (livez, readyz, metrics):
        app.add_api_route(f"/{handler.__name__}", handler, methods=["GET"])
    return app


def _health(complaint: str) -> PlainTextResponse:
    return PlainTextResponse(f"{complaint or 'ok'}\n", 503 if complaint else 200)


def listen(port: int) -> socket.socket:
    """A socket on all addresses of this machine, of IPv6 and IPv4 where it has both.

    Raises:
        ConfigurationError: the port is in use.
    """
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual
        )
    except OSError as error:
        raise ConfigurationError(f"cannot listen on port {port}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI, listener: socket.socket, context: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve an app while the block runs; at its end, requests that are being answered are finished."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_context_factory=None if context is None else lambda _config, _default: context,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await running


class _Server(uvicorn.Server):
    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

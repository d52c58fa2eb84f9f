"""The sidecar's process: one socket, one event loop, the service behind it, and how it ends.

Order of a start: settings, log, socket (so that a port in use stops the start before anything is made),
then the server, whose lifespan starts the service. Order of an end: a signal, or the service under
`fail`, stops the server; the lifespan stops the service; files stay, unless nothing may be left behind.
"""

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from kvcellar import __version__
from kvcellar.contract import ALL_ADDRESSES, ENV_HTTP_HOST, ENV_HTTP_PORT, ENV_OWNER, Owner
from kvcellar.daemon import logs
from kvcellar.daemon.api import create_app
from kvcellar.daemon.config import Settings
from kvcellar.daemon.connections import BACKLOG, BoundedConnection
from kvcellar.daemon.service import Service, describe, region_requests
from kvcellar.errors import ConfigurationError, KVCellarError
from kvcellar.region import leases

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""How long a sidecar that ends under `fail` goes on answering, so that `kvcellar wait` learns why."""
_STOP_S = 1.0
"""Deadline of the threads at an end, from the signal on, so beside the server's own: 2 s are promised."""


class _Server(uvicorn.Server):
    """A server whose signals also reach the service, without waiting for open connections."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._service.request_stop()
        super().handle_exit(sig, frame)


def run(settings: Settings, *, any_filesystem: bool = False) -> None:
    """Run the sidecar until a signal ends it. For the main thread of a process of its own.

    Raises:
        ConfigurationError: a setting is missing, or the address cannot be listened on.
        KVCellarError: under `fail`, why there is no region.
    """
    if settings.owner is Owner.ENGINE:
        raise ConfigurationError(
            f"{ENV_OWNER}=engine cannot be used here: engines that own their regions need no sidecar"
        )
    requests = region_requests(settings)
    leases.ignore_breaks()
    with _listen(settings.http_host, settings.http_port) as listener:
        service = Service(settings, requests, any_filesystem=any_filesystem)
        server = _make_server(service)
        # Also before the server takes them over, and after: it raises what it caught once more.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        ids = [request.engine_id for request in requests]
        logger.info("sidecar starts", extra={"version": __version__, **describe(settings, ids)})
        server.run(sockets=[listener])
        if not server.started:
            raise KVCellarError("the HTTP server did not start: the lines above say why")
    if service.fatal is not None:
        raise service.fatal
    logger.info("sidecar ended")


def _make_server(service: Service) -> _Server:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def end() -> None:
            server.should_exit = True

        def end_soon() -> None:
            loop.call_soon_threadsafe(loop.call_later, LINGER_S, end)

        service.start(end_soon)
        yield
        service.stop(_STOP_S)

    config = uvicorn.Config(
        create_app(service.status, lifespan),
        loop="asyncio",
        http=BoundedConnection,
        backlog=BACKLOG,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,
    )
    server = _Server(config, service)
    return server


def _listen(host: str, port: int) -> socket.socket:
    if host == ALL_ADDRESSES and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 - all addresses that a kernel without IPv6 has
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # the latter: no name of a machine looks like that
        raise _not_listening(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == ALL_ADDRESSES:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _not_listening(host, port, error) from error
    return listener


def _not_listening(host: str, port: int, error: OSError | UnicodeError) -> ConfigurationError:
    why = error.strerror if isinstance(error, OSError) else "that is no name or address"
    return ConfigurationError(
        f"cannot listen on {host} port {port}: {why}; set {ENV_HTTP_PORT} to a free port "
        f"and {ENV_HTTP_HOST} to an address of this machine"
    )


def main(arguments: Sequence[str]) -> int:
    """The command `kvcellar sidecar`, and `python -m kvcellar.daemon`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="kvcellar sidecar",
        description="Own the regions of this pod. Settings come from KVCELLAR_* variables.",
    )
    parser.add_argument(
        "--any-filesystem",
        action="store_true",
        help="accept a directory that is not on tmpfs, with a warning",
    )
    options = parser.parse_args(arguments)
    try:
        settings = Settings.load()
        logs.configure(settings.log_level)
        run(settings, any_filesystem=options.any_filesystem)
    except KVCellarError as error:
        sys.stderr.write(f"kvcellar: {error}\n")
        return error.exit_status
    return 0

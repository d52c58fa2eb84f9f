"""Sessions with the API server that are logged in, and stay so.

The login is read again every minute, so a token that the kubelet has renewed is used in time.
"""

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace

import aiohttp

from kvcellar.errors import ConfigurationError
from kvcellar_operator.login import Login, find_login

logger = logging.getLogger(__name__)

_REREAD_S = 60.0
"""A kubelet renews a token at 80% of its life, so at least minutes before the old one ends."""
_CONNECT_TIMEOUT_S = 10.0
_USER_AGENT = "kvcellar-operator"


class Connection:
    """Makes sessions that are logged in, and stay so when the token is renewed."""

    def __init__(self, read_login: Callable[[], Login] = find_login) -> None:
        self._read_login = read_login
        self._login = read_login()
        self._read_s = time.monotonic()

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._login.server

    def new_session(self, on_answer: Callable[[], None] | None = None) -> aiohttp.ClientSession:
        """A session of one's own, to be closed by the caller.

        Args:
            on_answer: called at each answer below 400: a list was served, a watch was opened.
        """
        traces = [_success_trace(on_answer)] if on_answer else []
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._login.tls()),
            headers={"User-Agent": _USER_AGENT, "Accept": "application/json"},
            timeout=aiohttp.ClientTimeout(total=60.0, sock_connect=_CONNECT_TIMEOUT_S),
            middlewares=(self._log_in,),
            trace_configs=traces,
        )

    async def _log_in(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        now_s = time.monotonic()
        if now_s - self._read_s > _REREAD_S:
            self._read_again(now_s)
        if self._login.token is not None:
            request.headers["Authorization"] = f"Bearer {self._login.token}"
        response = await handler(request)
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._read_s = float("-inf")
        return response

    def _read_again(self, now_s: float) -> None:
        """A login that cannot be read now may be half written; the old one may still do."""
        try:
            self._login = self._read_login()
        except ConfigurationError as error:
            logger.warning("%s", error)
        self._read_s = now_s


def _success_trace(on_answer: Callable[[], None]) -> aiohttp.TraceConfig:
    async def ended(
        _session: aiohttp.ClientSession,
        _context: SimpleNamespace,
        end: aiohttp.TraceRequestEndParams,
    ) -> None:
        if end.response.ok:
            on_answer()

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(ended)
    return trace

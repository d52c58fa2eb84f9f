"""Where the API server is, and how to log in to it.

In a cluster that is the pod's ServiceAccount, whose token the kubelet renews; elsewhere a kubeconfig.
kopf reads both; what it found is read again every minute, so a renewed token is used in time.
"""

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from types import SimpleNamespace

import aiohttp
import kopf

from kvcellar.errors import ConfigurationError

logger = logging.getLogger(__name__)

_REREAD_S = 60.0
"""A kubelet renews a token at 80% of its life, so at least minutes before the old one ends."""
_CONNECT_TIMEOUT_S = 10.0
_USER_AGENT = "kvcellar-operator"


def find_login() -> kopf.ConnectionInfo:
    """Read the ServiceAccount's login, or else the kubeconfig's.

    Raises:
        ConfigurationError: there is neither.
    """
    settings = kopf.OperatorSettings()
    login = kopf.login_with_service_account(
        logger=logger, settings=settings
    ) or kopf.login_with_kubeconfig(logger=logger, settings=settings)
    if login is None:
        raise ConfigurationError(
            "no API server to talk to: run in a pod with a ServiceAccount, or set KUBECONFIG"
        )
    return login


class Connection:
    """Makes sessions that are logged in, and stay so when the token is renewed."""

    def __init__(self, read_login: Callable[[], kopf.ConnectionInfo] = find_login) -> None:
        self._read_login = read_login
        self._login = read_login()
        self._read_s = time.monotonic()

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._login.server.rstrip("/")

    def new_session(self, on_answer: Callable[[], None] | None = None) -> aiohttp.ClientSession:
        """A session of one's own, to be closed by the caller.

        Args:
            on_answer: called at each answer below 400: a list was served, a watch was opened.
        """
        traces = [_success_trace(on_answer)] if on_answer else []
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._login.as_ssl_context()),
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
            self._login, self._read_s = self._read_login(), now_s
        request.headers.update(self._login.as_http_headers())
        response = await handler(request)
        if response.status == HTTPStatus.UNAUTHORIZED:
            self._read_s = float("-inf")
        return response


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

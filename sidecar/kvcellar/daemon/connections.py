"""Connections of the HTTP server: a bounded number, each for a bounded time.

A client that opens connections and says nothing would take every descriptor of the process. The limits
on memory are files, so from then on regions would be reserved without them.
"""

import asyncio
import resource

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 64
"""Connections that wait to be accepted; they are accepted in one go, before any can be dropped."""
_MAX_CONNECTIONS = 512
_REST_S = 30.0
"""After this time a connection ends as soon as no answer is being made; scrapers simply connect again."""
_LAST_S = 60.0
"""After this time it ends, whether or not its client has read the answer."""


def max_connections() -> int:
    """How many connections are accepted at a time: at most a quarter of the descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MAX_CONNECTIONS, soft // 4)


class BoundedConnection(H11Protocol):
    """One connection; one too many is dropped at once."""

    _ends: tuple[asyncio.TimerHandle, ...] = ()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
            return
        self._ends = (
            self.loop.call_later(_REST_S, self.shutdown),
            self.loop.call_later(_LAST_S, transport.abort),
        )

    @override
    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is served as if it had not asked, and uvicorn's advice is for others."""

    @override
    def send_400_response(self, msg: str) -> None:
        """Refuse what breaks HTTP, once: a body may do so after its request was taken up, or answered."""
        if self.cycle is not None:
            # Its handler finds that nobody listens any more.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        for end in self._ends:
            end.cancel()
        super().connection_lost(exc)

"""A client of the sidecar's HTTP: one short request at a time, and no answer is an answer."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvcellar.contract import printable

_TIMEOUT_S = 2.0
_MAX_BODY_BYTES = 16 * 2**20
"""Far above what 64 regions need; a longer body is no sidecar's."""
_REGION_KEYS = {
    "engineId": str,
    "state": str,
    "reason": str,
    "capacityBytes": int,
    "reservedBytes": int,
    "settledBytes": int,
    "usedBytes": int,
    "generation": int,
    "participants": list,
}
"""What the commands read of a region; they may be of another version than the sidecar."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sidecar said: HTTP status and body."""

    status: int
    text: str

    def json(self) -> dict[str, Any]:
        """The body as an object; empty if it is not one, so not a sidecar's."""
        try:
            parsed = json.loads(self.text)
        except (ValueError, RecursionError):
            return {}
        return parsed if isinstance(parsed, dict) else {}

    def regions(self) -> list[dict[str, Any]]:
        """The regions of a `/v1/regions` body; empty if it is not one, so not a sidecar's."""
        listed = self.json().get("regions") if self.status == http.client.OK else None
        return listed if isinstance(listed, list) and all(map(_is_region, listed)) else []

    @property
    def detail(self) -> str:
        """The sentence of a problem body, or the body itself, for a terminal; never empty."""
        said = str(self.json().get("detail", self.text.strip()[:1000]))
        return printable(said) or f"it answers with status {self.status} and no reason"


def _is_region(listed: object) -> bool:
    return isinstance(listed, dict) and all(
        isinstance(listed.get(key), kind) for key, kind in _REGION_KEYS.items()
    )


class SidecarClient:
    """Asks the sidecar at one address."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port

    def get(self, path: str) -> Answer | None:
        """GET a path; None if nobody answers there, or with no end. 2 s to connect, 2 s to answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.connect()
            with _cut_off(connection.sock) as is_late:
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read(_MAX_BODY_BYTES + 1)
            if is_late.is_set() or len(body) > _MAX_BODY_BYTES:
                return None
            return Answer(response.status, body.decode(errors="replace"))
        except (OSError, UnicodeError, http.client.HTTPException):
            return None
        finally:
            connection.close()


@contextlib.contextmanager
def _cut_off(connected: socket.socket) -> Iterator[threading.Event]:
    """Shut a socket down after the deadline: its own timeout begins anew with each byte."""
    is_late = threading.Event()

    def cut() -> None:
        is_late.set()
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(_TIMEOUT_S, cut)
    timer.daemon = True
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()

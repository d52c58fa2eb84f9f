"""A client of the sidecar's HTTP: one short request at a time, and no answer is an answer."""

import http.client
import json
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the sidecar said: HTTP status and body."""

    status: int
    text: str

    def json(self) -> dict[str, Any]:
        """The body as an object; empty if it is not one, so not a sidecar's."""
        try:
            parsed = json.loads(self.text)
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def detail(self) -> str:
        """The sentence of a problem body, or the body itself."""
        return str(self.json().get("detail", self.text.strip()))


class SidecarClient:
    """Asks the sidecar at one address."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port

    def get(self, path: str) -> Answer | None:
        """GET a path; None if nobody answers there. Blocks for 2 s at most."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return Answer(response.status, response.read().decode(errors="replace"))
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

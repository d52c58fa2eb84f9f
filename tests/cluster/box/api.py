"""The API server over plain HTTP: a request costs a millisecond, where a kubectl costs a hundred.

For tests that make thousands of requests, or need the answer's exact body. It reads the credentials
that a test cluster's kubeconfig holds: a token or a client certificate.
"""

import base64
import http.client
import json
import ssl
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from tests.cluster.box.errors import ApiError, BoxError

JsonObject = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

_TIMEOUT_S = 30.0
_PATIENCE_S = 10.0
"""With a server that is ready and asks to come again later: just started, it does so of kinds that CRDs define."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What it takes to talk to an API server."""

    server: str
    """Its URL, https."""
    ca_pem: str
    token: str | None = None
    client_pem: str | None = field(default=None, repr=False)
    """A client's certificate and its key, one after the other."""

    @classmethod
    def read(cls, kubeconfig: JsonObject) -> "Credentials":
        """Take them from a kubeconfig with a single context and its files flattened into it.

        Raises:
            BoxError: it names a way to log in that is neither a token nor a certificate.
        """
        cluster = kubeconfig["clusters"][0]["cluster"]
        user = kubeconfig["users"][0]["user"]
        client_pem = None
        if "client-certificate-data" in user:
            parts = (user["client-certificate-data"], user["client-key-data"])
            client_pem = "\n".join(base64.b64decode(part).decode() for part in parts)
        if client_pem is None and "token" not in user:
            raise BoxError(
                f"the kubeconfig's user has neither a token nor a certificate: {sorted(user)}"
            )
        ca_pem = base64.b64decode(cluster["certificate-authority-data"]).decode()
        return cls(cluster["server"], ca_pem, user.get("token"), client_pem)

    def tls(self) -> ssl.SSLContext:
        """Trust this cluster's authority alone, and show the client's certificate if there is one."""
        context = ssl.create_default_context(cadata=self.ca_pem)
        if self.client_pem is not None:
            # The ssl module takes certificates of its own from files only.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(self.client_pem)
                file.flush()
                context.load_cert_chain(file.name)
        return context


class Api:
    """Requests to one API server; any thread may make them, and each keeps its connection."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._tls = credentials.tls()
        self._local = threading.local()
        self._connections: list[http.client.HTTPSConnection] = []

    def get(self, path: str, **query: str) -> JsonObject:
        """Read an object or a list."""
        return self.request("GET", path, query=query)

    def create(self, path: str, body: JsonObject, **query: str) -> JsonObject:
        """Create an object in the collection `path`; ``dryRun="All"`` only shows what would be."""
        return self.request("POST", path, body, query=query)

    def replace(self, path: str, body: JsonObject) -> JsonObject:
        """Replace an object."""
        return self.request("PUT", path, body)

    def patch(
        self, path: str, body: JsonObject | list[JsonObject], content_type: str = MERGE_PATCH
    ) -> JsonObject:
        """Change an object; a list is a JSON patch and needs `JSON_PATCH`."""
        return self.request("PATCH", path, body, content_type=content_type)

    def delete(self, path: str, body: JsonObject | None = None) -> JsonObject:
        """Delete an object or a whole collection; the body is a DeleteOptions."""
        return self.request("DELETE", path, body)

    def request(
        self,
        method: str,
        path: str,
        body: JsonObject | list[JsonObject] | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        """Make one request; the answer is an object of JSON.

        Raises:
            ApiError: the server refused it.
            OSError: no server answered.
        """
        ask = partial(self.raw, method, path, body, query=query, content_type=content_type)
        deadline = time.monotonic() + _PATIENCE_S
        status, raw = ask()
        while status == http.client.TOO_MANY_REQUESTS and time.monotonic() < deadline:
            time.sleep(0.1)
            status, raw = ask()
        answer: JsonObject = json.loads(raw)
        if status >= http.client.BAD_REQUEST:
            reason, message = answer.get("reason", ""), answer.get("message", "")
            raise ApiError(f"{method} {path}", status, reason, message)
        return answer

    def raw(
        self,
        method: str,
        path: str,
        body: JsonObject | list[JsonObject] | None = None,
        *,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
    ) -> tuple[int, str]:
        """Make one request; returns the status and the text of the answer, whatever they are."""
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        if self._credentials.token is not None:
            headers["Authorization"] = f"Bearer {self._credentials.token}"
        target = quote(path) + ("?" + urlencode(query) if query else "")
        payload = None if body is None else json.dumps(body)
        connection = self._connection()
        # The server closes connections that were idle for long; only the next use shows it.
        may_be_stale = connection.sock is not None
        try:
            try:
                connection.request(method, target, payload, headers)
                answer = connection.getresponse()
            except (ConnectionError, ssl.SSLEOFError):
                if not may_be_stale:
                    raise
                connection.close()
                connection.request(method, target, payload, headers)
                answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            # Whatever is left of it, the next request needs a new one.
            connection.close()
            raise

    def close(self) -> None:
        """Close every thread's connection."""
        for connection in self._connections:
            connection.close()

    def _connection(self) -> http.client.HTTPSConnection:
        """This thread's connection; http.client opens it again after each close."""
        connection: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            server = urlsplit(self._credentials.server)
            connection = http.client.HTTPSConnection(
                server.hostname or "", server.port, timeout=_TIMEOUT_S, context=self._tls
            )
            self._local.connection = connection
            self._connections.append(connection)
        return connection

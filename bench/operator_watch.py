"""Sees when OffloadRegions say something, as a person with `kubectl get --watch` would."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.box.access import Access


class StatusWatch:
    """Notes, for each region, when each phase and each engine start was first seen."""

    def __init__(self, cluster: Access, path: str) -> None:
        self._credentials = cluster.credentials()
        self._path = path
        self._seen_s: dict[tuple[str, object], float] = {}
        self._connection: http.client.HTTPSConnection | None = None

    @contextmanager
    def running(self) -> "Iterator[StatusWatch]":
        """Watch for the length of a block."""
        server = urlsplit(self._credentials.server)
        connection = http.client.HTTPSConnection(
            server.hostname or "", server.port, context=self._credentials.tls()
        )
        token = self._credentials.token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", f"{self._path}?watch=1&timeoutSeconds=3600", headers=headers)
        answer = connection.getresponse()
        thread = threading.Thread(target=self._read, args=(answer,))
        thread.start()
        try:
            yield self
        finally:
            # Wakes the thread, which would else wait for the next line.
            connection.sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            answer.close()
            connection.close()

    def when(self, region: str, what: object) -> float | None:
        """When a region first showed a phase (a text) or a number of engine starts; monotonic seconds."""
        return self._seen_s.get((region, what))

    def count(self, what: object) -> int:
        """How many regions have shown it."""
        return sum(shown == what for _, shown in list(self._seen_s))

    def _read(self, answer: http.client.HTTPResponse) -> None:
        try:
            for line in answer:
                self._note(json.loads(line))
        except (OSError, ValueError, http.client.HTTPException):
            # The end of the block.
            return

    def _note(self, event: dict[str, Any]) -> None:
        now_s = time.monotonic()
        body = event["object"]
        status = body.get("status") or {}
        for what in (status.get("phase"), status.get("engineStarts"), event["type"]):
            self._seen_s.setdefault((body["metadata"]["name"], what), now_s)

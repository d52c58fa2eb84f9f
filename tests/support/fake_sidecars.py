"""Sidecars that are not there: HTTP servers on loopback that say what a test wants to hear.

They speak the sidecar's HTTP as docs/reference/http.md says, with the bodies of `kvcellar.contract`, and can
misbehave. All run in one thread; each has an address of its own in 127.0.0.0/8, as each pod has.
"""

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from kvcellar.contract import (
    CONTRACT_VERSION,
    DEFAULT_HTTP_PORT,
    GeometryBody,
    LimitBody,
    OrphanBody,
    ParticipantBody,
    PlanBody,
    RegionBody,
    RegionsBody,
    RegionState,
    to_json,
)

GIB = 2**30
_DEADLINE_S = 30.0


class Manner(Enum):
    """How a fake sidecar behaves."""

    WELL = auto()
    SLOW = auto()
    """It takes the request and never answers."""
    GARBAGE = auto()
    ERROR = auto()
    """It answers 500."""
    HUGE = auto()
    """Its body has no end."""
    REDIRECT = auto()
    HANGUP = auto()
    """It closes the connection at once."""


def region(engine_id: str, state: RegionState = RegionState.READY, **fields: Any) -> RegionBody:  # noqa: ANN401 - fields of the body
    """A region that is well unless `fields` say otherwise."""
    capacity = fields.pop("capacityBytes", GIB)
    is_reserved = state in (RegionState.RESERVED, RegionState.READY)
    defaults: dict[str, Any] = {
        "mode": "plugin",
        "reason": "",
        "contents": "discard",
        "retention": "keep",
        "observedGeneration": 0,
        "generation": 0,
        "session": "",
        "fingerprint": "",
        "reservedBytes": capacity if is_reserved else 0,
        "settledBytes": capacity if state is RegionState.READY else 0,
        "hugePageBytes": 0,
        "usedBytes": 0,
        "unusedTailBytes": 0,
        "geometry": None,
        "participants": [],
        "engineStarts": 0,
        "limits": [LimitBody("tmpfs", 4 * capacity, capacity, True)],
        "orphans": [],
    }
    return RegionBody(
        engineId=engine_id, state=state.value, capacityBytes=capacity, **{**defaults, **fields}
    )


def attached(engine_id: str, starts: int = 1, workers: int = 1, **fields: Any) -> RegionBody:  # noqa: ANN401 - fields of the body
    """A region that an engine holds."""
    holders = [ParticipantBody("scheduler", 0, 1.7e9, False)]
    holders += [ParticipantBody("worker", rank, 1.7e9, True) for rank in range(workers)]
    geometry = GeometryBody("sharded", workers, workers, GIB // workers, 2**20, 100)
    own: dict[str, Any] = {
        "participants": holders,
        "engineStarts": starts,
        "generation": 1,
        "session": "5e55",
        "fingerprint": "f1",
        "geometry": geometry,
    }
    return region(engine_id, **{**own, **fields})


def orphan(name: str, action: str = "reclaimed") -> OrphanBody:
    """A file that nobody held."""
    return OrphanBody(name, 2**20, action, "nobody held it")


@dataclass(slots=True)
class FakeSidecar:
    """One of them; a test sets what it says."""

    ip: str
    regions: list[RegionBody] = field(default_factory=list)
    plan: PlanBody | None = None
    manner: Manner = Manner.WELL
    n_asked: int = 0
    contract_version: int | None = CONTRACT_VERSION
    """None: as a sidecar that is older than this key."""
    version: str = "0.0.1"
    more: dict[str, Any] = field(default_factory=dict)
    """Keys of a later release, in the body and in each region."""

    def body(self, path: str) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        if path == "/v1/regions":
            told = to_json(RegionsBody(self.regions))["regions"]
            regions = self.more | {"regions": [each | self.more for each in told]}
            if self.contract_version is None:
                return 200, regions
            return 200, {
                "contractVersion": self.contract_version,
                "version": self.version,
            } | regions
        if path == "/v1/plan" and self.plan is not None:
            return 200, to_json(self.plan)
        return 404, {"title": "Not Found"}


class FakeSidecars:
    """Runs fake sidecars; use it as a context."""

    def __init__(self, port: int = DEFAULT_HTTP_PORT) -> None:
        self.port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._servers: list[asyncio.Server] = []
        self._numbers = itertools.count(1)

    @classmethod
    @contextlib.contextmanager
    def running(cls, port: int = DEFAULT_HTTP_PORT) -> "Iterator[FakeSidecars]":
        """The servers, for the length of a block."""
        servers = cls(port)
        servers._thread.start()
        try:
            yield servers
        finally:
            asyncio.run_coroutine_threadsafe(servers._end(), servers._loop).result(_DEADLINE_S)
            servers._loop.call_soon_threadsafe(servers._loop.stop)
            servers._thread.join(_DEADLINE_S)
            servers._loop.close()

    def add(self) -> FakeSidecar:
        """A sidecar at the next free address of loopback."""
        while True:
            number = next(self._numbers)
            fake = FakeSidecar(f"127.9.{number // 250}.{number % 250 + 1}")
            try:
                self._listen(fake)
            except OSError:
                # Another run of the tests has it.
                continue
            return fake

    def _listen(self, fake: FakeSidecar) -> None:
        work = asyncio.start_server(lambda r, w: _serve(fake, r, w), fake.ip, self.port)
        self._servers.append(asyncio.run_coroutine_threadsafe(work, self._loop).result(_DEADLINE_S))

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # Closed transports go at the next turns of the loop.
        for _ in range(3):
            await asyncio.sleep(0)


async def _serve(
    fake: FakeSidecar, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        request = await reader.readuntil(b"\r\n\r\n")
        fake.n_asked += 1
        await _answer(fake, request.split()[1].decode(), writer)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        # Whoever asked has gone.
        pass
    finally:
        writer.close()


_FIXED = {
    Manner.GARBAGE: b'HTTP/1.1 200 OK\r\n\r\n{"regions": [{"engineId": 7}]}',
    Manner.ERROR: b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    Manner.REDIRECT: b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    Manner.HANGUP: b"",
}


async def _answer(fake: FakeSidecar, path: str, writer: asyncio.StreamWriter) -> None:
    if fake.manner is Manner.WELL:
        status, body = fake.body(path)
        _send(writer, status, json.dumps(body).encode())
    elif fake.manner is Manner.SLOW:
        await asyncio.sleep(60)
    elif fake.manner is Manner.HUGE:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        while True:
            writer.write(b" " * 65536)
            await writer.drain()
    else:
        writer.write(_FIXED[fake.manner])


def _send(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    head = (
        f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)

"""Asks a sidecar what its regions are, and believes none of it before it was checked.

A sidecar runs in somebody else's pod: it may be slow, answer garbage or not be one at all. Whatever it
does ends here as an answer or as `NoAnswer`, within a time and a size.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from ipaddress import ip_address
from typing import TypeVar

import aiohttp
from pydantic import TypeAdapter, ValidationError

from kvcellar import __version__
from kvcellar.contract import (
    CONTRACT_VERSION,
    DEFAULT_HTTP_PORT,
    PlanBody,
    RegionBody,
    RegionsBody,
    RegionState,
    SpeakerBody,
    printable,
)
from kvcellar.errors import KVCellarError
from kvcellar_operator.podview import PodView
from kvcellar_operator.words import Why

_MAX_INTEGER = 2**63 - 1
"""The largest integer that the API server stores."""
_MAX_VERSION = 64
_SPEAKER = TypeAdapter(SpeakerBody)
_REGIONS = TypeAdapter(RegionsBody)
_PLAN = TypeAdapter(PlanBody)

_Body = TypeVar("_Body")

Resolve = Callable[[PodView], str | None]
"""Gives the base URL of a pod's sidecar; None if the pod has no address yet."""


class NoAnswer(KVCellarError):
    """A sidecar gave no answer that can be used.

    Attributes:
        why: reason of the condition `Reachable`.
    """

    def __init__(self, why: Why, message: str) -> None:
        """Keep the reason beside the sentence."""
        super().__init__(message)
        self.why = why


@dataclass(frozen=True, slots=True)
class AskLimits:
    """What a sidecar is given: seconds for the whole answer, and bytes of it."""

    timeout_s: float = 3.0
    body_bytes: int = 2**20


def pod_address(pod: PodView) -> str | None:
    """The sidecar's address in the cluster: the pod's IP and the sidecar's port."""
    if not pod.ip:
        return None
    host = f"[{pod.ip}]" if ip_address(pod.ip).version == 6 else pod.ip
    return f"http://{host}:{pod.sidecar_port or DEFAULT_HTTP_PORT}"


class Sidecars:
    """Asks sidecars; one for the whole process, and to be closed."""

    def __init__(self, limits: AskLimits, resolve: Resolve = pod_address) -> None:
        self._limits = limits
        self._resolve = resolve
        self._session = aiohttp.ClientSession(
            # Every sidecar has an address of its own, so a kept connection would save one in a hundred.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=limits.timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        """Close what is open."""
        await self._session.close()

    async def ask_regions(self, pod: PodView) -> dict[str, RegionBody]:
        """The regions of a pod's sidecar, by engine id.

        Raises:
            NoAnswer: with the reason.
        """
        body = await self._ask(pod, "/v1/regions")
        _check_contract(_decoded(_SPEAKER, body, "list of regions"))
        regions = _decoded(_REGIONS, body, "list of regions").regions
        for region in regions:
            _check(region)
        return {region.engineId: region for region in regions}

    async def ask_plan(self, pod: PodView) -> PlanBody:
        """Whether the regions of a pod fit.

        Raises:
            NoAnswer: with the reason.
        """
        return _decoded(_PLAN, await self._ask(pod, "/v1/plan"), "plan")

    async def _ask(self, pod: PodView, path: str) -> bytes:
        address = self._resolve(pod)
        if address is None:
            raise NoAnswer(Why.POD_PENDING, "the pod has no address yet")
        url = f"{address}{path}"
        try:
            return await self._read(url)
        except TimeoutError as error:
            raise NoAnswer(
                Why.TIMEOUT, f"{url} did not answer within {self._limits.timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoAnswer(Why.CONNECTION_FAILED, f"{url}: {error}") from error

    async def _read(self, url: str) -> bytes:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with self._session.get(url, headers=headers, allow_redirects=False) as response:
            if response.status != HTTPStatus.OK:
                raise NoAnswer(Why.BAD_STATUS, f"{url} answered {response.status}")
            body = bytearray()
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > self._limits.body_bytes:
                    raise NoAnswer(
                        Why.BAD_ANSWER, f"{url} answered more than {self._limits.body_bytes} bytes"
                    )
            return bytes(body)


def _decoded(shape: TypeAdapter[_Body], body: bytes, what: str) -> _Body:
    try:
        return shape.validate_json(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        message = f"the answer is no {what}: {where}: {first['msg']}"
        raise NoAnswer(Why.BAD_ANSWER, message) from error


def _check_contract(speaker: SpeakerBody) -> None:
    """Refuse an answer whose words may mean something else than ours."""
    if speaker.contractVersion != CONTRACT_VERSION:
        version = printable(speaker.version[:_MAX_VERSION])
        release = f"kvcellar {version}" if version else "an early release"
        raise NoAnswer(
            Why.OTHER_CONTRACT,
            f"the sidecar speaks contract version {speaker.contractVersion} ({release}), this operator "
            f"contract version {CONTRACT_VERSION} (kvcellar {__version__}): its answers are not used",
        )


def _check(region: RegionBody) -> None:
    """Refuse what no API server would store."""
    if region.state not in tuple(RegionState):
        raise NoAnswer(Why.BAD_ANSWER, f"the answer has the unknown state {region.state[:40]!r}")
    if not all(0 <= number <= _MAX_INTEGER for number in _numbers(region)):
        raise NoAnswer(Why.BAD_ANSWER, "the answer has a number below 0 or above 2^63 - 1")


def _numbers(region: RegionBody) -> Iterable[float]:
    yield from (
        region.observedGeneration,
        region.generation,
        region.capacityBytes,
        region.reservedBytes,
        region.settledBytes,
        region.hugePageBytes,
        region.usedBytes,
        region.unusedTailBytes,
        region.engineStarts,
    )
    for participant in region.participants:
        yield from (participant.rank, participant.since)
    if region.geometry is not None:
        geometry = region.geometry
        yield from (
            geometry.worldSize,
            geometry.copies,
            geometry.rankBytes,
            geometry.chunkStrideBytes,
            geometry.numChunks,
        )
    for limit in region.limits:
        yield from (limit.limitBytes, limit.usageBytes)

"""The JSON bodies of HTTP answers.

Field names are the JSON keys (camelCase), so that `asdict` is the encoder and no table maps names.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class LimitBody:
    """A limit on memory: its name, size, use, and whether it is the one that binds."""

    name: str
    limitBytes: int
    usageBytes: int
    binding: bool


@dataclass(frozen=True, slots=True)
class PlanBody:
    """Whether a capacity fits, and why not (`/v1/plan`, `kvcellar wait` on refusal)."""

    fits: bool
    askedBytes: int
    freeBytes: int
    bindingLimit: str
    limits: list[LimitBody]


@dataclass(frozen=True, slots=True)
class GeometryBody:
    """The geometry of the engine that is, or last was, attached."""

    layout: str
    worldSize: int
    copies: int
    rankBytes: int
    chunkStrideBytes: int
    numChunks: int


@dataclass(frozen=True, slots=True)
class ParticipantBody:
    """A process that holds a slot: `since` is seconds since the epoch."""

    role: str
    rank: int
    since: float
    pinned: bool


@dataclass(frozen=True, slots=True)
class OrphanBody:
    """A file that nobody holds: its size, what was done with it and why."""

    name: str
    bytes: int
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class RegionBody:
    """One region, as `/v1/regions` and `kvcellar status --json` show it."""

    engineId: str
    mode: str
    state: str
    reason: str
    contents: str
    retention: str
    observedGeneration: int
    generation: int
    session: str
    fingerprint: str
    capacityBytes: int
    reservedBytes: int
    settledBytes: int
    hugePageBytes: int
    usedBytes: int
    unusedTailBytes: int
    geometry: GeometryBody | None
    participants: list[ParticipantBody]
    engineStarts: int
    limits: list[LimitBody]
    orphans: list[OrphanBody] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeakerBody:
    """Who answers, in each body of `/v1/regions`: read first, since the rest may mean something else.

    Attributes:
        contractVersion: `CONTRACT_VERSION` of the sidecar; in every version this key has this name. A body
            without it speaks the first.
        version: kvcellar's release, for people.
    """

    contractVersion: int = 1
    version: str = ""


@dataclass(frozen=True, slots=True)
class RegionsBody(SpeakerBody):
    """The body of `/v1/regions`."""

    regions: list[RegionBody]


def to_json(body: PlanBody | RegionBody | RegionsBody) -> dict[str, Any]:
    """A body as plain dicts and lists, ready for a JSON encoder."""
    return asdict(body)

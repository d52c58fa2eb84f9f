"""The words that kvcellar's processes share: variables, paths, values, HTTP bodies.

The sidecar, the worker library inside the engine and the operator are released together but meet in
all mixtures while a cluster is upgraded, so this file is a contract.

Breaking (bump `CONTRACT_VERSION`, and say so in CHANGELOG.md):
    - to rename or remove a variable, label, annotation, value, path or a key of a JSON body;
    - to change the meaning or unit of one;
    - to change the metadata page (`region.metadata.FORMAT_VERSION` is bumped as well).

Not breaking:
    - a new variable with a default, a new key in a JSON body, a new annotation;
    - a new value of `reason` texts, which are for people.

Standard library only; no I/O, no environment reads.
"""

import re
from dataclasses import asdict, dataclass, field
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import Any, NewType

from kvcellar.errors import InvalidCapacity, InvalidEngineId

CONTRACT_VERSION = 1
"""Raised by each breaking change; sidecar and operator compare it."""

EngineId = NewType("EngineId", str)
"""A validated engine id; make one with `parse_engine_id`."""

# --- environment variables ------------------------------------------------------------------------

ENV_PREFIX = "KVCELLAR_"
ENV_ROOT = "KVCELLAR_ROOT"
ENV_DIR = "KVCELLAR_DIR"
ENV_OWNER = "KVCELLAR_OWNER"
ENV_ENGINE_ID = "KVCELLAR_ENGINE_ID"
ENV_ENGINES = "KVCELLAR_ENGINES"
ENV_CAPACITY = "KVCELLAR_CAPACITY"
ENV_CONTENTS = "KVCELLAR_CONTENTS"
ENV_RETENTION = "KVCELLAR_RETENTION"
ENV_MODE = "KVCELLAR_MODE"
ENV_ON_FAILURE = "KVCELLAR_ON_FAILURE"
ENV_ATTACH_TIMEOUT = "KVCELLAR_ATTACH_TIMEOUT"
ENV_PIN = "KVCELLAR_PIN"
ENV_SETTLE_THREADS = "KVCELLAR_SETTLE_THREADS"
ENV_HUGE_PAGES = "KVCELLAR_HUGE_PAGES"
ENV_JANITOR = "KVCELLAR_JANITOR"
ENV_POD_UID = "KVCELLAR_POD_UID"
ENV_POD_MEMORY_LIMIT = "KVCELLAR_POD_MEMORY_LIMIT"
ENV_DESIRED_FILE = "KVCELLAR_DESIRED_FILE"
ENV_VLLM_UNTESTED = "KVCELLAR_VLLM_UNTESTED"
ENV_HTTP_HOST = "KVCELLAR_HTTP_HOST"
ENV_HTTP_PORT = "KVCELLAR_HTTP_PORT"
ENV_LOG_LEVEL = "KVCELLAR_LOG_LEVEL"

ENV_NAMES = frozenset(
    {
        ENV_ROOT,
        ENV_DIR,
        ENV_OWNER,
        ENV_ENGINE_ID,
        ENV_ENGINES,
        ENV_CAPACITY,
        ENV_CONTENTS,
        ENV_RETENTION,
        ENV_MODE,
        ENV_ON_FAILURE,
        ENV_ATTACH_TIMEOUT,
        ENV_PIN,
        ENV_SETTLE_THREADS,
        ENV_HUGE_PAGES,
        ENV_JANITOR,
        ENV_POD_UID,
        ENV_POD_MEMORY_LIMIT,
        ENV_DESIRED_FILE,
        ENV_VLLM_UNTESTED,
        ENV_HTTP_HOST,
        ENV_HTTP_PORT,
        ENV_LOG_LEVEL,
    }
)
"""Every variable that a process of kvcellar reads; another `KVCELLAR_*` stops the start by its name."""

_IGNORED_ENV = re.compile(
    r"KVCELLAR_(TEST_.*|(.*_)?(SERVICE_HOST|SERVICE_PORT|SERVICE_PORT_.*|PORT|PORT_.*))"
)


def unknown_variables(names: "set[str] | frozenset[str]") -> list[str]:
    """The `KVCELLAR_*` names that nothing reads, sorted.

    `KVCELLAR_TEST_*` and the shapes of Kubernetes service links (`*_SERVICE_HOST`, `*_SERVICE_PORT*`,
    `*_PORT`, `*_PORT_*`) are let pass: the kubelet sets the latter in every pod of a namespace that has
    a Service named `kvcellar...`.
    """
    return sorted(
        name
        for name in names
        if name.startswith(ENV_PREFIX)
        and name not in ENV_NAMES
        and not _IGNORED_ENV.fullmatch(name)
    )


# --- values -----------------------------------------------------------------------------------------


class RegionState(StrEnum):
    """State of a region, decided by its owner (legal moves: `region.owner.LEGAL_MOVES`)."""

    PLANNED = "Planned"
    RESERVING = "Reserving"
    RESERVED = "Reserved"
    READY = "Ready"
    FAILED = "Failed"
    RELEASED = "Released"


class Role(StrEnum):
    """What a participant is in its engine."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Direction(StrEnum):
    """Direction of a transfer: device -> host, or host -> device."""

    STORE = "store"
    LOAD = "load"


class Contents(StrEnum):
    """Whether the next engine start may adopt the contents."""

    DISCARD = "discard"
    KEEP = "keep"


class Mode(StrEnum):
    """Who lays out the data file: the plugin, or an unmodified vLLM."""

    PLUGIN = "plugin"
    STOCK = "stock"


class OnFailure(StrEnum):
    """What a process does when there is no region."""

    DEGRADE = "degrade"
    FAIL = "fail"


class Owner(StrEnum):
    """Who makes and owns the region."""

    SIDECAR = "sidecar"
    ENGINE = "engine"


class StartGate(StrEnum):
    """What `kvcellar wait --for` waits for."""

    PLAN = "plan"
    RESERVED = "reserved"
    SETTLED = "settled"


class HugePages(StrEnum):
    """Whether the sidecar tries to make huge pages."""

    AUTO = "auto"
    NEVER = "never"


class Pin(StrEnum):
    """Whether workers register the region with the device driver."""

    AUTO = "auto"
    NEVER = "never"


class Janitor(StrEnum):
    """What the sidecar does with files of stock vLLM that nobody holds."""

    RECLAIM = "reclaim"
    REPORT = "report"
    OFF = "off"


# --- defaults ----------------------------------------------------------------------------------------

DEFAULT_ROOT = "/dev/shm"  # noqa: S108 - the mount that vLLM itself uses, fixed by DESIGN
DIRECTORY_NAME = "kvcellar"
DEFAULT_HTTP_HOST = "127.0.0.1"
DEFAULT_HTTP_PORT = 9785
DEFAULT_ATTACH_TIMEOUT_S = 300.0

# --- Kubernetes ---------------------------------------------------------------------------------------

API_GROUP = "kvcellar.dev"
API_VERSION = "v1alpha1"
PROFILE_KIND = "OffloadProfile"
PROFILE_PLURAL = "offloadprofiles"
REGION_KIND = "OffloadRegion"
REGION_PLURAL = "offloadregions"

LABEL_INJECT = "kvcellar.dev/inject"
"""`"true"` on a pod asks for a sidecar."""
LABEL_PROFILE = "kvcellar.dev/profile"
"""Name of the OffloadProfile, in the pod's namespace, that says how."""
DEFAULT_PROFILE = "default"
"""The profile of a pod that names none, if its namespace has one of this name."""

ANNOTATION_INJECTED = "kvcellar.dev/injected"
"""JSON: what was injected (docs/reference/injection.md)."""
ANNOTATION_SKIPPED = "kvcellar.dev/skipped"
"""`<Reason>: <sentence>`: why nothing was injected."""
ANNOTATION_DESIRED = "kvcellar.dev/desired"
"""JSON: `{podUID, regions: {<engine_id>: {generation, contents, retention}}}`, relayed by the controller."""

CONTAINER_SIDECAR = "kvcellar"
CONTAINER_WAIT = "kvcellar-wait"
CONTAINER_PATH = "kvcellar-path"
VOLUME_SHM = "kvcellar-shm"
VOLUME_LIBRARY = "kvcellar-lib"
VOLUME_INFO = "kvcellar-info"
VOLUME_NO_TOKEN = "kvcellar-no-token"  # noqa: S105 - a volume's name
"""An empty volume over the path of the service-account token, in containers that need none."""
PORT_NAME = "kvcellar"

LIBRARY_DIR = "/opt/kvcellar"
"""Mount of the library volume: `kvcellar install-library` keeps version folders in it, and `current`."""
LIBRARY_CURRENT = "/opt/kvcellar/current"
"""The installed library, a link; an engine has it on its PYTHONPATH."""
DESIRED_FILE = "/etc/kvcellar/desired.json"
"""Where the sidecar reads the desired state; a missing annotation is an empty file."""

# --- parsing -----------------------------------------------------------------------------------------

_ENGINE_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_QUANTITY = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<suffix>|[eE][+-]?[0-9]{1,3}|[kMGTPE]|[KMGTPE]i|m)"
)
_DURATION = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s)?")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
MAX_CAPACITY_BYTES = 2**63 - 1


def parse_engine_id(text: str) -> EngineId:
    """Validate an engine id: `[A-Za-z0-9._-]{1,128}` without a leading dot.

    It becomes part of a file name, so nothing that could leave the directory or hide may pass.

    Raises:
        InvalidEngineId: with the text and the rule.
    """
    if not _ENGINE_ID.fullmatch(text):
        raise InvalidEngineId(
            f"engine id {_shown(text)} ({len(text)} characters) cannot be used: an engine id is 1 to 128 characters of "
            "A-Z a-z 0-9 . _ - and does not begin with a dot; set KVCELLAR_ENGINE_ID to such a name"
        )
    return EngineId(text)


def expand_engine_ids(text: str, engines: int) -> list[EngineId]:
    """The engine ids of one sidecar: a comma list, each with `_dp0 ... _dp(n-1)` if `engines` > 1.

    Raises:
        InvalidEngineId: one of them is invalid, or appears twice.
    """
    ids: list[EngineId] = []
    for part in text.split(","):
        base = parse_engine_id(part.strip())
        names = [base] if engines <= 1 else [f"{base}_dp{n}" for n in range(engines)]
        ids += [parse_engine_id(name) for name in names]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise InvalidEngineId(
            f"engine id {twice[0]!r} is named twice in {text!r}: each engine needs a region, so an id, of its own"
        )
    return ids


def parse_capacity(text: str) -> int:
    """Bytes of a capacity: whole bytes, or a Kubernetes quantity such as `200Gi`.

    Raises:
        InvalidCapacity: not a quantity, a fraction of a byte, zero or less, or 2^63 and above.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if not match:
        raise InvalidCapacity(_capacity_message(text, "it is not a quantity"))
    suffix = match["suffix"]
    try:
        if suffix[:1] in ("e", "E") and suffix not in ("E", "Ei"):
            value = Decimal(match["number"] + suffix)
        elif suffix == "m":
            value = Decimal(match["number"]) / 1000
        else:
            value = Decimal(match["number"]) * (_BINARY.get(suffix) or _DECIMAL[suffix])
    except InvalidOperation as error:
        raise InvalidCapacity(_capacity_message(text, "it is not a quantity")) from error
    if value > MAX_CAPACITY_BYTES:
        raise InvalidCapacity(_capacity_message(text, "it is 2^63 bytes or more"))
    if value != value.to_integral_value():
        raise InvalidCapacity(_capacity_message(text, "it has a fraction of a byte"))
    if value <= 0:
        raise InvalidCapacity(_capacity_message(text, "it is not above zero"))
    return int(value)


def parse_duration_s(text: str) -> float | None:
    """Seconds of a duration such as `90s`, `15m` or `1h30m`; None if it is not one."""
    match = _DURATION.fullmatch(text)
    if not text or not match:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


def parse_timeout_s(text: str) -> float | None:
    """Seconds of `KVCELLAR_ATTACH_TIMEOUT`: a duration, or a number of seconds; None if it is neither or 0."""
    seconds = parse_duration_s(text)
    if seconds is None and _SECONDS.fullmatch(text):
        seconds = float(text)
    return seconds or None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 140 else text[:140] + "...")


def _capacity_message(text: str, why: str) -> str:
    return (
        f"capacity {_shown(text)} cannot be used: {why}; give whole bytes below 2^63 or a Kubernetes quantity "
        "such as 200Gi, 1500M or 1Ti"
    )


# --- HTTP bodies ---------------------------------------------------------------------------------------
# Field names are the JSON keys (camelCase), so that `asdict` is the encoder and no table maps names.


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


@dataclass(frozen=True, slots=True)
class RegionsBody:
    """The body of `/v1/regions`."""

    regions: list[RegionBody]


def to_json(body: PlanBody | RegionBody | RegionsBody) -> dict[str, Any]:
    """A body as plain dicts and lists, ready for a JSON encoder."""
    return asdict(body)

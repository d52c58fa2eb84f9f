"""The words that a setting, a state or a body may hold, and the defaults of settings."""

from enum import StrEnum


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


DEFAULT_ROOT = "/dev/shm"  # noqa: S108 - the mount that vLLM itself uses, fixed by DESIGN
DIRECTORY_NAME = "kvcellar"
DEFAULT_HTTP_HOST = "127.0.0.1"
ALL_ADDRESSES = "::"
"""As `KVCELLAR_HTTP_HOST`: every address of the pod, of IPv6 and of IPv4, whichever it has."""
DEFAULT_HTTP_PORT = 9785
DEFAULT_ATTACH_TIMEOUT_S = 300.0

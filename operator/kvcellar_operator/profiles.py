"""What an OffloadProfile says, as values: the only place that knows its defaults.

`crd_profile` takes the defaults of the schema from `Profile()` and `SidecarOptions()`, so that an object
that the API server has filled in and one that it has not seen (the chart's default profile, a file for
`kvcellar inject`) mean the same. Pure; `profile_reader` makes these values of an object.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from kvcellar.contract import (
    DEFAULT_HTTP_PORT,
    ENV_HTTP_HOST,
    ENV_LOG_LEVEL,
    ENV_SETTLE_THREADS,
    Contents,
    HugePages,
    Janitor,
    Mode,
    OnFailure,
    Pin,
    StartGate,
)
from kvcellar_operator.quantities import MEBIBYTE

MAX_ENGINES = 64
"""Engines of one container; the sidecar takes no more."""
MAX_ENGINE_CONTAINERS = 16
MAX_SIDECAR_ENV = 32
MIN_PORT = 1024
"""The sidecar is not root, so it cannot listen below."""
SIDECAR_ENV_ALLOWED = (ENV_HTTP_HOST, ENV_LOG_LEVEL, ENV_SETTLE_THREADS)
"""The `KVCELLAR_*` variables that `sidecar.env` may set: all others come from the profile's own fields."""
RETENTION_PATTERN = r"^(keep|now|([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,9}s)?)$"
DURATION_PATTERN = r"^([0-9]{1,6}h)?([0-9]{1,6}m)?([0-9]{1,9}s)?$"
SHARE_PATTERN = r"^(100|[0-9]{1,2}([.][0-9]{1,3})?)%$"
CONTAINER_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


class ImagePythonPath(StrEnum):
    """What happens to the PYTHONPATH that an engine's image sets itself."""

    PRESERVE = "preserve"
    IGNORE = "ignore"


class VllmArgument(StrEnum):
    """When `--kv-transfer-config` is added to an engine's arguments."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of each region: bytes, or a share of memory limits. One of the two is set.

    Attributes:
        text: as it was written.
        size_bytes: of each region.
        share: above 0 and up to 1, of the engine containers' memory limits, for all regions together.
    """

    text: str
    size_bytes: int | None = None
    share: Fraction | None = None


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """How the sidecar's container is made.

    Attributes:
        image: instead of the operator's own; "" is that one.
        port: TCP port of its HTTP.
        is_host_network_allowed: whether pods on the node's network get one.
        cpu_request_millis: CPU request; in a Guaranteed pod the limit is requested.
        cpu_limit_millis: CPU limit. No whole CPUs by default, so that a static CPU manager does not give
            it cores of its own.
        memory_overhead_bytes: memory beside the regions.
        run_as_user: its user; None follows the engine (docs/reference/injection.md).
        run_as_group: its primary group; None follows the engine.
        env: further variables, as (name, value).
    """

    image: str = ""
    port: int = DEFAULT_HTTP_PORT
    is_host_network_allowed: bool = False
    cpu_request_millis: int = 100
    cpu_limit_millis: int = 500
    memory_overhead_bytes: int = 96 * MEBIBYTE
    run_as_user: int | None = None
    run_as_group: int | None = None
    env: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """What to inject. `Profile()` is the profile of defaults.

    Attributes:
        name: of the OffloadProfile; "" is the chart's default profile.
        is_enabled: False turns injection off.
        capacity: size of each region.
        engines: data-parallel engines of each engine container.
        mode: the plugin, or an unmodified vLLM.
        contents: whether the next engine start may adopt the contents.
        retention: how long a region outlives its last holder.
        start_gate: what the pod's start waits for.
        on_failure: what happens without a region.
        attach_timeout: how long an engine waits without progress.
        janitor: what happens to files of stock vLLM that nobody holds.
        pin: whether engines register the region with the driver.
        huge_pages: whether the sidecar tries to make huge pages.
        containers: names of the engine containers; none: found by what they ask for.
        shm_headroom_bytes: room at /dev/shm beside the regions.
        image_python_path: what happens to a PYTHONPATH of the engine's image.
        vllm_argument: when `--kv-transfer-config` is added.
        sidecar: how the sidecar's container is made.
        unknown_fields: paths of fields of a newer CRD, which this version goes without.
    """

    name: str = ""
    is_enabled: bool = True
    capacity: Capacity = Capacity("50%", share=Fraction(1, 2))
    engines: int = 1
    mode: Mode = Mode.PLUGIN
    contents: Contents = Contents.DISCARD
    retention: str = "keep"
    start_gate: StartGate = StartGate.PLAN
    on_failure: OnFailure = OnFailure.DEGRADE
    attach_timeout: str = "5m"
    janitor: Janitor = Janitor.RECLAIM
    pin: Pin = Pin.AUTO
    huge_pages: HugePages = HugePages.AUTO
    containers: tuple[str, ...] = ()
    # vLLM 0.32 does not start unless 240 MiB are free beside the region with two ranks, and 160 MiB for
    # each message queue; NCCL and PyTorch use some more.
    shm_headroom_bytes: int = 1024 * MEBIBYTE
    image_python_path: ImagePythonPath = ImagePythonPath.PRESERVE
    vllm_argument: VllmArgument = VllmArgument.AUTO
    sidecar: SidecarOptions = field(default_factory=SidecarOptions)
    unknown_fields: tuple[str, ...] = ()

    @property
    def gate(self) -> StartGate:
        """What the start waits for: stock vLLM joins a file that it finds, so that has to be reserved."""
        if self.mode is Mode.STOCK and self.start_gate is StartGate.PLAN:
            return StartGate.RESERVED
        return self.start_gate

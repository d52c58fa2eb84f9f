"""The schema of OffloadProfile: what to inject. Pure.

The defaults are those of `profiles.Profile`, the only place that knows them; `profile_reader` reads the
same fields. docs/reference/offloadprofile.md lists them, and a test compares.
"""

from kvcellar.contract import (
    ENV_PREFIX,
    PROFILE_KIND,
    PROFILE_PLURAL,
    Contents,
    HugePages,
    Janitor,
    Mode,
    OnFailure,
    Pin,
    StartGate,
)
from kvcellar_operator import profiles, schema
from kvcellar_operator.profiles import ImagePythonPath, Profile, SidecarOptions, VllmArgument
from kvcellar_operator.quantities import format_millicpus
from kvcellar_operator.schema import Schema

_DEFAULT = Profile()
_SIDECAR = SidecarOptions()
_ALLOWED_ENV = ", ".join(f"'{name}'" for name in profiles.SIDECAR_ENV_ALLOWED)
_MAX_ID = 2**31 - 1

NAMES = {
    "plural": PROFILE_PLURAL,
    "singular": PROFILE_KIND.lower(),
    "kind": PROFILE_KIND,
    "listKind": f"{PROFILE_KIND}List",
    "shortNames": ["kvprof"],
    "categories": ["kvcellar"],
}

COLUMNS = [
    schema.column("Enabled", ".spec.enabled", "boolean", "Whether pods are injected by it."),
    schema.column("Capacity", ".spec.capacity", "string", "Size of each region."),
    schema.column("Engines", ".spec.engines", "integer", "Engines of each engine container."),
    schema.column("Mode", ".spec.mode", "string", "The plugin, or an unmodified vLLM."),
    schema.column("Contents", ".spec.contents", "string", "Kept or discarded at a start."),
    schema.column("Gate", ".spec.startGate", "string", "What the pod's start waits for.", 1),
    schema.column("Retention", ".spec.retention", "string", "How long a region is kept.", 1),
    schema.column("OnFailure", ".spec.onFailure", "string", "Without a region.", 1),
    schema.column("Age", ".metadata.creationTimestamp", "date", "Since it was made."),
]


def spec_schema() -> Schema:
    """The schema of `spec`."""
    return schema.mapping(
        "What is injected into pods that name this profile by the label kvcellar.dev/profile. It is read "
        "when a pod is created: a change reaches pods that are created later.",
        {**_region_fields(), **_engine_fields(), "sidecar": _sidecar_schema()},
        default={},
    )


def _region_fields() -> dict[str, Schema]:
    return {
        "enabled": schema.flag(
            "false turns injection off for pods of this profile, which then start without a sidecar.",
            default=_DEFAULT.is_enabled,
        ),
        "capacity": schema.quantity(
            "Size of each engine's region: bytes as a quantity (200Gi), or a share (50%) of the engine "
            "containers' memory limits for all regions together. It comes on top of those limits, as "
            "memory of the sidecar, and is rounded down to 2Mi.",
            [
                schema.rule(
                    schema.CAPACITY_RULE,
                    "capacity is whole bytes of at least 2Mi and below 8E, such as 200Gi, or a share of "
                    "the engine containers' memory limits above 0% and up to 100%, such as 50%",
                )
            ],
            _DEFAULT.capacity.text,
        ),
        "engines": schema.whole(
            "Data-parallel engines that each engine container starts; each gets a region.",
            (1, profiles.MAX_ENGINES),
            default=_DEFAULT.engines,
        ),
        "mode": schema.choice(
            "plugin: vLLM loads kvcellar's library, which lays out the region. stock: an unmodified vLLM "
            "joins a file that the sidecar made for it.",
            Mode,
            default=str(_DEFAULT.mode),
        ),
        "contents": schema.choice(
            "Whether an engine that starts again may find its cached blocks (keep) or starts with an "
            "empty region (discard).",
            Contents,
            default=str(_DEFAULT.contents),
        ),
        "retention": schema.text(
            "How long a region is kept after its last holder has gone: keep (as long as the pod), now, "
            "or a duration such as 15m.",
            schema.MAX_QUANTITY_CHARACTERS,
            default=_DEFAULT.retention,
            **_rules(schema.RETENTION_RULE, f"retention is {schema.RETENTION_WORDS}"),
        ),
        "startGate": schema.choice(
            "What the engines' start waits for: that the region is known to fit (plan), that the kernel "
            "has promised all of it (reserved), or that every page is there (settled). stock mode waits "
            "for reserved at least.",
            StartGate,
            default=str(_DEFAULT.start_gate),
        ),
        "onFailure": schema.choice(
            "Without a region engines serve without the host tier (degrade), or do not start (fail).",
            OnFailure,
            default=str(_DEFAULT.on_failure),
        ),
        "janitor": schema.choice(
            "What happens to files of stock vLLM in the volume that nobody holds: reclaim removes them, "
            "report only shows them, off does not look.",
            Janitor,
            default=str(_DEFAULT.janitor),
        ),
        "hugePages": schema.choice(
            "Whether the sidecar tries to make huge pages; what it cannot make gets small ones.",
            HugePages,
            default=str(_DEFAULT.huge_pages),
        ),
    }


def _engine_fields() -> dict[str, Schema]:
    name = schema.text("Name of a container.", 63, pattern=profiles.CONTAINER_PATTERN)
    listed = {"x-kubernetes-list-type": "set", "default": []}
    return {
        "attachTimeout": schema.text(
            "How long an engine waits for its region without progress, such as 5m.",
            schema.MAX_QUANTITY_CHARACTERS,
            default=_DEFAULT.attach_timeout,
            **_rules(schema.DURATION_RULE, f"attachTimeout is {schema.DURATION_WORDS}"),
        ),
        "pin": schema.choice(
            "Whether engines register the region with the GPU driver, for speed. never is for confidential "
            "computing, where that is not possible.",
            Pin,
            default=str(_DEFAULT.pin),
        ),
        "containers": schema.listing(
            "Names of the engine containers. Without any these are the containers that ask for a GPU, or "
            "else the pod's main container.",
            name,
            profiles.MAX_ENGINE_CONTAINERS,
            **listed,
        ),
        "shmHeadroom": schema.quantity(
            "Room in the volume at /dev/shm beside the regions, for vLLM's message queues, NCCL and "
            "PyTorch. vLLM does not start if it finds less than it wants there.",
            [schema.rule(schema.SIZE_RULE, "shmHeadroom is whole bytes from 0, such as 1Gi")],
            _DEFAULT.shm_headroom_bytes,
        ),
        "imagePythonPath": schema.choice(
            "preserve keeps the PYTHONPATH that the engine's image sets, by an init container with that "
            "image, which needs sh. ignore replaces it; for images that set none, or have no sh.",
            ImagePythonPath,
            default=str(_DEFAULT.image_python_path),
        ),
        "vllmArgument": schema.choice(
            "When --kv-transfer-config is added to an engine's arguments: to programs that are known to be "
            "vLLM and have none (auto), to every program that is not a shell's script (always), or never. "
            "Where it is not added the annotation kvcellar.dev/injected has the exact value.",
            VllmArgument,
            default=str(_DEFAULT.vllm_argument),
        ),
    }


def _sidecar_schema() -> Schema:
    return schema.mapping(
        "How the sidecar's container is made.",
        {
            "image": schema.text(
                "Image of the sidecar, instead of the operator's own.", 1024, default=_SIDECAR.image
            ),
            "port": schema.whole(
                "TCP port of the sidecar's HTTP, for health, metrics and status.",
                (profiles.MIN_PORT, 65535),
                default=_SIDECAR.port,
            ),
            "hostNetwork": schema.flag(
                "Whether pods with hostNetwork are injected: the port is then open on the node.",
                default=_SIDECAR.is_host_network_allowed,
            ),
            "resources": _resources_schema(),
            "securityContext": _security_schema(),
            "env": _env_schema(),
        },
        default={},
    )


def _resources_schema() -> Schema:
    cpu = [schema.rule(schema.CPU_RULE, "CPU is a quantity above zero, such as 500m or 2")]
    order = (
        "!has(self.cpuRequest) || !has(self.cpuLimit) || !isQuantity(string(self.cpuRequest)) || "
        "!isQuantity(string(self.cpuLimit)) || quantity(string(self.cpuRequest))"
        ".compareTo(quantity(string(self.cpuLimit))) <= 0"
    )
    return schema.mapping(
        "What the sidecar asks for. Its memory, requested and limited, is the regions' and an overhead.",
        {
            "cpuRequest": schema.quantity(
                "CPU that is requested; in a Guaranteed pod cpuLimit is.",
                cpu,
                format_millicpus(_SIDECAR.cpu_request_millis),
            ),
            "cpuLimit": schema.quantity(
                "CPU limit. A whole number gives the sidecar cores of its own under a static CPU manager.",
                cpu,
                format_millicpus(_SIDECAR.cpu_limit_millis),
            ),
            "memoryOverhead": schema.quantity(
                "Memory of the sidecar beside its regions and 0.3 % of them.",
                [
                    schema.rule(
                        schema.SIZE_RULE, "memoryOverhead is whole bytes from 0, such as 96Mi"
                    )
                ],
                _SIDECAR.memory_overhead_bytes,
            ),
        },
        default={},
        **_rules(order, "cpuRequest is no more than cpuLimit"),
    )


def _security_schema() -> Schema:
    return schema.mapping(
        "User and group of the sidecar. Left out, they follow the engine's. Everything else is as the "
        "restricted Pod Security Standard wants it.",
        {
            "runAsUser": schema.whole("User id, not root.", (1, _MAX_ID)),
            "runAsGroup": schema.whole("Primary group id, not root.", (1, _MAX_ID)),
        },
    )


def _env_schema() -> Schema:
    entry = schema.mapping(
        "One variable.",
        {
            "name": schema.text("Its name.", 128, pattern="^[-._A-Za-z][-._A-Za-z0-9]*$"),
            "value": schema.text("Its value.", 4096, default=""),
        },
        required=["name"],
        **_rules(
            f"!self.name.startsWith('{ENV_PREFIX}') || self.name in [{_ALLOWED_ENV}]",
            "of kvcellar's own variables only "
            f"{', '.join(profiles.SIDECAR_ENV_ALLOWED)} can be set here: the fields of the profile say "
            "the others",
        ),
    )
    return schema.listing(
        "Further variables of the sidecar.",
        entry,
        profiles.MAX_SIDECAR_ENV,
        **{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )


def _rules(expression: str, message: str) -> Schema:
    return {"x-kubernetes-validations": [schema.rule(expression, message)]}

"""The schema of OffloadRegion: one object for each engine id, kept true by the controller. Pure.

docs/reference/offloadregion.md lists its fields, phases and conditions, and a test compares.
"""

from enum import StrEnum

from kvcellar.contract import REGION_KIND, REGION_PLURAL, Contents, Mode, RegionState, Role
from kvcellar.region.geometry import Layout
from kvcellar_operator import schema
from kvcellar_operator.schema import Schema


class Condition(StrEnum):
    """Types of conditions of an OffloadRegion."""

    RESERVED = "Reserved"
    SETTLED = "Settled"
    ATTACHED = "Attached"
    REACHABLE = "Reachable"
    DEGRADED = "Degraded"


CONDITIONS: dict[Condition, str] = {
    Condition.RESERVED: "The kernel has promised every page; taking them cannot fail any more.",
    Condition.SETTLED: "Every page is zeroed and resident.",
    Condition.ATTACHED: "A process of the engine holds the region.",
    Condition.REACHABLE: "The sidecar answered the controller's last question.",
    Condition.DEGRADED: "The engine runs without its region, with one that is damaged, or cannot start.",
}
"""What each condition says when its status is True."""


class Layouts(StrEnum):
    """Layouts of a region, with that of an unmodified vLLM."""

    SHARDED = Layout.SHARDED.value
    REPLICATED = Layout.REPLICATED.value
    STOCK = "stock"


NAMES = {
    "plural": REGION_PLURAL,
    "singular": REGION_KIND.lower(),
    "kind": REGION_KIND,
    "listKind": f"{REGION_KIND}List",
    "shortNames": ["kvreg"],
    "categories": ["kvcellar"],
}

COLUMNS = [
    schema.column("Phase", ".status.phase", "string", "State of the region."),
    schema.column("Capacity", ".spec.capacity", "string", "Size of the region."),
    schema.column("Resident", ".status.residentBytes", "integer", "Bytes with pages."),
    schema.column("Used", ".status.usedBytes", "integer", "Bytes that hold cached blocks."),
    schema.column(
        "Attached",
        '.status.conditions[?(@.type=="Attached")].status',
        "string",
        "Whether an engine holds it.",
    ),
    schema.column("Pod", ".spec.podName", "string", "The engine's pod."),
    schema.column("Node", ".status.node", "string", "Where it is.", 1),
    schema.column("Settled", ".status.settleProgress", "integer", "Percent that is settled.", 1),
    schema.column("Restarts", ".status.engineRestarts", "integer", "Of the engine.", 1),
    schema.column("Generation", ".status.generation", "integer", "Of the contents.", 1),
    schema.column("Engine", ".spec.engineID", "string", "The engine id.", 1),
    schema.column("Reason", ".status.reason", "string", "Why it is as it is.", 1),
    schema.column("Age", ".metadata.creationTimestamp", "date", "Since it was made."),
]


def spec_schema() -> Schema:
    """The schema of `spec`: what the region is, and what is wanted of it."""
    return schema.mapping(
        "What the region is, and what is wanted of it. The controller makes the object; contents and "
        "retention can be edited, and reach the sidecar within seconds.",
        {
            "engineID": _fixed(
                "The engine id: name of the region in the pod. Cannot be changed.",
                128,
                "engineID",
                pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
            ),
            "podName": _fixed("Name of the engine's pod. Cannot be changed.", 253, "podName"),
            "podUID": _fixed("UID of the engine's pod. Cannot be changed.", 128, "podUID"),
            "capacity": schema.quantity(
                "Size of the region, as its pod was injected with; left out if the pod was not injected. "
                "Another size needs another pod: the kubelet sizes the volume once.",
                [
                    schema.rule(
                        schema.REGION_SIZE_RULE, "capacity is whole bytes above 0, such as 200Gi"
                    ),
                    schema.rule(
                        "self == oldSelf",
                        "capacity cannot be changed: change the OffloadProfile and create the pod anew",
                    ),
                ],
            ),
            "contents": schema.choice(
                "Whether the next engine start may adopt the contents; left out, as the profile said when "
                "the pod was created.",
                Contents,
            ),
            "retention": schema.text(
                "How long the region is kept after its last holder has gone: keep, a duration, or now, "
                "which frees it as soon as nobody holds it; left out, as the profile said.",
                schema.MAX_QUANTITY_CHARACTERS,
                **{
                    "x-kubernetes-validations": [
                        schema.rule(schema.RETENTION_RULE, f"retention is {schema.RETENTION_WORDS}")
                    ]
                },
            ),
        },
        # A pod that has no sidecar has no capacity, and its object says why.
        required=["engineID", "podName", "podUID"],
        **{
            "x-kubernetes-validations": [
                # The rule of the field itself is silent where one of the two is not there.
                schema.rule(
                    "has(self.capacity) == has(oldSelf.capacity)",
                    "capacity cannot be added or removed: it is what the pod was injected with",
                )
            ]
        },
    )


def _fixed(description: str, limit: int, name: str, pattern: str | None = None) -> Schema:
    rules = [
        schema.rule("self == oldSelf", f"{name} cannot be changed: the region belongs to one pod")
    ]
    shape = {} if pattern is None else {"pattern": pattern}
    more = {"minLength": 1, **shape, "x-kubernetes-validations": rules}
    return schema.text(description, limit, **more)


def status_schema() -> Schema:
    """The schema of `status`: what the sidecar and the kubelet say, written by the controller."""
    return schema.mapping(
        "What the controller saw of the region. Only the controller writes it.",
        {
            "observedGeneration": schema.count(
                "Generation of the spec that the sidecar has applied."
            ),
            "phase": schema.choice(
                "State of the region as its owner says: Planned (known to fit), Reserving, Reserved "
                "(attachable), Ready (settled), Failed (see reason) or Released (freed).",
                RegionState,
            ),
            "reason": schema.text("Why the region is as it is, for people.", 1024),
            "mode": schema.choice("The plugin, or an unmodified vLLM.", Mode),
            "contents": schema.choice("What the sidecar applies to the contents.", Contents),
            "retention": schema.text("What the sidecar applies as retention.", 64),
            "node": schema.text("Node of the pod.", 253),
            "generation": schema.count("Rises each time the contents stop being valid."),
            "session": schema.text("Hash of the engine start that laid out the region.", 128),
            "fingerprint": schema.text("Hash over what gives the contents their meaning.", 128),
            "engineRestarts": schema.count(
                "Restarts of the engine container, as the kubelet counts."
            ),
            "engineStarts": schema.count("Engine starts that have laid out the region."),
            **_byte_fields(),
            "settleProgress": schema.whole("Percent of the capacity that is settled.", (0, 100)),
            "geometry": _geometry_schema(),
            "participants": _participants_schema(),
            "memory": _memory_schema(),
            "orphans": _orphans_schema(),
            "conditions": _conditions_schema(),
        },
    )


def _byte_fields() -> dict[str, Schema]:
    meanings = {
        "capacityBytes": "Size of the region.",
        "reservedBytes": "Bytes that the kernel has promised.",
        "residentBytes": "Bytes that have pages of memory.",
        "usedBytes": "Bytes of chunks that hold cached blocks.",
        "hugePageBytes": "Bytes in huge pages.",
        "unusedTailBytes": "Bytes that no chunk covers.",
    }
    return {name: schema.count(meaning) for name, meaning in meanings.items()}


def _geometry_schema() -> Schema:
    return schema.mapping(
        "Where the chunks of the engine lie that is, or was last, attached.",
        {
            "layout": schema.choice("How the ranks share the region.", Layouts),
            "worldSize": schema.count("Ranks of the engine."),
            "copies": schema.count("Ranges in the region."),
            "rankBytes": schema.count("Bytes of one range."),
            "chunkStrideBytes": schema.count("Distance of two chunks."),
            "numChunks": schema.count("Chunks of one range."),
        },
    )


def _participants_schema() -> Schema:
    entry = schema.mapping(
        "One process of an engine.",
        {
            "role": schema.choice("What it is in its engine.", Role),
            "rank": schema.count("Its rank."),
            "since": {
                "type": "string",
                "format": "date-time",
                "description": "When it attached.",
            },
            "pinned": schema.flag("Whether it registered its range with the GPU driver."),
        },
        required=["role", "rank"],
    )
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["role", "rank"]}
    return schema.listing("Processes that hold the region.", entry, 1024, **keys)


def _memory_schema() -> Schema:
    limit = schema.mapping(
        "One limit on the region's memory, as the sidecar sees it.",
        {
            "name": schema.text("Which limit (docs/reference/memory-limits.md).", 512),
            "limitBytes": schema.count("Its size."),
            "usageBytes": schema.count("What is in use of it."),
            "binding": schema.flag("Whether it leaves least."),
        },
        required=["name"],
    )
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    return schema.mapping(
        "The pod's memory as it was sized at injection, and what bounds it.",
        {
            "sumBytes": schema.count("All regions of the pod."),
            "sidecarBytes": schema.count("Request and limit of the sidecar."),
            "volumeBytes": schema.count(
                "Size of the volume at /dev/shm; 0 if only the node bounds it."
            ),
            "podLimitBytes": schema.count("Memory limit of the pod; 0 if it has none."),
            "bindingLimit": schema.text(
                "The limit that leaves least: of the sidecar's list, or until it answers sizeLimit, pod or "
                "node.",
                512,
            ),
            "limits": schema.listing("Limits that the sidecar sees.", limit, 64, **keys),
        },
    )


def _orphans_schema() -> Schema:
    entry = schema.mapping(
        "One file that nobody holds.",
        {
            "name": schema.text("Its name.", 255),
            "bytes": schema.count("Its size."),
            "action": schema.text("What was done with it.", 64),
            "reason": schema.text("Why.", 1024),
        },
        required=["name"],
    )
    return schema.listing(
        "Files in the pod's volume that nobody holds.",
        entry,
        128,
        **{"x-kubernetes-list-type": "atomic"},
    )


def _conditions_schema() -> Schema:
    meanings = " ".join(f"{kind}: {meaning}" for kind, meaning in CONDITIONS.items())
    entry = schema.mapping(
        "One condition.",
        {
            "type": schema.choice("Which condition.", Condition),
            "status": {
                "type": "string",
                "description": "True, False or Unknown.",
                "enum": ["True", "False", "Unknown"],
            },
            "observedGeneration": schema.count("Generation of the spec that it speaks of."),
            "lastTransitionTime": {
                "type": "string",
                "format": "date-time",
                "description": "When the status last changed.",
            },
            "reason": schema.text(
                "Why, for machines.",
                256,
                minLength=1,
                pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            ),
            "message": schema.text("Why, for people.", 32768),
        },
        required=["type", "status", "lastTransitionTime", "reason", "message"],
    )
    keys = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return schema.listing(f"What holds of the region. {meanings}", entry, 8, **keys)

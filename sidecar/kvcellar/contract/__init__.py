"""The words that kvcellar's processes share: variables, paths, values, HTTP bodies.

The sidecar, the worker library inside the engine and the operator are released together but meet in
all mixtures while a cluster is upgraded, so this package is a contract. Import from here: where a name
stands inside is nobody's business.

Breaking (bump `CONTRACT_VERSION`, and say so in CHANGELOG.md):
    - to rename or remove a variable, label, annotation, value, path or a key of a JSON body;
    - to change the meaning or unit of one;
    - to change the metadata page (`region.frame.FORMAT_VERSION` is bumped as well).

Never changed, since an operator reads them before it knows the version, to say of which one a sidecar is:
    - the path `/v1/regions`, and `contractVersion` and `version` in its body;
    - the names of the label, of the annotation that says what was injected, and of the sidecar and its port;
    - `engineIds`, `containers` and `capacityBytes` in that annotation.

Not breaking:
    - a new variable with a default, a new key in a JSON body, a new annotation;
    - a new value of `reason` texts, which are for people.

Standard library only; no I/O, no environment reads.
"""

from kvcellar.contract.bodies import (
    GeometryBody,
    LimitBody,
    OrphanBody,
    ParticipantBody,
    PlanBody,
    RegionBody,
    RegionsBody,
    SpeakerBody,
    to_json,
)
from kvcellar.contract.cluster import (
    ANNOTATION_DESIRED,
    ANNOTATION_INJECTED,
    ANNOTATION_SKIPPED,
    API_GROUP,
    API_VERSION,
    CONTAINER_PATH,
    CONTAINER_SIDECAR,
    CONTAINER_WAIT,
    DEFAULT_PROFILE,
    DESIRED_FILE,
    LABEL_INJECT,
    LABEL_PROFILE,
    LIBRARY_CURRENT,
    LIBRARY_DIR,
    PORT_NAME,
    PROFILE_KIND,
    PROFILE_PLURAL,
    REGION_KIND,
    REGION_PLURAL,
    VOLUME_INFO,
    VOLUME_LIBRARY,
    VOLUME_NO_TOKEN,
    VOLUME_SHM,
)
from kvcellar.contract.desired import (
    MAX_DESIRED_BYTES,
    DesiredRegion,
    DesiredState,
    desired_text,
    is_retention,
    parse_desired,
)
from kvcellar.contract.parsing import (
    MAX_CAPACITY_BYTES,
    EngineId,
    expand_engine_ids,
    parse_capacity,
    parse_duration_s,
    parse_engine_id,
    parse_timeout_s,
)
from kvcellar.contract.text import printable
from kvcellar.contract.values import (
    ALL_ADDRESSES,
    DEFAULT_ATTACH_TIMEOUT_S,
    DEFAULT_HTTP_HOST,
    DEFAULT_HTTP_PORT,
    DEFAULT_ROOT,
    DIRECTORY_NAME,
    Contents,
    Direction,
    HugePages,
    Janitor,
    Mode,
    OnFailure,
    Owner,
    Pin,
    RegionState,
    Role,
    StartGate,
)
from kvcellar.contract.variables import (
    ENV_ATTACH_TIMEOUT,
    ENV_CAPACITY,
    ENV_CONTENTS,
    ENV_DESIRED_FILE,
    ENV_DIR,
    ENV_ENGINE_ID,
    ENV_ENGINES,
    ENV_HTTP_HOST,
    ENV_HTTP_PORT,
    ENV_HUGE_PAGES,
    ENV_JANITOR,
    ENV_LOG_LEVEL,
    ENV_MODE,
    ENV_NAMES,
    ENV_ON_FAILURE,
    ENV_OWNER,
    ENV_PIN,
    ENV_POD_MEMORY_LIMIT,
    ENV_POD_UID,
    ENV_PREFIX,
    ENV_RETENTION,
    ENV_ROOT,
    ENV_SETTLE_THREADS,
    ENV_VLLM_UNTESTED,
    unknown_variables,
)

CONTRACT_VERSION = 1
"""Raised by each breaking change. A sidecar tells its own (`SpeakerBody`), and an operator of another one uses
none of its answers."""

__all__ = [
    "ALL_ADDRESSES",
    "ANNOTATION_DESIRED",
    "ANNOTATION_INJECTED",
    "ANNOTATION_SKIPPED",
    "API_GROUP",
    "API_VERSION",
    "CONTAINER_PATH",
    "CONTAINER_SIDECAR",
    "CONTAINER_WAIT",
    "CONTRACT_VERSION",
    "DEFAULT_ATTACH_TIMEOUT_S",
    "DEFAULT_HTTP_HOST",
    "DEFAULT_HTTP_PORT",
    "DEFAULT_PROFILE",
    "DEFAULT_ROOT",
    "DESIRED_FILE",
    "DIRECTORY_NAME",
    "ENV_ATTACH_TIMEOUT",
    "ENV_CAPACITY",
    "ENV_CONTENTS",
    "ENV_DESIRED_FILE",
    "ENV_DIR",
    "ENV_ENGINES",
    "ENV_ENGINE_ID",
    "ENV_HTTP_HOST",
    "ENV_HTTP_PORT",
    "ENV_HUGE_PAGES",
    "ENV_JANITOR",
    "ENV_LOG_LEVEL",
    "ENV_MODE",
    "ENV_NAMES",
    "ENV_ON_FAILURE",
    "ENV_OWNER",
    "ENV_PIN",
    "ENV_POD_MEMORY_LIMIT",
    "ENV_POD_UID",
    "ENV_PREFIX",
    "ENV_RETENTION",
    "ENV_ROOT",
    "ENV_SETTLE_THREADS",
    "ENV_VLLM_UNTESTED",
    "LABEL_INJECT",
    "LABEL_PROFILE",
    "LIBRARY_CURRENT",
    "LIBRARY_DIR",
    "MAX_CAPACITY_BYTES",
    "MAX_DESIRED_BYTES",
    "PORT_NAME",
    "PROFILE_KIND",
    "PROFILE_PLURAL",
    "REGION_KIND",
    "REGION_PLURAL",
    "VOLUME_INFO",
    "VOLUME_LIBRARY",
    "VOLUME_NO_TOKEN",
    "VOLUME_SHM",
    "Contents",
    "DesiredRegion",
    "DesiredState",
    "Direction",
    "EngineId",
    "GeometryBody",
    "HugePages",
    "Janitor",
    "LimitBody",
    "Mode",
    "OnFailure",
    "OrphanBody",
    "Owner",
    "ParticipantBody",
    "Pin",
    "PlanBody",
    "RegionBody",
    "RegionState",
    "RegionsBody",
    "Role",
    "SpeakerBody",
    "StartGate",
    "desired_text",
    "expand_engine_ids",
    "is_retention",
    "parse_capacity",
    "parse_desired",
    "parse_duration_s",
    "parse_engine_id",
    "parse_timeout_s",
    "printable",
    "to_json",
    "unknown_variables",
]

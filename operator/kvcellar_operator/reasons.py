"""Why a pod was, or was not, injected: every reason, what it means and what to do.

The values are machine-readable and stable: they stand in annotations, Events and metrics. The sentences
beside them are for people. docs/reference/injection.md lists the same table, and a test compares them.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvcellar.errors import KVCellarError


class Outcome(StrEnum):
    """What became of a pod."""

    INJECTED = "injected"
    SKIPPED = "skipped"
    ALREADY = "already"


class Reason(StrEnum):
    """Why a pod has its outcome."""

    INJECTED = "Injected"
    ALREADY_INJECTED = "AlreadyInjected"
    NOT_OPTED_IN = "NotOptedIn"
    MIRROR_POD = "MirrorPod"
    INVALID_POD = "InvalidPod"
    POD_TOO_LARGE = "PodTooLarge"
    PROFILE_MISSING = "ProfileMissing"
    PROFILE_DISABLED = "ProfileDisabled"
    PROFILE_INVALID = "ProfileInvalid"
    PROFILE_UNAVAILABLE = "ProfileUnavailable"
    SIDECARS_UNSUPPORTED = "SidecarsUnsupported"
    WINDOWS_POD = "WindowsPod"
    HOST_IPC = "HostIPC"
    HOST_NETWORK = "HostNetwork"
    CONTAINER_NAME_TAKEN = "ContainerNameTaken"
    VOLUME_NAME_TAKEN = "VolumeNameTaken"
    MOUNT_PATH_TAKEN = "MountPathTaken"
    PORT_TAKEN = "PortTaken"
    ENGINE_MISSING = "EngineMissing"
    ENGINE_SETTING = "EngineSetting"
    SHM_NOT_MEMORY = "ShmNotMemory"
    SHM_READ_ONLY = "ShmReadOnly"
    SHM_DIFFERS = "ShmDiffers"
    SHM_SUBPATH = "ShmSubPath"
    SHM_TOO_SMALL = "ShmTooSmall"
    NO_MEMORY_LIMIT = "NoMemoryLimit"
    CAPACITY_TOO_SMALL = "CapacityTooSmall"
    CAPACITY_TOO_LARGE = "CapacityTooLarge"
    STOCK_ARGUMENT = "StockArgument"
    INTERNAL_ERROR = "InternalError"


class Notice(StrEnum):
    """What somebody should know of a pod that was injected."""

    ARGUMENT_PRESENT = "ArgumentPresent"
    ARGUMENT_OWN_CONFIG = "ArgumentOwnConfig"
    ARGUMENT_SHELL = "ArgumentShell"
    ARGUMENT_UNKNOWN_PROGRAM = "ArgumentUnknownProgram"
    ARGUMENT_CONFIG_FILE = "ArgumentConfigFile"
    ARGUMENT_OTHER_BACKEND = "ArgumentOtherBackend"
    ARGUMENT_OFF = "ArgumentOff"
    NO_GPU = "NoGPU"
    BEST_EFFORT = "BestEffort"
    SHM_CLAMPED = "ShmClamped"
    HOST_NETWORK_PORT = "HostNetworkPort"
    SUPPLEMENTAL_GROUP = "SupplementalGroup"
    PROFILE_NEWER = "ProfileNewer"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a reason means, and what to do about it."""

    meaning: str
    remedy: str


REASONS: dict[Reason | Notice, Explanation] = {
    Reason.INJECTED: Explanation("The sidecar and what belongs to it were added.", "None needed."),
    Reason.ALREADY_INJECTED: Explanation(
        "The pod carries the sidecar already; nothing was changed.", "None needed."
    ),
    Reason.NOT_OPTED_IN: Explanation(
        'The pod has no label kvcellar.dev/inject with the value "true".',
        "Set the label on the pod template, not on the Deployment.",
    ),
    Reason.MIRROR_POD: Explanation(
        "The pod mirrors a static pod of a node; its copy in the API must stay as it is.",
        "Run `kvcellar inject -f FILE` on the manifest that the kubelet reads.",
    ),
    Reason.INVALID_POD: Explanation(
        "A part of the pod has not the shape that Kubernetes asks for.",
        "Correct the field that the message names.",
    ),
    Reason.POD_TOO_LARGE: Explanation(
        "With the sidecar the object, or its annotations, would pass the limits of the API server.",
        "Move big annotations, arguments or variables to a ConfigMap.",
    ),
    Reason.PROFILE_MISSING: Explanation(
        "The OffloadProfile that the label kvcellar.dev/profile names is not in the pod's namespace.",
        "Create it, or correct the label, and create the pod anew.",
    ),
    Reason.PROFILE_DISABLED: Explanation(
        "The profile says `enabled: false`.",
        "Set `enabled: true`, or label the pod with another profile.",
    ),
    Reason.PROFILE_INVALID: Explanation(
        "The profile holds a value that this version of kvcellar does not take.",
        "Correct the field that the message names; upgrade CRDs and operator together.",
    ),
    Reason.PROFILE_UNAVAILABLE: Explanation(
        "The webhook could not read the profile from the API server.",
        "Look at the webhook's log and its permissions; create the pod anew.",
    ),
    Reason.SIDECARS_UNSUPPORTED: Explanation(
        "A kubelet of the cluster is older than 1.29, where a native sidecar hangs the pod for ever.",
        "Upgrade the nodes to 1.29 or newer.",
    ),
    Reason.WINDOWS_POD: Explanation(
        "The pod runs on Windows, which has no tmpfs.", "Remove the label kvcellar.dev/inject."
    ),
    Reason.HOST_IPC: Explanation(
        "The pod uses the node's IPC namespace, and with it the node's /dev/shm.",
        "Remove hostIPC, or mount an emptyDir with `medium: Memory` at /dev/shm.",
    ),
    Reason.HOST_NETWORK: Explanation(
        "The pod uses the node's network, where the sidecar's port would be open on the node.",
        "Set `sidecar.hostNetwork: true` in the profile, with a `sidecar.port` that is free on the nodes.",
    ),
    Reason.CONTAINER_NAME_TAKEN: Explanation(
        "A container of the pod has a name that the injector needs.",
        "Rename it; kvcellar, kvcellar-wait and kvcellar-path* are taken.",
    ),
    Reason.VOLUME_NAME_TAKEN: Explanation(
        "A volume of the pod has a name that the injector needs.",
        "Rename it; kvcellar-shm, kvcellar-lib, kvcellar-info and kvcellar-no-token are taken.",
    ),
    Reason.MOUNT_PATH_TAKEN: Explanation(
        "An engine container mounts something of its own at /opt/kvcellar.",
        "Mount it elsewhere.",
    ),
    Reason.PORT_TAKEN: Explanation(
        "A container of the pod declares the sidecar's port.",
        "Set `sidecar.port` in the profile to another one.",
    ),
    Reason.ENGINE_MISSING: Explanation(
        "The profile names a container that the pod does not have.",
        "Correct `containers` in the profile, or leave it out.",
    ),
    Reason.ENGINE_SETTING: Explanation(
        "An engine container sets a KVCELLAR_* variable that no sidecar can go with.",
        "Remove the variable that the message names.",
    ),
    Reason.SHM_NOT_MEMORY: Explanation(
        "An engine container mounts something at /dev/shm that is no memory-backed emptyDir.",
        "Give that emptyDir `medium: Memory`, or remove the mount.",
    ),
    Reason.SHM_READ_ONLY: Explanation(
        "An engine container mounts /dev/shm read-only.", "Remove `readOnly` from the mount."
    ),
    Reason.SHM_DIFFERS: Explanation(
        "The engine containers mount different volumes, or parts of one, at /dev/shm.",
        "Mount one volume, with one subPath, in all of them.",
    ),
    Reason.SHM_SUBPATH: Explanation(
        "The mount at /dev/shm has a subPathExpr whose variables the sidecar cannot have as well.",
        "Use subPath, or variables that are literals or come from a fieldRef.",
    ),
    Reason.SHM_TOO_SMALL: Explanation(
        "The pod's own volume at /dev/shm has a sizeLimit below the regions and the head-room.",
        "Raise the sizeLimit to what the message says, or lower `capacity` or `shmHeadroom`.",
    ),
    Reason.NO_MEMORY_LIMIT: Explanation(
        "The capacity is a share, and there is no memory limit to take it of.",
        "Set a memory limit on each engine container or on the pod, or give `capacity` in bytes.",
    ),
    Reason.CAPACITY_TOO_SMALL: Explanation(
        "The share leaves a region less than 2 MiB.", "Raise `capacity`, or the memory limit."
    ),
    Reason.CAPACITY_TOO_LARGE: Explanation(
        "The regions of the pod are 2^63 bytes or more together.", "Lower `capacity`."
    ),
    Reason.STOCK_ARGUMENT: Explanation(
        "In stock mode vLLM has to be told the engine id, and its arguments cannot be, or were not, changed.",
        'Give --kv-transfer-config with "engine_id": "$(KVCELLAR_ENGINE_ID)", or use the plugin.',
    ),
    Reason.INTERNAL_ERROR: Explanation(
        "The injector failed; the pod was let pass as it was.",
        "Look at the webhook's log, and file an issue with it.",
    ),
    Notice.ARGUMENT_PRESENT: Explanation(
        "The engine has a --kv-transfer-config that uses kvcellar; it was left as it is.",
        "None needed.",
    ),
    Notice.ARGUMENT_OWN_CONFIG: Explanation(
        "The engine has a --kv-transfer-config of its own that does not use kvcellar.",
        "Replace it by the `kvTransferConfig` in the annotation, which holds both.",
    ),
    Notice.ARGUMENT_SHELL: Explanation(
        "The engine is started by a shell, whose script cannot be changed.",
        "Put --kv-transfer-config with the annotation's `kvTransferConfig` into the script.",
    ),
    Notice.ARGUMENT_UNKNOWN_PROGRAM: Explanation(
        "What the container runs is not known to be vLLM.",
        "Start vLLM by `vllm serve`, set `vllmArgument: always`, or give the argument yourself.",
    ),
    Notice.ARGUMENT_CONFIG_FILE: Explanation(
        "vLLM reads a --config file, which may hold a kv-transfer-config that an argument would override.",
        "Put the annotation's `kvTransferConfig` into the file, or set `vllmArgument: always`.",
    ),
    Notice.ARGUMENT_OTHER_BACKEND: Explanation(
        "The engine asks vLLM for another offloading backend, which overrides the connector.",
        "Remove --kv-offloading-size and --kv-offloading-backend.",
    ),
    Notice.ARGUMENT_OFF: Explanation(
        "The profile says `vllmArgument: never`.",
        "Give vLLM --kv-transfer-config with the annotation's `kvTransferConfig`.",
    ),
    Notice.NO_GPU: Explanation(
        "No container asks for a GPU; the pod's main container was taken for the engine.",
        "Name the engine in the profile's `containers` if it is another one.",
    ),
    Notice.BEST_EFFORT: Explanation(
        "The pod sets neither requests nor limits, so the sidecar got none either and the region is in no "
        "request: the scheduler does not count it, and nothing but sizeLimit bounds it.",
        "Set requests and limits on the engine.",
    ),
    Notice.SHM_CLAMPED: Explanation(
        "The kubelet makes the volume at /dev/shm no larger than the pod's memory limit, so there is less "
        "head-room than the profile asks for.",
        "Raise the engine's memory limit, or lower `shmHeadroom`.",
    ),
    Notice.HOST_NETWORK_PORT: Explanation(
        "The sidecar's port is open on the node, and only one such pod fits on a node.",
        "Use profiles with other values of `sidecar.port`.",
    ),
    Notice.SUPPLEMENTAL_GROUP: Explanation(
        "A group was added to the pod's supplementalGroups, so that engine and sidecar share the region's "
        "files.",
        "Set `securityContext.fsGroup`, or `runAsUser`, if you want another one.",
    ),
    Notice.PROFILE_NEWER: Explanation(
        "The profile has fields of a newer CRD, which the webhook does not know: `unknownFields` in the "
        "annotation names them. The pod was injected without them.",
        "Upgrade the operator to the CRDs' release (`helm upgrade`); then create the pod anew if it needs "
        "the fields.",
    ),
}
"""Every reason and notice, in the order of the enumerations."""


class InjectionRefused(KVCellarError):
    """A pod that cannot, or must not, be injected.

    Attributes:
        reason: why, for machines.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        """Keep the reason beside the sentence, so that callers need not parse it."""
        super().__init__(message)
        self.reason = reason

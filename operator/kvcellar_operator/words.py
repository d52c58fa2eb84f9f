"""Why a condition has its status, and what Events tell: every word, what it means and what to do. Pure.

The values are stable: they stand in objects, Events and metrics. docs/reference/events.md lists the same
tables, and a test compares them.
"""

from enum import StrEnum

from kvcellar_operator.reasons import Explanation


class Why(StrEnum):
    """Reason of a condition."""

    AS_EXPECTED = "AsExpected"
    ANSWERED = "Answered"
    RESERVED = "Reserved"
    RESERVING = "Reserving"
    SETTLED = "Settled"
    SETTLING = "Settling"
    ENGINE_ATTACHED = "EngineAttached"
    NO_ENGINE = "NoEngine"
    RELEASED = "Released"
    REGION_FAILED = "RegionFailed"
    DOES_NOT_FIT = "DoesNotFit"
    START_FAILED = "StartFailed"
    POD_PENDING = "PodPending"
    POD_ENDED = "PodEnded"
    POD_GONE = "PodGone"
    NOT_INJECTED = "NotInjected"
    CAPACITY_UNKNOWN = "CapacityUnknown"
    SIDECAR_NOT_RUNNING = "SidecarNotRunning"
    CONNECTION_FAILED = "ConnectionFailed"
    TIMEOUT = "Timeout"
    BAD_STATUS = "BadStatus"
    BAD_ANSWER = "BadAnswer"
    OTHER_CONTRACT = "OtherContract"
    WRONG_SIDECAR = "WrongSidecar"


WHYS: dict[Why, Explanation] = {
    Why.AS_EXPECTED: Explanation("Nothing is wrong that is known.", "None needed."),
    Why.ANSWERED: Explanation("The sidecar answered.", "None needed."),
    Why.RESERVED: Explanation("The kernel has promised every page.", "None needed."),
    Why.RESERVING: Explanation("The sidecar is taking the pages.", "Wait; see settleProgress."),
    Why.SETTLED: Explanation("Every page is zeroed and resident.", "None needed."),
    Why.SETTLING: Explanation("Pages are being zeroed.", "Wait; engines can attach meanwhile."),
    Why.ENGINE_ATTACHED: Explanation("Processes of the engine hold the region.", "None needed."),
    Why.NO_ENGINE: Explanation(
        "No process holds the region: the engine starts, has crashed, or runs without the plugin.",
        "If it stays, look at the engine's log and at `notices` in the pod's annotation.",
    ),
    Why.RELEASED: Explanation(
        "The region was freed, as its retention asked.",
        "Set `spec.retention` to keep to have one again, without its contents.",
    ),
    Why.REGION_FAILED: Explanation(
        "The sidecar cannot keep the region; `status.reason` says why.",
        "Do what the sentence asks; the sidecar tries again by itself.",
    ),
    Why.DOES_NOT_FIT: Explanation(
        "A memory limit leaves less than the region needs.",
        "Lower `capacity` in the profile, or raise the limit that the message names.",
    ),
    Why.START_FAILED: Explanation(
        "An init container of kvcellar fails, so the engine is not started; the message has its last words.",
        "kvcellar-path: the engine's image has no sh, so set `imagePythonPath: ignore` in the profile. "
        "kvcellar-wait: do what the message asks.",
    ),
    Why.POD_PENDING: Explanation(
        "The pod, or its sidecar, has not started yet.", "Look at the pod's events if it stays."
    ),
    Why.POD_ENDED: Explanation(
        "The pod has ended, and its memory with it.", "None needed; delete the pod."
    ),
    Why.POD_GONE: Explanation(
        "The pod is not looked at any more: it was deleted, or has lost the label kvcellar.dev/inject.",
        "Delete the OffloadRegion, or set the label again.",
    ),
    Why.NOT_INJECTED: Explanation(
        "The pod was labelled after it was created, or created while the webhook did not answer or did not apply "
        "to it: it has no sidecar.",
        "Set the label where the pod is made from, its template; else look at the webhook's Deployment and its "
        "namespace selector. Create the pod anew.",
    ),
    Why.CAPACITY_UNKNOWN: Explanation(
        "The webhook found no capacity for the region, so the pod has no sidecar; the message says why.",
        "Do what the message asks (kvcellar.dev/skipped of the pod has it as well); create the pod anew.",
    ),
    Why.SIDECAR_NOT_RUNNING: Explanation(
        "The kubelet says that the sidecar's container does not run.",
        "Look at the log of container kvcellar.",
    ),
    Why.CONNECTION_FAILED: Explanation(
        "The sidecar's port could not be reached, or the connection broke.",
        "Let the controller reach port kvcellar of the pods (NetworkPolicy, service mesh).",
    ),
    Why.TIMEOUT: Explanation(
        "The sidecar did not answer in time.", "Look at the sidecar's CPU limit and its log."
    ),
    Why.BAD_STATUS: Explanation(
        "Something answered with another status than 200.",
        "Look at the sidecar's log, and whether a proxy stands in between.",
    ),
    Why.BAD_ANSWER: Explanation(
        "What answered is no list of regions, or too large.",
        "Look at what listens on the port; upgrade sidecars and operator together.",
    ),
    Why.OTHER_CONTRACT: Explanation(
        "The sidecar is of a release that this operator does not understand. The engine and its region go on; "
        "wishes do not reach the sidecar.",
        "Create the pod anew (`kubectl rollout restart`), or run the operator of the sidecar's release.",
    ),
    Why.WRONG_SIDECAR: Explanation(
        "A sidecar answered that does not have this engine's region.",
        "Look at KVCELLAR_ENGINE_ID of the sidecar; pods of a node's network may share a port.",
    ),
}
"""Every reason of a condition."""


class Told(StrEnum):
    """Reason of an Event."""

    REGION_RESERVED = "RegionReserved"
    REGION_FAILED = "RegionFailed"
    DOES_NOT_FIT = "RegionDoesNotFit"
    REGION_RECOVERED = "RegionRecovered"
    REGION_RELEASED = "RegionReleased"
    ENGINE_ATTACHED = "EngineAttached"
    ENGINE_DETACHED = "EngineDetached"
    ENGINE_RESTARTED = "EngineRestarted"
    START_FAILED = "StartFailed"
    SIDECAR_UNREACHABLE = "SidecarUnreachable"
    SIDECAR_REACHABLE = "SidecarReachable"
    ORPHAN_RECLAIMED = "OrphanReclaimed"
    NOT_INJECTED = "NotInjected"
    INJECTION_SKIPPED = "InjectionSkipped"
    POD_REFUSED = "PodRefused"


TOLD: dict[Told, Explanation] = {
    Told.REGION_RESERVED: Explanation("Engines can attach.", "None needed."),
    Told.REGION_FAILED: Explanation(
        "The sidecar cannot keep the region; the engine runs without it.",
        "Do what the message asks; the sidecar tries again by itself.",
    ),
    Told.DOES_NOT_FIT: Explanation(
        "A memory limit leaves less than the region needs; the engine runs without it.",
        "Lower `capacity` in the profile, or raise the limit that the message names.",
    ),
    Told.REGION_RECOVERED: Explanation("A region that had failed is there.", "None needed."),
    Told.REGION_RELEASED: Explanation(
        "The region was freed, as its retention asked.", "None needed."
    ),
    Told.ENGINE_ATTACHED: Explanation("The engine's first start has the region.", "None needed."),
    Told.ENGINE_DETACHED: Explanation(
        "No process of the engine holds the region any more: it crashed or was stopped.",
        "Look at the engine's log (`kubectl logs --previous`).",
    ),
    Told.ENGINE_RESTARTED: Explanation(
        "The engine came back and has its region again.",
        "Look at why it ended (`kubectl logs --previous`).",
    ),
    Told.START_FAILED: Explanation(
        "An init container of kvcellar fails, so the engine is not started.",
        "See the reason of the condition.",
    ),
    Told.SIDECAR_UNREACHABLE: Explanation(
        "The sidecar gave no answer that can be used; the condition Reachable says why.",
        "See the reason of the condition.",
    ),
    Told.SIDECAR_REACHABLE: Explanation("The sidecar answers again.", "None needed."),
    Told.ORPHAN_RECLAIMED: Explanation("A file that nobody held was removed.", "None needed."),
    Told.NOT_INJECTED: Explanation(
        "A pod that has opted in came up without its sidecar: it was labelled later, or the webhook was not asked.",
        "Set the label where the pod is made from, its template; else look at the webhook's Deployment and its "
        "namespace selector. Create the pod anew.",
    ),
    Told.INJECTION_SKIPPED: Explanation(
        "The webhook let a pod that has opted in pass as it was: the message begins with the reason.",
        "See that reason, which the pod's annotation kvcellar.dev/skipped has too. Create the pod anew.",
    ),
    Told.POD_REFUSED: Explanation(
        "Pods that have opted in are refused by a quota or a LimitRange, which count the sidecar as well.",
        "Raise the quota by the sidecar's share, or lower `capacity` in the profile.",
    ),
}
"""Every reason of an Event."""

"""What is to be said of a pod that has opted in and has no sidecar. Pure.

A pod that the webhook skipped bears the reason in an annotation. The webhook's warning reaches whoever
creates the pod, which mostly is a ReplicaSet that shows it to nobody, so an Event tells it as well, except
where somebody chose it (a profile that is off). Two cases are told by an OffloadRegion too, since somebody
who looks for it finds none: the webhook was never asked, and the webhook knew no capacity.
"""

from kvcellar.contract import printable
from kvcellar_operator.events import EventType, Occurrence, Subject
from kvcellar_operator.explain import parse_skipped
from kvcellar_operator.heard import Silence
from kvcellar_operator.podview import PodView
from kvcellar_operator.reasons import Reason
from kvcellar_operator.words import Told, Why

NOT_INJECTED = (
    "the pod has opted in to kvcellar and came up without its sidecar: the label was set after "
    "it was created, or the webhook was not asked, or could not mark it"
)
_NO_CAPACITY = (Reason.NO_MEMORY_LIMIT, Reason.CAPACITY_TOO_SMALL, Reason.CAPACITY_TOO_LARGE)


def silence_of(pod: PodView) -> Silence | None:
    """Why a pod without a sidecar has no region; None if no object is to say so."""
    if pod.is_mirror:
        return None
    if pod.phase in ("Succeeded", "Failed"):
        return Silence(Why.POD_ENDED, f"the pod has ended: {pod.phase}")
    if not pod.skipped:
        return Silence(Why.NOT_INJECTED, NOT_INJECTED)
    # The annotation is anybody's to write; what is no reason of ours is none.
    if parse_skipped(pod.skipped)[0] in _NO_CAPACITY:
        return Silence(Why.CAPACITY_UNKNOWN, pod.skipped)
    return None


def occurrence_of(pod: PodView) -> Occurrence | None:
    """The Event on a pod without a sidecar; None if it is to have none."""
    if pod.is_mirror or pod.is_ending:
        return None
    subject = Subject("v1", "Pod", pod.namespace, pod.name, pod.uid)
    if not pod.skipped:
        return Occurrence(subject, EventType.WARNING, Told.NOT_INJECTED, NOT_INJECTED, "created")
    if parse_skipped(pod.skipped)[0] is Reason.PROFILE_DISABLED:
        return None
    message = f"the pod has opted in to kvcellar and was not injected: {printable(pod.skipped)}"
    return Occurrence(subject, EventType.WARNING, Told.INJECTION_SKIPPED, message, "created")

"""What is to be said of a pod that has opted in and has no sidecar. Pure.

A pod that the webhook skipped bears the reason in an annotation, and that is enough where somebody chose
it (a profile that is off) or has to change the pod (a volume that is in the way). Two cases are told by an
object as well, since somebody who looks for the region finds none: the webhook was never asked, and the
webhook knew no capacity.
"""

from kvcellar_operator.explain import parse_skipped
from kvcellar_operator.heard import Silence
from kvcellar_operator.podview import PodView
from kvcellar_operator.reasons import Reason
from kvcellar_operator.words import Why

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

"""Answers one AdmissionReview: looks up the profile, lets `inject` decide, makes a patch of it. Pure.

A pod is never refused. What goes wrong here, be it our own mistake, lets the pod pass, says so in a warning
that kubectl shows and, where the pod can be marked, in its annotation.
"""

import base64
import copy
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcellar.contract import DEFAULT_PROFILE
from kvcellar.errors import KVCellarError
from kvcellar_operator.inject import (
    Injection,
    InjectSettings,
    InvalidProfile,
    Outcome,
    Profile,
    Reason,
    inject,
    json_patch,
    skip,
    wanted_profile,
)
from kvcellar_operator.objects import JsonObject
from kvcellar_operator.reasons import InjectionRefused

logger = logging.getLogger(__name__)

API_VERSION = "admission.k8s.io/v1"
_MAX_WARNING = 256
"""The API server cuts longer ones."""


class NoReview(KVCellarError):
    """A request that is no AdmissionReview of v1: there is nobody to answer."""


class ProfileUnavailable(KVCellarError):
    """The profiles could not be read yet."""


FindProfile = Callable[[str, str], Profile | None]
"""The profile of a namespace and a name; None if there is none there.

Raises `InvalidProfile` for one that cannot be used, `ProfileUnavailable` if none is known yet.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to send back, and what to count."""

    body: JsonObject
    outcome: Outcome
    reason: Reason


def answer(review: object, find_profile: FindProfile, settings: InjectSettings) -> Answer:
    """Decide on the pod of a review.

    Raises:
        NoReview: it is none, or not of version v1.
    """
    request = _request(review)
    uid, pod = request["uid"], request.get("object")
    namespace = str(request.get("namespace") or "")
    if request.get("operation") != "CREATE" or not _is_pod(request):
        return _unchanged(uid, Reason.NOT_OPTED_IN, "only the creation of pods is looked at")
    if not isinstance(pod, dict):
        return _unchanged(uid, Reason.INVALID_POD, "the review holds no pod")
    try:
        injection = decide(pod, namespace, find_profile, settings)
        patch = json_patch(pod, injection.pod)
    except Exception:
        # The border: the pod of somebody else must come up whatever mistake we made.
        logger.exception("a pod of namespace %s could not be looked at", namespace)
        injection = skip(
            copy.deepcopy(pod), Reason.INTERNAL_ERROR, "the webhook failed; its log says why"
        )
        patch = json_patch(pod, injection.pod)
    return _answer(uid, injection, patch)


def _request(review: object) -> Mapping[str, Any]:
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        raise NoReview("the request is no AdmissionReview")
    if review.get("apiVersion") != API_VERSION:
        raise NoReview(f"the request is no AdmissionReview of {API_VERSION}")
    request = review.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise NoReview("the AdmissionReview has no request with a uid")
    return request


def _is_pod(request: Mapping[str, Any]) -> bool:
    kind = request.get("kind") or {}
    return (
        kind.get("group", "") == "" and kind.get("kind") == "Pod" and not request.get("subResource")
    )


def decide(
    pod: JsonObject, namespace: str, find_profile: FindProfile, settings: InjectSettings
) -> Injection:
    """Decide on a pod with the profile that it names, or `default`; also for manifests without a cluster."""
    try:
        profile = find_profile(namespace, wanted_profile(pod) or DEFAULT_PROFILE)
    except InvalidProfile as error:
        return skip(pod, Reason.PROFILE_INVALID, str(error))
    except ProfileUnavailable as error:
        return skip(pod, Reason.PROFILE_UNAVAILABLE, str(error))
    except InjectionRefused as refusal:
        return skip(pod, refusal.reason, str(refusal))
    return inject(pod, namespace, profile, settings)


def _unchanged(uid: str, reason: Reason, message: str) -> Answer:
    body = _review({"uid": uid, "allowed": True, "warnings": [_warning(reason, message)]})
    return Answer(body, Outcome.SKIPPED, reason)


def _answer(uid: str, injection: Injection, patch: list[dict[str, Any]]) -> Answer:
    response: JsonObject = {"uid": uid, "allowed": True}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    if injection.outcome is Outcome.SKIPPED:
        response["warnings"] = [_warning(injection.reason, injection.message)]
    # They stand in the API server's audit log, with the webhook's name before them.
    response["auditAnnotations"] = {"outcome": injection.outcome, "reason": injection.reason}
    return Answer(_review(response), injection.outcome, injection.reason)


def _warning(reason: Reason, message: str) -> str:
    text = f"kvcellar: not injected ({reason}): {message}"
    return text if len(text) <= _MAX_WARNING else f"{text[: _MAX_WARNING - 3]}..."


def _review(response: JsonObject) -> JsonObject:
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}

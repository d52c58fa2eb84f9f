"""Asks the API server, at start, whether this ServiceAccount may do all that it has to.

A missing rule would show as silence: lists and watches are simply tried again. Here it is said by name.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from kvcellar_operator.cluster import Api
from kvcellar_operator.objects import JsonObject

logger = logging.getLogger(__name__)

_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True)
class Need:
    """One thing that the program has to be allowed.

    Attributes:
        verbs: of the API.
        resource: plural, with its subresource after a slash.
        why: what it is needed for; the end of a sentence.
        group: of the API; "" is the core.
        namespace: "" is all of them, or a resource without.
        name: of the only object; "" is any.
    """

    verbs: tuple[str, ...]
    resource: str
    why: str
    group: str = ""
    namespace: str = ""
    name: str = ""


async def missing(api: Api, needs: Iterable[Need]) -> list[str]:
    """A sentence for each verb that is not allowed; all of them are logged.

    Raises:
        ApiFailure: the API server does not answer the question.
    """
    sentences = []
    for need in needs:
        for verb in need.verbs:
            if not await _is_allowed(api, need, verb):
                sentences.append(_sentence(need, verb))
                logger.error("%s", sentences[-1])
    return sentences


async def _is_allowed(api: Api, need: Need, verb: str) -> bool:
    resource, _, subresource = need.resource.partition("/")
    asked: JsonObject = {
        "group": need.group,
        "resource": resource,
        "subresource": subresource,
        "verb": verb,
        "namespace": need.namespace,
        "name": need.name,
    }
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }
    answer = await api.create(_REVIEWS, body)
    return bool(answer.get("status", {}).get("allowed"))


def _sentence(need: Need, verb: str) -> str:
    resource = f"{need.resource}.{need.group}" if need.group else need.resource
    what = f"{resource} {need.name}" if need.name else resource
    where = f" in namespace {need.namespace}" if need.namespace else ""
    return f"RBAC: this ServiceAccount may not {verb} {what}{where}, which it needs to {need.why}"

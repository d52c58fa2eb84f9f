"""Injects into the objects of a manifest, as the webhook would into their pods. Pure.

The webhook sees pods alone; a manifest mostly holds what makes them. Each pod template is decided on as
the pod that would be made of it, by the very function that the webhook calls. What becomes of an object
without a known pod template: nothing.
"""

from dataclasses import dataclass, field
from typing import Any

from kvcellar_operator.admission import FindProfile, decide
from kvcellar_operator.inject import Injection, InjectSettings, Profile
from kvcellar_operator.objects import JsonObject

_TEMPLATE = ("spec", "template")
TEMPLATES: dict[str, tuple[str, ...]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "DaemonSet": _TEMPLATE,
    "Deployment": _TEMPLATE,
    "Job": _TEMPLATE,
    "ReplicaSet": _TEMPLATE,
    "ReplicationController": _TEMPLATE,
    "StatefulSet": _TEMPLATE,
}
"""Where an object has its pod, by kind; `List` holds others."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of one pod of a manifest.

    Attributes:
        owner: the object that it stands in, such as `Deployment team/llama`.
        injection: as the webhook would have it.
    """

    owner: str
    injection: Injection


@dataclass(frozen=True, slots=True)
class Injector:
    """What is the same for all objects of a manifest.

    Attributes:
        settings: as the webhook would have them.
        namespace: of objects that name none.
        profiles: those that a pod can name, by (namespace or "" for any, name).
    """

    settings: InjectSettings
    namespace: str
    profiles: dict[tuple[str, str], Profile] = field(default_factory=dict)

    def inject(self, document: object) -> tuple[Any, list[Decision]]:
        """The document with the sidecar in its pods, and what was decided; the one given is not changed."""
        if not isinstance(document, dict):
            return document, []
        kind = str(document.get("kind"))
        if kind == "List" and isinstance(document.get("items"), list):
            done = [self.inject(item) for item in document["items"]]
            items = [changed for changed, _ in done]
            return {**document, "items": items}, [one for _, decided in done for one in decided]
        path = TEMPLATES.get(kind)
        pod = None if path is None else _at(document, path)
        if path is None or pod is None:
            return document, []
        metadata = document.get("metadata")
        names = metadata if isinstance(metadata, dict) else {}
        namespace = str(names.get("namespace") or self.namespace)
        name = names.get("name") or f"{names.get('generateName') or ''}*"
        injection = decide(pod, namespace, self._profile_finder, self.settings)
        decision = Decision(f"{kind} {namespace}/{name}", injection)
        return _with(document, path, injection.pod), [decision]

    @property
    def _profile_finder(self) -> FindProfile:
        def find(namespace: str, name: str) -> Profile | None:
            return self.profiles.get((namespace, name)) or self.profiles.get(("", name))

        return find


def _at(document: JsonObject, path: tuple[str, ...]) -> JsonObject | None:
    found: object = document
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def _with(document: JsonObject, path: tuple[str, ...], pod: JsonObject) -> JsonObject:
    if not path:
        return pod
    first, *rest = path
    return {**document, first: _with(document[first], tuple(rest), pod)}

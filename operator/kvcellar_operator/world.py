"""What the controller knows of pods and regions: what the watches said, and what its own writes answered.

Of one object the newest version counts, whichever of the two ways it came.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kvcellar_operator import regions
from kvcellar_operator.objects import JsonObject, Key
from kvcellar_operator.podview import PodView


class World:
    """Pods that have opted in, and all OffloadRegions.

    Attributes:
        pods: by key.
        regions: by key, each `regions.slim`.
    """

    def __init__(self) -> None:
        self.pods: dict[Key, PodView] = {}
        self.regions: dict[Key, JsonObject] = {}
        self._by_pod: defaultdict[Key, set[Key]] = defaultdict(set)

    def regions_of(self, pod: Key, uid: str | None = None) -> list[JsonObject]:
        """The regions of a pod, or of this very one, in the order of their names."""
        found = [self.regions[key] for key in sorted(self._by_pod.get(pod, ()))]
        return [body for body in found if uid is None or body["spec"].get("podUID") == uid]

    def take_region(self, body: Mapping[str, Any]) -> JsonObject:
        """Note a version of a region; returns the newest one that is known."""
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        known = self.regions.get(key)
        if known is not None and not regions.is_newer(body, known):
            return known
        taken = regions.slim(body)
        self.regions[key] = taken
        self._by_pod[pod_of(taken)].add(key)
        return taken

    def drop_region(self, body: Mapping[str, Any]) -> None:
        """A region is gone, unless another has taken its place."""
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        known = self.regions.get(key)
        if known is None or known["metadata"].get("uid") != body["metadata"].get("uid"):
            return
        del self.regions[key]
        pod = pod_of(known)
        self._by_pod[pod].discard(key)
        if not self._by_pod[pod]:
            del self._by_pod[pod]


def pod_of(region: Mapping[str, Any]) -> Key:
    """The pod that a region says it belongs to."""
    return Key(region["metadata"]["namespace"], str(region["spec"].get("podName", "")))

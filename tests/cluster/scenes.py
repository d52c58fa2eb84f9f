"""One namespace with pods that have no containers, sidecars on loopback, and a controller as a process."""

import contextlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcellar.contract import ANNOTATION_INJECTED, LABEL_INJECT
from kvcellar_operator.config import ControllerSettings, parse
from kvcellar_operator.controller import needs
from kvcellar_operator.engines import region_object_name
from kvcellar_operator.inject import InjectSettings, inject
from kvcellar_operator.profiles import Capacity, Profile
from tests.cluster.box import simulated
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.errors import ApiError
from tests.cluster.operators import OperatorProcess, granted, own_namespace
from tests.support.fake_sidecars import GIB, FakeSidecar, FakeSidecars, attached

SETTINGS = InjectSettings(image="kvcellar:test", version="0")
PROFILE = Profile(capacity=Capacity("1Gi", size_bytes=GIB))
QUICK = ("--poll-interval", "0.5", "--poll-timeout", "0.5", "--poll-max-backoff", "1")


@dataclass
class Engine:
    """A pod of a test and what its sidecar says."""

    name: str
    uid: str
    sidecar: FakeSidecar

    @property
    def region_name(self) -> str:
        return region_object_name(self.name, self.uid)


@dataclass
class Scene:
    """One namespace, its pods and the controller that looks after them."""

    cluster: Access
    namespace: str
    node: str
    sidecars: FakeSidecars
    process: OperatorProcess

    @property
    def regions_path(self) -> str:
        return f"/apis/kvcellar.dev/v1alpha1/namespaces/{self.namespace}/offloadregions"

    def create(
        self,
        name: str,
        profile: Profile | None = PROFILE,
        *,
        limit: str = "2Gi",
        stamp: JsonObject | None = None,
    ) -> JsonObject:
        """Create a pod as the webhook lets it pass, bound to the node.

        Args:
            name: of the pod.
            profile: that it is injected by; None if the webhook was not asked.
            limit: the engine's memory limit; "" for none.
            stamp: the annotation `kvcellar.dev/injected`, if it is not what the injector writes.
        """
        engine = {
            "name": "engine",
            "image": "engine:1",
            "command": ["vllm", "serve", "m"],
            "resources": {"limits": {"cpu": "1", **({"memory": limit} if limit else {})}},
        }
        body: JsonObject = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {LABEL_INJECT: "true"}},
            "spec": {"containers": [engine], "nodeName": self.node},
        }
        if profile is not None:
            body = inject(body, self.namespace, profile, SETTINGS).pod
        if stamp is not None:
            body["metadata"]["annotations"][ANNOTATION_INJECTED] = json.dumps(stamp)
        return self.cluster.api.create(f"/api/v1/namespaces/{self.namespace}/pods", body)

    def run(self, name: str, stamp: JsonObject | None = None) -> Engine:
        """A pod that runs, with a sidecar that is well and an engine that is attached."""
        uid = self.create(name, stamp=stamp)["metadata"]["uid"]
        sidecar = self.sidecars.add()
        sidecar.regions = [attached(uid)]
        simulated.mark_running(self.cluster, self.namespace, name, sidecar.ip)
        return Engine(name, uid, sidecar)

    def delete(self, name: str) -> None:
        simulated.finish_deletion(self.cluster, self.namespace, name)

    def regions(self) -> list[JsonObject]:
        return list(self.cluster.api.get(self.regions_path)["items"])

    def region(self, name: str) -> JsonObject:
        """An object; empty until it is there."""
        try:
            return self.cluster.api.get(f"{self.regions_path}/{name}")
        except ApiError:
            return {}

    def holds(self, name: str, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        for each in self.region(name).get("status", {}).get("conditions", []):
            if each["type"] == kind:
                return each["status"], each["reason"]
        return "", ""

    def events(self) -> Counter[tuple[str, str]]:
        """Counts of our Events, by reason and object."""
        listed = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return Counter(
            {
                (each["reason"], each["involvedObject"]["name"]): each["count"]
                for each in listed
                if each.get("source", {}).get("component") == "kvcellar-operator"
            }
        )

    def until_holds(self, name: str, kind: str, status: str, reason: str) -> None:
        until(
            lambda: self.holds(name, kind) == (status, reason),
            f"{kind} of {name} is {status} ({reason}), not {self.holds(name, kind)}",
        )


def settings_of(namespace: str) -> ControllerSettings:
    settings = parse(["controller", *arguments(namespace)])
    assert isinstance(settings, ControllerSettings)
    return settings


def arguments(namespace: str) -> list[str]:
    return ["--namespace", namespace, "--watch-namespace", namespace, *QUICK]


@contextlib.contextmanager
def scene_of(cluster: Access, sidecars: FakeSidecars, folder: Path) -> Iterator[Scene]:
    """A scene whose controller has exactly the rights that it asks for."""
    node = f"kvc-node-{secrets.token_hex(4)}"
    simulated.create_node(cluster, node)
    with (
        own_namespace(cluster) as namespace,
        granted(cluster, namespace, needs(settings_of(namespace))) as account,
    ):
        log = folder / "controller.log"
        process = OperatorProcess(account, log, "controller", *arguments(namespace))
        with process.running():
            yield Scene(cluster, namespace, node, sidecars, process)
    simulated.delete_node(cluster, node)

"""Pods of every shape that a sidecar has to go with, and what has to hold of each of them on the real node."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcellar.contract import LABEL_PROFILE
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.images import recipes
from tests.cluster.node_pods import (
    CAPACITY_BYTES,
    MIB,
    engine_container,
    engine_pod,
    memory,
    read_pod,
    restricted_container,
)
from tests.cluster.node_sidecars import NodeSidecar

ALL_START_S = 150.0
"""For the first of many pods that start at once on a busy machine; measured on a quiet one: 25 s."""
OTHER_USER = 4321

ENGINE = "/engines/pattern_engine.py"
PROFILES: dict[str, JsonObject] = {
    "default": {},
    "both": {"containers": ["one", "two"]},
    "two-in-one": {"engines": 2},
    "other-user": {"sidecar": {"securityContext": {"runAsUser": OTHER_USER}}},
    "ignore-path": {"imagePythonPath": "ignore"},
}


def profiles(namespace: str) -> list[JsonObject]:
    """Those of all shapes; their sidecars ask for little CPU, so that many fit on a small node."""
    made = []
    for name, more in PROFILES.items():
        sidecar = {**more.get("sidecar", {}), "resources": {"cpuRequest": "10m"}}
        spec = {"capacity": str(CAPACITY_BYTES), "shmHeadroom": "16Mi", **more, "sidecar": sidecar}
        metadata = {"name": name, "namespace": namespace}
        kind = {"apiVersion": "kvcellar.dev/v1alpha1", "kind": "OffloadProfile"}
        made.append({**kind, "metadata": metadata, "spec": spec})
    return made


def shaped(name: str, profile: str = "default", **more: object) -> JsonObject:
    """A pod that has opted in, with a profile; `more` goes into its engine's container."""
    resources = {"limits": {"memory": "128Mi"}, "requests": {"cpu": "10m"}}
    made = engine_pod(name, **({"resources": resources} | more))
    made["metadata"]["labels"][LABEL_PROFILE] = profile
    return made


# ---- the shapes


def two_engines() -> JsonObject:
    made = shaped("two-engines", "both")
    made["spec"]["containers"] = [engine_container("one"), engine_container("two")]
    return made


def two_in_one() -> JsonObject:
    """One container with two data-parallel engines."""
    script = f"ENGINE_SUFFIX=_dp0 python3 {ENGINE} & ENGINE_SUFFIX=_dp1 exec python3 {ENGINE}"
    return shaped("two-in-one", "two-in-one", command=["sh", "-c", script])


def own_volume() -> JsonObject:
    """The engine has a part of a memory volume of its own at /dev/shm."""
    mount = {"name": "mine", "mountPath": "/dev/shm", "subPath": "part"}
    made = shaped("own-volume", volumeMounts=[mount])
    volume = {"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}}
    made["spec"]["volumes"] = [volume]
    return made


def sidecars_first() -> JsonObject:
    """Native sidecars of others, one of them a mesh's proxy."""
    made = shaped("sidecars-first")
    made["spec"]["initContainers"] = [
        restricted_container(
            name=name,
            command=["sleep", "infinity"],
            resources={"limits": {"memory": "32Mi"}},
            restartPolicy="Always",
        )
        for name in ("istio-proxy", "shipper")
    ]
    return made


def pod_level() -> JsonObject:
    """The pod is limited, its engine is not."""
    made = shaped("pod-level", resources={})
    made["spec"]["resources"] = {"limits": {"memory": "160Mi"}}
    return made


def guaranteed() -> JsonObject:
    asked = {"cpu": "200m", "memory": "128Mi"}
    return shaped("guaranteed", resources={"limits": asked, "requests": asked})


def other_user(name: str, *, has_group: bool) -> JsonObject:
    """The sidecar runs as another user than the engine."""
    made = shaped(name, "other-user")
    if not has_group:
        del made["spec"]["securityContext"]["fsGroup"]
    return made


def own_path() -> JsonObject:
    """The engine needs what the PYTHONPATH of its image leads to."""
    program = f"import own_module, runpy; runpy.run_path({ENGINE!r}, run_name='__main__')"
    return shaped("own-path", image=recipes.OWN_PATH_IMAGE, command=["python3", "-c", program])


def no_shell(name: str, profile: str) -> JsonObject:
    return shaped(name, profile, image=recipes.NO_SHELL_IMAGE)


SHAPES: dict[str, tuple[JsonObject, int]] = {
    made["metadata"]["name"]: (made, n_regions)
    for made, n_regions in (
        (two_engines(), 2),
        (two_in_one(), 2),
        (own_volume(), 1),
        (sidecars_first(), 1),
        (pod_level(), 1),
        (guaranteed(), 1),
        (shaped("burstable"), 1),
        (shaped("best-effort", resources={}), 1),
        (other_user("other-user", has_group=True), 1),
        (other_user("other-user-without-group", has_group=False), 1),
        (own_path(), 1),
        (no_shell("no-shell", "ignore-path"), 1),
    )
}
"""Each pod by its name, with its number of regions. All have a read-only root: `restricted_container`."""


def _template(name: str, env: Sequence[JsonObject] = ()) -> JsonObject:
    made = shaped(name, env=list(env))
    made["metadata"]["labels"]["app"] = name
    return {"metadata": {"labels": made["metadata"]["labels"]}, "spec": made["spec"]}


def _workload(kind: str, name: str, spec: JsonObject) -> JsonObject:
    group = "batch" if kind == "Job" else "apps"
    return {"apiVersion": f"{group}/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def replicated(kind: str, name: str, replicas: int) -> JsonObject:
    """A Deployment or a StatefulSet."""
    selector = {"matchLabels": {"app": name}}
    spec = {"replicas": replicas, "selector": selector, "template": _template(name)}
    return _workload(kind, name, spec)


def job(name: str, policy: str, loads: int) -> JsonObject:
    """A Job that is done after so many loads."""
    template = _template(name, env=[{"name": "ENGINE_LOADS", "value": str(loads)}])
    template["spec"]["restartPolicy"] = policy
    return _workload("Job", name, {"backoffLimit": 0, "template": template})


# ---- what has to hold


@dataclass(frozen=True, slots=True)
class Shapes:
    """A namespace in which pods of many shapes run beside each other."""

    cluster: Cluster
    namespace: str

    def pod(self, name: str) -> JsonObject:
        return read_pod(self.cluster, self.namespace, name)

    def pods_of(self, name: str, number: int) -> list[JsonObject]:
        """Those of a workload, once all are there."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"

        def look() -> list[JsonObject]:
            found: list[JsonObject] = self.cluster.api.get(path, labelSelector=f"app={name}")[
                "items"
            ]
            found = [each for each in found if "deletionTimestamp" not in each["metadata"]]
            return found if len(found) == number else []

        return until(look, f"{name} has {number} pods")

    def regions(self, made: JsonObject) -> list[JsonObject]:
        """The OffloadRegions of one pod."""
        path = f"/apis/kvcellar.dev/v1alpha1/namespaces/{self.namespace}/offloadregions"
        uid = made["metadata"]["uid"]
        return [e for e in self.cluster.api.get(path)["items"] if e["spec"]["podUID"] == uid]

    def until_works(self, name: str, n_regions: int = 1) -> JsonObject:
        """Wait until every engine of a pod has its region and has loaded from it; returns the pod.

        Its containers have not been restarted then, and the sidecar pays for the regions, all alone.
        """
        made = self.pod(name)
        regions = until(
            lambda: self._whole_regions(made, n_regions),
            f"{n_regions} OffloadRegion(s) of {name} are Ready and Attached",
            ALL_START_S,
        )
        sidecar = NodeSidecar.of(self.cluster, self.namespace, name)
        engines = {region["spec"]["engineID"] for region in regions}
        until(lambda: engines <= _loading(sidecar), f"{engines} load", ALL_START_S)
        made = self.pod(name)
        self._check(made, n_regions)
        return made

    def _whole_regions(self, made: JsonObject, number: int) -> list[JsonObject]:
        found = [each for each in self.regions(made) if _is_whole(each)]
        return found if len(found) == number else []

    def _check(self, made: JsonObject, n_regions: int) -> None:
        pays, status = memory(self.cluster, made), made["status"]
        for each in (*status["initContainerStatuses"], *status["containerStatuses"]):
            assert each["restartCount"] == 0, each
            if "running" not in each["state"]:
                continue
            group = pays.container(each["containerID"])
            if each["name"] == "kvcellar":
                assert group.usage_bytes > n_regions * CAPACITY_BYTES
            else:
                assert group.stat["shmem"] < MIB, each["name"]


def conditions(region: JsonObject) -> dict[str, str]:
    listed = region.get("status", {}).get("conditions", [])
    return {each["type"]: each["status"] for each in listed}


def _is_whole(region: JsonObject) -> bool:
    status, holds = region.get("status", {}), conditions(region)
    return (
        status.get("phase") == "Ready"
        and status.get("capacityBytes") == CAPACITY_BYTES
        and holds.get("Attached") == "True"
        and holds.get("Degraded") == "False"
    )


def _loading(sidecar: NodeSidecar) -> set[str]:
    """The engines that have loaded something: one stops at a wrong byte, so that was right."""
    return {engine_id for engine_id, value in sidecar.loaded_bytes_by_engine().items() if value > 0}

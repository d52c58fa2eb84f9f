"""A thousand engines for the controller: pods without containers, and sidecars that are HTTP servers on loopback.

Each lives as a real one does: its sidecar reserves when the pod runs, is ready two seconds later, the
engine attaches when it has loaded, restarts when told to, and goes.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from kvcellar.contract import LABEL_INJECT, RegionState
from kvcellar_operator.engines import region_object_name
from kvcellar_operator.inject import InjectSettings, inject
from kvcellar_operator.profiles import Capacity, Profile
from tests.cluster.box import simulated
from tests.cluster.box.access import Access
from tests.cluster.box.api import JsonObject
from tests.support.fake_sidecars import GIB, FakeSidecar, FakeSidecars, attached, region

_SETTINGS = InjectSettings(image="kvcellar:bench", version="0")
_PROFILE = Profile(capacity=Capacity("1Gi", size_bytes=GIB))
_READY_S = 2.0
_TICK_S = 0.1
_THREADS = 4


def vllm_pod(name: str, node: str = "") -> JsonObject:
    """A pod as a Deployment makes it: one engine with a GPU, a few variables, probes and volumes."""
    env = [{"name": f"SETTING_{number}", "value": "x" * 40} for number in range(10)]
    probe = {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 10}
    engine = {
        "name": "engine",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--model", "some/model", "--max-model-len", "8192"],
        "env": env,
        "ports": [{"containerPort": 8000}],
        "livenessProbe": probe,
        "readinessProbe": probe,
        "resources": {"limits": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "1"}},
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {LABEL_INJECT: "true", "app": "bench"}},
        "spec": {
            "containers": [engine],
            "volumes": [{"name": "cache", "emptyDir": {}}],
            **({"nodeName": node} if node else {}),
        },
    }


@dataclass(slots=True)
class Engine:
    """A pod and its sidecar.

    Attributes:
        pod: its name.
        uid: the pod's UID, which is the engine id.
        sidecar: what answers for it.
        born_s: when it ran.
        starts: engine starts so far.
    """

    pod: str
    uid: str
    sidecar: FakeSidecar
    born_s: float
    starts: int = 0

    @property
    def region_name(self) -> str:
        """Name of its OffloadRegion."""
        return region_object_name(self.pod, self.uid)

    def grow(self, now_s: float, load_s: float) -> None:
        """Let its sidecar say what it would at its age, if the engine loads for `load_s`."""
        if self.starts:
            return
        age_s = now_s - self.born_s
        if age_s >= load_s:
            self.start()
        elif age_s >= _READY_S:
            self.sidecar.regions = [region(self.uid)]

    def start(self) -> None:
        """An engine start that has the region."""
        self.starts += 1
        self.sidecar.regions = [attached(self.uid, starts=self.starts)]


class Engines:
    """All of them, on one node of one namespace."""

    def __init__(self, cluster: Access, namespace: str, node: str, sidecars: FakeSidecars) -> None:
        self.all: list[Engine] = []
        self._cluster = cluster
        self._namespace = namespace
        self._node = node
        self._sidecars = sidecars
        self._lock = threading.Lock()

    @contextmanager
    def growing(self, load_s: float) -> Iterator[None]:
        """Engines grow older for the length of a block, and attach when they have loaded."""
        stop = threading.Event()

        def grow() -> None:
            while not stop.wait(_TICK_S):
                now_s = time.monotonic()
                with self._lock:
                    present = list(self.all)
                for engine in present:
                    engine.grow(now_s, load_s)

        thread = threading.Thread(target=grow)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def create(self, n_pods: int) -> None:
        """Create pods as the webhook lets them pass, and have them run."""
        with ThreadPoolExecutor(_THREADS) as threads:
            for done in threads.map(self._create, range(n_pods)):
                with self._lock:
                    self.all.append(done)

    def _create(self, number: int) -> Engine:
        name = f"engine-{number}"
        body = inject(vllm_pod(name, self._node), self._namespace, _PROFILE, _SETTINGS).pod
        made = self._cluster.api.create(f"/api/v1/namespaces/{self._namespace}/pods", body)
        uid = made["metadata"]["uid"]
        with self._lock:
            sidecar = self._sidecars.add()
        sidecar.regions = [region(uid, RegionState.RESERVING, reservedBytes=GIB // 4)]
        simulated.mark_running(self._cluster, self._namespace, name, sidecar.ip)
        return Engine(name, uid, sidecar, time.monotonic())

    def delete(self, n_pods: int, pause_s: float) -> set[str]:
        """Delete the last pods one after the other; returns the names of their regions."""
        with self._lock:
            gone, self.all = self.all[-n_pods:], self.all[:-n_pods]
        for engine in gone:
            simulated.finish_deletion(self._cluster, self._namespace, engine.pod)
            time.sleep(pause_s)
        return {engine.region_name for engine in gone}

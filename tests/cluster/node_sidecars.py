"""What the sidecar of a pod on the real node says of itself over HTTP, asked from outside the pod.

No API server and no kubelet is needed for it: it shows how a pod fares while they are away.
"""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass

from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.node_pods import START_S, read_pod

_PORT = 9785
_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class NodeSidecar:
    """The sidecar of one pod.

    Attributes:
        address: of its pod, which it keeps for its life.
    """

    address: str

    @classmethod
    def of(cls, cluster: Cluster, namespace: str, name: str) -> "NodeSidecar":
        """That of a pod that runs."""
        return cls(read_pod(cluster, namespace, name)["status"]["podIP"])

    def region(self) -> JsonObject:
        """Its first region; empty while it does not answer."""
        text = self._get("/v1/regions")
        found: JsonObject = json.loads(text)["regions"][0] if text else {}
        return found

    def metrics(self) -> dict[str, float]:
        """Its samples by name and labels, as they are written; empty while it does not answer."""
        lines = (
            line.rpartition(" ") for line in self._get("/metrics").splitlines() if line[0] != "#"
        )
        return {name: float(value) for name, _, value in lines}

    def loaded_bytes(self) -> float:
        """What its engines have loaded, as far as this run of the sidecar has seen."""
        return sum(self.loaded_bytes_by_engine().values())

    def loaded_bytes_by_engine(self) -> dict[str, float]:
        """The same of each engine, by its id."""
        return {
            name.partition('engine_id="')[2].partition('"')[0]: value
            for name, value in self.metrics().items()
            if name.startswith("kvcellar_transfer_bytes_total{") and 'direction="load"' in name
        }

    def until_more_is_loaded(self) -> None:
        """Wait until the engine has loaded something after this call: it stops at a wrong byte."""
        until(self.metrics, "the sidecar answers", START_S)
        before = self.loaded_bytes()
        until(lambda: self.loaded_bytes() > before, "the engine loads on", START_S)

    def until_ready(self) -> JsonObject:
        """Wait until it answers with a region that is ready; returns that."""
        return until(
            lambda: shown if (shown := self.region()).get("state") == "Ready" else {},
            "the sidecar shows a region that is ready",
            START_S,
        )

    def _get(self, path: str) -> str:
        url = f"http://{self.address}:{_PORT}{path}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as got:
                return str(got.read().decode())
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return ""

"""A webhook as a process that a real API server asks, with exactly the rights that it needs."""

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcellar.contract import CONTAINER_SIDECAR, LABEL_INJECT
from kvcellar.demo.sidecar import free_port
from kvcellar_operator.config import WebhookSettings, parse
from kvcellar_operator.webhook import PATH, needs
from tests.cluster.balancing import Service
from tests.cluster.box.access import Access
from tests.cluster.box.api import JsonObject
from tests.cluster.operators import OperatorProcess, granted

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@dataclass
class Webhook:
    """One webhook of a test, and what it is asked for."""

    cluster: Access
    namespace: str
    name: str
    port: int
    """Where the API server asks."""
    process: OperatorProcess

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def configure(self) -> None:
        """What Helm makes: the configuration, without a caBundle."""
        webhook = {
            "name": "inject.kvcellar.dev",
            "clientConfig": {"url": f"https://127.0.0.1:{self.port}{PATH}"},
            "rules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "resources": ["pods"],
                    "operations": ["CREATE"],
                }
            ],
            "objectSelector": {"matchLabels": {LABEL_INJECT: "true"}},
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self.namespace}},
            "failurePolicy": "Ignore",
            "reinvocationPolicy": "IfNeeded",
            "sideEffects": "None",
            "timeoutSeconds": 5,
            "admissionReviewVersions": ["v1"],
        }
        self.cluster.api.create(
            CONFIGURATIONS, {"metadata": {"name": self.name}, "webhooks": [webhook]}
        )

    def unconfigure(self) -> None:
        self.cluster.api.delete(f"{CONFIGURATIONS}/{self.name}")

    def create(self, body: JsonObject, *, dry: bool = True) -> JsonObject:
        return self.cluster.api.create(self.pods, body, **({"dryRun": "All"} if dry else {}))

    def spoil(self, data: dict[str, str] | None) -> None:
        """Change what the Secret holds."""
        path = f"/api/v1/namespaces/{self.namespace}/secrets/{self.name}"
        self.cluster.api.patch(path, {"data": data})


def arguments(namespace: str, name: str, port: int) -> list[str]:
    return [
        *("--namespace", namespace, "--image", "kvcellar:test", "--port", str(port)),
        *("--tls-secret", name, "--tls-name", "127.0.0.1", "--drain", "0.2"),
        *("--webhook-configuration", name),
    ]


@contextlib.contextmanager
def started(
    cluster: Access, namespace: str, folder: Path, service: Service | None = None
) -> Iterator[Webhook]:
    """A webhook that serves a namespace, with a ServiceAccount that may do what it needs."""
    name, port = f"kvc-{secrets.token_hex(4)}", free_port()
    argv = arguments(namespace, name, port)
    if service is not None:
        service.backend, port = port, service.port
    settings = parse(["webhook", *argv])
    assert isinstance(settings, WebhookSettings)
    # The chart makes the Secret, so that no right to create Secrets is needed.
    cluster.api.create(f"/api/v1/namespaces/{namespace}/secrets", {"metadata": {"name": name}})
    with granted(cluster, namespace, needs(settings)) as account:
        process = OperatorProcess(account, folder / "webhook.log", "webhook", *argv)
        webhook = Webhook(cluster, namespace, name, port, process)
        webhook.configure()
        try:
            with process.running():
                yield webhook
        finally:
            webhook.unconfigure()


def pod(name: str = "engine", **labels: str) -> JsonObject:
    engine = {
        "name": "engine",
        "image": "engine:1",
        "command": ["vllm", "serve", "m"],
        "resources": {"limits": {"cpu": "2", "memory": "2Gi"}},
    }
    metadata = {"name": name, "labels": {LABEL_INJECT: "true", **labels}}
    return {"metadata": metadata, "spec": {"containers": [engine]}}


def is_injected(body: JsonObject) -> bool:
    names = [each["name"] for each in body["spec"].get("initContainers", [])]
    return CONTAINER_SIDECAR in names

"""The webhook under load: two replicas, and a client that takes them in turn, as a Service does.

The client is Python on the same machine, so the figures are a lower bound of what the webhook can do.
"""

import base64
import contextlib
import http.client
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.operator_pods import vllm_pod
from kvcellar.demo.sidecar import free_port
from kvcellar_operator.config import WebhookSettings, parse
from kvcellar_operator.webhook import PATH, needs
from tests.cluster.box.access import Access
from tests.cluster.operators import OperatorProcess, granted

_REPLICAS = 2
_CONNECTIONS = 8
_PACED_PER_S = 40.0
"""A cluster that creates pods faster than this has other worries."""
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ReviewFigures:
    """What was measured.

    Attributes:
        paced_s: seconds of each review at a steady rate.
        busy_s: seconds of each review while all connections ask without a pause.
        per_s: reviews a second in the latter.
    """

    paced_s: list[float]
    busy_s: list[float]
    per_s: float


@contextlib.contextmanager
def replicas(cluster: Access, namespace: str, folder: Path) -> Iterator[tuple[list[int], str]]:
    """Two webhooks that share a certificate; gives their ports and their authority."""
    name = f"kvc-{secrets.token_hex(4)}"
    secret = f"/api/v1/namespaces/{namespace}/secrets"
    cluster.api.create(secret, {"metadata": {"name": name}})
    ports = [free_port() for _ in range(_REPLICAS)]
    common = ["--namespace", namespace, "--image", "kvcellar:bench", "--tls-secret", name]
    common += ["--tls-name", "127.0.0.1", "--drain", "0.2"]
    settings = parse(["webhook", *common])
    if not isinstance(settings, WebhookSettings):
        raise TypeError("the arguments are not the webhook's")
    with (
        granted(cluster, namespace, needs(settings)) as account,
        contextlib.ExitStack() as running,
    ):
        for number, port in enumerate(ports):
            log = folder / f"webhook-{number}.log"
            argv = ("webhook", *common, "--port", str(port))
            running.enter_context(OperatorProcess(account, log, *argv).running())
        data = cluster.api.get(f"{secret}/{name}")["data"]
        yield ports, base64.b64decode(data["ca.crt"]).decode()


@dataclass(slots=True)
class _Client:
    """One of several clients; takes the replicas in turn, each by a connection that it keeps."""

    ports: list[int]
    authority: str
    body: bytes
    took_s: list[float] = field(default_factory=list)
    problem: str = ""

    def ask_until(self, end_s: float, pause_s: Callable[[], float]) -> None:
        """Ask until a time; a pause of 0 asks again at once."""
        context = ssl.create_default_context(cadata=self.authority)
        connections = [
            http.client.HTTPSConnection("127.0.0.1", port, timeout=_TIMEOUT_S, context=context)
            for port in self.ports
        ]
        for connection in connections:
            connection.connect()
        try:
            while time.monotonic() < end_s and not self.problem:
                self._ask(connections[len(self.took_s) % len(connections)])
                time.sleep(pause_s())
        finally:
            for connection in connections:
                connection.close()

    def _ask(self, connection: http.client.HTTPSConnection) -> None:
        began_s = time.perf_counter()
        connection.request("POST", PATH, self.body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
        self.took_s.append(time.perf_counter() - began_s)
        if answer.status != http.HTTPStatus.OK or b'"patch"' not in text:
            self.problem = f"a review was answered {answer.status}: {text[:200]!r}"


def measure_reviews(cluster: Access, namespace: str, folder: Path, seconds: float) -> ReviewFigures:
    """Ask at a steady rate, then as fast as possible, each for so many seconds.

    Raises:
        RuntimeError: a review was answered without a patch.
    """
    with replicas(cluster, namespace, folder) as (ports, authority):
        paced_s = _ask(ports, authority, seconds, _CONNECTIONS / _PACED_PER_S)
        busy_s = _ask(ports, authority, seconds, 0.0)
    return ReviewFigures(paced_s, busy_s, len(busy_s) / seconds)


def _ask(ports: list[int], authority: str, seconds: float, pause_s: float) -> list[float]:
    clients = [_Client(ports, authority, _review()) for _ in range(_CONNECTIONS)]
    end_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=client.ask_until, args=(end_s, lambda: pause_s))
        for client in clients
    ]
    for number, thread in enumerate(threads):
        thread.start()
        # Clients that keep a pace should not ask in step.
        time.sleep(min(pause_s, 1.0) / (number + 2) if pause_s else 0.0)
    for thread in threads:
        thread.join()
    for client in clients:
        if client.problem:
            raise RuntimeError(client.problem)
    return [each for client in clients for each in client.took_s]


def _review() -> bytes:
    request = {
        "uid": "0",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "operation": "CREATE",
        "namespace": "bench",
        "object": vllm_pod("engine-0"),
    }
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    return json.dumps(review).encode()

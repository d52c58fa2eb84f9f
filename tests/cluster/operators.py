"""The operator's programs as processes beside a real API server, each with a ServiceAccount of its own.

The ServiceAccount may do exactly what the program says that it needs, so a rule that is missing, or one that
nothing uses, shows in a test.
"""

import contextlib
import http
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvcellar.demo.sidecar import free_port
from kvcellar_operator.access import Need
from kvcellar_operator.crd import definitions
from tests.cluster import namespaces
from tests.cluster.box import simulated
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
_RBAC = "rbac.authorization.k8s.io"
_END_S = 20.0
_ASKING_ABOUT_ITSELF = ("authorization.k8s.io", "authentication.k8s.io")


def install_crds(cluster: Access) -> None:
    """Install both CRDs and wait until they are served."""
    crds = definitions()
    cluster.apply(*crds)
    names = [crd["metadata"]["name"] for crd in crds]
    for name in names:
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")


@contextlib.contextmanager
def own_namespace(cluster: Access) -> Iterator[str]:
    """A namespace for the tests of a module, which share what they start: a start takes seconds."""
    name = namespaces.new_name()
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    path = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    until(lambda: cluster.api.raw("GET", path)[0] == http.HTTPStatus.OK, f"{name} is ready")
    try:
        yield name
    finally:
        simulated.delete_pods(cluster, name)
        cluster.kubectl("delete", "namespace", name, "--wait=false")


def rules(needs: Iterable[Need], namespace: str) -> list[JsonObject]:
    """The rules that grant the needs of one namespace, or of the cluster."""
    granted = []
    for need in needs:
        if need.namespace == namespace:
            rule: JsonObject = {
                "apiGroups": [need.group],
                "resources": [need.resource],
                "verbs": list(need.verbs),
            }
            granted.append(rule | ({"resourceNames": [need.name]} if need.name else {}))
    return granted


@contextlib.contextmanager
def granted(cluster: Access, namespace: str, needs: list[Need]) -> Iterator[Access]:
    """The cluster as a ServiceAccount sees it that may do what is needed, and nothing else."""
    name = f"kvc-{secrets.token_hex(4)}"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    cluster.api.create(
        f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}}
    )
    made = []
    for space in sorted({need.namespace for need in needs}):
        kind = "Role" if space else "ClusterRole"
        base = f"/apis/{_RBAC}/v1" + (f"/namespaces/{space}" if space else "")
        role = {"metadata": {"name": name}, "rules": rules(needs, space)}
        reference = {"apiGroup": _RBAC, "kind": kind, "name": name}
        binding = {"metadata": {"name": name}, "subjects": [subject], "roleRef": reference}
        for plural, body in ((f"{kind.lower()}s", role), (f"{kind.lower()}bindings", binding)):
            cluster.api.create(f"{base}/{plural}", body)
            made.append(f"{base}/{plural}/{name}")
    try:
        yield cluster.as_service_account(namespace, name)
    finally:
        for path in made:
            cluster.api.delete(path)


def user_of(access: Access) -> str:
    """The name under which the audit log knows this login."""
    shown = access.kubectl("auth", "whoami", "-o", "json").stdout
    return str(json.loads(shown)["status"]["userInfo"]["username"])


def used(box: Cluster, access: Access) -> set[tuple[str, str]]:
    """Verb and resource, with a subresource behind a slash, of everything that a login asked for."""
    found = set()
    for event in box.audit(user_of(access)):
        about = event.get("objectRef", {})
        # Versions and the like are no resources, and anybody may ask for them.
        if "resource" in about and about.get("apiGroup", "") not in _ASKING_ABOUT_ITSELF:
            resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            found.add((event["verb"], resource))
    return found


def refused(box: Cluster, access: Access) -> list[tuple[str, str]]:
    """Verb and path of everything that a login was refused."""
    forbidden = http.HTTPStatus.FORBIDDEN
    return [
        (event["verb"], event["requestURI"])
        for event in box.audit(user_of(access))
        if event["responseStatus"]["code"] == forbidden
    ]


class OperatorProcess:
    """One of the programs; start it again after `end`."""

    def __init__(self, access: Access, log: Path, command: str, *arguments: str) -> None:
        self.health_port = free_port()
        self.access = access
        self._log = log
        self._environment = os.environ | {"KUBECONFIG": str(access.kubeconfig)}
        self._argv = [
            *(sys.executable, "-m", "kvcellar_operator", command),
            *("--health-port", str(self.health_port), *arguments),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def running(self, *, until_ready: bool = True) -> "Iterator[OperatorProcess]":
        """The process, for the length of a block."""
        self.start()
        try:
            if until_ready:
                self.until_ready()
            yield self
        finally:
            self.end()

    def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._argv, cwd=ROOT, env=self._environment, stdout=log, stderr=log
            )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; returns its exit status."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        try:
            return self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._process = None

    def until_ready(self, deadline_s: float = 30.0) -> None:
        """Wait until it says that it is ready."""
        until(lambda: self.health("/readyz")[0] == 200, f"{self._argv[3]} is ready", deadline_s)

    def health(self, path: str) -> tuple[int, str]:
        """Status and text of a path of its health port; 0 if nobody answers."""
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"it ended by itself:\n{self.log()[-4000:]}")
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.health_port}{path}", timeout=5
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, line: str) -> float:
        """The value of a sample, such as ``name{label="x"}``; 0 if it is not there."""
        for each in self.health("/metrics")[1].splitlines():
            if each.startswith(f"{line} "):
                return float(each.rsplit(" ", 1)[1])
        return 0.0

    def rss_bytes(self) -> int:
        """Its resident memory."""
        if self._process is None:
            return 0
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def peak_rss_bytes(self) -> int:
        """The most resident memory that it ever had."""
        if self._process is None:
            return 0
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def log(self) -> str:
        """What it wrote."""
        return self._log.read_text(errors="replace")

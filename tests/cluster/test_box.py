"""The test cluster itself: what other tests rely on, and that it leaves nothing behind."""

import http.server
import json
import os
import secrets
import signal
import ssl
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.certificates import Authority
from tests.cluster.box.cluster import ROOT, Cluster
from tests.cluster.box.errors import ApiError, BoxError, CommandFailed
from tests.cluster.box.processes import ProcessId
from tests.cluster.box.record import Record
from tests.cluster.box.settings import Settings
from tests.cluster.box.simulated import (
    create_node,
    finish_deletion,
    mark_running,
    pod_path,
    set_pod_status,
    until_bound,
)
from tests.cluster.conftest import MakeNode

pytestmark = pytest.mark.cluster


def pod(name: str, node: str | None = None) -> JsonObject:
    spec: JsonObject = {"containers": [{"name": "engine", "image": "engine"}]}
    if node is not None:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def pods_of(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


# ---- what it can do


def test_kubectl_and_helm_talk_to_the_same_cluster(cluster: Access, namespace: str) -> None:
    version = json.loads(cluster.kubectl("version", "--output=json").stdout)
    assert version["clientVersion"]["gitVersion"] == version["serverVersion"]["gitVersion"]
    assert cluster.helm("list", "--namespace", namespace, "--output=json").stdout.strip() == "[]"
    with pytest.raises(CommandFailed, match="NotFound"):
        cluster.kubectl("get", "pod", "missing", "--namespace", namespace)


def test_a_crd_with_cel_rules_refuses_with_the_rules_own_sentence(
    cluster: Access, namespace: str
) -> None:
    group = f"{namespace}.example.com"
    rule = {"rule": "quantity(self.capacity).isGreaterThan(quantity('0'))", "message": "give some"}
    spec = {
        "type": "object",
        "properties": {"capacity": {"type": "string"}},
        "x-kubernetes-validations": [rule],
    }
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"jars.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": "jars", "singular": "jar", "kind": "Jar"},
            "versions": [version],
        },
    }
    cluster.apply(crd)
    cluster.kubectl("wait", "--for=condition=Established", f"crd/jars.{group}", "--timeout=20s")
    jars = f"/apis/{group}/v1/namespaces/{namespace}/jars"

    def jar(capacity: str) -> JsonObject:
        kind = {"apiVersion": f"{group}/v1", "kind": "Jar", "metadata": {"name": "one"}}
        return kind | {"spec": {"capacity": capacity}}

    with pytest.raises(ApiError, match="give some"):
        cluster.api.create(jars, jar("0"))
    assert cluster.api.create(jars, jar("1Gi"))["spec"]["capacity"] == "1Gi"
    cluster.kubectl("delete", f"crd/jars.{group}", "--wait=false")


def test_a_pod_is_bound_to_a_simulated_node_and_runs_when_the_test_says_so(
    cluster: Access, namespace: str, make_node: MakeNode
) -> None:
    node = make_node(capacity={"nvidia.com/gpu": "1"})
    wants_gpu = pod("one", node)
    wants_gpu["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    cluster.api.create(pods_of(namespace), wants_gpu)

    assert until_bound(cluster, namespace, "one")["spec"]["nodeName"] == node
    mark_running(cluster, namespace, "one", pod_ip="127.0.0.9", restarts=3)

    cluster.kubectl("wait", "--for=condition=Ready", "pod/one", f"--namespace={namespace}")
    line = cluster.kubectl("get", "pod", "one", "--namespace", namespace, "--no-headers").stdout
    assert line.split()[1:4] == ["1/1", "Running", "3"]
    failed = set_pod_status(cluster, namespace, "one", {"phase": "Failed", "reason": "Evicted"})
    assert failed["status"]["podIP"] == "127.0.0.9"


def test_a_deleted_pod_terminates_until_the_test_ends_it(
    cluster: Access, namespace: str, make_node: MakeNode
) -> None:
    cluster.api.create(pods_of(namespace), pod("one", make_node()))
    until_bound(cluster, namespace, "one")

    cluster.kubectl("delete", "pod", "one", "--namespace", namespace, "--wait=false")

    assert "deletionTimestamp" in cluster.api.get(pod_path(namespace, "one"))["metadata"]
    finish_deletion(cluster, namespace, "one")
    with pytest.raises(ApiError) as refused:
        cluster.api.get(pod_path(namespace, "one"))
    assert refused.value.reason == "NotFound"


def test_the_audit_log_tells_what_a_service_account_was_granted_and_refused(
    box: Cluster, namespace: str
) -> None:
    box.kubectl("create", "serviceaccount", "reader", "--namespace", namespace)
    box.kubectl("create", "role", "reader", "--verb=list", "--resource=pods", "-n", namespace)
    account = f"--serviceaccount={namespace}:reader"
    box.kubectl("create", "rolebinding", "reader", "--role=reader", account, "-n", namespace)
    user = f"system:serviceaccount:{namespace}:reader"
    with box.as_service_account(namespace, "reader") as reader:
        assert reader.api.get(pods_of(namespace))["items"] == []
        with pytest.raises(ApiError, match="cannot list resource"):
            reader.api.get(f"/api/v1/namespaces/{namespace}/secrets")

    seen = {
        (event["verb"], event["objectRef"]["resource"]): event["responseStatus"]["code"]
        for event in box.audit(user)
    }
    assert seen == {("list", "pods"): 200, ("list", "secrets"): 403}


def test_a_write_is_logged_with_its_body_and_a_secret_is_not(box: Cluster, namespace: str) -> None:
    box.kubectl("create", "configmap", "plain", "--from-literal=key=seen", "-n", namespace)
    box.kubectl(
        "create", "secret", "generic", "hidden", "--from-literal=key=unseen", "-n", namespace
    )

    bodies = {
        event["objectRef"]["name"]: event.get("requestObject", {}).get("data")
        for event in box.audit("kvcellar-admin")
        if event["verb"] == "create" and event["objectRef"].get("namespace") == namespace
    }
    assert bodies["plain"] == {"key": "seen"}
    assert bodies["hidden"] is None


def test_another_user_has_the_rights_of_its_groups(box: Cluster) -> None:
    with box.as_user("ada") as ada:
        refused = ada.kubectl("get", "nodes", check=False)
        assert refused.returncode == 1
        assert 'User "ada" cannot list resource "nodes"' in refused.stderr
    with box.as_user("ada", "system:masters") as ada:
        ada.kubectl("get", "nodes")


# ---- webhooks


class Webhook(http.server.BaseHTTPRequestHandler):
    """Labels every object that it is shown."""

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        patch = [{"op": "add", "path": "/metadata/labels", "value": {"seen": "yes"}}]
        response = {
            "uid": review["request"]["uid"],
            "allowed": True,
            "patchType": "JSONPatch",
            "patch": b64encode(json.dumps(patch).encode()).decode(),
        }
        body = json.dumps(review | {"response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def webhook_on(
    address: str, port: int, names: list[str], folder: Path
) -> Iterator[tuple[int, str]]:
    """A webhook with a certificate for `names`; yields its port and what its clients trust."""
    authority = Authority.create(folder)
    pair = authority.server("webhook", names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with http.server.ThreadingHTTPServer((address, port), Webhook) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield (
                server.server_address[1],
                b64encode(authority.own.certificate.read_bytes()).decode(),
            )
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def registered(cluster: Access, namespace: str, client_config: JsonObject) -> Iterator[None]:
    """A webhook that is asked about every new pod of one namespace."""
    webhook = {
        "name": "label.example.com",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": client_config,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": ["CREATE"],
                "resources": ["pods"],
            }
        ],
    }
    configuration = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": namespace},
        "webhooks": [webhook],
    }
    collection = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
    cluster.api.create(collection, configuration)
    try:
        yield
    finally:
        cluster.api.delete(f"{collection}/{namespace}")


def until_labelled(cluster: Access, namespace: str) -> None:
    """Wait until new pods pass the webhook: the API server reads configurations with a delay."""

    def is_labelled() -> bool:
        try:
            made = cluster.api.create(pods_of(namespace), pod("probe"), dryRun="All")
        except ApiError as error:
            # Asked, but the webhook's Service or its endpoints are not seen yet.
            if "failed calling webhook" not in error.message:
                raise
            return False
        return bool(made["metadata"].get("labels") == {"seen": "yes"})

    until(is_labelled, "the webhook labels a pod")


def test_a_webhook_is_reached_by_its_url(box: Cluster, namespace: str, tmp_path: Path) -> None:
    with webhook_on("127.0.0.1", 0, ["IP:127.0.0.1"], tmp_path) as (port, trusted):
        client_config: JsonObject = {"url": f"https://127.0.0.1:{port}/", "caBundle": trusted}
        with registered(box, namespace, client_config):
            until_labelled(box, namespace)


def service(name: str, port: int, selector: dict[str, str]) -> JsonObject:
    spec = {"selector": selector, "ports": [{"name": "https", "port": port, "targetPort": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def test_on_loopback_a_webhook_is_reached_at_its_services_address(
    box: Cluster, namespace: str, tmp_path: Path
) -> None:
    services = f"/api/v1/namespaces/{namespace}/services"
    made = box.api.create(services, service("webhook", 8443, {"app": "webhook"}))
    address = made["spec"]["clusterIP"]
    with webhook_on(address, 8443, [f"DNS:webhook.{namespace}.svc"], tmp_path) as (port, trusted):
        place = {"namespace": namespace, "name": "webhook", "port": port}
        with registered(box, namespace, {"service": place, "caBundle": trusted}):
            until_labelled(box, namespace)


# ---- two side by side, and what is left


def has_bridges() -> bool:
    """Whether this process may make a bridge."""
    return os.geteuid() == 0


@pytest.mark.skipif(not has_bridges(), reason="a bridge needs root")
def test_a_second_cluster_has_a_bridge_reaches_a_webhook_by_its_pod_and_leaves_nothing(
    box: Cluster, tmp_path: Path
) -> None:
    settings = Settings.choose(tmp_path / "state", tmp_path / "logs", bridge=True)
    bridge = settings.bridge
    assert bridge is not None
    with Cluster.running(settings) as second:
        name = f"only-{secrets.token_hex(4)}"
        second.kubectl("create", "namespace", name)
        assert name not in box.kubectl("get", "namespaces", "--output=name").stdout
        until(
            lambda: second.kubectl("get", "sa", "default", "-n", name, check=False).returncode == 0,
            "the namespace takes pods",
        )
        reach_a_webhook_by_its_pod(second, name, settings.address, tmp_path)
        processes = [ProcessId.of(pid) for pid in second.pids().values()]
        assert all(process.is_running() for process in processes)

    assert not any(process.is_running() for process in processes)
    assert not settings.folder.exists()
    assert not Path("/sys/class/net", bridge.name).exists()
    assert (settings.logs / "kube-apiserver.log").stat().st_size > 0


def reach_a_webhook_by_its_pod(
    cluster: Cluster, namespace: str, address: str, folder: Path
) -> None:
    """The pod is simulated; its address is the bridge's, where the webhook listens."""
    selector = {"app": "webhook"}
    served = pod("server")
    served["metadata"]["labels"] = selector
    with webhook_on(address, 0, [f"DNS:webhook.{namespace}.svc"], folder) as (port, trusted):
        services = f"/api/v1/namespaces/{namespace}/services"
        cluster.api.create(services, service("webhook", port, selector))
        cluster.api.create(pods_of(namespace), served)
        # A pod without a node that exists is no endpoint.
        create_node(cluster, "node")
        until_bound(cluster, namespace, "server")
        mark_running(cluster, namespace, "server", pod_ip=address)
        place = {"namespace": namespace, "name": "webhook", "port": port}
        with registered(cluster, namespace, {"service": place, "caBundle": trusted}):
            until_labelled(cluster, namespace)


MAKER = """
import sys, time
from pathlib import Path
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.programs import programs
from tests.cluster.box.settings import Settings

Cluster(Settings.choose(Path(sys.argv[1]), Path(sys.argv[2])), programs()).start()
print("started", flush=True)
time.sleep(600)
"""


def test_a_cluster_goes_when_its_maker_is_killed(box: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    argv = [sys.executable, "-c", MAKER, str(folder), str(tmp_path / "logs")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "started\n"
        record = Record.load(folder)
        assert record is not None
        maker.send_signal(signal.SIGKILL)

    until(lambda: not folder.exists(), "the keeper has removed the cluster")
    assert len(record.processes) == 4
    assert not any(process.is_running() for process in record.processes.values())


def test_a_cluster_does_not_start_in_a_folder_that_exists(box: Cluster, tmp_path: Path) -> None:
    with (
        pytest.raises(BoxError, match="may be another cluster's"),
        Cluster.running(Settings.choose(tmp_path)),
    ):
        pass
    assert tmp_path.exists()


def test_an_outage_of_the_api_server_ends_where_it_began(
    tmp_path: Path, box: Cluster, namespace: str
) -> None:
    box.kubectl("create", "configmap", "kept", "--namespace", namespace)
    box.end_program("kube-apiserver")
    assert box.kubectl("get", "nodes", check=False).returncode == 1

    box.start_program("kube-apiserver")
    box.wait_until_ready()

    box.kubectl("get", "configmap", "kept", "--namespace", namespace)

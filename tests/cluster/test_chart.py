"""The chart, by real helm and kubectl on a real API server.

No kubelet runs here, so the Deployments never become ready: nothing waits for them (`helm --wait`). The
programs run as processes instead, with the arguments, the configuration and the ServiceAccounts that the
chart gave them, and the pod of `helm test` is simulated by running its command.
"""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvcellar.contract import ANNOTATION_INJECTED, ANNOTATION_SKIPPED, LABEL_INJECT
from kvcellar.demo.sidecar import free_port
from kvcellar_operator.inject import InjectSettings, inject
from kvcellar_operator.profiles import Profile
from tests.cluster import namespaces
from tests.cluster.box import simulated
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.errors import ApiError, CommandFailed
from tests.cluster.charts import (
    CHART,
    CONFIGURATION,
    CRDS,
    container,
    present_crds,
    rendered,
)
from tests.cluster.operators import OperatorProcess, refused, used

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("without_crds")]


@dataclass
class Release:
    """A release of the chart in a namespace, with its programs as processes.

    The webhook is reached at its Service's address, so it listens on the Service's port.
    """

    box: Cluster
    namespace: str
    folder: Path
    port: int

    def helm(self, *arguments: str) -> str:
        return self.box.helm(*arguments, "--namespace", self.namespace).stdout

    def install(self, command: str = "install", **values: Any) -> str:  # noqa: ANN401 - values
        ports = {"port": self.port, "servicePort": self.port, "drain": 0.2}
        values = {**values, "webhook": {**ports, **values.get("webhook", {})}}
        path = self.folder / "values.json"
        path.write_text(json.dumps(values))
        return self.helm(command, "kvcellar", str(CHART), "--values", str(path))

    def program(self, name: str) -> OperatorProcess:
        """A program with the arguments and the ServiceAccount that its Deployment has now."""
        box, space = self.box, self.namespace
        deployment = box.api.get(f"/apis/apps/v1/namespaces/{space}/deployments/kvcellar-{name}")
        profile = self.folder / "profile.yaml"
        configmap = f"/api/v1/namespaces/{space}/configmaps/kvcellar-default-profile"
        profile.write_text(box.api.get(configmap)["data"]["profile.yaml"])
        argv = [
            f"--default-profile={profile}" if each.startswith("--default-profile=") else each
            for each in container(deployment)["args"]
            if not each.startswith("--health-port=")
        ]
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        log = self.folder / f"{name}.log"
        return OperatorProcess(box.as_service_account(space, account), log, name, *argv)

    def try_pod(self, namespace: str, **labels: str) -> dict[str, str]:
        """The annotations that a pod would get."""
        made = self.box.api.create(
            f"/api/v1/namespaces/{namespace}/pods", engine(**labels), dryRun="All"
        )
        found: dict[str, str] = made["metadata"].get("annotations") or {}
        return found

    def until_injected(self, namespace: str, deadline_s: float = 30.0) -> JsonObject:
        stamp = until(
            lambda: self.try_pod(namespace).get(ANNOTATION_INJECTED),
            "a pod is injected",
            deadline_s,
        )
        found: JsonObject = json.loads(stamp or "{}")
        return found


@pytest.fixture
def release(box: Cluster, namespace: str, tmp_path: Path) -> Iterator[Release]:
    release = Release(box, namespace, tmp_path, free_port())
    try:
        yield release
    finally:
        with contextlib.suppress(CommandFailed):
            release.helm("uninstall", "kvcellar", "--ignore-not-found")
        box.kubectl("delete", "crd", *CRDS, "--ignore-not-found")


def engine(**labels: str) -> JsonObject:
    limits = {"limits": {"cpu": "1", "memory": "4Gi"}}
    command = ["vllm", "serve", "model"]
    served = {"name": "engine", "image": "vllm", "command": command, "resources": limits}
    metadata = {"name": "engine", "labels": {LABEL_INJECT: "true", **labels}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": [served]},
    }


def test_a_release_is_installed_upgraded_rolled_back_removed_and_installed_again(
    release: Release, namespace: str
) -> None:
    box = release.box
    notes = release.install()
    assert "STATUS: deployed" in notes
    assert 'kvcellar.dev/inject: "true"' in notes
    assert sorted(present_crds(box)) == sorted(
        f"customresourcedefinition.apiextensions.k8s.io/{name}" for name in CRDS
    )
    assert "caBundle" not in box.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]
    # Nobody answers, and a pod passes as it is.
    assert release.try_pod(namespace) == {}

    process = release.program("webhook")
    with process.running():
        assert release.until_injected(namespace)["capacityBytes"] == 2 * 2**30
        bundle = box.api.get(CONFIGURATION)["webhooks"][0]["clientConfig"]["caBundle"]

        release.install(
            "upgrade", defaultProfile={"capacity": "1Gi"}, webhook={"timeoutSeconds": 3}
        )
        configured = box.api.get(CONFIGURATION)["webhooks"][0]
        assert configured["clientConfig"]["caBundle"] == bundle
        assert configured["timeoutSeconds"] == 3
        assert release.until_injected(namespace, 5.0)

    # As the Deployment would, with the new default profile and the certificate of before.
    process = release.program("webhook")
    with process.running():
        assert release.until_injected(namespace)["capacityBytes"] == 2**30
        release.helm("rollback", "kvcellar", "1")
        configured = box.api.get(CONFIGURATION)["webhooks"][0]
        assert configured["clientConfig"]["caBundle"] == bundle
        assert configured["timeoutSeconds"] == 5
        assert release.until_injected(namespace, 5.0)
        with process.access as account:
            check_audit(box, account)

    profile = {"apiVersion": "kvcellar.dev/v1alpha1", "kind": "OffloadProfile"}
    box.apply({**profile, "metadata": {"name": "mine", "namespace": namespace}, "spec": {}})
    release.helm("uninstall", "kvcellar")
    assert len(present_crds(box)) == 2
    for kind in ("mutatingwebhookconfiguration/zz-kvcellar", "secret/kvcellar-webhook-tls"):
        gone = box.kubectl("get", kind, "--namespace", namespace, "--ignore-not-found").stdout
        assert gone == ""
    assert release.try_pod(namespace) == {}

    release.install()
    box.kubectl("get", "kvprof", "mine", "--namespace", namespace)
    process = release.program("webhook")
    with process.running():
        ready_s = time.monotonic()
        assert release.until_injected(namespace, 5.0)
        assert time.monotonic() - ready_s < 5.0


def check_audit(box: Cluster, account: Access) -> None:
    """Nothing was refused to the webhook, and no right of it was unused."""
    assert refused(box, account) == []
    read = ("list", "watch")
    granted = {(verb, "offloadprofiles") for verb in read}
    for plural in ("secrets", "mutatingwebhookconfigurations"):
        granted |= {(verb, plural) for verb in (*read, "patch")}
    assert used(box, account) == granted


def test_a_release_for_one_namespace_lets_the_others_be(
    release: Release, namespace: str, other_namespace: str
) -> None:
    # The operator's own Service is in the namespace of the engines.
    release.install(watchNamespaces=[namespace])
    with release.program("webhook").running(), release.program("controller").running():
        release.until_injected(namespace)
        assert release.try_pod(other_namespace) == {}
        path = f"/api/v1/namespaces/{namespace}/pods"
        uid = release.box.api.create(path, engine())["metadata"]["uid"]

        def region() -> JsonObject | None:
            found = release.box.kubectl("get", "kvreg", "-n", namespace, "-o", "json").stdout
            items = json.loads(found)["items"]
            return items[0] if items else None

        assert (until(region, "the pod has a region") or {})["spec"]["engineID"] == uid
        for name in ("webhook", "controller"):
            user = f"system:serviceaccount:{namespace}:kvcellar-{name}"
            refused = [
                each["requestURI"]
                for each in release.box.audit(user)
                if each["responseStatus"]["code"] == 403
            ]
            assert refused == []


def test_a_second_release_leaves_the_crds_to_the_first(
    release: Release, other_namespace: str
) -> None:
    release.install()
    second = ("install", "two", str(CHART), "--namespace", other_namespace)
    with pytest.raises(CommandFailed, match="exists and cannot be imported into the current"):
        release.box.helm(*second)
    release.box.helm(*second, "--set", "crds.install=false")
    release.box.helm("uninstall", "two", "--namespace", other_namespace)
    assert len(present_crds(release.box)) == 2
    release.box.api.get(CONFIGURATION)


@pytest.fixture
def other_namespace(box: Cluster) -> Iterator[str]:
    name = namespaces.new_name()
    box.kubectl("create", "namespace", name)
    until(
        lambda: box.kubectl("get", "sa", "default", "-n", name, check=False).returncode == 0,
        "the namespace takes pods",
    )
    yield name
    box.kubectl("delete", "namespace", name, "--wait=false")


# ---- helm test


def test_helm_test_passes_when_pods_are_injected_and_says_what_is_missing_when_not(
    release: Release, namespace: str
) -> None:
    release.install()
    status, said = run_helm_test(release, deadline_s=1)
    assert status != 0
    assert "after 1 s: zz-kvcellar has no caBundle yet: look at the webhook's log" in said

    with release.program("webhook").running():
        status, said = run_helm_test(release, deadline_s=60)
    assert status == 0, said
    assert f"a pod in namespace {namespace} was injected" in said
    left = release.box.kubectl(
        *("get", "serviceaccount,role,rolebinding,job", "--namespace", namespace, "-o", "name")
    ).stdout.split()
    assert [name for name in left if name.endswith("/kvcellar-test")] == ["job.batch/kvcellar-test"]
    with pytest.raises(CommandFailed, match="NotFound"):
        release.box.kubectl("get", "clusterrole", "kvcellar-test")


def run_helm_test(release: Release, deadline_s: int) -> tuple[int, str]:
    """`helm test`, with its pod's command run here: its status, and what the pod wrote."""
    statuses: list[int] = []

    def ask() -> None:
        done = release.box.helm(
            *("test", "kvcellar", "--namespace", release.namespace, "--timeout", "100s"),
            check=False,
        )
        statuses.append(done.returncode)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        said = run_test_pod(release, deadline_s)
    finally:
        asking.join()
    return statuses[0], said


def run_test_pod(release: Release, deadline_s: int) -> str:
    """Do what a kubelet would with the pod of the test's Job; returns what it wrote."""
    box, space = release.box, release.namespace
    query = {"labelSelector": "app.kubernetes.io/component=test"}

    def new_pod() -> JsonObject | None:
        for pod in box.api.get(f"/api/v1/namespaces/{space}/pods", **query)["items"]:
            if pod["status"]["phase"] == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                found: JsonObject = pod
                return found
        return None

    pod = until(new_pod, "the test's Job has a pod")
    assert pod is not None
    program = pod["spec"]["containers"][0]
    assert program["command"] == ["python3", "-c"]
    folder = release.folder / "account"
    folder.mkdir(exist_ok=True)
    with box.as_service_account(space, pod["spec"]["serviceAccountName"]) as account:
        login = account.credentials()
    (folder / "token").write_text(login.token or "")
    (folder / "ca.crt").write_text(login.ca_pem)
    server = urlsplit(login.server)
    done = subprocess.run(
        [*program["command"], *program["args"]],
        env={
            "PATH": os.environ["PATH"],
            "KUBERNETES_SERVICE_HOST": str(server.hostname),
            "KUBERNETES_SERVICE_PORT": str(server.port),
            "KVCELLAR_TEST_ACCOUNT": str(folder),
            "KVCELLAR_TEST_DEADLINE": str(deadline_s),
        },
        capture_output=True,
        text=True,
        timeout=deadline_s + 30,
        check=False,
    )
    phase = "Failed" if done.returncode else "Succeeded"
    simulated.set_pod_status(box, space, pod["metadata"]["name"], {"phase": phase})
    return done.stdout + done.stderr


# ---- the admission policy


def test_the_admission_policy_refuses_pods_that_were_spoilt_after_the_injection(
    box: Cluster, namespace: str
) -> None:
    policy_values = {"enabled": True, "requireInjection": True}
    values = {"watchNamespaces": [namespace], "validatingAdmissionPolicy": policy_values}
    objects = rendered(box, values, namespace=namespace)
    policy = [each for each in objects if each["kind"].startswith("ValidatingAdmissionPolicy")]
    box.apply(*policy)
    try:
        until(lambda: refusal(box, namespace, engine()), "the policy is in force")
        compiled = box.api.get(
            "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/kvcellar"
        )
        assert "typeChecking" not in compiled.get("status", {}) or not compiled["status"][
            "typeChecking"
        ].get("expressionWarnings")
        settings = InjectSettings(image="kvcellar:test", version="0")
        injected = inject(engine(), namespace, Profile(), settings).pod
        assert refusal(box, namespace, injected) == ""
        skipped = engine()
        skipped["metadata"]["annotations"] = {ANNOTATION_SKIPPED: "EngineMissing: there is none"}
        assert refusal(box, namespace, skipped) == ""
        assert "the webhook of kvcellar has not seen it" in refusal(box, namespace, engine())
        for spoil, complaint in SPOILT.items():
            body = json.loads(json.dumps(injected))
            spoil_it(body, spoil)
            assert complaint in refusal(box, namespace, body), spoil
    finally:
        for each in policy:
            box.kubectl("delete", each["kind"], each["metadata"]["name"])


SPOILT = {
    "no sidecar": "it has no init container kvcellar",
    "no restartPolicy": "has lost restartPolicy Always",
    "order": "kvcellar-wait stands before kvcellar",
    "no env": "has lost KVCELLAR_ENGINE_ID, KVCELLAR_CAPACITY or its mount",
    "no mount": "has lost KVCELLAR_ENGINE_ID, KVCELLAR_CAPACITY or its mount",
}


def spoil_it(body: JsonObject, how: str) -> None:
    spec = body["spec"]
    init = {each["name"]: each for each in spec["initContainers"]}
    match how:
        case "no sidecar":
            spec["initContainers"].remove(init["kvcellar"])
        case "no restartPolicy":
            # With its probe the API server would refuse it itself.
            del init["kvcellar"]["restartPolicy"], init["kvcellar"]["livenessProbe"]
        case "order":
            spec["initContainers"].reverse()
        case "no env":
            del init["kvcellar"]["env"]
        case "no mount":
            del init["kvcellar"]["volumeMounts"]
        case _:
            raise ValueError(how)


def refusal(box: Cluster, namespace: str, body: JsonObject) -> str:
    """Why the API server refuses a pod; "" if it takes it."""
    try:
        box.api.create(f"/api/v1/namespaces/{namespace}/pods", body, dryRun="All")
    except ApiError as error:
        return error.message
    return ""

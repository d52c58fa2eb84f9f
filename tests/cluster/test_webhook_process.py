"""The webhook as a process, asked by a real API server: injection, certificates, what it may do."""

import base64
import contextlib
import itertools
import json
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from kvcellar.contract import (
    ANNOTATION_INJECTED,
    ANNOTATION_SKIPPED,
    API_GROUP,
    LABEL_PROFILE,
)
from kvcellar.demo.sidecar import free_port
from kvcellar_operator.certificates import next_bundle
from kvcellar_operator.config import WebhookSettings, parse
from kvcellar_operator.webhook import needs
from tests.cluster.balancing import Service
from tests.cluster.box.access import Access, until
from tests.cluster.box.cluster import Cluster
from tests.cluster.operators import (
    OperatorProcess,
    granted,
    install_crds,
    own_namespace,
    refused,
    used,
)
from tests.cluster.webhooks import Webhook, arguments, is_injected, pod, started

pytestmark = pytest.mark.cluster

MEBIBYTE = 2**20


@pytest.fixture(scope="module", autouse=True)
def _crds(cluster: Access) -> None:
    install_crds(cluster)


@pytest.fixture(scope="module")
def webhook(cluster: Access, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    folder = tmp_path_factory.mktemp("webhook")
    with own_namespace(cluster) as namespace, started(cluster, namespace, folder) as running:
        yield running


def test_pods_are_injected_by_the_profile_they_name_or_say_why_not(webhook: Webhook) -> None:
    created = webhook.create(pod("real"), dry=False)
    assert is_injected(created)
    stamp = json.loads(created["metadata"]["annotations"][ANNOTATION_INJECTED])
    assert stamp["capacityBytes"] == 1024 * MEBIBYTE

    missing = webhook.create(pod(**{LABEL_PROFILE: "small"}))
    assert not is_injected(missing)
    assert missing["metadata"]["annotations"][ANNOTATION_SKIPPED].startswith("ProfileMissing: ")

    path = f"/apis/{API_GROUP}/v1alpha1/namespaces/{webhook.namespace}/offloadprofiles"
    for name, capacity in (("small", "64Mi"), ("default", "128Mi")):
        body = {
            "apiVersion": f"{API_GROUP}/v1alpha1",
            "kind": "OffloadProfile",
            "metadata": {"name": name},
            "spec": {"capacity": capacity},
        }
        webhook.cluster.api.create(path, body)

    def capacity_of(**labels: str) -> int:
        body = webhook.create(pod(**labels))
        text = body["metadata"]["annotations"].get(ANNOTATION_INJECTED, "{}")
        return int(json.loads(text).get("capacityBytes", 0))

    until(lambda: capacity_of(**{LABEL_PROFILE: "small"}) == 64 * MEBIBYTE, "the profile is known")
    until(lambda: capacity_of() == 128 * MEBIBYTE, "the default profile is known")

    # An object near the limit of the API server gets an answer as well.
    large = pod()
    large["spec"]["containers"][0]["env"] = [
        {"name": f"V{number}", "value": "x" * 10_000} for number in range(130)
    ]
    answer = webhook.create(large)
    assert is_injected(answer) or answer["spec"]["containers"][0].get("env")
    assert webhook.process.metric("kvcellar_webhook_bad_requests_total") == 0


def test_kubectl_shows_the_reason_as_a_warning(webhook: Webhook) -> None:
    body = json.dumps({"apiVersion": "v1", "kind": "Pod", **pod(**{LABEL_PROFILE: "none"})})
    shown = webhook.cluster.kubectl(
        "create", "-n", webhook.namespace, "--dry-run=server", "-f", "-", stdin=body
    )
    assert "kvcellar: not injected (ProfileMissing)" in shown.stderr


def test_it_uses_every_right_that_it_asks_for_and_no_other(
    webhook: Webhook, box: Cluster, namespace: str
) -> None:
    webhook.create(pod())
    until(lambda: webhook.process.metric("kvcellar_webhook_profiles_age_seconds") >= 0, "it is up")
    account = webhook.process.access
    assert refused(box, account) == []
    settings = parse(["webhook", *arguments(webhook.namespace, webhook.name, webhook.port)])
    assert isinstance(settings, WebhookSettings)
    asked = {(verb, need.resource) for need in needs(settings) for verb in need.verbs}
    assert asked - used(box, account) == set()
    assert webhook.process.metric("kvcellar_operator_missing_permissions") == 0


def serial(port: int) -> str:
    """The certificate that is served now."""
    return ssl.get_server_certificate(("127.0.0.1", port))


class Load:
    """Pods that are created all the time, by two threads."""

    def __init__(self, webhook: Webhook) -> None:
        self.missed: list[object] = []
        self.n_created = 0
        self._webhook = webhook
        self._stop = threading.Event()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._create) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _create(self) -> None:
        while not self._stop.is_set():
            body = self._webhook.create(pod())
            self.n_created += 1
            if not is_injected(body):
                self.missed.append(body["metadata"].get("annotations"))


def test_certificates_are_renewed_under_load_without_a_pod_that_is_missed(webhook: Webhook) -> None:
    load = Load(webhook)
    seen = {serial(webhook.port)}

    def has_another(count: int) -> bool:
        seen.add(serial(webhook.port))
        return len(seen) == count

    def has_made(count: int) -> bool:
        return load.n_created >= count

    with load.running():
        for number in range(10):
            # As if it had grown old: the authority stays.
            webhook.spoil({"tls.crt": base64.b64encode(b"-").decode()})
            until(partial(has_another, number + 2), "another certificate")
            until(partial(has_made, load.n_created + 10), "some more pods")
    assert load.missed == []
    assert load.n_created >= 100


def test_replicas_that_leave_one_after_the_other_under_load_miss_no_pod(
    cluster: Access, tmp_path: Path
) -> None:
    with (
        own_namespace(cluster) as namespace,
        Service().running() as service,
        started(cluster, namespace, tmp_path, service) as webhook,
    ):
        port = free_port()
        argv = arguments(namespace, webhook.name, port)
        other = OperatorProcess(webhook.process.access, tmp_path / "other.log", "webhook", *argv)
        replicas = itertools.cycle([(other, port), (webhook.process, service.backend)])
        load, leaving = Load(webhook), webhook.process
        with other.running(until_ready=False), load.running():
            for process, port in itertools.islice(replicas, 10):
                process.until_ready()
                service.backend = port
                assert leaving.end() == 0
                leaving.start()
                leaving = process
        assert load.missed == []
        assert load.n_created >= 100


def test_a_reinstall_is_trusted_again_at_once(webhook: Webhook) -> None:
    assert is_injected(webhook.create(pod()))
    webhook.unconfigure()
    # The API server reads its configurations from a cache.
    until(lambda: not is_injected(webhook.create(pod())), "nobody is asked any more")
    webhook.configure()
    began_s = time.monotonic()
    until(lambda: is_injected(webhook.create(pod())), "pods are injected again")
    assert time.monotonic() - began_s < 5.0

    # Without the Secret's content everything is made anew, and trusted.
    before = serial(webhook.port)
    webhook.spoil(None)
    until(lambda: serial(webhook.port) != before, "another certificate")
    until(lambda: is_injected(webhook.create(pod())), "it is trusted")


def test_replicas_that_find_no_certificate_at_once_serve_the_same_one(
    webhook: Webhook, tmp_path: Path
) -> None:
    port = free_port()
    argv = arguments(webhook.namespace, webhook.name, port)
    second = OperatorProcess(webhook.process.access, tmp_path / "log", "webhook", *argv)

    def serve_another(before: str) -> bool:
        return before != serial(port) == serial(webhook.port)

    with second.running():
        for _ in range(5):
            before = serial(port)
            # Both see it at the same moment, and both make a new authority.
            webhook.spoil(None)
            until(partial(serve_another, before), "the same one")
            until(lambda: is_injected(webhook.create(pod())), "it is trusted")


def test_files_are_served_as_they_change_and_bad_ones_are_named(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tls"
    folder.mkdir()

    def write(name: str, age: timedelta = timedelta()) -> None:
        bundle = next_bundle(None, [name], datetime.now(UTC) - age)
        assert bundle is not None
        for file, content in (
            ("ca.crt", bundle.authorities),
            ("tls.crt", bundle.serving.certificate),
            ("tls.key", bundle.serving.key),
        ):
            (folder / file).write_bytes(content)

    argv = [
        *("--namespace", namespace, "--image", "i", "--port", str(free_port())),
        *("--tls-dir", str(folder), "--tls-name", "127.0.0.1", "--drain", "0.1"),
    ]
    settings = parse(["webhook", *argv])
    assert isinstance(settings, WebhookSettings)
    wanted = needs(settings)
    with granted(cluster, namespace, wanted) as account:
        process = OperatorProcess(account, tmp_path / "log", "webhook", *argv)
        with process.running(until_ready=False):
            until(lambda: "tls.crt cannot be read" in process.health("/readyz")[1], "missing files")
            write("elsewhere.svc")
            until(lambda: "is not for 127.0.0.1" in process.health("/readyz")[1], "a wrong name")
            write("127.0.0.1", timedelta(days=400))
            until(lambda: "tls.crt expired at" in process.health("/readyz")[1], "an old one")
            write("127.0.0.1")
            process.until_ready()


def test_a_missing_rule_is_said_by_name(cluster: Access, namespace: str, tmp_path: Path) -> None:
    argv = arguments(namespace, "kvc-none", free_port())
    with granted(cluster, namespace, []) as account:
        process = OperatorProcess(account, tmp_path / "log", "webhook", *argv)
        with process.running(until_ready=False):
            until(
                lambda: "may not watch offloadprofiles.kvcellar.dev" in process.log(),
                "the rule is named",
            )
            until(
                lambda: f"may not patch secrets kvc-none in namespace {namespace}" in process.log(),
                "and",
            )


def test_it_ends_cleanly_and_pods_come_up_without_it(webhook: Webhook) -> None:
    assert webhook.process.end() == 0
    assert not is_injected(webhook.create(pod()))

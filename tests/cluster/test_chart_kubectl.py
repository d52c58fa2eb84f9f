"""What the chart renders, as kubectl takes it without Helm, and what people may do by its roles."""

import json
import subprocess
from pathlib import Path

import pytest

from kvcellar import __version__
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.charts import (
    CONFIGURATION,
    ROOT,
    container,
    of_kind,
    present_crds,
    rendered,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("without_crds")]


@pytest.mark.parametrize("mode", ["defaults", "one namespace", "a Secret"])
def test_kubectl_takes_what_helm_template_writes(box: Cluster, namespace: str, mode: str) -> None:
    values: dict[str, JsonObject] = {
        "defaults": {},
        "one namespace": {
            "watchNamespaces": [namespace],
            "networkPolicy": {"enabled": True},
            "validatingAdmissionPolicy": {"enabled": True, "requireInjection": True},
            "dashboard": {"enabled": True},
        },
        "a Secret": {"certificates": {"source": "secret", "secretName": "mine"}},
    }
    objects = rendered(box, values[mode], namespace=namespace)
    said = box.apply(*objects, options=("--dry-run=server",))
    assert said.count("(server dry run)") == len(objects)


def test_kubectl_apply_server_side_has_no_conflicts_with_the_operator(
    box: Cluster, namespace: str
) -> None:
    options = ("--server-side",)
    first = rendered(box, {}, "--skip-tests", namespace=namespace)
    second = rendered(
        box, {"webhook": {"replicas": 3, "timeoutSeconds": 7}}, "--skip-tests", namespace=namespace
    )
    try:
        box.apply(*first, options=options)
        with box.as_service_account(namespace, "kvcellar-webhook") as operator:
            path = "/webhooks/0/clientConfig/caBundle"
            change = [{"op": "add", "path": path, "value": trusted_bundle(box)}]
            operator.api.patch(CONFIGURATION, change, "application/json-patch+json")
            secret = f"/api/v1/namespaces/{namespace}/secrets/kvcellar-webhook-tls"
            operator.api.patch(secret, {"data": {"tls.crt": "YQ=="}})
        box.apply(*second, options=options)

        configured = box.api.get(CONFIGURATION)["webhooks"][0]
        assert configured["clientConfig"]["caBundle"] == trusted_bundle(box)
        assert configured["timeoutSeconds"] == 7
        assert box.api.get(secret)["data"] == {"tls.crt": "YQ=="}
    finally:
        box.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=json.dumps(listed(first)))


def listed(objects: list[JsonObject]) -> JsonObject:
    return {"apiVersion": "v1", "kind": "List", "items": objects}


def trusted_bundle(box: Cluster) -> str:
    """Some certificate that the API server takes for an authority's."""
    shown = box.kubectl("config", "view", "--raw", "--minify", "--output=json").stdout
    bundle: str = json.loads(shown)["clusters"][0]["cluster"]["certificate-authority-data"]
    return bundle


def test_make_manifests_writes_what_kubectl_takes_without_helm(
    box: Cluster, tmp_path: Path
) -> None:
    options = "--set image.repository=mine"
    done = subprocess.run(
        ["make", "manifests", f"MANIFESTS={tmp_path}", f"MANIFEST_ARGS={options}"],
        cwd=ROOT,
        env=box.environment(),
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names = ("crds.yaml", "namespace.yaml", "kvcellar.yaml")
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    try:
        for name in names:
            box.kubectl("apply", "--server-side", "-f", str(tmp_path / name))
        shown = box.api.get("/apis/apps/v1/namespaces/kvcellar-system/deployments")["items"]
        assert {container(each)["image"] for each in shown} == {f"mine:{__version__}"}
    finally:
        for name in reversed(names):
            box.kubectl(
                *("delete", "-f", str(tmp_path / name), "--ignore-not-found", "--wait=false")
            )
        until(lambda: not present_crds(box), "the CRDs are gone")


def test_who_may_edit_pods_may_edit_profiles_and_what_regions_keep(
    box: Cluster, namespace: str
) -> None:
    objects = rendered(box, {}, namespace=namespace)
    roles = [
        each
        for name, each in of_kind(objects, "ClusterRole").items()
        if name in ("kvcellar-view", "kvcellar-edit")
    ]
    box.apply(*roles)
    for role in ("view", "edit"):
        user = f"--user={role}er"
        box.kubectl("create", "rolebinding", role, f"--clusterrole={role}", user, "-n", namespace)

    def may(who: str, verb: str, plural: str) -> bool:
        what = {"namespace": namespace, "verb": verb, "group": "kvcellar.dev", "resource": plural}
        review = {"spec": {"user": who, "resourceAttributes": what}}
        path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
        return bool(box.api.create(path, review)["status"]["allowed"])

    try:
        until(lambda: may("editer", "patch", "offloadregions"), "the roles are aggregated")
        until(lambda: may("viewer", "get", "offloadregions"), "the roles are aggregated")
        assert may("editer", "create", "offloadprofiles")
        assert not may("editer", "create", "offloadregions")
        assert not may("viewer", "patch", "offloadregions")
    finally:
        box.kubectl("delete", "clusterrole", "kvcellar-view", "kvcellar-edit")

"""What helm makes of the chart's values, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from kvcellar import __version__
from kvcellar_operator import controller, webhook
from kvcellar_operator.access import Need
from kvcellar_operator.config import ControllerSettings, WebhookSettings, parse
from kvcellar_operator.inject import InjectSettings
from kvcellar_operator.profiles import Capacity
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.errors import CommandFailed
from tests.cluster.charts import CHART, container, of_kind, rendered

pytestmark = pytest.mark.cluster

EVERYTHING: JsonObject = {
    "watchNamespaces": ["chat"],
    "certificates": {"source": "certManager"},
    "networkPolicy": {"enabled": True, "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]},
    "validatingAdmissionPolicy": {"enabled": True, "requireInjection": True},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
    "injection": {"runAsUser": None, "gpuResources": ["example.com/gpu-*"], "pullPolicy": "Never"},
    "runAsUser": None,
    "webhook": {"hostNetwork": True, "drain": 2.5},
    "controller": {"pollInterval": 0.5},
    "defaultProfile": {"capacity": "200Gi", "sidecar": {"env": [{"name": "A", "value": "b"}]}},
    "imagePullSecrets": [{"name": "registry"}],
    "podLabels": {"app.kubernetes.io/component": "mine", "team": "x"},
    "tolerations": [{"operator": "Exists"}],
}


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"webook": {}}, "additional properties 'webook' not allowed"),
        ({"webhook": {"replica": 2}}, "additional properties 'replica' not allowed"),
        ({"webhook": {"failurePolicy": "Fial"}}, "must be one of 'Ignore', 'Fail'"),
        ({"defaultProfile": {"capcity": "1Gi"}}, "additional properties 'capcity' not allowed"),
        ({"certificates": {"source": "secret"}}, "/certificates/secretName"),
        ({"injection": {"runAsUser": 0}}, "/injection/runAsUser"),
        ({"image": {"digest": "sha256:1"}}, "/image/digest"),
    ],
)
def test_helm_refuses_values_that_the_chart_does_not_know(
    box: Cluster, values: JsonObject, complaint: str
) -> None:
    with pytest.raises(CommandFailed, match=re.escape(complaint)):
        rendered(box, values)


def test_helm_lint_has_no_complaint(box: Cluster) -> None:
    said = box.helm("lint", "--strict", str(CHART)).stdout
    assert "1 chart(s) linted, 0 chart(s) failed" in said


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_the_programs_take_the_arguments_that_the_chart_gives_them(
    box: Cluster, values: JsonObject, tmp_path: Path
) -> None:
    objects = rendered(box, values)
    deployments = of_kind(objects, "Deployment")
    assert set(deployments) == {"kvcellar-webhook", "kvcellar-controller"}
    profile = tmp_path / "profile.yaml"
    profile.write_text(
        of_kind(objects, "ConfigMap")["kvcellar-default-profile"]["data"]["profile.yaml"]
    )
    settings = {}
    for name, deployment in deployments.items():
        program = container(deployment)
        assert program["command"][0] == "kvcellar-operator"
        arguments = [
            f"--default-profile={profile}" if each.startswith("--default-profile=") else each
            for each in program["args"]
        ]
        settings[name] = parse([program["command"][1], *arguments])
    asked, kept = settings["kvcellar-webhook"], settings["kvcellar-controller"]
    assert isinstance(asked, WebhookSettings)
    assert isinstance(kept, ControllerSettings)
    assert asked.common == kept.common
    service = of_kind(objects, "Service")["kvcellar-webhook"]
    assert asked.tls.names == (f"{service['metadata']['name']}.ops.svc",)
    assert asked.inject.image == container(deployments["kvcellar-webhook"])["image"]
    if not values:
        assert asked.inject == InjectSettings(image="kvcellar:0.1.0", version=__version__)
        return
    assert asked.common.watch_namespaces == ("chat",)
    assert asked.drain_s == 2.5
    assert asked.inject.run_as_user is None
    assert asked.inject.gpu_resources == ("example.com/gpu-*",)
    assert asked.inject.default_profile.capacity == Capacity("200Gi", size_bytes=200 * 2**30)
    assert asked.inject.default_profile.sidecar.env == (("A", "b"),)
    assert kept.poll_s == 0.5


def granted_to(objects: list[JsonObject], account: str) -> set[tuple[str, ...]]:
    """What a ServiceAccount may do: (namespace, group, resource, name, verb)."""
    found: set[tuple[str, ...]] = set()
    for kind in ("Role", "ClusterRole"):
        for binding in [each for each in objects if each["kind"] == f"{kind}Binding"]:
            namespace = binding["metadata"].get("namespace", "")
            if binding["subjects"][0]["name"] != account:
                continue
            role = next(
                each
                for each in objects
                if each["kind"] == kind
                and each["metadata"]["name"] == binding["roleRef"]["name"]
                and each["metadata"].get("namespace", "") == namespace
            )
            for rule in role["rules"]:
                found |= {
                    (namespace, group, resource, name, verb)
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                    for name in rule.get("resourceNames", [""])
                    for verb in rule["verbs"]
                }
    return found


def asked_by(needs: list[Need]) -> set[tuple[str, ...]]:
    return {
        (need.namespace, need.group, need.resource, need.name, verb)
        for need in needs
        for verb in need.verbs
    }


@pytest.mark.parametrize("source", ["operator", "certManager", "secret"])
@pytest.mark.parametrize("namespaces", [[], ["chat", "ops"]], ids=["all", "two namespaces"])
def test_the_roles_grant_what_the_programs_ask_for_and_no_more(
    box: Cluster, namespaces: list[str], source: str
) -> None:
    certificates = {"source": source, "secretName": "mine"}
    objects = rendered(box, {"watchNamespaces": namespaces, "certificates": certificates})
    deployments = of_kind(objects, "Deployment")
    argv = container(deployments["kvcellar-webhook"])["args"]
    asked = parse(["webhook", *(each for each in argv if "default-profile" not in each)])
    kept = parse(["controller", *container(deployments["kvcellar-controller"])["args"]])
    assert isinstance(asked, WebhookSettings)
    assert isinstance(kept, ControllerSettings)

    assert granted_to(objects, "kvcellar-webhook") == asked_by(webhook.needs(asked))
    assert granted_to(objects, "kvcellar-controller") == asked_by(controller.needs(kept))


def test_on_an_old_cluster_the_webhook_may_list_nodes(box: Cluster) -> None:
    old = granted_to(rendered(box, {}, "--kube-version", "1.31.4-eks.1"), "kvcellar-webhook")
    new = granted_to(rendered(box, {}, "--kube-version", "1.32.0"), "kvcellar-webhook")
    assert old - new == {("", "", "nodes", "", "list")}


def test_helm_refuses_a_cluster_that_is_too_old(box: Cluster) -> None:
    with pytest.raises(CommandFailed, match=r"incompatible with Kubernetes v1\.28"):
        rendered(box, {}, "--kube-version", "1.28.9")
    policy = {"validatingAdmissionPolicy": {"enabled": True}}
    with pytest.raises(CommandFailed, match=r"needs Kubernetes 1\.30 or newer"):
        rendered(box, policy, "--kube-version", "1.29.0")


def test_what_needs_the_crds_of_others_is_off_by_default(box: Cluster) -> None:
    def groups(values: JsonObject) -> set[str]:
        return {each["apiVersion"].rpartition("/")[0] for each in rendered(box, values)}

    own = {"networking.k8s.io"}
    assert groups(EVERYTHING) - groups({}) - own == {"cert-manager.io", "monitoring.coreos.com"}


def test_a_network_policy_lets_in_what_its_pods_listen_on_and_nothing_else(box: Cluster) -> None:
    # As it is rendered: nothing in the box enforces one.
    egress = EVERYTHING["networkPolicy"]["egress"]
    for values, more in (
        ({"networkPolicy": {"enabled": True}}, {}),
        (EVERYTHING, {"egress": egress}),
    ):
        objects = rendered(box, values)
        deployments = of_kind(objects, "Deployment")
        policies = of_kind(objects, "NetworkPolicy")
        assert policies.keys() == deployments.keys()
        for name, policy in policies.items():
            spec = policy["spec"]
            assert selected_by(spec["podSelector"], deployments) == {name}
            told = {key: spec[key] for key in spec.keys() - {"podSelector", "ingress"}}
            kinds = ["Ingress", *(["Egress"] if more else [])]
            assert told == {"policyTypes": kinds, **more}
            (rule,) = spec["ingress"]
            assert rule.keys() == {"ports"}
            listened = {each["containerPort"] for each in container(deployments[name])["ports"]}
            assert {each["port"] for each in rule["ports"]} == listened
    assert of_kind(rendered(box), "NetworkPolicy") == {}


def selected_by(selector: JsonObject, deployments: dict[str, JsonObject]) -> set[str]:
    """The Deployments whose pods a selector by labels takes."""
    wanted = selector["matchLabels"].items()
    return {
        name
        for name, each in deployments.items()
        if wanted <= each["spec"]["template"]["metadata"]["labels"].items()
    }


def test_a_changed_default_profile_starts_the_webhook_anew(box: Cluster) -> None:
    hashes = {
        json.dumps(
            of_kind(rendered(box, values), "Deployment")["kvcellar-webhook"]["spec"]["template"]
        )
        for values in ({}, {"defaultProfile": {"capacity": "1Gi"}}, {"crds": {"keep": False}})
    }
    assert len(hashes) == 2


@pytest.mark.parametrize("values", [{}, {"runAsUser": None}], ids=["defaults", "no user"])
def test_the_api_server_takes_the_pods_where_the_restricted_standard_is_enforced(
    box: Cluster, namespace: str, values: JsonObject
) -> None:
    label = "pod-security.kubernetes.io/enforce=restricted"
    box.kubectl("label", "namespace", namespace, label)
    objects = rendered(box, values, namespace=namespace)
    for each in [*of_kind(objects, "Deployment").values(), *of_kind(objects, "Job").values()]:
        spec = {**each["spec"]["template"]["spec"], "serviceAccountName": "default"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        box.api.create(f"/api/v1/namespaces/{namespace}/pods", body, dryRun="All")

"""What helm makes of the chart, as objects."""

import json
from pathlib import Path

import yaml

from kvcellar_operator import crd
from tests.cluster.box.access import Access
from tests.cluster.box.api import JsonObject
from tests.cluster.images.recipes import KVCELLAR_IMAGE

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvcellar"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/zz-kvcellar"
CRDS = tuple(definition["metadata"]["name"] for definition in crd.definitions())


OPERATOR_NAMESPACE = "kvcellar-system"


def install(cluster: Access) -> None:
    """Install the chart with the image of this tree; returns when its pods are ready."""
    repository, _, tag = KVCELLAR_IMAGE.rpartition(":")
    image = ("--set", f"image.repository={repository}", "--set", f"image.tag={tag}")
    cluster.helm(
        *("install", "kvcellar", str(CHART), "--namespace", OPERATOR_NAMESPACE, *image),
        *("--wait", "--timeout=150s"),
        timeout_s=180,
    )


def rendered(
    box: Access, values: JsonObject | None = None, *options: str, namespace: str = "ops"
) -> list[JsonObject]:
    """What `helm template` writes."""
    text = box.helm(
        *("template", "kvcellar", str(CHART), "--namespace", namespace, "--values", "-"),
        *options,
        stdin=json.dumps(values or {}),
    ).stdout
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def of_kind(objects: list[JsonObject], kind: str) -> dict[str, JsonObject]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def container(deployment: JsonObject) -> JsonObject:
    found: JsonObject = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def present_crds(box: Access) -> list[str]:
    return box.kubectl("get", "crd", *CRDS, "--ignore-not-found", "-o", "name").stdout.split()


def delete_crds(box: Access) -> None:
    box.kubectl("delete", "crd", *CRDS, "--ignore-not-found")

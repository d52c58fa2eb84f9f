"""What helm makes of the chart, as objects."""

import json
from pathlib import Path

import yaml

from tests.cluster.box.access import Access
from tests.cluster.box.api import JsonObject

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvcellar"


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

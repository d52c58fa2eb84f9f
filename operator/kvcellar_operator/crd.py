"""The two CustomResourceDefinitions, and their text. Pure.

`render` is what `make manifests` writes into the chart; nothing else is a source of them.
"""

from typing import Any

from kvcellar.contract import API_GROUP, API_VERSION, PROFILE_KIND, REGION_KIND
from kvcellar_operator import crd_profile, crd_region, schema
from kvcellar_operator.schema import Schema
from kvcellar_operator.yaml_text import to_yaml


def definitions() -> list[dict[str, Any]]:
    """Both definitions, as the API server takes them."""
    return [profile_definition(), region_definition()]


def profile_definition() -> dict[str, Any]:
    """The definition of OffloadProfile."""
    properties = {"spec": crd_profile.spec_schema()}
    about = "What kvcellar injects into pods that name it by the label kvcellar.dev/profile."
    version = _version(PROFILE_KIND, about, properties)
    version["additionalPrinterColumns"] = crd_profile.COLUMNS
    return _definition(crd_profile.NAMES, version)


def region_definition() -> dict[str, Any]:
    """The definition of OffloadRegion."""
    properties = {"spec": crd_region.spec_schema(), "status": crd_region.status_schema()}
    about = "The host memory of one vLLM engine, owned by its pod."
    version = _version(REGION_KIND, about, properties, required=["spec"])
    version["subresources"] = {"status": {}}
    version["additionalPrinterColumns"] = crd_region.COLUMNS
    return _definition(crd_region.NAMES, version)


def render(annotations: dict[str, str] | None = None) -> str:
    """Both definitions as YAML, each a document of its own.

    Args:
        annotations: for both, such as Helm's resource policy.
    """
    texts = []
    for definition in definitions():
        if annotations:
            definition["metadata"]["annotations"] = dict(annotations)
        texts.append(f"---\n{to_yaml(definition)}")
    return "".join(texts)


def _definition(names: dict[str, Any], version: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{API_GROUP}"},
        "spec": {
            "group": API_GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [version],
        },
    }


def _version(
    kind: str, about: str, properties: dict[str, Schema], required: list[str] | None = None
) -> dict[str, Any]:
    standard: dict[str, Schema] = {
        "apiVersion": {
            "type": "string",
            "description": f"Version of the schema: {API_GROUP}/{API_VERSION}.",
        },
        "kind": {"type": "string", "description": f"Kind of the object: {kind}."},
        "metadata": {"type": "object"},
    }
    wanted = {"required": required} if required else {}
    return {
        "name": API_VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema.mapping(about, {**standard, **properties}, **wanted)},
    }

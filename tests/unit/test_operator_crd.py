"""The CRDs: described, bounded, with the defaults of the code, and told by the documents."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.contract import RegionState
from kvcellar_operator import crd
from kvcellar_operator.crd_region import Condition
from kvcellar_operator.profile_reader import parse_profile_spec
from kvcellar_operator.profiles import Profile
from kvcellar_operator.yaml_text import to_yaml

DOCS = Path(__file__).resolve().parents[2] / "docs" / "reference"
KINDS = {"OffloadProfile": "offloadprofile.md", "OffloadRegion": "offloadregion.md"}
DEFINITIONS = {each["spec"]["names"]["kind"]: each for each in crd.definitions()}


def schema_of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = DEFINITIONS[kind]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field with its path; entries of lists as `name[]`."""
    for name, field in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, field
        yield from fields(field, here)
        if "items" in field:
            yield f"{here}[]", field["items"]
            yield from fields(field["items"], f"{here}[]")


def defaults(schema: dict[str, Any]) -> dict[str, Any]:
    """What the API server fills into an empty object."""
    filled = {}
    for name, field in schema.get("properties", {}).items():
        if "default" in field:
            is_map = field.get("type") == "object"
            filled[name] = defaults(field) if is_map else field["default"]
    return filled


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described(kind: str) -> None:
    bare = [p for p, field in fields(schema_of(kind)) if not field.get("description")]

    assert bare == ["metadata"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_says_what_is_allowed_and_every_text_is_bounded(kind: str) -> None:
    for path, field in fields(schema_of(kind)):
        for rule in field.get("x-kubernetes-validations", []):
            assert rule["message"], path
            assert "\\" not in rule["rule"], f"{path}: a backslash is an escape in CEL"
            assert "sign()" not in rule["rule"]
        if path.startswith(("spec", "status")) and field.get("type") == "string":
            assert "maxLength" in field or "enum" in field or "format" in field, path
        if field.get("type") == "array":
            assert "maxItems" in field, path
            assert "x-kubernetes-list-type" in field, path


@pytest.mark.parametrize("kind", KINDS)
def test_columns_lead_to_fields(kind: str) -> None:
    known = {f".{path}" for path, _ in fields(schema_of(kind))} | {".metadata.creationTimestamp"}

    for column in DEFINITIONS[kind]["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = column["jsonPath"].partition("[?")[0]
        assert path in known, column


def test_the_defaults_of_the_schema_are_those_of_the_code() -> None:
    spec = schema_of("OffloadProfile")["properties"]["spec"]

    assert parse_profile_spec(defaults(spec)) == Profile()
    assert parse_profile_spec({}) == Profile()


def nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Every field of an object, each null or such an object."""
    return {
        name: nulls(field) if "properties" in field else None
        for name, field in schema["properties"].items()
    }


def test_every_field_of_a_profile_is_read() -> None:
    assert parse_profile_spec(nulls(schema_of("OffloadProfile")["properties"]["spec"])) == Profile()


def test_conditions_and_phases_are_those_of_the_code() -> None:
    status = schema_of("OffloadRegion")["properties"]["status"]["properties"]

    assert status["phase"]["enum"] == [str(state) for state in RegionState]
    assert status["conditions"]["items"]["properties"]["type"]["enum"] == list(Condition)


def test_what_belongs_to_one_pod_cannot_be_changed() -> None:
    spec = schema_of("OffloadRegion")["properties"]["spec"]

    fixed = {
        name
        for name, field in spec["properties"].items()
        if any(r["rule"] == "self == oldSelf" for r in field.get("x-kubernetes-validations", []))
    }
    # A pod that was not injected has no capacity, and an object all the same.
    assert fixed - {"capacity"} == {"engineID", "podName", "podUID"} == set(spec["required"])
    assert [each["rule"] for each in spec["x-kubernetes-validations"]] == [
        "has(self.capacity) == has(oldSelf.capacity)"
    ]


def test_the_text_is_what_was_defined() -> None:
    text = crd.render({"helm.sh/resource-policy": "keep"})
    read = list(yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))

    for definition in read:
        assert definition["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert read == crd.definitions()
    assert "resource-policy" not in crd.render()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii"), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "yes", "no", "1", "x-y", "a b", "null"]), inner)
    ),
    max_leaves=8,
)


@given(PLAIN)
def test_yaml_is_read_back_as_it_was(value: Any) -> None:  # noqa: ANN401 - plain data
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize(("kind", "page"), KINDS.items())
def test_the_page_lists_every_field_and_no_other(kind: str, page: str) -> None:
    text = (DOCS / page).read_text()
    told = set(re.findall(r"^\| `((?:spec|status)\.[a-zA-Z.\[\]]+)` \|", text, re.MULTILINE))

    known = {p for p, _ in fields(schema_of(kind)) if p.startswith(("spec.", "status."))}
    assert told == {p for p in known if not p.endswith("[]")}


def test_the_page_lists_every_default() -> None:
    text = (DOCS / "offloadprofile.md").read_text()

    for path, field in fields(schema_of("OffloadProfile")):
        if (
            path.startswith("spec.")
            and field.get("default") not in (None, {}, [], "")
            and "[]" not in path
        ):
            shown = (
                str(field["default"]).lower()
                if isinstance(field["default"], bool)
                else field["default"]
            )
            assert re.search(
                rf"^\| `{re.escape(path)}` \|.*\| `{re.escape(str(shown))}` \|", text, re.MULTILINE
            ), path


def test_the_page_lists_every_condition_and_phase() -> None:
    text = (DOCS / "offloadregion.md").read_text()

    for word in [*Condition, *RegionState]:
        assert re.search(rf"^\| `{word}` \|", text, re.MULTILINE), word

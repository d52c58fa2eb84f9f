"""Writes what the chart takes from elsewhere, so that nothing is said twice.

- The CRDs, and the schema of `defaultProfile`, from the operator's code.
- The table of values in the chart's README, from the comments in values.yaml.

`make manifests` runs it; tests/unit/test_chart.py fails where a file is not what it would write.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvcellar_operator import crd, crd_profile, schema

CHART = Path(__file__).resolve().parent / "kvcellar"
_KEEP = {"helm.sh/resource-policy": "keep"}
_TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- end -->)", re.DOTALL)
_KEY = re.compile(r"(?P<indent> *)(?P<name>[A-Za-z]+):")


@dataclass(frozen=True, slots=True)
class Value:
    """A value of values.yaml: its path with dots, its default, and its comment."""

    path: str
    default: Any
    meaning: str


def files() -> dict[Path, str]:
    """Each generated file with its text."""
    readme = (CHART / "README.md").read_text()
    values_schema = json.loads((CHART / "values.schema.json").read_text())
    values_schema["properties"]["defaultProfile"] = _strict(crd_profile.spec_schema())
    return {
        **{CHART / "templates" / "crds" / name: text for name, text in _crds()},
        CHART / "values.schema.json": json.dumps(values_schema, indent=2) + "\n",
        CHART / "README.md": _TABLE.sub(lambda _: _table(), readme),
    }


# --- CRDs -----------------------------------------------------------------------------------------------


def _crds() -> Iterator[tuple[str, str]]:
    """A template for each CRD: the operator's own text between two conditions."""
    for text in crd.render(_KEEP).split("---\n")[1:]:
        if "{{" in text:
            raise ValueError("a CRD has two braces in a row, which Helm would take for its own")
        plural = text.partition('name: "')[2].partition(".")[0]
        head, annotations, body = re.split(r"^(  annotations:\n    .*\n)", text, flags=re.MULTILINE)
        yield (
            f"{plural}.yaml",
            "{{- /* Written by `make manifests`. */}}\n"
            "{{- if .Values.crds.install }}\n"
            f"{head}"
            "  labels:\n"
            '    {{- include "kvcellar.labels" . | nindent 4 }}\n'
            "  {{- if .Values.crds.keep }}\n"
            f"{annotations}"
            "  {{- end }}\n"
            f"{body}"
            "{{- end }}\n",
        )


def _strict(field: schema.Schema) -> schema.Schema:
    """A CRD's schema as JSON Schema that refuses unknown fields.

    CEL rules and defaults stay with the CRD; the operator checks the former again when it starts.
    """
    told = {
        key: item
        for key, item in field.items()
        if not key.startswith("x-kubernetes-") and key not in ("default", "format")
    }
    if field.get("x-kubernetes-int-or-string"):
        told["type"] = ["string", "integer"]
    if "properties" in told:
        told["properties"] = {name: _strict(item) for name, item in told["properties"].items()}
        told["additionalProperties"] = False
    if "items" in told:
        told["items"] = _strict(told["items"])
    return told


# --- values ---------------------------------------------------------------------------------------------


def documented_values() -> list[Value]:
    """The values that have a comment; what is below one without a comment of its own belongs to it.

    Raises:
        ValueError: one has no comment, nor has anything above it.
    """
    text = (CHART / "values.yaml").read_text()
    defaults = yaml.safe_load(text)
    found: list[Value] = []
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        key = _KEY.match(line)
        if line.strip().startswith("# "):
            comment.append(line.strip().removeprefix("# "))
        elif key:
            path = [*path[: len(key["indent"]) // 2], key["name"]]
            name = ".".join(path)
            if comment:
                found.append(Value(name, _at(defaults, path), " ".join(comment)))
            elif not line.endswith(":") and not _belongs(name, found):
                raise ValueError(f"{name} in values.yaml has no comment")
            comment = []
    return found


def _belongs(name: str, found: list[Value]) -> bool:
    return any(name.startswith(f"{value.path}.") for value in found)


def _at(values: Any, path: list[str]) -> Any:  # noqa: ANN401 - any value
    for name in path:
        values = values[name]
    return values


def _table() -> str:
    rows = ["| value | default | meaning |", "|---|---|---|"]
    rows += [
        f"| `{value.path}` | `{json.dumps(value.default)}` | {value.meaning} |"
        for value in documented_values()
    ]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the files."""
    for path, text in files().items():
        path.write_text(text)


if __name__ == "__main__":
    main()

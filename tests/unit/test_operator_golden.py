"""What becomes of pods of every shape: `tests/data/inject/<shape>.in.yaml` -> `<shape>.out.yaml`.

An input is a Pod, and an OffloadProfile if the shape needs one. Its first line says what is special. The
first line of an output says what became of it. After a wanted change:

    UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/unit/test_operator_golden.py

writes the outputs anew; read the difference before you commit it.
"""

import copy
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonpatch import apply_patch

from kvcellar_operator.demands import qos_class
from kvcellar_operator.inject import (
    Injection,
    InjectSettings,
    Outcome,
    inject,
    json_patch,
    parse_profile,
)

SHAPES = Path(__file__).resolve().parents[1] / "data" / "inject"
NAMES = sorted(path.name.removesuffix(".in.yaml") for path in SHAPES.glob("*.in.yaml"))
SETTINGS = InjectSettings(image="example/kvcellar:1", version="1.0.0")
NAMESPACE = "team"
UPDATE = os.environ.get("UPDATE_GOLDEN") == "1"


@cache
def shape(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The pod of a shape, and its profile."""
    pod, *profiles = yaml.load_all(
        (SHAPES / f"{name}.in.yaml").read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return pod, profiles[0] if profiles else None


@cache
def injected(name: str) -> Injection:
    """What becomes of a shape; nobody changes it."""
    return again(name, shape(name)[0])


def again(name: str, pod: dict[str, Any]) -> Injection:
    profile = shape(name)[1]
    return inject(pod, NAMESPACE, parse_profile(profile) if profile else None, SETTINGS)


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc] # either one
    """Scripts are written as they are."""


def _text(dumper: Dumper, text: str) -> Any:  # noqa: ANN401 - a node
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


Dumper.add_representer(str, _text)


def rendered(injection: Injection) -> str:
    notices = f" ({', '.join(injection.notices)})" if injection.notices else ""
    head = f"# {injection.outcome}, {injection.reason}{notices}: {injection.message}\n"
    dumped: str = yaml.dump(
        injection.pod, Dumper=Dumper, sort_keys=False, width=110, allow_unicode=True
    )
    return head + dumped


def test_there_are_shapes_enough() -> None:
    assert len(NAMES) >= 40
    assert not {path.name for path in SHAPES.glob("*.out.yaml")} ^ {
        f"{name}.out.yaml" for name in NAMES
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_becomes_what_it_became_before(name: str) -> None:
    path = SHAPES / f"{name}.out.yaml"
    text = rendered(injected(name))
    if UPDATE:
        path.write_text(text)

    assert text == path.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_what_holds_of_every_shape(name: str) -> None:
    pod = copy.deepcopy(shape(name)[0])
    once = again(name, pod)
    twice = again(name, once.pod)

    assert pod == shape(name)[0], "the pod that was given is not changed"
    assert twice.pod == once.pod, "twice is once"
    assert (twice.outcome is Outcome.ALREADY) == (once.outcome is Outcome.INJECTED)
    assert qos_class(once.pod) == qos_class(pod), "the QoS class stays"
    assert apply_patch(pod, json_patch(pod, once.pod)) == once.pod, "the patch makes the pod"

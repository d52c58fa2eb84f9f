"""Whole manifests: each pod template gets what the webhook gives the pod that is made of it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcellar.cli import main
from kvcellar_operator.inject import InjectSettings, parse_profile
from kvcellar_operator.manifests import TEMPLATES, Injector

SHAPES = Path(__file__).resolve().parents[1] / "data" / "inject"
NAMES = sorted(path.name.removesuffix(".in.yaml") for path in SHAPES.glob("*.in.yaml"))
SETTINGS = InjectSettings(image="example/kvcellar:1", version="1.0.0")


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((SHAPES / name).read_text()))


def injector(profiles: list[Any]) -> Injector:
    parsed = [parse_profile(body) for body in profiles]
    return Injector(SETTINGS, "team", {("", profile.name): profile for profile in parsed})


def refers_to_what_is_not_there(name: str) -> bool:
    """Whether a golden output is that of a profile which its input does not hold."""
    return "ProfileMissing" in (SHAPES / f"{name}.out.yaml").read_text()


@pytest.mark.parametrize("name", [name for name in NAMES if not refers_to_what_is_not_there(name)])
def test_a_pod_of_a_manifest_becomes_what_the_webhook_makes_of_it(name: str) -> None:
    pod, *profiles = documents(f"{name}.in.yaml")
    if not isinstance(pod, dict) or pod.get("kind") != "Pod":
        pytest.fail(f"{name} is no Pod")
    before = copy.deepcopy(pod)
    made, _ = injector(profiles).inject(pod)
    assert made == next(yaml.safe_load_all((SHAPES / f"{name}.out.yaml").read_text()))
    assert pod == before


@pytest.mark.parametrize("kind", sorted(set(TEMPLATES) - {"Pod"}))
def test_the_template_of_a_workload_is_treated_as_its_pod(kind: str) -> None:
    pod, *_ = documents("annotation-copied.in.yaml")
    expected, _ = injector([]).inject(pod)
    template = {key: pod[key] for key in ("metadata", "spec")}
    workload: dict[str, Any] = template
    for key in reversed(TEMPLATES[kind]):
        workload = {key: workload}
    workload |= {"kind": kind, "metadata": {"name": "llama"}}
    made, decisions = injector([]).inject(workload)
    assert [decision.owner for decision in decisions] == [f"{kind} team/llama"]
    for key in TEMPLATES[kind]:
        made = made[key]
    assert made["spec"] == expected["spec"]


def test_what_has_no_pod_stays_as_it_is() -> None:
    for document in (None, 5, {"kind": "Service", "spec": {}}, {"kind": "Deployment", "spec": 3}):
        assert injector([]).inject(document) == (document, [])


def test_the_command_prints_the_manifest_or_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "pod.yaml"
    pod, *_ = documents("annotation-copied.in.yaml")
    other = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}}
    manifest.write_text(yaml.safe_dump_all([pod, other]))
    assert main(["inject", "-f", str(manifest)]) == 0
    made, unchanged = yaml.safe_load_all(capsys.readouterr().out)
    assert unchanged == other
    assert made["spec"]["initContainers"][0]["name"] == "kvcellar"
    assert main(["inject", "-f", str(manifest), "--explain"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Pod default/annotation-copied: ")
    assert "sidecar memory" in text


@pytest.mark.parametrize(
    "around", [{}, {"spec"}, {"spec", "kind", "metadata"}], ids=lambda keys: "+".join(sorted(keys))
)
def test_a_profile_that_is_given_counts_for_pods_that_name_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], around: set[str]
) -> None:
    spec = {"capacity": "3Gi"}
    whole = {"kind": "OffloadProfile", "metadata": {"name": "given"}, "spec": spec}
    manifest, profile = tmp_path / "pod.yaml", tmp_path / "profile.yaml"
    manifest.write_text(yaml.safe_dump(documents("annotation-copied.in.yaml")[0]))
    profile.write_text(yaml.safe_dump({key: whole[key] for key in around} or spec))
    assert main(["inject", "-f", str(manifest), "--profile", str(profile)]) == 0
    sidecar = yaml.safe_load(capsys.readouterr().out)["spec"]["initContainers"][0]
    assert {"name": "KVCELLAR_CAPACITY", "value": str(3 << 30)} in sidecar["env"]


@pytest.mark.parametrize("text", ["", "a: [", "- {{ template }}"])
def test_a_file_that_is_no_manifest_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    manifest = tmp_path / "bad.yaml"
    manifest.write_text(text)
    assert main(["inject", "-f", str(manifest)]) == 2
    assert str(manifest) in capsys.readouterr().err


def test_a_field_that_no_profile_has_is_a_typo_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = tmp_path / "profile.yaml"
    profile = {"kind": "OffloadProfile", "metadata": {"name": "a"}, "spec": {"capacityy": "1Gi"}}
    manifest.write_text(yaml.safe_dump(profile))
    assert main(["inject", "-f", str(manifest)]) == 2
    assert "spec.capacityy is no field" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["&a [*a]", "kind: Pod\nmetadata: &m {name: a, self: *m}\n"])
def test_a_manifest_that_contains_itself_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    manifest = tmp_path / "pod.yaml"
    manifest.write_text(text)
    assert main(["inject", "-f", str(manifest)]) == 2
    assert "contains itself" in capsys.readouterr().err

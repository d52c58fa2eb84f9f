"""The chart's files agree with each other and with the code; what Helm makes of them: tests/cluster."""

import json
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from charts import generate
from kvcellar import __version__
from kvcellar.contract import ANNOTATION_INJECTED, API_GROUP, LABEL_INJECT, unknown_variables
from kvcellar_operator import crd
from kvcellar_operator.config import ControllerSettings, WebhookSettings, parse
from kvcellar_operator.profile_reader import parse_profile_spec
from kvcellar_operator.profiles import Profile
from kvcellar_operator.webhook import PATH
from tests.cluster import charts as cluster_charts
from tests.cluster.box.access import Access
from tests.cluster.box.errors import BoxError, CommandFailed

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvcellar"
TEMPLATES = sorted((CHART / "templates").rglob("*.yaml"))
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
GENERATED = generate.files()
METRIC = re.compile(r"kvcellar_[a-z_]*[a-z]")


def name_of(path: Path) -> str:
    return str(path.relative_to(CHART))


# ---- what is written from elsewhere


@pytest.mark.parametrize("path", sorted(GENERATED), ids=name_of)
def test_a_generated_file_is_what_make_manifests_writes(path: Path) -> None:
    assert path.read_text() == GENERATED[path], "run make manifests"


def test_without_its_two_conditions_a_crd_is_the_operators_own() -> None:
    texts = [path.read_text() for path in sorted((CHART / "templates" / "crds").iterdir())]
    plain = [
        "".join(line for line in text.splitlines(keepends=True) if "{{" not in line).replace(
            "  labels:\n", "", 1
        )
        for text in texts
    ]
    keep = {"helm.sh/resource-policy": "keep"}
    assert [yaml.safe_load(text) for text in plain] == list(yaml.safe_load_all(crd.render(keep)))


def test_the_chart_has_the_version_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    assert chart["kubeVersion"] == ">=1.29.0-0"


# ---- values, schema and README


def properties_of(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """The paths of the values that a schema names; not inside of definitions and lists."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from properties_of(inner, f"{path}{name}.")


def objects_of(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object that a schema describes, with where it stands."""
    if schema.get("type") == "object":
        yield path, schema
    for name, inner in schema.items():
        if isinstance(inner, dict):
            yield from objects_of(inner, f"{path}/{name}")


def leaves_of(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves_of(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


def is_below(path: str, parents: set[str]) -> bool:
    return path in parents or any(path.startswith(f"{parent}.") for parent in parents)


def test_every_value_has_a_comment_and_a_row_in_the_readme() -> None:
    documented = {value.path for value in generate.documented_values()}
    table = (CHART / "README.md").read_text().partition("## Values")[2]
    rows = set(re.findall(r"^\| `([A-Za-z.]+)` \|", table, re.MULTILINE))
    assert rows == documented
    assert [leaf for leaf in leaves_of(VALUES) if not is_below(leaf, documented)] == []


def test_the_schema_knows_the_documented_values_and_no_others() -> None:
    documented = {value.path for value in generate.documented_values()}
    known = set(properties_of(SCHEMA))
    assert documented <= known
    sections = {path for path in known if any(each.startswith(f"{path}.") for each in documented)}
    # Helm gives `global` to every chart that another one depends on.
    assert {each for each in known - sections if not is_below(each, documented)} == {"global"}


def test_the_schema_refuses_unknown_fields_everywhere() -> None:
    lax = [
        path
        for path, each in objects_of(SCHEMA)
        if each.get("additionalProperties", True) is True and path != "/properties/global"
    ]
    assert lax == []


def test_the_default_profile_says_what_the_code_does_without_one() -> None:
    assert parse_profile_spec(VALUES["defaultProfile"]) == Profile()


def test_the_defaults_are_those_of_the_command_line() -> None:
    controller = parse(["controller", "--namespace=x"])
    webhook = parse(["webhook", "--namespace=x", "--image=y"])
    assert isinstance(controller, ControllerSettings)
    assert isinstance(webhook, WebhookSettings)
    common = webhook.common
    assert {
        "healthPort": common.health_port,
        "logLevel": common.log_level,
    }.items() <= VALUES.items()
    chosen = {name: value for name, value in VALUES["controller"].items() if name != "resources"}
    assert chosen == {
        "pollInterval": controller.poll_s,
        "pollTimeout": controller.poll_timeout_s,
        "pollMaxBody": controller.poll_body_bytes,
        "pollConcurrency": controller.poll_at_once,
        "pollMaxBackoff": controller.poll_backoff_s,
        "smallChangeInterval": controller.small_change_s,
        "staleAfter": controller.stale_s,
    }
    assert {
        "port": webhook.port,
        "maxBody": webhook.max_body_bytes,
        "drain": webhook.drain_s,
    }.items() <= VALUES["webhook"].items()
    assert VALUES["injection"] == {
        "pullPolicy": webhook.inject.image_pull_policy,
        "runAsUser": webhook.inject.run_as_user,
        "sharedGroup": webhook.inject.shared_group,
        "gpuResources": [],
    }


# ---- templates


@pytest.mark.parametrize("path", TEMPLATES, ids=name_of)
def test_a_template_has_objects_of_one_kind(path: Path) -> None:
    kinds = re.findall(r"^kind: (\S+)", path.read_text(), re.MULTILINE)
    assert len(set(kinds)) == 1


def test_the_webhook_configuration_says_what_the_code_does_and_never_its_ca_bundle() -> None:
    text = (CHART / "templates" / "mutatingwebhookconfiguration.yaml").read_text()
    assert f"path: {PATH}\n" in text
    assert f'{LABEL_INJECT}: "true"\n' in text
    fields = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert "caBundle" not in "\n".join(fields)


def test_the_admission_policy_names_what_the_injector_writes() -> None:
    text = (CHART / "templates" / "validatingadmissionpolicy.yaml").read_text()
    assert f"'{ANNOTATION_INJECTED}' in variables.annotations" in text
    assert f'{LABEL_INJECT}: "true"\n' in text
    assert unknown_variables(set(re.findall(r"KVCELLAR_[A-Z_]+", text))) == []


def test_every_rule_of_rbac_has_a_comment_that_says_why() -> None:
    roles = [path for path in TEMPLATES if path.name in ("role.yaml", "clusterrole.yaml")]
    n_rules = 0
    for path in [*roles, CHART / "templates" / "_helpers.tpl"]:
        lines = path.read_text().splitlines()
        for before, line in pairwise(lines):
            if line.lstrip().startswith("- apiGroups: "):
                n_rules += 1
                assert before.lstrip().startswith("# "), f"{path.name}: {line}"
    assert n_rules == 14


def test_no_role_reads_all_secrets() -> None:
    for path in TEMPLATES:
        for rule in re.findall(r"resources: \[secrets\]\n(.*\n)", path.read_text()):
            assert rule.lstrip().startswith("resourceNames: [")


def test_the_service_links_of_the_operators_service_stop_no_engine() -> None:
    names = {
        f"KVCELLAR_WEBHOOK_{suffix}"
        for suffix in (
            "SERVICE_HOST",
            "SERVICE_PORT",
            "SERVICE_PORT_HTTPS",
            "PORT",
            "PORT_443_TCP",
            "PORT_443_TCP_PROTO",
            "PORT_443_TCP_PORT",
            "PORT_443_TCP_ADDR",
        )
    }
    assert unknown_variables(names) == []


# ---- monitoring


def known_metrics() -> set[str]:
    """Those of the sidecar's reference, and those that stand in the operator's code."""
    known = set(METRIC.findall((ROOT / "docs/reference/metrics.md").read_text()))
    for path in (ROOT / "operator" / "kvcellar_operator").glob("*.py"):
        known |= set(re.findall(r'"(kvcellar_[a-z_]+)"', path.read_text()))
    return known | {f"{name}_bucket" for name in known if name.endswith("_seconds")}


@pytest.mark.parametrize("name", ["files/dashboard.json", "templates/prometheusrule.yaml"])
def test_every_metric_that_is_asked_for_exists(name: str) -> None:
    text = (CHART / name).read_text()
    used = set(METRIC.findall(text))
    assert len(used) > 5
    assert used <= known_metrics()


def test_the_dashboard_has_a_description_on_every_panel_and_no_two_in_one_place() -> None:
    panels = json.loads((CHART / "files" / "dashboard.json").read_text())["panels"]
    assert all(panel["description"] for panel in panels if panel["type"] != "row")
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells


# ---- documents


@pytest.mark.parametrize("name", ["install.md", "uninstall.md"])
def test_the_documents_name_values_and_kinds_that_exist(name: str) -> None:
    text = (ROOT / "docs" / "how-to" / name).read_text()
    known = set(properties_of(SCHEMA))
    set_values = re.findall(r"--set '?([A-Za-z.]+)=", text)
    named = re.findall(r"`([a-z][A-Za-z]+\.(?!crt|key)[a-zA-Z]+)`", text)
    assert [each for each in [*set_values, *named] if each not in known] == []
    assert set(re.findall(rf"[a-z]+\.{re.escape(API_GROUP)}(?![/\w])", text)) <= {
        definition["metadata"]["name"] for definition in crd.definitions()
    }


# ---- how the cluster's tests put it back


class ReleaseLeft:
    """Helm in a cluster whose release has another manifest than before; keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def helm(self, command: str, *_: str, **__: object) -> subprocess.CompletedProcess[str]:
        self.told.append(command)
        status = '{"version": 2, "info": {"status": "deployed"}}'
        text = {"status": status, "get": "of another release"}.get(command, "")
        return subprocess.CompletedProcess(command, 0, text, "")


@pytest.mark.parametrize(
    "error",
    [
        CommandFailed(["helm"], 1, "", "it has no such revision"),
        BoxError("the pods of before have not gone"),
        subprocess.TimeoutExpired("helm", 180),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_release_that_cannot_be_rolled_back_is_installed_anew(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_cluster: object, _revision: int) -> None:
        raise error

    installed: list[object] = []
    monkeypatch.setattr(cluster_charts, "roll_back", fail)
    monkeypatch.setattr(cluster_charts, "install", installed.append)
    left = ReleaseLeft()

    cluster_charts.Deployed(1, "of before").restore(cast("Access", left))

    assert left.told[-1] == "uninstall"
    assert installed == [left]

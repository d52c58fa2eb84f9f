"""What helm makes of the chart, as objects."""

import contextlib
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvcellar_operator import crd
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.errors import BoxError
from tests.cluster.images.recipes import KVCELLAR_IMAGE

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "kvcellar"
CONFIGURATION = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/zz-kvcellar"
CRDS = tuple(definition["metadata"]["name"] for definition in crd.definitions())


OPERATOR_NAMESPACE = "kvcellar-system"


def install(cluster: Access) -> None:
    """Install the chart with the image of this tree; returns when its pods are ready."""
    _helm_and_wait(cluster, "install", "kvcellar", str(CHART), *_image(KVCELLAR_IMAGE))


def upgrade(cluster: Access, chart: Path, image: str, *options: str) -> None:
    """Upgrade as docs/how-to/install.md says, to another chart and image; the pods before have gone then."""
    more = ("--reset-then-reuse-values", *_image(image), *options)
    _helm_and_wait(cluster, "upgrade", "kvcellar", str(chart), *more)


def roll_back(cluster: Access, revision: int) -> None:
    """Go back to an earlier revision; the pods before have gone then."""
    _helm_and_wait(cluster, "rollback", "kvcellar", str(revision))


@dataclass(frozen=True, slots=True)
class Deployed:
    """The release as it is: its revision, and the objects that Helm made."""

    revision: int
    manifest: str

    @classmethod
    def now(cls, cluster: Access) -> "Deployed":
        """What is deployed; revision 0 if nothing is, or if the last try failed."""
        in_operators = ("kvcellar", "--namespace", OPERATOR_NAMESPACE)
        told = cluster.helm("status", *in_operators, "--output=json", check=False)
        status: JsonObject = json.loads(told.stdout) if told.returncode == 0 else {}
        if status.get("info", {}).get("status") != "deployed":
            return cls(0, "")
        return cls(status["version"], cluster.helm("get", "manifest", *in_operators).stdout)

    def restore(self, cluster: Access) -> None:
        """Have it deployed again, however the release was left."""
        if self.now(cluster).manifest == self.manifest:
            return
        with contextlib.suppress(BoxError, subprocess.TimeoutExpired):
            roll_back(cluster, self.revision)
        if self.now(cluster).manifest != self.manifest:
            in_operators = ("--namespace", OPERATOR_NAMESPACE, "--wait")
            cluster.helm("uninstall", "kvcellar", *in_operators, check=False, timeout_s=120)
            install(cluster)


def _image(name: str) -> tuple[str, ...]:
    repository, _, tag = name.rpartition(":")
    return ("--set", f"image.repository={repository}", "--set", f"image.tag={tag}")


def _helm_and_wait(cluster: Access, *arguments: str) -> None:
    options = ("--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout=150s")
    cluster.helm(*arguments, *options, timeout_s=180)
    # A webhook that is told to end answers for some seconds more.
    until(lambda: not _ending(cluster), "the operator's pods of before have gone", 60)


def _ending(cluster: Access) -> list[JsonObject]:
    pods = cluster.api.get(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods")["items"]
    return [each for each in pods if "deletionTimestamp" in each["metadata"]]


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

"""The README's quick start for Kubernetes, run word for word: on a node of its own, as a newcomer's cluster is.

Its first block sets the names that a reader replaces, so this test has one of its own in that place. There is no
registry here: of the two ways to give nodes the image, it takes the one without.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from kvcellar.contract import ANNOTATION_INJECTED
from tests.cluster import evidence
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import ROOT, Cluster
from tests.cluster.box.settings import Settings
from tests.cluster.charts import OPERATOR_NAMESPACE
from tests.cluster.images import recipes
from tests.cluster.node_pods import engine_pod

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

IMAGE = "registry.test:5000/somebody/kvcellar:first"
TITLE = "## Use it on Kubernetes"
EXAMPLE = "examples/vllm.yaml"
MEMORY = "128Mi"
STEP_S = 400.0


@dataclass(frozen=True, slots=True)
class QuickStart:
    """The section's blocks, in order, by what they are for."""

    names: str
    to_nodes: list[str]
    """From the build to an operator that injects."""
    label: str
    look: str
    shown: list[str]
    """What the last command prints, line by line."""

    @classmethod
    def read(cls) -> "QuickStart":
        section = (ROOT / "README.md").read_text().partition(f"{TITLE}\n")[2].partition("\n## ")[0]
        blocks = re.findall(r"^```(.*?)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        assert {kind for kind, _ in blocks} == {"sh", "sh push", "text"}
        names, *to_nodes, label, look = (text for kind, text in blocks if kind == "sh")
        (shown,) = (text for kind, text in blocks if kind == "text")
        (push,) = (text for kind, text in blocks if kind == "sh push")
        assert push == 'make image-push IMAGE="$IMAGE"\n'
        return cls(names, to_nodes, label, look, shown.splitlines())


def names(deployment: str | Path) -> str:
    """What this reader has in the place of the first block; it sets the same names."""
    return f"IMAGE={IMAGE}\nDEPLOYMENT={deployment}\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """This tree without what was made in it."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = tmp_path / "kvcellar"
    for name in filter(None, found.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def newcomer(
    node_box: Cluster, images: dict[str, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """A cluster that has nothing of kvcellar; `node_box` is asked for its rights and programs."""
    settings = Settings.choose(tmp_path / "state", tmp_path / "logs", node=True)
    with Cluster.running(settings) as cluster:
        for name, archive in images.items():
            if name != recipes.KVCELLAR_IMAGE:
                cluster.node.import_image(archive)
        until(
            lambda: cluster.kubectl("get", "sa", "default", check=False).returncode == 0,
            "the namespace takes pods",
        )
        yield cluster
        for namespace in ("default", OPERATOR_NAMESPACE):
            evidence.save(cluster, namespace, tmp_path / "evidence" / namespace)
    assert cluster.traces() == []


def run(cluster: Cluster, folder: Path, *blocks: str) -> str:
    """Run blocks in one shell, as a reader pastes them; returns what they print."""
    environment = cluster.environment() | recipes.environment_of_make()
    path = f"{cluster.environment()['PATH']}:/usr/sbin:/sbin"
    done = subprocess.run(
        ["bash", "-c", "\n".join(["set -euo pipefail", *blocks])],
        cwd=folder,
        env=environment | {"PATH": path, "CONTAINERD_ADDRESS": str(cluster.node.socket)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def small_engine(folder: Path) -> Path:
    """The file of a Deployment with the small engine, which has not opted in."""
    made = engine_pod("engine", memory=MEMORY)
    labels = {"app": "small"}
    deployment: JsonObject = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "small"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": made["spec"]},
        },
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(deployment))
    return path


def injected_pod(cluster: Cluster, app: str) -> JsonObject:
    """The pod of a Deployment that was injected; empty until there is one."""
    pods = cluster.api.get("/api/v1/namespaces/default/pods", labelSelector=f"app={app}")["items"]
    marked = (
        each for each in pods if ANNOTATION_INJECTED in each["metadata"].get("annotations", {})
    )
    found: JsonObject = next(marked, {})
    return found


def test_the_quick_start_of_the_readme_runs_as_it_is_written(
    newcomer: Cluster, clone: Path, tmp_path: Path
) -> None:
    cluster, guide = newcomer, QuickStart.read()
    assert re.findall(r"^(\w+)=", guide.names, re.MULTILINE) == ["IMAGE", "DEPLOYMENT"]
    assert f"DEPLOYMENT={EXAMPLE} " in guide.names
    mine = names(small_engine(tmp_path))
    # It runs before anybody has heard of kvcellar.
    cluster.kubectl("apply", "--filename", str(tmp_path / "small.yaml"))

    run(cluster, clone, mine, *guide.to_nodes)
    run(cluster, clone, mine, guide.label)
    printed = run(cluster, clone, mine, guide.look).splitlines()

    as_in_the_readme(guide, printed)
    pod = injected_pod(cluster, "small")
    (sidecar,) = (each for each in pod["spec"]["initContainers"] if each["name"] == "kvcellar")
    assert sidecar["image"] == IMAGE
    the_example_is_injected(cluster, clone, guide)


def as_in_the_readme(guide: QuickStart, printed: list[str]) -> None:
    """The last two lines are the header and a row; another engine has other names, sizes and age."""
    *_, header, row = printed
    assert header.split() == guide.shown[0].split()
    here, there = (
        dict(zip(header.split(), each.split(), strict=True)) for each in (row, guide.shown[1])
    )
    for same in ("PHASE", "ATTACHED"):
        assert here[same] == there[same]
    for each, capacity, resident in ((here, "64Mi", 64 << 20), (there, "32Gi", 32 << 30)):
        assert (each["CAPACITY"], each["RESIDENT"]) == (capacity, str(resident))
        assert re.fullmatch(re.escape(each["POD"]) + "-[0-9a-f]{8}", each["NAME"])


def the_example_is_injected(cluster: Cluster, clone: Path, guide: QuickStart) -> None:
    """Its pod waits for a GPU, so it is looked at as it was admitted."""
    run(cluster, clone, names(EXAMPLE), guide.label)
    pod = until(lambda: injected_pod(cluster, "vllm"), "the example's pod is injected")
    (engine,) = pod["spec"]["containers"]
    assert engine["image"].startswith("vllm/vllm-openai:")
    assert (
        "KVCellarOffloadingSpec" in engine["args"][engine["args"].index("--kv-transfer-config") + 1]
    )
    stamp = json.loads(pod["metadata"]["annotations"][ANNOTATION_INJECTED])
    limit = engine["resources"]["limits"]["memory"]
    assert (limit, stamp["capacityBytes"]) == ("64Gi", 32 << 30)

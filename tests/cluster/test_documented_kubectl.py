"""The commands of docs/how-to/watch.md, run as they stand there, with a real kubectl."""

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcellar.contract import ANNOTATION_DESIRED
from tests.cluster.box import simulated
from tests.cluster.box.access import Access, until
from tests.cluster.operators import install_crds
from tests.cluster.scenes import Engine, Scene, scene_of
from tests.support.fake_sidecars import GIB, FakeSidecars, attached

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "watch.md"
EDITOR = "sed -i 's/^spec:$/spec:\\n  retention: 5m/'"
POD = "llama-0"


@dataclass
class Block:
    """A block of the page, and what its commands printed."""

    language: str
    text: str
    printed: str = ""


@pytest.fixture
def scene(cluster: Access, tmp_path: Path) -> Iterator[Scene]:
    install_crds(cluster)
    with FakeSidecars.running() as sidecars, scene_of(cluster, sidecars, tmp_path) as running:
        yield running


@contextlib.contextmanager
def obeying(scene: Scene, engine: Engine) -> Iterator[None]:
    """Its sidecar applies what the pod's annotation wishes, as a real one does, for the length of a block."""
    path = simulated.pod_path(scene.namespace, engine.name)
    stop = threading.Event()

    def obey() -> None:
        while not stop.wait(0.1):
            marks = scene.cluster.api.get(path)["metadata"]["annotations"]
            regions = json.loads(marks.get(ANNOTATION_DESIRED) or "{}").get("regions", {})
            wish = regions.get(engine.uid, {})
            applied = {key: wish[key] for key in ("contents", "retention") if key in wish}
            generation = wish.get("generation", 0)
            engine.sidecar.regions = [
                attached(engine.uid, usedBytes=GIB // 4, observedGeneration=generation, **applied)
            ]

    thread = threading.Thread(target=obey)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run(scene: Scene, blocks: list[Block], folder: Path) -> None:
    """Run the page's commands in one shell, from top to bottom."""
    lines = ["set -euo pipefail"]
    for number, block in enumerate(blocks):
        if block.language.startswith("sh"):
            lines.append(f"echo '=== {number}'")
            fails = block.language == "sh fails"
            lines += [f"if {block.text.strip()}; then exit 9; fi" if fails else block.text]
    script = folder / "watch.sh"
    script.write_text("\n".join(lines))
    shell = Path(folder / "kubeconfig")
    shell.write_bytes(scene.cluster.kubeconfig.read_bytes())
    environment = scene.cluster.environment() | {"KUBECONFIG": str(shell), "KUBE_EDITOR": EDITOR}
    subprocess.run(
        ["kubectl", "config", "set-context", "--current", f"--namespace={scene.namespace}"],
        env=environment,
        check=True,
        capture_output=True,
    )
    done = subprocess.run(
        ["bash", str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    for piece in done.stdout.split("=== ")[1:]:
        place, _, printed = piece.partition("\n")
        blocks[int(place)].printed = printed


def test_the_page_runs_as_it_is_written(scene: Scene, tmp_path: Path) -> None:
    found = re.findall(
        r"^```(sh(?: fails)?|text)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    blocks = [Block(*each) for each in found]
    engine = scene.run(POD)
    engine.sidecar.regions = [attached(engine.uid, usedBytes=GIB // 4)]
    until(lambda: scene.region(engine.region_name).get("status", {}).get("usedBytes"), "it is used")
    with obeying(scene, engine):
        run(scene, blocks, tmp_path)

    def printed(command: str) -> str:
        return next(block.printed for block in blocks if command in block.text)

    shown = next(block.text for block in blocks if block.language == "text").splitlines()
    assert printed("get kvreg -A\n").split()[: len(shown[0].split())] == shown[0].split()
    row = next(line.split() for line in printed("get kvreg -A\n").splitlines() if POD in line)
    # Name and age differ.
    assert row[2:-1] == shown[1].split()[2:-1]
    wide = printed("-o wide").splitlines()[0].split()
    assert {"NODE", "SETTLED", "RESTARTS", "GENERATION", "ENGINE", "REASON"} <= set(wide)
    assert {"Conditions:", "Events:"} <= set(printed("describe").split())
    assert "RegionReserved" in printed("describe")
    assert "podLimitBytes" in printed("explain offloadregion --recursive")
    assert "edited" in printed("kubectl edit")
    assert "retention is keep, now, or a duration" in printed("for ever")
    assert json.loads(printed("kubectl get pod"))["capacityBytes"] == GIB

"""The commands of the documents, run as they stand there."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from kvcellar.demo.engine_config import KV_TRANSFER
from kvcellar.demo.sandbox import Sandbox

ROOT = Path(__file__).parents[2]
JSON_OF_VLLM = re.compile(r"--kv-transfer-config\s+'(\{.*?\})'", re.DOTALL)


def _blocks(document: Path, language: str) -> list[str]:
    text = document.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.integration
def test_the_tutorial_runs_as_it_is_written(tmp_path: Path) -> None:
    blocks = _blocks(ROOT / "docs/tutorial.md", "sh")
    assert len(blocks) >= 5
    script = tmp_path / "tutorial.sh"
    script.write_text("set -eux\n" + f"cd {tmp_path}\n" + "\n".join(blocks))
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with Sandbox.open(64 << 20) as sandbox:
        ended = sandbox.run(["bash", script], timeout_s=90.0, env=env)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["README.md", "docs/how-to/use-with-vllm.md"])
def test_the_argument_for_vllm_is_the_one_that_the_demo_runs_with(name: str) -> None:
    found = JSON_OF_VLLM.findall((ROOT / name).read_text())
    assert KV_TRANSFER in [json.loads(text) for text in found]

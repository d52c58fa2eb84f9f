"""How docs/how-to/install.md lets people see whether their cluster enforces network policies: this one does not."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.cluster.box.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "install.md"


def test_the_documented_command_tells_that_nothing_in_the_box_enforces_policies(
    installed: Cluster,
) -> None:
    (section,) = re.findall(r"^## Network policies\n.*?^## ", PAGE.read_text(), re.M | re.S)
    (block,) = re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        env=installed.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "8081 let in"
    assert second.startswith("8082 refused")

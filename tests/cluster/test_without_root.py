"""What a run says to somebody who is not root: nothing about the node is left out in silence."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.box.cluster import ROOT

pytestmark = pytest.mark.cluster

SENTENCE = (
    r"a real node takes namespaces, mounts and cgroups: run as root the (\d+) tests that need one"
)
AS_USER = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""Root with another number and without any right, so that it can still read this folder."""


def pytest_on_stories(folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    stories = sorted(str(path) for path in (ROOT / "tests/cluster").glob("test_node*.py"))
    options = ["-m", "not soak", "-p", "no:cacheprovider", f"--basetemp={folder / 'base'}"]
    return subprocess.run(
        [*before, sys.executable, "-m", "pytest", *options, *stories],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_root_the_stories_fail_as_one_with_one_sentence_and_none_is_skipped(
    tmp_path: Path,
) -> None:
    done = pytest_on_stories(tmp_path, *(AS_USER if os.geteuid() == 0 else ()))

    assert done.returncode == 1, done.stdout + done.stderr
    (needed,) = {int(number) for number in re.findall(SENTENCE, done.stdout)}
    assert needed > 20
    last = done.stdout.splitlines()[-1]
    assert "1 error" in last
    assert "skipped" not in last
    assert "Traceback" not in done.stdout

"""That the check of what a run leaves behind finds what is left, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import traces
from tests.cluster.box import cgroups
from tests.cluster.box.cluster import ROOT
from tests.cluster.box.record import Record, to_remove
from tests.cluster.box.settings import RUN_VARIABLE, Settings, name_prefix
from tests.cluster.traces import Run

pytestmark = pytest.mark.cluster


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run beside the one that these tests are in."""
    (tmp_path / "pytest").mkdir()
    made = Run.begin(tmp_path / "pytest")
    yield made
    made.scratch.rmdir()


# ---- planted on this machine


def test_a_process_of_the_run_is_found_until_it_ends(run: Run) -> None:
    before = traces.look()
    assert run.traces(before) == []
    with subprocess.Popen(["sleep", "60"], env=os.environ | {RUN_VARIABLE: run.tag}) as process:
        assert run.traces(before) == [f"process {process.pid} (sleep 60)"]
        process.kill()
    assert run.traces(before) == []


def test_a_file_in_the_folder_of_temporary_files_is_found(run: Run) -> None:
    before = traces.look()
    left = run.scratch / "left"
    left.touch()
    assert run.traces(before) == [f"file {left}"]
    left.unlink()


def test_a_cgroup_of_the_run_is_found_with_the_process_in_it(
    run: Run, request: pytest.FixtureRequest
) -> None:
    need_root()
    before = traces.look()
    name = f"{name_prefix(run.tag)}1"
    request.addfinalizer(lambda: cgroups.remove(name))
    cgroups.make(name)
    into_group = f"echo $$ >{cgroups.entrance(name)}; exec sleep 60"
    with subprocess.Popen(["sh", "-c", into_group]) as process:
        found = run.traces(before)
        # Wherever the shell is with that.
        assert any(each.startswith("cgroup ") and each.endswith(f"/{name}") for each in found)
        while not any(each.startswith(f"process {process.pid} ") for each in found):
            found = run.traces(before)
        cgroups.remove(name)
    assert run.traces(before) == []


# ---- planted where nobody else sees it

PLANT = """\
import os, subprocess, sys
from pathlib import Path
from tests.cluster import traces

def do(*argv):
    subprocess.run(argv, check=True, capture_output=True)

mine, folder = sys.argv[1:]
run = traces.Run(mine, Path(folder, "scratch"), Path(folder, "pytest"))
os.makedirs(run.folder / "state")
do("mount", "-t", "tmpfs", "tmpfs", "/run")
os.mkdir("/run/netns")
before = traces.look()
assert run.traces(before) == []
for tag in (mine, "0000"):
    do("ip", "link", "add", f"kvc{tag}-7", "type", "bridge")
do("mount", "-t", "tmpfs", "tmpfs", run.folder / "state")
do("iptables", "-N", "KUBE-SERVICES")
do("iptables", "-N", "SOMEBODY-ELSES")
do("touch", "/run/netns/cni-1", "/run/netns/somebody-elses")
print("\\n".join(run.traces(before)))
"""


def in_private_namespaces(*arguments: str) -> list[str]:
    need_root()
    done = subprocess.run(
        ["unshare", "--mount", "--net", sys.executable, "-c", PLANT, *arguments],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_links_mounts_chains_and_namespaces_are_found_and_those_of_others_are_not(
    run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "planted"
    assert in_private_namespaces(run.tag, str(folder)) == [
        "chain KUBE-SERVICES",
        "file /run/netns/cni-1",
        f"interface kvc{run.tag}-7",
        f"mount {folder}/pytest/state (tmpfs)",
    ]


def test_the_names_of_a_cluster_carry_the_tag_and_fit_into_the_kernels_fifteen_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "beef")
    settings = Settings.choose(tmp_path / "state", node=True)
    assert settings.bridge is not None
    assert settings.node is not None
    for name in (settings.bridge.name, settings.node.name, settings.node.link):
        assert name.startswith("kvcbeef-")
        assert len(name) <= 15


# ---- the run fails

SAMPLE = """\
import tempfile
from tests.cluster import traces
from tests.cluster.conftest import leaves_nothing

traces._SETTLE_S = 0.1

def test_forgets_a_file():
    tempfile.mkstemp(prefix="forgotten-")

def test_is_tidy():
    with tempfile.TemporaryFile():
        pass
"""


@pytest.mark.parametrize(("chosen", "status"), [("forgets", 1), ("tidy", 0)])
def test_a_run_that_leaves_something_fails_and_names_it(
    tmp_path: Path, chosen: str, status: int
) -> None:
    sample = tmp_path / "test_sample.py"
    sample.write_text(SAMPLE)
    argv = [sys.executable, "-m", "pytest", "-k", chosen, "-p", "no:cacheprovider", str(sample)]
    # What it leaves is this test's to keep.
    options = [f"--rootdir={tmp_path}", f"--basetemp={tmp_path / 'base'}", f"-c{os.devnull}"]
    done = subprocess.run(
        [*argv, *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert ("this run leaves on the machine" in done.stdout) == bool(status)
    assert ("/forgotten-" in done.stdout) == bool(status)


# ---- folders that clusters share

COVER = 'mount -t tmpfs tmpfs "$1" && echo covered && read wait && [ -d "$1" ] && touch "$1/kept"'


def test_a_folder_stays_while_another_cluster_has_something_mounted_there(tmp_path: Path) -> None:
    """Removed, it would take the mount with it in every namespace: rmdir(2), since Linux 3.18."""
    need_root()
    shared = tmp_path / "shared"
    assert to_remove([str(shared)]) == [str(shared)]
    shared.mkdir()
    assert to_remove([str(shared)]) == []
    (tmp_path / "first").mkdir()
    first = Record(tmp_path / "first", folders=[str(shared)])
    argv = ["unshare", "--mount", "sh", "-ec", COVER, "sh", str(shared)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == b"covered\n"
        # The second removes it in the first one's stead.
        assert to_remove([str(shared)]) == [str(shared)]
        first.remove_all()
        assert first.traces() == []
        second.communicate(b"\n", timeout=30)
        assert second.returncode == 0
    assert first.traces() == [f"folder {shared}"]
    Record(tmp_path / "second", folders=[str(shared)]).remove_all()
    assert first.traces() == []
    assert not shared.exists()


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.fail("links, mounts and cgroups take rights: run the cluster tests as root", False)

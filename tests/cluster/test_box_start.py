"""How the test cluster gets its programs, and what it makes of one that ends while it starts."""

import json
import os
from pathlib import Path

import pytest

from tests.cluster.box.cluster import Cluster
from tests.cluster.box.errors import BoxError, NoGoToolchain
from tests.cluster.box.programs import MODULE
from tests.cluster.box.settings import Settings
from tests.cluster.box.toolchain import go

pytestmark = pytest.mark.cluster


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


# ---- programs that end


def programs_but(folder: Path, box: Cluster, program: str, text: str) -> Path:
    """The box's programs, with a script in the place of one of them; ``$real`` is that one."""
    folder.mkdir()
    for each in box.folder_of_programs.iterdir():
        if each.name != program:
            (folder / each.name).symlink_to(each)
    script(folder / program, f"real={box.folder_of_programs / program}\n{text}")
    return folder


def test_a_program_that_ends_while_the_cluster_starts_is_started_again(
    box: Cluster, tmp_path: Path
) -> None:
    once = f'[ -e {tmp_path}/ended ] || {{ touch {tmp_path}/ended; exit 1; }}\nexec "$real" "$@"\n'
    programs = programs_but(tmp_path / "programs", box, "kube-controller-manager", once)
    cluster = Cluster(Settings.choose(tmp_path / "state", tmp_path / "logs"), programs)
    cluster.start()
    try:
        assert (tmp_path / "ended").exists()
        cluster.api.get("/api/v1/namespaces/default/serviceaccounts/default")
    finally:
        cluster.stop()
    assert cluster.traces() == []


def test_a_program_that_never_stays_fails_the_start_with_its_own_words(
    box: Cluster, tmp_path: Path
) -> None:
    words = "echo it is no use; exit 1\n"
    programs = programs_but(tmp_path / "programs", box, "kube-controller-manager", words)
    cluster = Cluster(Settings.choose(tmp_path / "state", tmp_path / "logs"), programs)
    with pytest.raises(BoxError, match=r"kube-controller-manager ended by itself(?s:.*)no use"):
        cluster.start()
    assert cluster.traces() == []


# ---- Go


def test_without_go_one_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoGoToolchain, match="golang-go"):
        go(MODULE / "go.mod")


def test_a_go_that_fetches_others_by_itself_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = script(tmp_path / "go", "echo go1.21.0\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert go(MODULE / "go.mod") == str(newer)


def test_an_older_go_fetches_the_one_that_is_asked_for_and_it_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = tmp_path / "fetched"
    (fetched / "bin").mkdir(parents=True)
    (fetched / "pkg" / "tool" / "linux").mkdir(parents=True)
    for name in ("bin/go", "pkg/tool/linux/compile"):
        (fetched / name).write_text("#!/bin/sh\n")
    answers = f"""\
case "$1" in
env) echo go1.19.8 ;;
mod) echo "$4" >{tmp_path}/asked; echo '{json.dumps({"Dir": str(fetched)})}' ;;
esac
"""
    script(tmp_path / "go", answers)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    program = go(MODULE / "go.mod")

    assert program == str(fetched / "bin" / "go")
    assert "golang.org/toolchain@v0.0.1-go1." in (tmp_path / "asked").read_text()
    assert os.access(program, os.X_OK)
    assert os.access(fetched / "pkg/tool/linux/compile", os.X_OK)

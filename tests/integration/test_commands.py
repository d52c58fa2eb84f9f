"""The commands that look at a directory themselves: what they say of what is odd in it."""

import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, HugePages, RegionState
from kvcellar.daemon.orphans import lying
from kvcellar.region import frame, metadata
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.names import data_name, meta_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import survey
from tests.support.sidecars import KVCELLAR

pytestmark = pytest.mark.integration

MIB = 2**20
ID = EngineId("eng")
WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
"""Root without its rights is held up by a file's mode, and still comes to the volume."""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def region(directory: RegionDirectory) -> OwnedRegion:
    """A region that is Ready, and that nobody owns or holds any more."""
    request = RegionRequest(ID, 4 * MIB, huge_pages=HugePages.NEVER)
    made = OwnedRegion.acquire(directory, request, list)
    made.reserve(lambda: False)
    made.settle(lambda: False)
    made.close()
    return made


@pytest.fixture
def run(directory: RegionDirectory) -> Run:
    """Runs a command beside no sidecar; its exit status, stdout and stderr."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free_port = taken.getsockname()[1]
    settings = {"KVCELLAR_DIR": str(directory.path), "KVCELLAR_HTTP_PORT": str(free_port)}

    def start(*arguments: str, below: list[str] | None = None) -> tuple[int, str, str]:
        ended = subprocess.run(
            [*(below or []), KVCELLAR, *arguments],
            env={"PATH": os.environ["PATH"], **settings},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return ended.returncode, ended.stdout, ended.stderr

    return start


def test_a_region_whose_data_file_has_a_second_name_is_told_and_kept(
    directory: RegionDirectory, region: OwnedRegion, run: Run, volume: Path
) -> None:
    name = data_name(ID, region.owner.nonce)
    os.link(directory.path / name, volume / "second")
    names = directory.names()
    status, shown, said = run("status")
    assert (status, "Failed" in shown, "Ready" in shown) == (5, True, False)
    assert f"{name} has more than one name" in shown
    assert said.count("\n") == 1
    for arguments in (["clean", "--dry-run"], ["clean"]):
        status, shown, said = run(*arguments)
        assert status == 5
        assert "kept  eng.meta" in shown
        assert f"{name} has more than one name" in shown
        assert directory.names() == names
    (volume / "second").unlink()
    assert run("clean")[0] == 0
    assert directory.names() == []


def test_a_loose_file_with_a_second_name_is_told_and_kept(
    directory: RegionDirectory, run: Run, volume: Path
) -> None:
    name = "eng.0123456789abcdef.data"
    (directory.path / name).touch()
    os.link(directory.path / name, volume / "second")
    status, shown, said = run("clean")
    assert (status, shown) == (4, f"kept  {name}  0 bytes  {name} has more than one name\n")
    assert "all 1 found are owned or held, or not as kvcellar made them" in said
    assert directory.names() == [name]
    told = [
        (orphan.name, orphan.action, orphan.reason)
        for orphan in lying(survey(directory), frozenset())
    ]
    assert told == [(name, "kept", f"{name} has more than one name; it is left alone")]


def test_a_region_that_lost_pages_is_shown_as_failed_and_can_be_removed(
    directory: RegionDirectory, region: OwnedRegion, run: Run
) -> None:
    path = directory.path / data_name(ID, region.owner.nonce)
    os.truncate(path, 0)
    os.truncate(path, 4 * MIB)
    status, shown, said = run("status")
    assert (status, "Failed" in shown, "(0 of them reserved)" in shown) == (0, True, True)
    assert said == ""
    assert run("clean")[0] == 0
    assert directory.names() == []


def test_what_another_owner_wrote_does_not_move_the_terminal(
    directory: RegionDirectory, region: OwnedRegion, run: Run
) -> None:
    owner = replace(region.owner, state=RegionState.FAILED, reason="QQQQQQQQ end")
    payload = metadata.pack_owner(owner).replace(b"QQQQQQQQ", b"\x1b[2J\r\n\x07\x9b")
    fd = directory.open_file(meta_name(ID))
    for which in (0, 1):
        copy = frame.pack_copy(frame.OWNER_AT, 9, payload)
        os.pwrite(fd, copy, frame.OWNER_AT.copy_offset(which))
    os.close(fd)
    status, shown, _ = run("status")
    assert status == 0
    assert shown.splitlines()[2:] == ["eng: \\x1b[2J\\r\\n\\x07\ufffd end"]


needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="taking rights away needs root, as mounting does"
)


@needs_root
@pytest.mark.parametrize("command", ["status", "clean"])
def test_a_directory_that_may_not_be_read_is_told_by_its_permission(
    directory: RegionDirectory, run: Run, command: str
) -> None:
    directory.path.chmod(0)
    status, shown, said = run(command, below=WITHOUT_RIGHTS)
    assert (status, shown, said.count("\n")) == (2, "", 1)
    assert f"{directory.path} may not be opened by uid 0, gid 0: it belongs to uid 0, gid 0" in said
    assert "has mode 0; set its mode" in said
    assert "link" not in said


@needs_root
@pytest.mark.parametrize("command", ["status", "clean"])
def test_a_page_that_may_not_be_read_is_told_by_its_permission(
    directory: RegionDirectory, region: OwnedRegion, run: Run, command: str
) -> None:
    name = meta_name(region.engine_id)
    (directory.path / name).chmod(0o060)
    status, shown, said = run(command, below=WITHOUT_RIGHTS)
    assert (status, said.count("\n")) == (5, 1)
    for text in (shown, said):
        assert f"{name} may not be opened by uid 0, gid 0: it belongs to uid 0, gid 0" in text
    assert len(directory.names()) == 3

"""Files of stock vLLM in a volume: which go, which stay and why, and what a kill in between leaves."""

import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pytest

from kvcellar.contract import EngineId, Mode
from kvcellar.daemon.cleaning import lying_stock
from kvcellar.daemon.orphans import REMEMBERED
from kvcellar.region import leases
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.janitor import MOST_ASIDE, Janitor, StockFile
from kvcellar.region.names import quarantine_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import survey
from tests.integration.conftest import Fork, MakeSidecar
from tests.support.sidecars import until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("sigio_ignored")]

MIB = 2**20
NAME = "vllm_offload_left.mmap"
WAIT_S = 0.05


@pytest.fixture
def janitor(volume: Path) -> Iterator[Janitor]:
    made = Janitor(volume, wait_s=WAIT_S, young_s=0.0)
    yield made
    made.close()


def make(volume: Path, name: str = NAME, size_bytes: int = 4 * MIB) -> Path:
    """A file that a killed engine left."""
    path = volume / name
    path.touch(0o600)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    return path


def clean(janitor: Janitor, directory: RegionDirectory) -> tuple[list[str], dict[str, str]]:
    """A whole pass: names that went, and reasons of those that stayed."""
    left = janitor.set_aside(directory)
    time.sleep(WAIT_S * 1.5)
    gone = janitor.finish(directory)
    return [file.name for file in gone], {file.name: file.reason for file in left}


# --- what goes ----------------------------------------------------------------------------------------


def test_what_nobody_has_goes_with_its_pages(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    before = os.statvfs(volume).f_bfree
    names = [NAME, f"{NAME}.1", "vllm_offload_hisparse_0_dp1.mmap"]
    for name in names:
        make(volume, name)
    gone, left = clean(janitor, directory)
    assert (sorted(gone), left) == (sorted(names), {})
    assert os.statvfs(volume).f_bfree == before
    assert not os.listdir(directory.path)


def test_thousands_of_files_go_a_few_at_a_time_and_a_few_are_shown(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    for number in range(MOST_ASIDE + 5):
        make(volume, f"vllm_offload_{number:03}.mmap", 4096)
    assert len(lying_stock(janitor.look(directory))) == REMEMBERED
    before = len(os.listdir("/proc/self/fd"))
    left = janitor.set_aside(directory)
    assert len(os.listdir("/proc/self/fd")) <= before + MOST_ASIDE + 1
    assert {file.reason for file in left} == {
        f"{MOST_ASIDE} others are removed first: it goes at one of the next looks"
    }
    janitor.close()  # it was killed, and the next one goes on
    gone, _ = clean(janitor, directory)
    assert len(gone) == MOST_ASIDE
    gone, kept = clean(janitor, directory)
    assert (len(gone), kept, os.listdir(volume)) == (5, {}, [directory.path.name])


def test_a_file_lies_aside_for_a_while_before_it_goes(
    volume: Path, directory: RegionDirectory
) -> None:
    path = make(volume)
    janitor = Janitor(volume, wait_s=60.0, young_s=0.0)
    aside = directory.path / quarantine_name(path.stat().st_ino, NAME)
    assert janitor.set_aside(directory) == []
    assert janitor.finish(directory) == []
    assert (path.exists(), aside.exists()) == (False, True)
    # It is neither a region's file nor a stranger's to the rest of the house.
    assert survey(directory).loose == ()
    assert janitor.put_back(directory) == []
    assert (path.exists(), aside.exists()) == (True, False)
    janitor.close()


def test_looking_changes_nothing(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    path = make(volume)
    before = path.stat()
    assert janitor.look(directory) == [StockFile(NAME, 4 * MIB)]
    assert path.stat() == before
    assert not janitor.is_waiting


# --- what stays ---------------------------------------------------------------------------------------


def test_what_a_process_has_open_or_mapped_stays(
    volume: Path, directory: RegionDirectory, janitor: Janitor, fork: Fork
) -> None:
    path = make(volume)

    def engine(connection: Connection) -> None:
        fd = os.open(path, os.O_RDWR)
        mapped = mmap.mmap(fd, 4 * MIB)
        os.close(fd)
        connection.send("mapped")
        connection.recv()
        mapped.close()

    child = fork(engine)
    assert child.hear() == "mapped"
    assert janitor.look(directory) == [
        StockFile(NAME, 4 * MIB, is_held=True, reason="an engine has it")
    ]
    assert clean(janitor, directory) == ([], {NAME: "an engine has it"})
    child.kill()
    assert clean(janitor, directory) == ([NAME], {})


def test_a_file_that_is_being_made_stays(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    path = volume / NAME
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    assert clean(janitor, directory)[0] == []
    os.ftruncate(fd, 4 * MIB)
    assert clean(janitor, directory)[0] == []
    os.close(fd)
    assert clean(janitor, directory)[0] == [NAME]


def test_an_empty_file_and_one_that_is_a_moment_old_stay(
    volume: Path, directory: RegionDirectory
) -> None:
    (volume / NAME).touch()
    make(volume, f"{NAME}.1")
    janitor = Janitor(volume, wait_s=WAIT_S, young_s=60.0)
    gone, left = clean(janitor, directory)
    assert gone == []
    assert left == {
        NAME: "it is empty: an engine may be about to use it",
        f"{NAME}.1": "it was made or changed a moment ago",
    }
    janitor.close()


def test_odd_files_stay_and_are_not_opened(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    other = make(volume, "other")
    (volume / "vllm_offload_link.mmap").symlink_to(other)
    os.mkfifo(volume / "vllm_offload_pipe.mmap")
    (volume / "vllm_offload_folder.mmap").mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(volume / "vllm_offload_socket.mmap"))
        os.link(other, volume / "vllm_offload_second.mmap")
        before = sorted(os.listdir(volume))
        gone, left = clean(janitor, directory)
    assert (gone, sorted(os.listdir(volume))) == ([], before)
    assert left == {
        "vllm_offload_second.mmap": "it has more than one name",
        "vllm_offload_link.mmap": "it is no regular file but a symbolic link",
        "vllm_offload_pipe.mmap": "it is no regular file but a pipe",
        "vllm_offload_folder.mmap": "it is no regular file but a directory",
        "vllm_offload_socket.mmap": "it is no regular file but a socket",
    }


def test_files_of_other_names_are_none_of_the_janitor_s(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    names = ["vllm_offload_x", "xvllm_offload_a.mmap", "psm_1", "quarantine.vllm_offload_a.mmap"]
    for name in names:
        make(volume, name)
    assert clean(janitor, directory) == ([], {})
    assert set(names) <= set(os.listdir(volume))


def test_the_file_of_a_stock_region_is_never_the_janitor_s(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    request = RegionRequest(EngineId("left"), 4 * MIB, Mode.STOCK)
    region = OwnedRegion.acquire(directory, request, list)
    region.reserve(lambda: False)
    region.close()  # nobody owns or holds it now: its sidecar is about to start again
    assert janitor.look(directory) == []
    assert clean(janitor, directory) == ([], {})
    assert (volume / NAME).stat().st_blocks * 512 == 4 * MIB
    # With a page that nobody can read it may be one, or not.
    (directory.path / "left.meta").write_bytes(b"no page")
    gone, left = clean(janitor, directory)
    assert (gone, list(left)) == ([], [NAME])
    assert "cannot be read" in left[NAME]


def test_without_the_owner_s_uid_a_file_is_only_reported(
    volume: Path, directory: RegionDirectory, fork: Fork
) -> None:
    path = make(volume)
    path.chmod(0o666)
    closed = make(volume, f"{NAME}.1")

    def look(connection: Connection) -> None:
        opened = RegionDirectory.open(directory.path)
        janitor = Janitor(volume, young_s=0.0)
        janitor.look(opened)  # opens the root, which lies where another uid cannot go
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        connection.send((janitor.set_aside(opened), janitor.is_waiting))

    answer = cast("tuple[list[StockFile], bool]", fork(look).hear())
    left, is_waiting = answer
    assert not is_waiting
    assert [file.is_held for file in left] == [False, False]
    reasons = {file.name: file.reason for file in left}
    assert reasons[NAME].startswith("only its owner's uid, or a process with CAP_LEASE, can tell")
    assert "uid 65534 now" in reasons[NAME]
    assert reasons[f"{NAME}.1"].startswith("it belongs to uid 0; only its owner's uid")
    assert path.exists()
    assert closed.exists()


# --- races and kills ----------------------------------------------------------------------------------


def test_a_file_that_somebody_opens_meanwhile_goes_back(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    path = make(volume)
    inode = path.stat().st_ino
    janitor.set_aside(directory)
    opened: list[int] = []
    aside = directory.path / quarantine_name(inode, NAME)
    # A process that had looked the name up comes to the file by another way than the old name.
    opener = threading.Thread(target=lambda: opened.append(os.open(aside, os.O_RDWR)))
    opener.start()
    until(lambda: not leases.is_intact(janitor._waiting[0].moved.fd), "the lease is broken")
    time.sleep(WAIT_S)
    assert opened == []
    assert janitor.finish(directory) == []
    opener.join(5)
    assert path.stat().st_ino == os.fstat(opened[0]).st_ino == inode
    os.close(opened[0])


def test_a_file_whose_name_was_taken_meanwhile_stays_aside(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    inode = make(volume).stat().st_ino
    aside = directory.path / quarantine_name(inode, NAME)
    janitor.set_aside(directory)
    newer = make(volume)
    held = os.open(newer, os.O_RDWR)
    (left,) = janitor.put_back(directory)
    assert (left.name, left.size_bytes) == (aside.name, 4 * MIB)
    assert "name is taken" in left.reason
    assert newer.exists()
    # The next pass has the time to remove it, since nobody wants it.
    gone, kept = clean(janitor, directory)
    assert (gone, kept) == ([NAME], {NAME: "an engine has it"})
    assert (aside.exists(), newer.exists()) == (False, True)
    os.close(held)


def test_an_interrupted_quarantine_is_finished_by_the_next_one(
    volume: Path, directory: RegionDirectory, fork: Fork
) -> None:
    make(volume)

    def die(connection: Connection) -> None:
        Janitor(volume, young_s=0.0).set_aside(RegionDirectory.open(directory.path))
        connection.send("aside")
        connection.recv()

    child = fork(die)
    assert child.hear() == "aside"
    child.kill()
    assert len(os.listdir(directory.path)) == 1
    janitor = Janitor(volume, wait_s=WAIT_S, young_s=0.0)
    assert clean(janitor, directory) == ([NAME], {})
    assert not os.listdir(directory.path)
    janitor.close()


def test_what_only_looks_like_a_quarantine_is_left_alone(
    volume: Path, directory: RegionDirectory, janitor: Janitor
) -> None:
    odd = make(directory.path, quarantine_name(1, NAME))
    (directory.path / quarantine_name(2, NAME)).mkdir()
    gone, left = clean(janitor, directory)
    assert gone == []
    assert set(left.values()) == {"it is not what was set aside"}
    assert odd.exists()


def test_a_directory_on_another_file_system_only_reports(
    volume: Path, tmp_path: Path, janitor: Janitor
) -> None:
    path = make(volume)
    (tmp_path / "elsewhere").mkdir()
    directory = RegionDirectory.create(tmp_path / "elsewhere/kvcellar", any_filesystem=True)
    gone, left = clean(janitor, directory)
    assert gone == []
    assert "cannot be moved" in left[NAME]
    assert path.exists()
    directory.close()


# --- the sidecar and the commands ---------------------------------------------------------------------


def age(path: Path) -> None:
    """Wait until a file is old enough for a sidecar's janitor."""
    while time.time() - path.stat().st_ctime < 2.1:
        time.sleep(0.05)


def test_a_sidecar_frees_what_a_killed_engine_left_before_it_plans(
    volume: Path, make_sidecar: MakeSidecar
) -> None:
    age(make(volume, size_bytes=240 * MIB))
    sidecar = make_sidecar().start()
    region = sidecar.until_state("Ready")
    assert not sidecar.events("region failed")
    (orphan,) = region["orphans"]
    assert (orphan["name"], orphan["bytes"], orphan["action"]) == (NAME, 240 * MIB, "reclaimed")
    metrics = sidecar.metrics()
    assert metrics["kvcellar_orphans_reclaimed_total"] == 1
    assert metrics["kvcellar_orphans_reclaimed_bytes_total"] == 240 * MIB
    assert metrics["kvcellar_foreign_bytes"] == 0


@pytest.mark.parametrize("policy", ["report", "off"])
def test_a_sidecar_that_may_not_reclaim_leaves_everything(
    volume: Path, make_sidecar: MakeSidecar, policy: str
) -> None:
    path = make(volume)
    age(path)
    sidecar = make_sidecar(KVCELLAR_JANITOR=policy).start()
    sidecar.until_state("Ready")
    assert path.exists()
    orphans = sidecar.region()["orphans"]
    assert [(o["name"], o["action"]) for o in orphans] == [(NAME, "kept")] * (policy == "report")
    assert sidecar.metrics()["kvcellar_foreign_bytes"] == (4 * MIB if policy == "report" else 0)
    assert sidecar.get("/livez")[0] == 200


def test_a_name_that_is_no_text_is_shown_by_its_escapes(
    volume: Path, make_sidecar: MakeSidecar
) -> None:
    path = make(volume, os.fsdecode(b"vllm_offload_\xff\n.mmap"))
    os.link(path, volume / "second")
    age(path)
    sidecar = make_sidecar().start()
    (orphan,) = sidecar.until_state("Ready")["orphans"]
    assert (orphan["name"], orphan["action"]) == (r"vllm_offload_\udcff\n.mmap", "kept")
    status = sidecar.run("status", "--json")
    assert (status.returncode, json.loads(status.stdout)["regions"][0]["orphans"]) == (0, [orphan])


def test_a_live_engine_s_file_is_no_orphan_but_counts_as_foreign(
    volume: Path, make_sidecar: MakeSidecar
) -> None:
    path = make(volume)
    held = os.open(path, os.O_RDWR)
    age(path)
    sidecar = make_sidecar().start()
    region = sidecar.until_state("Ready")
    assert region["orphans"] == []
    assert sidecar.metrics()["kvcellar_foreign_bytes"] == 4 * MIB
    os.close(held)
    until(lambda: not path.exists(), "the file is reclaimed")


def test_a_file_is_no_orphan_before_the_janitor_may_look_whether_an_engine_has_it(
    volume: Path, directory: RegionDirectory
) -> None:
    make(volume)
    for young_s, shown in ((60.0, []), (0.0, [NAME])):
        janitor = Janitor(volume, young_s=young_s)
        left = janitor.look(directory)
        assert [file.name for file in left] == [NAME]
        assert [orphan.name for orphan in lying_stock(left)] == shown
        janitor.close()


def test_clean_and_status_show_the_volume_s_root(
    volume: Path, make_sidecar: MakeSidecar, directory: RegionDirectory
) -> None:
    sidecar = make_sidecar()
    path = make(volume)
    fresh = sidecar.run("clean")
    assert (fresh.returncode, "moment ago" in fresh.stdout) == (4, True)
    age(path)
    dry = sidecar.run("clean", "--dry-run")
    assert dry.stdout.startswith(f"would be removed  {NAME}  {4 * MIB} bytes")
    assert path.exists()
    done = sidecar.run("clean")
    assert done.stdout.startswith(f"removed  {NAME}  {4 * MIB} bytes  no engine had it")
    assert not path.exists()
    assert sidecar.run("clean").stdout == "nothing to remove\n"

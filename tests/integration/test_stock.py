"""Regions for an unmodified vLLM: the file that it finds, who holds it, how it goes, and what cannot be.

`engine` does to the file what vLLM's own class does; tests/vllm/test_stock_region.py uses that class itself.
"""

import mmap
import os
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, Mode, RegionState
from kvcellar.errors import ConfigurationError, RegionMismatch
from kvcellar.region import leases
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.names import data_name, meta_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import survey
from tests.integration.conftest import Fork, MakeSidecar, MakeVolume
from tests.support.children import Child
from tests.support.sidecars import Sidecar, attach, until
from tests.support.volumes import mount_tmpfs, unmount, used_bytes

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("sigio_ignored")]

MIB = 2**20
ID = EngineId("eng")
NAME = "vllm_offload_eng.mmap"
STOCK = RegionRequest(ID, 8 * MIB, Mode.STOCK)


def never() -> bool:
    return False


def made(directory: RegionDirectory, request: RegionRequest = STOCK) -> OwnedRegion:
    region = OwnedRegion.acquire(directory, request, list)
    region.reserve(never)
    region.settle(never)
    return region


def engine(fork: Fork, path: Path) -> Child:
    """A process that has the file as an engine has it: opened by name, mapped and written."""

    def run(connection: Connection) -> None:
        fd = os.open(path, os.O_RDWR)
        mapped = mmap.mmap(fd, 0)
        mapped[:4] = b"data"
        connection.send(os.fstat(fd).st_ino)
        connection.recv()

    child = fork(run)
    child.hear()
    return child


# --- the file -----------------------------------------------------------------------------------------


def test_the_file_gets_its_name_once_every_page_is_promised(
    volume: Path, directory: RegionDirectory
) -> None:
    region = OwnedRegion.acquire(directory, STOCK, list)
    hidden = directory.path / data_name(ID, region.owner.nonce)
    assert (hidden.exists(), (volume / NAME).exists()) == (True, False)
    region.reserve(never)
    status = (volume / NAME).stat()
    assert (status.st_size, status.st_blocks * 512) == (8 * MIB, 8 * MIB)
    assert (status.st_mode & 0o777, status.st_ino) == (0o660, region.owner.data_inode)
    # No index file: what a stock vLLM keeps where is in its own memory.
    assert os.listdir(directory.path) == [meta_name(ID)]
    region.settle(never)
    assert region.owner.state is RegionState.READY
    assert region.snapshot().damage == ""
    region.close()


def test_the_region_is_adopted_with_its_bytes_and_goes_with_all_its_files(
    volume: Path, directory: RegionDirectory
) -> None:
    before = used_bytes(volume)
    region = made(directory)
    with (volume / NAME).open("r+b") as file:
        file.write(b"data")
    region.close()
    again = OwnedRegion.acquire(directory, STOCK, list)
    assert (again.is_adopted, again.owner.state) == (True, RegionState.READY)
    assert (volume / NAME).read_bytes()[:4] == b"data"
    assert again.release()
    assert (os.listdir(volume), os.listdir(directory.path)) == (["kvcellar"], [])
    assert used_bytes(volume) == before


@pytest.mark.parametrize("step", ["renamed", "hidden"])
def test_a_kill_between_a_name_and_the_page_is_made_good(
    volume: Path, directory: RegionDirectory, step: str
) -> None:
    region = OwnedRegion.acquire(directory, STOCK, list)
    hidden = directory.path / data_name(ID, region.owner.nonce)
    inode = region.owner.data_inode
    if step == "renamed":  # reserved, named, and killed before the page says so
        os.posix_fallocate(region._data_fd, 0, 8 * MIB)
        hidden.rename(volume / NAME)
    else:  # killed inside a release
        region.reserve(never)
        (volume / NAME).rename(hidden)
    region.close()
    again = made(directory)
    assert again.is_adopted
    assert ((volume / NAME).stat().st_ino, hidden.exists()) == (inode, False)
    again.close()


def test_a_name_that_is_taken_is_refused_before_a_page_is_used(
    volume: Path, directory: RegionDirectory
) -> None:
    (volume / NAME).write_bytes(b"an engine's own")
    before = used_bytes(volume)
    with pytest.raises(RegionMismatch, match="is there already"):
        OwnedRegion.acquire(directory, STOCK, list)
    assert (used_bytes(volume), os.listdir(directory.path)) == (before, [])


def test_a_name_that_is_taken_while_reserving_gives_the_pages_back(
    volume: Path, directory: RegionDirectory
) -> None:
    region = OwnedRegion.acquire(directory, STOCK, list)
    (volume / NAME).write_bytes(b"an engine's own")
    with pytest.raises(RegionMismatch, match="is there already"):
        region.reserve(never)
    assert region.reserved_bytes() == 0
    assert (volume / NAME).read_bytes() == b"an engine's own"
    region.close()


def test_a_directory_that_is_not_in_the_root_is_refused(volume: Path) -> None:
    sidecar = Sidecar(volume, KVCELLAR_MODE="stock", KVCELLAR_DIR=str(volume / "a/b")).start()
    assert sidecar.wait() == 2
    assert "has to lie directly in" in sidecar.complaint


def test_a_directory_that_is_a_mount_of_its_own_is_refused(
    volume: Path,
) -> None:
    inner = volume / "kvcellar"
    inner.mkdir(mode=0o750)
    mount_tmpfs(inner, 16 * MIB)
    try:
        opened = RegionDirectory.open(inner)
        with pytest.raises(ConfigurationError, match="on another file system"):
            OwnedRegion.acquire(opened, STOCK, list)
        opened.close()
    finally:
        unmount(inner)


# --- who holds it -------------------------------------------------------------------------------------


def test_an_engine_is_seen_by_its_mapping_alone_and_its_coming_is_written_down(
    volume: Path, directory: RegionDirectory, fork: Fork
) -> None:
    region = made(directory)
    seen = region.snapshot()
    assert (seen.held, seen.was_used) == ((), False)
    child = engine(fork, volume / NAME)
    seen = region.snapshot()
    assert (seen.held, seen.was_used, len(seen.rows)) == ((0,), True, 1)
    assert not region.release()
    assert (volume / NAME).exists()
    child.kill()
    assert region.snapshot().held == ()
    assert region.snapshot().was_used
    region.close()


def test_looking_at_a_region_does_not_make_it_held(
    directory: RegionDirectory, fork: Fork, volume: Path
) -> None:
    region = made(directory)
    (found,) = survey(directory).regions
    assert (found.is_owned, found.held, found.reserved_bytes) == (True, (), 8 * MIB)
    region.close()
    (found,) = survey(directory).regions
    assert (found.is_owned, found.held) == (False, ())
    child = engine(fork, volume / NAME)
    (found,) = survey(directory).regions
    assert (found.is_owned, found.held, found.damage) == (False, (0,), "")
    child.kill()


def test_a_process_that_sigio_would_kill_asks_for_no_lease(
    directory: RegionDirectory, volume: Path
) -> None:
    region = made(directory)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    assert region.held()
    assert not region.release()
    assert (volume / NAME).exists()
    leases.ignore_breaks()
    assert region.release()


def test_an_engine_that_comes_while_the_region_goes_has_it(
    volume: Path, directory: RegionDirectory, fork: Fork
) -> None:
    region = made(directory)
    hidden = directory.path / data_name(ID, region.owner.nonce)

    def come(connection: Connection) -> None:
        # It had looked the name up: it comes to the file, wherever that has gone.
        until(hidden.exists, "the file is hidden")
        fd = os.open(hidden, os.O_RDWR)
        connection.send(os.fstat(fd).st_ino)
        connection.recv()

    child = fork(come)
    assert not region.release()
    assert child.hear() == (volume / NAME).stat().st_ino == region.owner.data_inode
    assert region.snapshot().held == (0,)
    child.kill()
    assert region.release()


def test_a_held_region_is_adopted_in_the_mode_it_has(
    volume: Path, directory: RegionDirectory, fork: Fork
) -> None:
    made(directory).close()
    child = engine(fork, volume / NAME)
    plugin = RegionRequest(ID, 8 * MIB)
    region = OwnedRegion.acquire(directory, plugin, list)
    assert (region.is_adopted, region.owner.mode, region.held()) == (True, Mode.STOCK, True)
    region.close()
    child.kill()
    region = made(directory, plugin)
    assert (region.is_adopted, region.owner.mode) == (False, Mode.PLUGIN)
    assert not (volume / NAME).exists()
    region.close()


def test_the_plug_in_refuses_a_stock_region(directory: RegionDirectory) -> None:
    region = made(directory)
    with pytest.raises(RegionMismatch, match="KVCELLAR_MODE=stock"):
        attach(directory.path)
    region.close()


# --- the sidecar --------------------------------------------------------------------------------------


def test_a_sidecar_keeps_the_file_between_engine_starts(
    volume: Path, make_sidecar: MakeSidecar, fork: Fork
) -> None:
    sidecar = make_sidecar(KVCELLAR_MODE="stock").start()
    region = sidecar.until_state("Ready")
    assert (region["mode"], region["participants"]) == ("stock", [])
    inode, used = (volume / NAME).stat().st_ino, used_bytes(volume)
    for _ in range(3):
        child = engine(fork, volume / NAME)
        until(lambda: sidecar.region()["participants"], "the engine is seen")
        (shown,) = sidecar.region()["participants"]
        assert (shown["role"], shown["rank"], shown["pinned"]) == ("worker", 0, False)
        child.kill()
        until(lambda: not sidecar.region()["participants"], "the engine is gone")
    assert ((volume / NAME).stat().st_ino, used_bytes(volume)) == (inode, used)
    # A sidecar that is killed and comes again goes on with it, engine or not.
    sidecar.end(signal.SIGKILL)
    child = engine(fork, volume / NAME)
    sidecar.start()
    region = sidecar.until_state("Ready")
    assert (volume / NAME).stat().st_ino == inode
    until(lambda: sidecar.region()["participants"], "the engine is seen again")
    assert region["orphans"] == []
    child.kill()
    assert sidecar.end()[0] == 0
    assert (volume / NAME).exists()


def test_the_region_goes_after_its_last_engine_when_its_retention_is_over(
    volume: Path, make_sidecar: MakeSidecar, fork: Fork
) -> None:
    sidecar = make_sidecar(KVCELLAR_MODE="stock", KVCELLAR_RETENTION="now").start()
    sidecar.until_state("Ready")
    child = engine(fork, volume / NAME)
    until(lambda: sidecar.region()["participants"], "the engine is seen")
    child.kill()
    sidecar.until_state("Released")
    assert not (volume / NAME).exists()
    assert sidecar.files == []


@pytest.mark.parametrize("change", ["unlinked", "replaced", "cut"])
def test_a_file_that_was_tampered_with_fails_and_is_made_anew_once_unheld(
    volume: Path, make_sidecar: MakeSidecar, fork: Fork, change: str
) -> None:
    sidecar = make_sidecar(KVCELLAR_MODE="stock").start()
    sidecar.until_state("Ready")
    path = volume / NAME
    inode = path.stat().st_ino
    child = engine(fork, path)
    if change == "cut":
        os.truncate(path, 4 * MIB)
    else:
        path.unlink()
        if change == "replaced":
            path.write_bytes(b"somebody else's")
    region = sidecar.until_state("Failed")
    assert "another process" in region["reason"]
    child.kill()
    if change == "replaced":
        # Not ours, and nobody's: the janitor has it, once it is old enough.
        assert path.stat().st_ino != inode
    sidecar.until_state("Ready")
    assert (path.stat().st_size, path.stat().st_blocks * 512) == (32 * MIB, 32 * MIB)
    assert path.stat().st_ino != inode


def test_a_region_whose_directory_was_removed_goes_with_its_file(
    volume: Path, directory: RegionDirectory
) -> None:
    region = made(directory)
    shutil.rmtree(directory.path)
    assert region.release()
    assert (os.listdir(volume), used_bytes(volume)) == ([], 0)


def test_a_region_whose_hidden_name_is_taken_goes_once_that_is_free(
    volume: Path, directory: RegionDirectory
) -> None:
    region = made(directory)
    hidden = directory.path / data_name(ID, region.owner.nonce)
    hidden.mkdir()
    with pytest.raises(RegionMismatch, match=f"{hidden} is there already"):
        region.release()
    hidden.rmdir()
    assert region.release()
    assert (os.listdir(volume), used_bytes(volume)) == ([directory.path.name], 0)


def test_the_pages_of_a_file_that_another_process_has_renamed_go_with_the_region(
    volume: Path, directory: RegionDirectory
) -> None:
    region = made(directory)
    kept = (volume / NAME).rename(volume / "vllm_offload_other.mmap")
    assert region.release()
    # Not an empty file, which the janitor would leave alone.
    assert (kept.stat().st_size, used_bytes(volume)) == (8 * MIB, 0)


def test_a_region_whose_memory_vanished_while_it_was_reserved_goes_on_once_there_is_room(
    make_sidecar: MakeSidecar, make_volume: MakeVolume
) -> None:
    large = make_volume(1024 * MIB)
    sidecar = make_sidecar(
        on=large, KVCELLAR_MODE="stock", KVCELLAR_CAPACITY="900Mi", KVCELLAR_HUGE_PAGES="never"
    ).start()
    until(lambda: sidecar.region().get("reservedBytes"), "some of it is reserved")
    greedy = large / "greedy"
    with greedy.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 200 * MIB)
    assert "size of the tmpfs" in sidecar.until_state("Failed")["reason"]
    greedy.unlink()
    assert sidecar.until_state("Ready")["reservedBytes"] == 900 * MIB
    assert len(sidecar.events("region made")) == 1


def test_a_region_that_does_not_fit_leaves_the_name_to_the_engine(
    volume: Path, make_sidecar: MakeSidecar
) -> None:
    sidecar = make_sidecar(KVCELLAR_MODE="stock", KVCELLAR_CAPACITY="300Mi").start()
    sidecar.until_state("Failed")
    assert not (volume / NAME).exists()
    assert sidecar.run("wait", "--for", "reserved", "--timeout", "5").returncode == 0


def test_clean_leaves_a_held_stock_region_and_removes_one_that_is_not(
    volume: Path, make_sidecar: MakeSidecar, directory: RegionDirectory, fork: Fork
) -> None:
    made(directory).close()
    sidecar = make_sidecar()
    child = engine(fork, volume / NAME)
    held = sidecar.run("clean")
    assert (held.returncode, "an engine holds it" in held.stdout) == (4, True)
    child.kill()
    assert sidecar.run("clean").stdout.startswith("removed  eng.meta")
    assert os.listdir(volume) == ["kvcellar"]

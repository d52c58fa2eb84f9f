"""Owners and engines inside real memory cgroups: who pays, and a limit refuses and nobody is killed."""

import ctypes
import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, HugePages
from kvcellar.errors import DoesNotFit
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.memory import Limit, read_limits
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.worker.attach import AttachOptions, attach
from tests.integration.conftest import Fork
from tests.support.children import Child
from tests.support.sidecars import until

pytestmark = pytest.mark.integration

MIB = 2**20
V1 = Path("/sys/fs/cgroup/memory")
REQUEST = RegionRequest(EngineId("engine"), 96 * MIB, huge_pages=HugePages.NEVER)


def _own_v1_path() -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return path.strip("/")
    return ""


@pytest.fixture
def cgroups() -> Iterator[tuple[Path, Path]]:
    """A memory cgroup (version 1) of the test's own, and one inside it; nothing is limited yet."""
    if os.geteuid() != 0 or not (V1 / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a memory controller of cgroup version 1")
    parent = V1 / _own_v1_path()
    outer = (parent if parent.is_dir() else V1) / f"kvcellar-test-{uuid.uuid4().hex[:8]}"
    own = outer / "own"
    own.mkdir(parents=True)
    yield outer, own
    for directory in (*(path for path in outer.iterdir() if path.is_dir()), outer):
        for _ in range(100):
            try:
                directory.rmdir()
                break
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                time.sleep(0.05)


def _limit(directory: Path, size_bytes: int) -> None:
    (directory / "memory.limit_in_bytes").write_text(str(size_bytes))


def _try(
    connection: Connection, own: Path, path: Path, request: RegionRequest, *, read: bool
) -> None:
    """In the cgroup: own and reserve; sends the refusal's numbers, and how much memory is left taken."""
    (own / "cgroup.procs").write_text(str(os.getpid()))
    directory = RegionDirectory.create(path)

    def limits() -> list[Limit]:
        return read_limits(directory.fd) if read else []

    try:
        region = OwnedRegion.acquire(directory, request, limits)
        region.reserve(lambda: False)
    except DoesNotFit as error:
        connection.send((error.binding_limit, error.asked_bytes, error.free_bytes, str(error)))
    else:
        region.settle(lambda: False)
        connection.send((region.owner.state, region.reserved_bytes(), 0, ""))


def _answer(
    fork: Fork, own: Path, volume: Path, request: RegionRequest, *, read: bool = True
) -> object:
    child = fork(lambda connection: _try(connection, own, volume / "kvcellar", request, read=read))
    answer = child.hear()
    assert child.wait() == 0  # nobody was killed
    return answer


@pytest.mark.parametrize("which", ["own", "outer"])
def test_a_limit_of_the_own_or_the_parent_cgroup_refuses_the_plan(
    cgroups: tuple[Path, Path], volume: Path, fork: Fork, which: str
) -> None:
    outer, own = cgroups
    _limit(outer if which == "outer" else own, 64 * MIB)
    answer = _answer(fork, own, volume, REQUEST)
    assert isinstance(answer, tuple)
    name, asked, free, message = answer
    assert name == ("container" if which == "own" else f"ancestor:{outer.name}")
    assert asked > 96 * MIB > 64 * MIB > free
    assert "KVCELLAR_CAPACITY" in message
    assert os.listdir(volume / "kvcellar") == []


def test_what_the_limit_holds_is_made(cgroups: tuple[Path, Path], volume: Path, fork: Fork) -> None:
    _, own = cgroups
    _limit(own, 160 * MIB)
    assert _answer(fork, own, volume, REQUEST) == ("Ready", 96 * MIB, 0, "")
    shutil.rmtree(volume / "kvcellar")


def test_huge_pages_over_a_limit_that_cannot_be_read_are_refused_by_the_kernel(
    cgroups: tuple[Path, Path], volume: Path, fork: Fork
) -> None:
    _, own = cgroups
    _limit(own, 64 * MIB)
    request = replace(REQUEST, huge_pages=HugePages.AUTO)
    answer = _answer(fork, own, volume, request, read=False)
    assert isinstance(answer, tuple)
    name, asked, had, _ = answer
    assert (name, asked) == ("memory cgroup", 96 * MIB)
    assert 0 < had < 64 * MIB
    used = os.statvfs(volume)
    assert (
        used.f_blocks - used.f_bfree
    ) * used.f_frsize <= MIB  # the page, and nothing of the data


# --- who pays ------------------------------------------------------------------------------------------


def _stat(group: Path, name: str) -> int:
    """A figure of a group; one of now may lack 64 pages of each CPU, until the kernel sums up: every two seconds."""
    lines = (group / "memory.stat").read_text().splitlines()
    return int(dict(line.split() for line in lines)[name])


def _enter(group: Path) -> None:
    group.mkdir()
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _page_table_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmPTE:")[1].split()[0]) * 1024


def _own_and_stay(connection: Connection, group: Path, path: Path, huge: HugePages) -> None:
    """A sidecar: make the region, or adopt the one that is there."""
    _enter(group)
    request = replace(REQUEST, huge_pages=huge)
    region = OwnedRegion.acquire(RegionDirectory.create(path), request, list)
    region.reserve(lambda: False)
    region.settle(lambda: False)
    connection.send(region.is_adopted)
    connection.recv()


def _attach_and_stay(connection: Connection, group: Path, path: Path) -> None:
    """An engine: attach, write every page; sends what its page tables have grown by."""
    _enter(group)
    before = _page_table_bytes()
    region = attach("engine", MIB, options=AttachOptions(directory=path))
    ctypes.memset(region.base_address, 7, 96 * MIB)
    connection.send(_page_table_bytes() - before)
    connection.recv()
    # What it is first to write itself is its own.
    (path.parent / "of-its-own").write_bytes(b"x" * 8 * MIB)
    connection.send("written")
    connection.recv()


@pytest.mark.parametrize("huge", list(HugePages))
def test_the_first_owner_pays_for_the_region_and_engines_for_page_tables_whoever_starts_again(
    cgroups: tuple[Path, Path], volume: Path, fork: Fork, huge: HugePages
) -> None:
    outer, _ = cgroups
    path = volume / "kvcellar"

    def start_owner(name: str) -> tuple[Child, object]:
        child = fork(lambda connection: _own_and_stay(connection, outer / name, path, huge))
        return child, child.hear()

    def start_engine(name: str) -> Child:
        child = fork(lambda connection: _attach_and_stay(connection, outer / name, path))
        grown = child.hear()
        assert isinstance(grown, int)
        # 2 MiB for each GiB in small pages, and some of the mappings of its own.
        assert grown <= 96 * MIB // 512 + 128 * 1024
        assert _stat(outer / name, "shmem") < MIB
        return child

    def until_the_owner_pays() -> None:
        until(lambda: 96 * MIB <= _stat(outer / "owner", "shmem") < 97 * MIB, "the owner pays")

    owner, is_adopted = start_owner("owner")
    assert is_adopted is False
    until_the_owner_pays()
    for name in ("engine-1", "engine-2"):
        start_engine(name).kill()
        until_the_owner_pays()
    owner.kill()
    assert start_owner("owner-2")[1] is True
    assert _stat(outer / "owner-2", "shmem") < MIB
    engine = start_engine("engine-3")
    until_the_owner_pays()
    # These figures do tell whose a page is.
    assert engine.ask("write") == "written"
    until(lambda: _stat(outer / "engine-3", "shmem") >= 8 * MIB, "the engine pays for its own")

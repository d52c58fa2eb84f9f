"""Kernels and file systems that lack something: what is done instead, and what is said.

This machine's kernel has it all, so the call is made to answer as such a kernel does.
"""

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, HugePages, RegionState
from kvcellar.errors import ConfigurationError, KVCellarError
from kvcellar.region import leases, syscalls
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.janitor import Janitor
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest

pytestmark = pytest.mark.integration

MIB = 2**20
SMALL = RegionRequest(EngineId("engine"), 32 * MIB, huge_pages=HugePages.NEVER)
Refuse = Callable[[int, int], list[int]]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """Let an advice fail with an errno; returns the addresses that it was given for."""
    real = syscalls.madvise

    def install(refused: int, number: int) -> list[int]:
        asked: list[int] = []

        def madvise(address: int, length: int, advice: int) -> None:
            if advice != refused:
                return real(address, length, advice)
            asked.append(address)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(syscalls, "madvise", madvise)
        return asked

    return install


@pytest.fixture
def own(directory: RegionDirectory) -> Iterator[Callable[[RegionRequest], OwnedRegion]]:
    made: list[OwnedRegion] = []

    def acquire(request: RegionRequest) -> OwnedRegion:
        made.append(OwnedRegion.acquire(directory, request, list))
        return made[-1]

    yield acquire
    for region in made:
        region.close()


def never() -> bool:
    return False


def data_of(directory: RegionDirectory) -> Path:
    (path,) = directory.path.glob("*.data")
    return path


# --- huge pages ---------------------------------------------------------------------------------------


def test_a_kernel_without_collapse_gives_small_pages_and_is_asked_a_few_times_only(
    own: Callable[[RegionRequest], OwnedRegion], refuse: Refuse, caplog: pytest.LogCaptureFixture
) -> None:
    asked = refuse(syscalls.MADV_COLLAPSE, errno.EINVAL)
    region = own(replace(SMALL, huge_pages=HugePages.AUTO))
    with caplog.at_level("INFO"):
        region.reserve(never)
        region.settle(never)
    assert (region.owner.state, region.owner.huge_page_bytes) == (RegionState.READY, 0)
    assert region.reserved_bytes() == 32 * MIB
    assert 0 < len(asked) < 16
    assert caplog.text.count("no more huge pages for this region") == 1


def test_any_other_answer_to_collapse_is_an_error(
    own: Callable[[RegionRequest], OwnedRegion], refuse: Refuse
) -> None:
    refuse(syscalls.MADV_COLLAPSE, errno.EIO)
    with pytest.raises(KVCellarError, match="Input/output error"):
        own(replace(SMALL, huge_pages=HugePages.AUTO)).reserve(never)


# --- settling by several threads ----------------------------------------------------------------------


def test_a_kernel_without_populate_settles_all_the_same_and_loses_no_byte_of_a_peer(
    own: Callable[[RegionRequest], OwnedRegion], directory: RegionDirectory, refuse: Refuse
) -> None:
    asked = refuse(syscalls.MADV_POPULATE_WRITE, errno.EINVAL)
    region = own(replace(SMALL, settle_threads=3))
    region.reserve(never)
    with data_of(directory).open("r+b") as file:
        file.seek(5 * MIB + 1)
        file.write(b"of a peer")
    region.settle(never)
    assert asked
    assert region.owner.state is RegionState.READY
    content = data_of(directory).read_bytes()
    assert content[5 * MIB + 1 :].startswith(b"of a peer")
    assert content.count(0) == 32 * MIB - len(b"of a peer")


def test_any_other_answer_to_populate_is_an_error(
    own: Callable[[RegionRequest], OwnedRegion], refuse: Refuse
) -> None:
    refuse(syscalls.MADV_POPULATE_WRITE, errno.EIO)
    region = own(replace(SMALL, settle_threads=3))
    region.reserve(never)
    with pytest.raises(KVCellarError, match="Input/output error"):
        region.settle(never)
    assert region.owner.state is not RegionState.READY


# --- file systems -------------------------------------------------------------------------------------


def _without(monkeypatch: pytest.MonkeyPatch, lacking: int, number: int) -> None:
    real = fcntl.fcntl

    def answer(fd: int, command: int, argument: int | bytes = 0) -> int | bytes:
        if command == lacking:
            raise OSError(number, os.strerror(number))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", answer)


@pytest.mark.usefixtures("sigio_ignored")
def test_without_leases_the_janitor_says_so_and_removes_nothing(
    volume: Path, directory: RegionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = volume / "vllm_offload_left.mmap"
    path.write_bytes(b"x" * 4096)
    _without(monkeypatch, fcntl.F_SETLEASE, errno.EINVAL)
    janitor = Janitor(volume, wait_s=0.0, young_s=0.0)
    try:
        left = janitor.set_aside(directory)
        assert [(file.name, file.is_held) for file in left] == [(path.name, False)]
        assert left[0].reason.endswith("(no leases)")
        assert not janitor.is_waiting
        assert janitor.finish(directory) == []
    finally:
        janitor.close()
    assert path.read_bytes() == b"x" * 4096
    with path.open("rb") as file:
        # What nobody can tell counts as held.
        assert leases.is_held(file.fileno())


def test_without_locks_no_region_is_made_and_the_sentence_names_the_volume(
    own: Callable[[RegionRequest], OwnedRegion],
    directory: RegionDirectory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without(monkeypatch, fcntl.F_OFD_SETLK, errno.EINVAL)
    sentence = f"cannot be made: {os.strerror(errno.EINVAL)}; check the volume at KVCELLAR_DIR"
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        own(SMALL)
    assert directory.names() == []

"""Making, reserving, settling and ending regions, on a real tmpfs and with real processes."""

import errno
import os
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, HugePages, RegionState
from kvcellar.errors import (
    ConfigurationError,
    DoesNotFit,
    KVCellarError,
    MetadataDamaged,
    RegionHeld,
    RegionMismatch,
)
from kvcellar.region import file, frame, locks, syscalls
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import HUGE_PAGE_BYTES
from kvcellar.region.index_file import index_bound_bytes
from kvcellar.region.mapping import Mapping
from kvcellar.region.memory import Limit, read_limits
from kvcellar.region.names import data_name, index_name, meta_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import survey
from kvcellar.region.syscalls import MADV_COLLAPSE, MADV_POPULATE_READ, madvise
from tests.integration.conftest import Fork, MakeVolume
from tests.support.volumes import used_bytes

pytestmark = pytest.mark.integration

MIB = 2**20
ID = EngineId("engine")
SMALL = RegionRequest(ID, 8 * MIB, huge_pages=HugePages.NEVER)


def never() -> bool:
    return False


def own(directory: RegionDirectory, request: RegionRequest = SMALL) -> OwnedRegion:
    return OwnedRegion.acquire(directory, request, lambda: read_limits(directory.fd))


def make(directory: RegionDirectory, request: RegionRequest = SMALL) -> OwnedRegion:
    region = own(directory, request)
    region.reserve(never)
    region.settle(never)
    assert state_of(region) == "Ready"
    return region


def state_of(region: OwnedRegion) -> str:
    return region.owner.state


def data_fd(directory: RegionDirectory, region: OwnedRegion) -> int:
    return directory.open_file(data_name(region.engine_id, region.owner.nonce))


def _resident_bytes(fd: int) -> int:
    """Bytes that are zeroed or written: a page that is only reserved counts as a hole."""
    size, position, total = os.fstat(fd).st_size, 0, 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            raise
        position = os.lseek(fd, start, os.SEEK_HOLE)
        total += position - start
    return total


def punch(fd: int, offset: int, length: int) -> None:
    """Take pages out of the file and keep its size, as fallocate(1) does."""
    subprocess.run(
        ["fallocate", "--punch-hole", "-o", str(offset), "-l", str(length), f"/dev/fd/{fd}"],
        pass_fds=(fd,),
        check=True,
    )


def can_collapse(volume: Path) -> bool:
    """Whether the kernel makes huge pages on this tmpfs at all."""
    fd = os.open(volume, os.O_RDWR | os.O_TMPFILE)
    os.ftruncate(fd, HUGE_PAGE_BYTES)
    os.posix_fallocate(fd, 0, 4096)
    mapping = Mapping.map_range(fd, 0, HUGE_PAGE_BYTES)
    try:
        madvise(mapping.address, HUGE_PAGE_BYTES, MADV_COLLAPSE)
    except OSError:
        return False
    finally:
        mapping.close()
        os.close(fd)
    return True


def pmd_mapped_bytes(address: int) -> int:
    """ShmemPmdMapped of the mapping at `address`, from smaps."""
    wanted = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            wanted = int(first.split("-")[0], 16) == address
        elif wanted and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0


# --- reserve and settle


@pytest.mark.parametrize("huge_pages", list(HugePages))
@pytest.mark.parametrize("threads", [1, 4])
def test_a_made_region_has_every_page_and_not_one_more(
    directory: RegionDirectory, volume: Path, huge_pages: HugePages, threads: int
) -> None:
    before = used_bytes(volume)
    request = RegionRequest(ID, 70 * MIB + 12345, huge_pages=huge_pages, settle_threads=threads)
    region = make(directory, request)
    assert region.capacity_bytes == 70 * MIB
    fd = data_fd(directory, region)
    status = os.fstat(fd)
    assert status.st_size == status.st_blocks * 512 == 70 * MIB == region.reserved_bytes()
    assert region.owner.settled_bytes == _resident_bytes(fd) == 70 * MIB
    assert os.pread(fd, 70 * MIB, 0) == bytes(70 * MIB)
    assert used_bytes(volume) - before == 70 * MIB + frame.META_BYTES
    os.close(fd)


def test_huge_pages_are_made_on_a_stock_tmpfs_and_mapped_as_such(
    directory: RegionDirectory, volume: Path
) -> None:
    if not can_collapse(volume):
        pytest.skip("no free huge pages on this machine")
    region = make(directory, replace(SMALL, capacity_bytes=16 * MIB, huge_pages=HugePages.AUTO))
    huge = region.owner.huge_page_bytes
    assert huge > 0
    fd = data_fd(directory, region)
    mapping = Mapping.map_range(fd, 0, 16 * MIB)
    madvise(mapping.address, 16 * MIB, MADV_POPULATE_READ)
    assert pmd_mapped_bytes(mapping.address) == huge
    mapping.close()
    os.close(fd)


def test_without_huge_pages_none_are_made(directory: RegionDirectory) -> None:
    region = make(directory)
    assert region.owner.huge_page_bytes == 0
    fd = data_fd(directory, region)
    mapping = Mapping.map_range(fd, 0, 8 * MIB)
    madvise(mapping.address, 8 * MIB, MADV_POPULATE_READ)
    assert pmd_mapped_bytes(mapping.address) == 0
    mapping.close()
    os.close(fd)


@pytest.mark.parametrize("offset", [0, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 8192])
def test_a_mapping_lies_congruent_to_its_offset_and_shows_the_file(
    directory: RegionDirectory, offset: int
) -> None:
    region = make(directory)
    fd = data_fd(directory, region)
    os.pwrite(fd, b"kv", offset)
    mapping = Mapping.map_range(fd, offset, 3 * MIB)
    assert mapping.address % HUGE_PAGE_BYTES == offset % HUGE_PAGE_BYTES
    memory = (__import__("ctypes").c_char * 2).from_address(mapping.address)
    assert bytes(memory) == b"kv"
    memory[0] = b"K"
    assert os.pread(fd, 2, offset) == b"Kv"
    mapping.close()
    mapping.close()
    os.close(fd)


@pytest.mark.parametrize("threads", [1, 3])
def test_settling_never_touches_data(directory: RegionDirectory, threads: int) -> None:
    region = own(directory, replace(SMALL, capacity_bytes=20 * MIB, settle_threads=threads))
    region.reserve(never)
    fd = data_fd(directory, region)
    offsets = [0, 4095, 5 * MIB + 1, 20 * MIB - 5]
    for offset in offsets:
        os.pwrite(fd, b"data!", offset)
    region.settle(never)
    content = os.pread(fd, 20 * MIB, 0)
    for offset in offsets:
        assert content[offset : offset + 5] == b"data!"
    assert content.count(0) == 20 * MIB - 5 * len(offsets)
    os.close(fd)


def test_a_stopped_pass_leaves_its_state_and_the_next_owner_goes_on(
    directory: RegionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "STEP_BYTES", 2 * MIB)
    stops = iter([False, False, True])
    region = own(directory)
    region.reserve(lambda: next(stops))
    assert state_of(region) == "Reserving"
    assert region.reserved_bytes() == 4 * MIB
    region.settle(never)
    assert state_of(region) == "Reserving"
    region.close()
    again = own(directory)
    assert again.is_adopted
    assert again.reserved_bytes() == 4 * MIB
    again.reserve(never)
    assert state_of(again) == "Reserved"
    stops = iter([False, True])
    again.settle(lambda: next(stops))
    assert state_of(again) == "Reserved"
    again.settle(never)
    assert state_of(again) == "Ready"


def _resume_after_kills(volume: Path, fork: Fork, kills: int) -> None:
    dice = random.Random(7)
    path = volume / "kvcellar"
    request = replace(SMALL, capacity_bytes=48 * MIB, huge_pages=HugePages.AUTO)

    def sidecar(connection: Connection) -> None:
        file.STEP_BYTES = 2 * MIB
        make(RegionDirectory.create(path), request)
        connection.send("ready")
        connection.recv()

    for _ in range(kills):
        if path.exists() and dice.random() < 0.3:
            for name in path.iterdir():
                name.unlink()
        child = fork(sidecar)
        time.sleep(dice.random() * 0.06)
        child.kill()
    child = fork(sidecar)
    assert child.hear() == "ready"
    directory = RegionDirectory.open(path)
    found = survey(directory)
    assert [f.reserved_bytes for f in found.regions] == [48 * MIB]
    region = found.regions[0]
    assert region.is_owned
    assert region.contents is not None
    assert region.contents.owner.state is RegionState.READY
    child.kill()
    region_again = own(directory, request)
    assert region_again.is_adopted
    assert region_again.release()
    for loose in survey(directory).loose:
        (path / loose.name).unlink()


def test_an_owner_killed_at_any_moment_is_resumed(volume: Path, fork: Fork) -> None:
    _resume_after_kills(volume, fork, 10)


@pytest.mark.soak
def test_an_owner_killed_200_times_is_resumed(volume: Path, fork: Fork) -> None:
    _resume_after_kills(volume, fork, 200)


# --- what does not fit


def test_more_than_the_tmpfs_is_refused_before_a_page_is_touched(
    directory: RegionDirectory, volume: Path
) -> None:
    before = used_bytes(volume)
    with pytest.raises(DoesNotFit) as refusal:
        own(directory, replace(SMALL, capacity_bytes=257 * MIB))
    error = refusal.value
    assert error.binding_limit == "tmpfs"
    assert error.free_bytes == 256 * MIB - before
    assert error.asked_bytes > 257 * MIB - HUGE_PAGE_BYTES
    assert "KVCELLAR_CAPACITY" in str(error)
    assert directory.names() == []
    assert used_bytes(volume) == before


def test_what_fits_to_the_page_is_made_and_one_page_more_is_not(
    make_volume: MakeVolume,
) -> None:
    need = 32 * MIB + frame.META_BYTES + index_bound_bytes(32 * MIB)
    for missing in (4096, 0):
        volume = make_volume(need - missing)
        directory = RegionDirectory.create(volume / "kvcellar")
        request = replace(SMALL, capacity_bytes=32 * MIB)
        if missing:
            with pytest.raises(DoesNotFit):
                own(directory, request)
            assert used_bytes(volume) == 0
        else:
            make(directory, request)


@pytest.mark.parametrize("huge_pages", list(HugePages))
def test_memory_that_vanishes_while_reserving_is_given_back(
    directory: RegionDirectory,
    volume: Path,
    huge_pages: HugePages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A neighbour takes it between a look at the limits and the call that fails."""
    monkeypatch.setattr(file, "STEP_BYTES", 8 * MIB)
    looks = [0]

    def limits() -> list[Limit]:
        looks[0] += 1
        if looks[0] == 4:
            fd = os.open(volume / "neighbour", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(fd, 0, 230 * MIB)
            os.close(fd)
        return []

    request = replace(SMALL, capacity_bytes=64 * MIB, huge_pages=huge_pages)
    region = OwnedRegion.acquire(directory, request, limits)
    with pytest.raises(DoesNotFit, match="tmpfs limit was reached when it had") as refusal:
        region.reserve(never)
    assert refusal.value.binding_limit == "tmpfs"
    assert 16 * MIB <= refusal.value.free_bytes < 64 * MIB
    assert region.reserved_bytes() == 0
    assert used_bytes(volume) == 230 * MIB + frame.META_BYTES
    assert state_of(region) == "Reserving"
    region.fail(str(refusal.value))
    (volume / "neighbour").unlink()
    with directory.lock():
        region.retry()
    region.reserve(never)
    assert state_of(region) == "Reserved"
    assert region.owner.reason == ""


def test_a_limit_that_shrinks_while_reserving_stops_it_with_the_numbers(
    directory: RegionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "STEP_BYTES", 8 * MIB)
    free = iter([500, 500, 500, 4])
    region = OwnedRegion.acquire(
        directory,
        replace(SMALL, capacity_bytes=64 * MIB),
        lambda: [Limit("pod", 1000 * MIB, (1000 - next(free)) * MIB)],
    )
    with pytest.raises(DoesNotFit) as refusal:
        region.reserve(never)
    assert refusal.value.binding_limit == "pod"
    assert refusal.value.asked_bytes == 64 * MIB
    assert 16 * MIB < refusal.value.free_bytes < 21 * MIB
    assert region.reserved_bytes() == 0


def test_what_is_held_is_not_given_back_when_a_resumed_reserve_fails(
    directory: RegionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "STEP_BYTES", 2 * MIB)
    stops = iter([False, False, True])
    region = own(directory)
    region.reserve(lambda: next(stops))
    holder = data_fd(directory, region)
    assert locks.try_lock(holder, locks.SLOT_BASE + 9)
    os.pwrite(holder, b"kv", 3 * MIB)
    region.close()
    again = OwnedRegion.acquire(directory, SMALL, lambda: [Limit("pod", 10 * MIB, 9 * MIB)])
    for _ in range(2):
        with pytest.raises(DoesNotFit):
            again.reserve(never)
        assert again.reserved_bytes() == 4 * MIB
        assert os.pread(holder, 2, 3 * MIB) == b"kv"
    os.close(holder)
    with pytest.raises(DoesNotFit):
        again.reserve(never)
    assert again.reserved_bytes() == 0


def _start_together(fork: Fork, programs: list[Callable[[Connection], None]]) -> list[object]:
    """Run programs at the same moment; each one's first answer, or its exception."""

    def wait_and_run(program: Callable[[Connection], None]) -> Callable[[Connection], None]:
        def run(connection: Connection) -> None:
            connection.send("here")
            connection.recv()
            program(connection)

        return run

    children = [fork(wait_and_run(program)) for program in programs]
    for child in children:
        assert child.hear() == "here"
    for child in children:
        child.tell("go")
    answers: list[object] = []
    for child in children:
        try:
            answers.append(child.hear())
        except (DoesNotFit, RegionHeld) as error:
            answers.append(error)
    return answers


def test_of_two_owners_at_once_exactly_one_wins(volume: Path, fork: Fork) -> None:
    def owner(connection: Connection) -> None:
        region = make(RegionDirectory.create(path))
        connection.send("owns")
        connection.recv()
        region.close()

    for number in range(3):
        path = volume / f"kvcellar-{number}"
        answers = _start_together(fork, [owner] * 3)
        assert answers.count("owns") == 1
        held = [answer for answer in answers if isinstance(answer, RegionHeld)]
        assert len(held) == 2
        assert "another living process" in str(held[0])


def test_the_second_owner_takes_over_when_the_first_is_killed(
    directory: RegionDirectory, volume: Path, fork: Fork
) -> None:
    def owner(connection: Connection) -> None:
        region = make(RegionDirectory.create(volume / "kvcellar"))
        connection.send(region.owner.data_inode)
        connection.recv()

    first = fork(owner)
    inode = first.hear()
    with pytest.raises(RegionHeld):
        own(directory)
    first.kill()
    region = own(directory)
    assert region.is_adopted
    assert region.owner.data_inode == inode


def test_of_regions_whose_sum_does_not_fit_exactly_one_is_made(
    make_volume: MakeVolume, fork: Fork
) -> None:
    volume = make_volume(100 * MIB)
    path = volume / "kvcellar"

    def sidecar(number: int) -> Callable[[Connection], None]:
        def run(connection: Connection) -> None:
            directory = RegionDirectory.create(path)
            request = replace(SMALL, engine_id=EngineId(f"e{number}"), capacity_bytes=60 * MIB)
            region = own(directory, request)
            connection.send("planned")
            region.reserve(never)
            connection.send(region.owner.state)

        return run

    for number in range(4):
        answers = _start_together(fork, [sidecar(2 * number), sidecar(2 * number + 1)])
        assert answers.count("planned") == 1
        refusals = [answer for answer in answers if isinstance(answer, DoesNotFit)]
        assert len(refusals) == 1
        assert refusals[0].binding_limit == "tmpfs"
        volume = make_volume(100 * MIB)
        path = volume / "kvcellar"


def test_the_index_of_a_reserved_region_is_promised_too(make_volume: MakeVolume) -> None:
    """The engine makes it after the plan of the next region, and must not find it taken."""
    one = 32 * MIB + frame.META_BYTES + index_bound_bytes(32 * MIB)
    volume = make_volume(2 * one - 4096)
    directory = RegionDirectory.create(volume / "kvcellar")
    make(directory, replace(SMALL, capacity_bytes=32 * MIB))
    with pytest.raises(DoesNotFit):
        own(directory, replace(SMALL, engine_id=EngineId("next"), capacity_bytes=32 * MIB))


@pytest.mark.parametrize("capacity", [0, 1, HUGE_PAGE_BYTES - 1])
def test_less_than_a_huge_page_is_no_region(directory: RegionDirectory, capacity: int) -> None:
    with pytest.raises(ConfigurationError, match="raise KVCELLAR_CAPACITY"):
        own(directory, replace(SMALL, capacity_bytes=capacity))
    assert directory.names() == []


@pytest.mark.parametrize("capacity", [MIB, 257 * MIB])
def test_a_refusal_names_the_setting_that_the_capacity_came_from(
    directory: RegionDirectory, capacity: int
) -> None:
    request = replace(SMALL, capacity_bytes=capacity, capacity_setting="cpu_bytes_to_use")
    with pytest.raises(KVCellarError, match=r"(raise|lower) cpu_bytes_to_use") as refusal:
        own(directory, request)
    assert "KVCELLAR" not in str(refusal.value)


# --- adopting


def test_an_unheld_region_of_another_capacity_is_made_anew(
    directory: RegionDirectory, volume: Path
) -> None:
    make(directory).close()
    region = make(directory, replace(SMALL, capacity_bytes=12 * MIB))
    assert not region.is_adopted
    assert region.capacity_bytes == 12 * MIB
    assert len(directory.names()) == 3
    assert used_bytes(volume) == 12 * MIB + frame.META_BYTES


def test_a_held_region_of_another_capacity_is_adopted_as_it_is(directory: RegionDirectory) -> None:
    region = make(directory)
    holder = data_fd(directory, region)
    assert locks.try_lock(holder, locks.SLOT_BASE + 9)
    region.close()
    again = own(directory, replace(SMALL, capacity_bytes=12 * MIB))
    assert again.is_adopted
    assert (again.capacity_bytes, again.asked_bytes) == (8 * MIB, 12 * MIB)
    assert again.held()
    assert not again.release()
    os.close(holder)
    assert again.release()
    assert directory.names() == []


def _cut(fd: int) -> None:
    os.ftruncate(fd, 4 * MIB)


def _cut_and_grow(fd: int) -> None:
    os.ftruncate(fd, 4 * MIB)
    os.ftruncate(fd, 8 * MIB)


def _punch(fd: int) -> None:
    punch(fd, 2 * MIB, 4096)


@pytest.mark.parametrize("damage", [_cut, _cut_and_grow, _punch])
def test_an_unheld_region_whose_data_lacks_pages_is_made_anew(
    directory: RegionDirectory, damage: Callable[[int], None]
) -> None:
    region = make(directory)
    inode = region.owner.data_inode
    fd = data_fd(directory, region)
    region.close()
    damage(fd)
    os.close(fd)
    again = make(directory)
    assert not again.is_adopted
    assert again.owner.data_inode != inode
    assert len(directory.names()) == 3


@pytest.mark.parametrize("state", ["Reserved", "Ready"])
@pytest.mark.parametrize("damage", [_cut, _cut_and_grow, _punch])
def test_a_held_region_whose_data_lacks_pages_is_adopted_as_failed_and_not_filled(
    directory: RegionDirectory, damage: Callable[[int], None], state: str
) -> None:
    region = own(directory)
    region.reserve(never)
    if state == "Ready":
        region.settle(never)
    holder = data_fd(directory, region)
    assert locks.try_lock(holder, locks.SLOT_BASE)
    region.close()
    damage(holder)
    had = os.fstat(holder).st_blocks
    again = own(directory)
    assert again.is_adopted
    assert (state_of(again), again.owner.data_inode) == ("Failed", region.owner.data_inode)
    assert "another process of this pod" in again.owner.reason
    assert again.owner.settled_bytes <= had * 512
    again.reserve(never)
    again.settle(never)
    with directory.lock():
        again.retry()
    assert (state_of(again), os.fstat(holder).st_blocks) == ("Failed", had)
    os.close(holder)
    with directory.lock():
        again.retry()
    assert state_of(again) == "Reserving"


def test_a_failed_region_that_lost_pages_is_filled_by_the_next_owner_once_it_is_unheld(
    directory: RegionDirectory,
) -> None:
    region = make(directory)
    fd = data_fd(directory, region)
    _punch(fd)
    region.fail(region.snapshot().damage)
    region.close()
    again = make(directory)
    assert again.is_adopted
    assert again.snapshot().damage == ""
    assert again.owner.settled_bytes == _resident_bytes(fd) == 8 * MIB
    os.close(fd)


def test_a_region_whose_data_file_is_gone_or_replaced_is_made_anew(
    directory: RegionDirectory,
) -> None:
    region = make(directory)
    name = data_name(ID, region.owner.nonce)
    region.close()
    (directory.path / name).unlink()
    region = make(directory)
    assert not region.is_adopted
    name = data_name(ID, region.owner.nonce)
    region.close()
    os.rename(directory.path / name, directory.path / "kept-by-somebody")
    (directory.path / name).write_bytes(b"a file of somebody else")
    again = make(directory)
    assert not again.is_adopted
    assert (directory.path / name).read_bytes() == b"a file of somebody else"


def test_an_unheld_region_without_its_index_is_made_anew(directory: RegionDirectory) -> None:
    region = make(directory)
    name = index_name(ID, region.owner.nonce)
    region.close()
    (directory.path / name).unlink()
    assert not make(directory).is_adopted


def test_a_damaged_owner_section_is_never_touched(directory: RegionDirectory) -> None:
    region = make(directory)
    region.close()
    fd = directory.open_file(meta_name(ID))
    for which in (0, 1):
        os.pwrite(fd, b"\xff" * 64, frame.OWNER_AT.copy_offset(which))
    os.close(fd)
    names = directory.names()
    with pytest.raises(MetadataDamaged):
        own(directory)
    assert directory.names() == names
    found = survey(directory)
    assert "owner section" in found.regions[0].error
    assert found.loose == ()


def test_an_unheld_region_with_a_damaged_session_is_made_anew(directory: RegionDirectory) -> None:
    region = make(directory)
    region.close()
    fd = directory.open_file(meta_name(ID))
    os.pwrite(fd, b"\xff" * 64, frame.SESSION_AT.offset)
    os.close(fd)
    assert not make(directory).is_adopted


def test_a_cut_page_is_damage_with_a_sentence(directory: RegionDirectory) -> None:
    make(directory).close()
    os.truncate(directory.path / meta_name(ID), 100)
    with pytest.raises(MetadataDamaged, match="cut: it has 100 bytes"):
        own(directory)


# --- watching and repairing


def test_damage_to_one_copy_is_seen_and_repaired(directory: RegionDirectory) -> None:
    region = make(directory)
    assert region.snapshot().damage == ""
    fd = directory.open_file(meta_name(ID))
    for at in (0, frame.OWNER_AT.offset, *map(frame.OWNER_AT.copy_offset, (0, 1))):
        (byte,) = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte ^ 0xEE]), at)
        assert region.snapshot().damage != ""
        region.repair()
        assert region.snapshot().damage == ""
    os.ftruncate(fd, 0)
    assert "cut" in region.snapshot().damage
    region.repair()
    assert region.snapshot().damage == ""
    os.close(fd)


def test_a_long_reason_is_no_damage(directory: RegionDirectory) -> None:
    region = make(directory)
    region.fail("because " + "é" * 500)
    assert region.snapshot().damage == ""
    region.close()
    assert own(directory).owner.state is RegionState.RESERVING


def test_a_file_cut_or_removed_under_a_living_owner_is_damage(directory: RegionDirectory) -> None:
    region = make(directory)
    fd = data_fd(directory, region)
    os.ftruncate(fd, 4096)
    assert "has 4096 bytes" in region.snapshot().damage
    os.ftruncate(fd, 8 * MIB)
    os.close(fd)
    (directory.path / data_name(ID, region.owner.nonce)).unlink()
    assert "data file" in region.snapshot().damage
    (directory.path / meta_name(ID)).unlink()
    assert "metadata page" in region.snapshot().damage


@pytest.mark.parametrize("state", ["Reserved", "Ready"])
def test_a_file_that_was_punched_under_a_living_owner_is_damage(
    directory: RegionDirectory, state: str
) -> None:
    region = own(directory)
    region.reserve(never)
    if state == "Ready":
        region.settle(never)
    assert region.snapshot().damage == ""
    fd = data_fd(directory, region)
    punch(fd, 4 * MIB, 8192)
    assert f"({8 * MIB - 8192} of them reserved)" in region.snapshot().damage
    assert "punched" in region.snapshot().damage
    os.close(fd)


def test_pages_that_were_punched_are_not_filled_by_settling(directory: RegionDirectory) -> None:
    region = own(directory)
    region.reserve(never)
    fd = data_fd(directory, region)
    punch(fd, 4 * MIB, 4096)
    with pytest.raises(RegionMismatch, match="punched"):
        region.settle(never)
    assert (state_of(region), region.reserved_bytes()) == ("Reserved", 8 * MIB - 4096)
    os.close(fd)


def test_a_data_file_cut_while_it_is_reserved_is_not_called_reserved(
    directory: RegionDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "STEP_BYTES", 2 * MIB)
    region = own(directory)
    fd = data_fd(directory, region)
    steps = [0]

    def cut_once() -> bool:
        steps[0] += 1
        if steps[0] == 3:
            os.ftruncate(fd, 0)
        return False

    with pytest.raises(RegionMismatch, match="cut"):
        region.reserve(cut_once)
    assert state_of(region) == "Reserving"
    os.close(fd)


@pytest.mark.parametrize("replace_by", [Path.mkdir, Path.touch])
def test_what_takes_the_names_of_a_region_that_is_being_made_stays_and_costs_no_descriptor(
    directory: RegionDirectory,
    monkeypatch: pytest.MonkeyPatch,
    replace_by: Callable[[Path], None],
) -> None:
    rename = syscalls.rename_no_replace

    def come_before(dir_fd: int, old: str, new: str) -> None:
        for name in directory.names():
            (directory.path / name).unlink()
            replace_by(directory.path / name)
        (directory.path / new).mkdir()
        rename(dir_fd, old, new)

    monkeypatch.setattr(syscalls, "rename_no_replace", come_before)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigurationError, match=f"region {ID} of 8388608 bytes cannot be made"):
        own(directory)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(directory.names()) == 4


# --- ending


def test_a_late_release_leaves_the_region_of_a_later_generation(
    directory: RegionDirectory, volume: Path
) -> None:
    old = make(directory)
    (directory.path / meta_name(ID)).unlink()  # somebody removed it by hand
    second = RegionDirectory.open(volume / "kvcellar")
    new = make(second)
    names = {meta_name(ID), data_name(ID, new.owner.nonce), index_name(ID, new.owner.nonce)}
    assert old.release()
    assert names <= set(directory.names())
    assert new.snapshot().damage == ""
    assert not new.is_adopted


def test_a_release_frees_all_memory(directory: RegionDirectory, volume: Path) -> None:
    region = make(directory)
    assert region.release()
    assert directory.names() == []
    assert used_bytes(volume) == 0


@pytest.mark.parametrize("taken_by", [Path.touch, Path.mkdir, lambda path: path.symlink_to("it")])
def test_a_release_frees_all_memory_although_the_name_of_its_page_is_taken(
    directory: RegionDirectory, volume: Path, taken_by: Callable[[Path], object]
) -> None:
    region = make(directory)
    page = directory.path / meta_name(ID)
    page.unlink()
    taken_by(page)

    assert region.release()

    assert directory.names() == [page.name]
    assert used_bytes(volume) == 0


def keep_by_a_rename(path: Path) -> None:
    path.rename(path.with_name("mine"))


def keep_by_a_second_name(path: Path) -> None:
    os.link(path, path.with_name("mine"))


@pytest.mark.parametrize("keep", [keep_by_a_rename, keep_by_a_second_name])
def test_a_release_frees_the_pages_of_a_file_that_another_process_keeps_by_a_name(
    directory: RegionDirectory, volume: Path, keep: Callable[[Path], None]
) -> None:
    region = make(directory)
    keep(directory.path / data_name(ID, region.owner.nonce))
    assert region.release()
    assert directory.names() == ["mine"]
    assert used_bytes(volume) == 0


def test_a_release_frees_the_pages_of_a_file_that_another_process_has_open(
    directory: RegionDirectory, volume: Path
) -> None:
    region = make(directory)
    fd = data_fd(directory, region)
    assert region.release()
    assert (directory.names(), used_bytes(volume)) == ([], 0)
    os.close(fd)


def test_an_owner_that_forked_for_something_else_can_be_followed_by_the_next(
    directory: RegionDirectory, volume: Path, fork: Fork
) -> None:
    def owner(connection: Connection) -> None:
        region = make(RegionDirectory.open(volume / "kvcellar"))
        ready, said = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(said, b"!")  # what is done after a fork is done
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
        connection.send((child, region.owner.state))
        connection.recv()

    first = fork(owner)
    said = first.hear()
    assert isinstance(said, tuple)
    first.kill()
    try:
        assert own(directory).is_adopted
    finally:
        os.kill(said[0], 9)

"""Attaching with real processes: sessions, slots, kills and children that linger."""

import errno
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, HugePages, Owner, Role
from kvcellar.errors import (
    ConfigurationError,
    DoesNotFit,
    NoFreeSlot,
    NotReady,
    RanksDisagree,
    RankTaken,
    RegionHeld,
    RegionMismatch,
)
from kvcellar.region import locks
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.frame import META_BYTES
from kvcellar.region.geometry import HUGE_PAGE_BYTES, Geometry, Layout
from kvcellar.region.joining import JoinRequest
from kvcellar.region.mapping import Mapping
from kvcellar.region.names import data_name, index_name, meta_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.participants import join_scheduler, join_session, open_session
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import survey
from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from tests.support.children import Child
from tests.support.ranks import CHUNK_BYTES, Look, Ranks
from tests.support.volumes import used_bytes

pytestmark = pytest.mark.integration

MIB = 2**20
ID = EngineId("engine")
CAPACITY = 21 * MIB
Starts = Callable[..., Ranks]


@pytest.fixture
def region(volume: Path) -> Iterator[OwnedRegion]:
    """A region of 20 MiB, Ready, owned by this process as a sidecar owns it."""
    directory = RegionDirectory.create(volume / "kvcellar")
    request = RegionRequest(ID, CAPACITY, huge_pages=HugePages.NEVER)
    owned = OwnedRegion.acquire(directory, request, list)
    owned.reserve(lambda: False)
    owned.settle(lambda: False)
    yield owned
    owned.close()


@pytest.fixture
def starts(volume: Path) -> Iterator[Starts]:
    """Starts engines; every process of theirs is killed after the test."""
    made: list[Ranks] = []

    def start(world_size: int = 2, **options: object) -> Ranks:
        made.append(Ranks.start(volume / "kvcellar", world_size, **options))  # type: ignore[arg-type]  # mixed options
        return made[-1]

    yield start
    for ranks in made:
        ranks.kill()


@contextmanager
def ended(child: Child) -> Iterator[Child]:
    try:
        yield child
    finally:
        child.kill()


@contextmanager
def killed(pid: object) -> Iterator[None]:
    assert isinstance(pid, int)
    assert pid > 0
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def look(child: Child) -> Look:
    seen = child.ask("look")
    assert isinstance(seen, Look)
    return seen


def wait_until(is_done: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.01)


# --- two ranks and a scheduler


def test_two_ranks_map_their_own_range_of_one_file(region: OwnedRegion, starts: Starts) -> None:
    ranks = starts().attached()
    seen = [look(child) for child in ranks.rank]
    expected = Geometry.compute(CAPACITY, CHUNK_BYTES, 2, Layout.SHARDED)
    assert expected.rank_bytes == 10 * MIB
    for rank, what in enumerate(seen):
        assert what.identity == (region.owner.data_device, region.owner.data_inode)
        assert what.mapped_bytes == [10 * MIB]
        assert what.offsets == [rank * 10 * MIB]
        assert what.is_aligned
        assert what.num_chunks == expected.num_chunks
    with ended(ranks.scheduler()) as scheduler:
        assert scheduler.hear() == expected.num_chunks
        held = [(row.role, row.rank) for _, row, is_held in region.snapshot().rows if is_held]
        assert sorted(held) == [(Role.SCHEDULER, 0), (Role.WORKER, 0), (Role.WORKER, 1)]


def test_replicated_ranks_map_the_whole(region: OwnedRegion, starts: Starts) -> None:
    ranks = starts(layout=Layout.REPLICATED).attached()
    for child in ranks.rank:
        seen = look(child)
        assert (seen.mapped_bytes, seen.offsets) == ([20 * MIB], [0])


def test_what_ranks_write_lies_where_the_geometry_says(
    region: OwnedRegion, volume: Path, starts: Starts
) -> None:
    ranks = starts().attached()
    geometry = Geometry.compute(CAPACITY, CHUNK_BYTES, 2, Layout.SHARDED)
    for rank, child in enumerate(ranks.rank):
        for chunk in (0, geometry.num_chunks - 1):
            child.ask(("fill", chunk, b"%d-%d." % (rank, chunk)))
    data = (volume / "kvcellar" / data_name(ID, region.owner.nonce)).read_bytes()
    for rank in (0, 1):
        for chunk in (0, geometry.num_chunks - 1):
            at = geometry.chunk_offset_bytes(rank, chunk)
            pattern = b"%d-%d." % (rank, chunk)
            assert data[at : at + CHUNK_BYTES] == (pattern * CHUNK_BYTES)[:CHUNK_BYTES]


def test_an_80_mib_request_uses_80_mib_to_the_page(volume: Path, starts: Starts) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    owned = OwnedRegion.acquire(directory, RegionRequest(ID, 80 * MIB), list)
    owned.reserve(lambda: False)
    owned.settle(lambda: False)
    ranks = starts(world_size=2).attached()
    geometry = Geometry.compute(80 * MIB, CHUNK_BYTES, 2, Layout.SHARDED)
    assert geometry.rank_bytes == 40 * MIB
    for chunk in range(geometry.num_chunks):
        for child in ranks.rank:
            child.ask(("fill", chunk, b"x"))
    index = 8192 + 2 * geometry.num_chunks
    pages = -(-index // 4096) * 4096
    assert used_bytes(volume) == 80 * MIB + META_BYTES + pages
    assert owned.reserved_bytes() == 80 * MIB


def test_zero_chunks_attach_and_map_nothing(region: OwnedRegion, starts: Starts) -> None:
    ranks = starts(chunk_bytes=lambda rank: 11 * MIB).attached()
    for child in ranks.rank:
        seen = look(child)
        assert (seen.num_chunks, seen.mapped_bytes) == (0, [])
    with ended(ranks.scheduler()) as scheduler:
        assert scheduler.hear() == 0


def test_a_failed_store_of_any_rank_reaches_the_scheduler(
    region: OwnedRegion, starts: Starts
) -> None:
    ranks = starts().attached()
    with ended(ranks.scheduler()) as scheduler:
        scheduler.hear()
        ranks.rank[1].ask(("mark", 3))
        ranks.rank[0].ask(("mark", 5))
        assert scheduler.ask([1, 2, 3]) == {3}
        assert scheduler.ask([3, 4, 5, 6]) == {5}


def test_each_start_has_a_new_generation(region: OwnedRegion, starts: Starts) -> None:
    for expected in (1, 2, 3):
        ranks = starts().attached()
        assert {look(child).generation for child in ranks.rank} == {expected}
        ranks.kill()
    session = region.snapshot().session
    assert session is not None
    assert session.engine_starts == 3


# --- leaving, dying and lingering


def test_the_slots_of_a_closed_start_are_free(region: OwnedRegion, starts: Starts) -> None:
    ranks = starts().attached()
    assert region.held()
    for child in ranks.rank:
        assert child.ask("close") == "closed"
        assert child.ask("look")  # it lives on
    assert not region.held()


def test_a_killed_ranks_slot_is_free_at_once(region: OwnedRegion, starts: Starts) -> None:
    ranks = starts().attached()
    assert len(region.snapshot().held) == 2
    ranks.rank[1].kill()
    assert len(region.snapshot().held) == 1
    ranks.rank[0].kill()
    assert not region.held()


@pytest.mark.parametrize("how", ["fork", "subprocess"])
def test_a_child_that_python_forks_does_not_hold_the_slot(
    region: OwnedRegion, starts: Starts, how: str
) -> None:
    ranks = starts(world_size=1).attached()
    with killed(ranks.rank[0].ask(how)):
        assert region.held()
        ranks.kill()
        # The child may be younger than its parent's answer: its hook has yet to run then.
        wait_until(lambda: not region.held())


def test_a_child_that_c_code_forks_holds_the_slot_until_it_ends(
    region: OwnedRegion, starts: Starts
) -> None:
    ranks = starts(world_size=1).attached()
    with killed(ranks.rank[0].ask("fork in C")):
        ranks.kill()
        assert region.held()
        assert not region.release()
    wait_until(lambda: not region.held())


def test_a_forked_child_that_closes_the_region_frees_nothing(
    region: OwnedRegion, volume: Path
) -> None:
    attached = attach(ID, CHUNK_BYTES, options=AttachOptions(directory=volume / "kvcellar"))
    child = os.fork()
    if child == 0:
        attached.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert region.held()
    attached.mark_failed_store(0)
    attached.close()
    assert not region.held()
    attached.mark_failed_store(0)  # late, and without effect


def test_the_next_start_waits_for_lingering_ranks_and_then_goes_on(
    region: OwnedRegion, starts: Starts
) -> None:
    old = starts().attached()
    old.rank[0].kill()
    new = starts(timeout_s=20.0)
    with pytest.raises(TimeoutError):
        new.rank[0].hear(0.3)
    old.rank[1].kill()
    new.attached()
    assert look(new.rank[0]).generation == 2


def test_the_deadline_names_who_is_still_there(region: OwnedRegion, starts: Starts) -> None:
    old = starts().attached()
    outcomes = starts(timeout_s=0.3).outcomes()
    assert isinstance(outcomes[0], RegionHeld)
    assert re.search("worker 0 since .*, worker 1 since", str(outcomes[0]))
    assert isinstance(outcomes[1], NotReady)
    assert "rank 0 could not attach: region engine is still held" in str(outcomes[1])
    assert [look(child).generation for child in old.rank] == [1, 1]


def test_a_rank_killed_while_all_attach_detaches_the_others(
    region: OwnedRegion, starts: Starts
) -> None:
    ranks = starts(chunk_bytes=lambda rank: CHUNK_BYTES)
    ranks.rank[1].kill()
    outcome = ranks.outcomes()[0]
    if outcome != "attached":  # else it was killed a moment too late
        assert isinstance(outcome, (EOFError, OSError))
    ranks.rank[0].kill()
    assert not region.held()
    starts().attached()


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_the_next_start_works(
    region: OwnedRegion, volume: Path, starts: Starts, seed: int
) -> None:
    dice = random.Random(seed)
    ranks = starts()
    time.sleep(dice.random() * 0.03)
    for child in dice.sample(ranks.rank, 2):
        child.kill()
        time.sleep(dice.random() * 0.005)
    new = starts().attached()
    with ended(new.scheduler()) as scheduler:
        assert scheduler.hear() == look(new.rank[0]).num_chunks
    assert len(os.listdir(volume / "kvcellar")) == 3


# --- what is refused


def request(rank: int = 0, role: Role = Role.WORKER, **more: object) -> JoinRequest:
    fields = {"world_size": 63, "timeout_s": 0.1, **more}
    return JoinRequest(ID, "5" * 32, role, rank, **fields)  # type: ignore[arg-type]  # mixed fields


def geometry_of(capacity_bytes: int) -> Geometry:
    return Geometry.compute(capacity_bytes, 4096, 63, Layout.REPLICATED)


def test_a_taken_rank_and_a_taken_scheduler_are_refused(region: OwnedRegion, volume: Path) -> None:
    path = volume / "kvcellar"
    first = open_session(RegionDirectory.open(path), request(world_size=1), geometry_of)
    with pytest.raises(RankTaken, match="worker 0 of region engine is held by a living process"):
        open_session(RegionDirectory.open(path), request(), geometry_of)
    ask = request(role=Role.SCHEDULER, world_size=1)
    second = join_scheduler(RegionDirectory.open(path), ask)
    with pytest.raises(RankTaken, match="scheduler 0"):
        join_scheduler(RegionDirectory.open(path), ask)
    first.close()
    second.close()
    assert not region.held()


def test_more_ranks_than_slots_are_refused(region: OwnedRegion, volume: Path) -> None:
    path = volume / "kvcellar"
    world = 65
    inside = [open_session(RegionDirectory.open(path), request(world_size=world), geometry_of)]
    inside += [
        join_session(RegionDirectory.open(path), request(rank, world_size=world), geometry_of)
        for rank in range(1, 64)
    ]
    assert sorted(p.slot for p in inside) == list(range(64))
    directory = RegionDirectory.open(path)
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NoFreeSlot, match="all 64 slots are held"):
        join_session(directory, request(64, world_size=world), geometry_of)
    assert len(os.listdir("/proc/self/fd")) == open_files
    inside.pop(30).close()
    inside.append(join_session(directory, request(64, world_size=world), geometry_of))
    assert inside[-1].slot == 30
    for participant in inside:
        participant.close()


def test_ranks_of_another_geometry_are_refused(region: OwnedRegion, starts: Starts) -> None:
    outcomes = starts(chunk_bytes=lambda rank: CHUNK_BYTES + 4096 * rank).outcomes()
    assert isinstance(outcomes[1], RanksDisagree)
    assert "rank 1 computes" in str(outcomes[1])
    assert isinstance(outcomes[0], NotReady)
    assert "rank 1 could not attach: rank 1 computes" in str(outcomes[0])
    assert not region.held()


def test_a_rank_with_an_impossible_chunk_is_heard_of_by_all(
    region: OwnedRegion, starts: Starts
) -> None:
    outcomes = starts(chunk_bytes=lambda rank: CHUNK_BYTES if rank == 0 else -1).outcomes()
    assert isinstance(outcomes[1], ConfigurationError)
    assert isinstance(outcomes[0], NotReady)
    assert not region.held()


@pytest.mark.parametrize(
    "wrong",
    [
        {"session": "short"},
        {"session": "G" * 32},
        {"fingerprint": "xyz"},
        {"fingerprint": "a" * 65},
        {"session": None},
        {"fingerprint": b"ab"},
        {"timeout_s": -1.0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"timeout_s": "5"},
        {"layout": "sharded"},
        {"owner": "engine"},
        {"pin": "auto"},
        {"directory": "/dev/shm/kvcellar"},
        {"capacity_bytes": 4e6},
        {"chunk_bytes": lambda _rank: 4096.0},
        {"chunk_bytes": lambda _rank: True},
        {"chunk_bytes": lambda _rank: -1},
        {"chunk_bytes": lambda _rank: 2**63},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_written_are_refused_in_all_ranks(
    region: OwnedRegion, starts: Starts, wrong: dict[str, object]
) -> None:
    outcomes = starts(**wrong).outcomes()
    assert all(isinstance(outcome, ConfigurationError) for outcome in outcomes)
    assert not region.held()


def test_an_argument_that_is_wrong_in_one_rank_is_heard_of_by_the_others(
    region: OwnedRegion, starts: Starts
) -> None:
    def chunk_bytes(rank: int) -> float:
        return CHUNK_BYTES if rank else float(CHUNK_BYTES)

    first, second = starts(chunk_bytes=chunk_bytes).outcomes()
    assert isinstance(first, ConfigurationError)
    assert isinstance(second, NotReady)
    assert str(second).startswith("rank 0 could not attach: chunk_bytes=300000.0 cannot be used")
    assert not region.held()


@pytest.mark.parametrize(
    "heard", [[], None, ["?"], [None, None]], ids=["nobody", "nothing", "a word", "two of one"]
)
def test_an_exchange_that_brings_not_every_rank_is_refused_and_nothing_stays(
    region: OwnedRegion, volume: Path, heard: list[object]
) -> None:
    def exchange(mine: object) -> list[object]:
        return heard and [mine if word is None else word for word in heard]

    before = os.listdir("/proc/self/fd")
    options = AttachOptions(directory=volume / "kvcellar", exchange=exchange)
    with pytest.raises(RanksDisagree, match="all-gather over all ranks"):
        attach(ID, CHUNK_BYTES, options=options)
    assert os.listdir("/proc/self/fd") == before
    assert not region.held()


def test_a_rank_of_several_does_not_attach_by_an_exchange_for_one(
    region: OwnedRegion, volume: Path
) -> None:
    options = AttachOptions(directory=volume / "kvcellar")
    with pytest.raises(RanksDisagree, match=r"rank 0 of 2 heard of ranks \[0\]"):
        attach(ID, CHUNK_BYTES, world_size=2, options=options)
    assert not region.held()


def test_a_rank_that_may_map_no_more_memory_says_which_limits_to_look_at(
    region: OwnedRegion, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mapping, "map_range", _out_of_memory)
    with pytest.raises(NotReady) as caught:
        attach(ID, CHUNK_BYTES, options=AttachOptions(directory=volume / "kvcellar"))
    assert str(caught.value) == (
        f"rank 0 cannot attach: the kernel answered 'Cannot allocate memory' for the files in {volume}/kvcellar; check "
        "the limits of the engine's processes (ulimit -a) and the volume, and start the engine again"
    )
    assert not region.held()


def _out_of_memory(*_arguments: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_an_interrupt_while_attaching_leaves_nothing_open(
    region: OwnedRegion, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(Geometry, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attach(ID, CHUNK_BYTES, options=AttachOptions(directory=volume / "kvcellar"))
    assert os.listdir("/proc/self/fd") == before
    assert not region.held()


@pytest.mark.parametrize(("rank", "world"), [(-1, 1), (1, 1), (0, 0)])
def test_a_rank_outside_its_world_is_refused(
    region: OwnedRegion, volume: Path, rank: int, world: int
) -> None:
    options = AttachOptions(directory=volume / "kvcellar", timeout_s=0.1)
    with pytest.raises(ConfigurationError, match=f"rank {rank} of world size {world}"):
        attach(ID, CHUNK_BYTES, rank=rank, world_size=world, options=options)


@pytest.mark.parametrize(
    "wrong",
    [
        {"world_size": 2.0},
        {"world_size": None},
        {"world_size": 0},
        {"engine_id": None},
        {"directory": "/dev/shm/kvcellar"},
        {"owner": "engine"},
        {"session": None},
    ],
    ids=str,
)
def test_a_scheduler_with_arguments_of_another_type_is_refused_and_leaves_no_descriptor(
    region: OwnedRegion, starts: Starts, wrong: dict[str, object]
) -> None:
    ranks = starts().attached()
    arguments: dict[str, object] = {"engine_id": ID, "world_size": 2}
    arguments |= {key: value for key, value in wrong.items() if key in arguments}
    fields = {key: value for key, value in wrong.items() if key not in arguments}
    options = replace(ranks.options, **fields)  # type: ignore[arg-type]  # what is wrong with it
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigurationError):
        attach_scheduler(**arguments, options=options)  # type: ignore[arg-type]  # the same
    assert os.listdir("/proc/self/fd") == before


def test_a_scheduler_without_all_ranks_stays_off(region: OwnedRegion, starts: Starts) -> None:
    ranks = starts().attached()
    ranks.rank[1].kill()
    with ended(ranks.scheduler()) as scheduler, pytest.raises(NotReady, match=r"only \[0\]"):
        scheduler.hear()
    other = replace(ranks.options, session="6" * 32)
    with pytest.raises(NotReady, match="session"):
        attach_scheduler(ID, world_size=2, options=other)


def test_a_refused_scheduler_leaves_no_descriptor(region: OwnedRegion, volume: Path) -> None:
    options = AttachOptions(directory=volume / "kvcellar")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(NotReady):
            attach_scheduler(ID, world_size=2, options=options)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_scheduler_without_the_index_file_is_told_so(region: OwnedRegion, volume: Path) -> None:
    options = AttachOptions(directory=volume / "kvcellar")
    rank = attach(ID, CHUNK_BYTES, options=options)
    (volume / "kvcellar" / index_name(ID, region.owner.nonce)).unlink()
    with pytest.raises(NotReady, match="No such file"):
        attach_scheduler(ID, world_size=1, options=options)
    rank.close()


def test_without_a_directory_attach_waits_and_then_says_so(volume: Path) -> None:
    options = AttachOptions(directory=volume / "kvcellar", timeout_s=0.2)
    with pytest.raises(NotReady, match="no directory"):
        attach(ID, CHUNK_BYTES, options=options)
    with pytest.raises(NotReady, match="no directory"):
        attach_scheduler(ID, world_size=1, options=options)
    RegionDirectory.create(volume / "kvcellar")
    with pytest.raises(NotReady, match="there is no region engine"):
        attach(ID, CHUNK_BYTES, options=options)
    assert os.listdir(volume / "kvcellar") == []


def test_attach_waits_while_the_region_is_being_reserved(volume: Path, starts: Starts) -> None:
    ranks = starts(timeout_s=5.0)
    directory = RegionDirectory.create(volume / "kvcellar")
    owned = OwnedRegion.acquire(directory, RegionRequest(ID, CAPACITY), list)
    with pytest.raises(TimeoutError):
        ranks.rank[0].hear(0.3)
    owned.reserve(lambda: False)
    ranks.attached()
    owned.settle(lambda: False)
    assert owned.owner.settled_bytes == 20 * MIB


def test_a_failed_region_is_refused_with_its_reason(region: OwnedRegion, starts: Starts) -> None:
    region.fail("the moon is in the wrong phase")
    outcomes = starts().outcomes()
    assert "the moon is in the wrong phase" in str(outcomes[0])


def test_attach_never_makes_a_second_region(
    region: OwnedRegion, volume: Path, starts: Starts
) -> None:
    ranks = starts().attached()
    (volume / "kvcellar" / meta_name(ID)).unlink()
    names = os.listdir(volume / "kvcellar")
    outcomes = starts(timeout_s=0.3).outcomes()
    assert "there is no region engine" in str(outcomes[0])
    assert os.listdir(volume / "kvcellar") == names
    with ended(ranks.scheduler()) as scheduler, pytest.raises(NotReady):
        scheduler.hear()


def _plant(what: str, path: Path, saved: Path) -> None:
    """Put something else in a file's place, or change what it has; `saved` is a free name."""
    match what:
        case "hard link":
            os.link(path, saved)
        case "cut":
            os.truncate(path, 4096)
        case "punched":
            size = path.stat().st_size
            os.truncate(path, 0)
            os.truncate(path, size)
        case _:
            path.rename(saved)
    if what == "symlink":
        path.symlink_to(saved)
    elif what == "replaced":
        path.write_bytes(b"x")
    elif what == "fifo":
        os.mkfifo(path)


@pytest.mark.parametrize("suffix", ["data", "index"])
@pytest.mark.parametrize(
    "plant", ["gone", "symlink", "hard link", "replaced", "fifo", "cut", "punched"]
)
def test_attach_refuses_files_that_are_not_the_owners(
    region: OwnedRegion, volume: Path, starts: Starts, suffix: str, plant: str
) -> None:
    name = {"data": data_name, "index": index_name}[suffix](ID, region.owner.nonce)
    saved = volume / "saved"
    _plant(plant, volume / "kvcellar" / name, saved)
    if suffix == "index" and plant in ("cut", "punched", "replaced"):
        starts().attached()  # rank 0 lays it out anew
        return
    outcomes = starts(timeout_s=0.3).outcomes()
    assert isinstance(outcomes[0], (RegionMismatch, NotReady))
    assert isinstance(outcomes[1], NotReady)
    assert not region.held()
    if saved.exists() and suffix == "data":
        assert saved.stat().st_size == 20 * MIB


def test_no_room_for_the_index_is_said(volume: Path) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    owned = OwnedRegion.acquire(directory, RegionRequest(ID, CAPACITY), list)
    owned.reserve(lambda: False)
    status = os.statvfs(volume)
    filler = os.open(volume / "filler", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(filler, 0, status.f_bfree * status.f_frsize)
    with pytest.raises(DoesNotFit, match="index file"):
        attach(ID, CHUNK_BYTES, options=AttachOptions(directory=volume / "kvcellar"))
    assert not owned.held()
    os.close(filler)


# --- engines that own their region


@pytest.fixture
def own_starts(starts: Starts) -> Starts:
    def start(world_size: int = 2, **options: object) -> Ranks:
        given = {"owner": Owner.ENGINE, "capacity_bytes": CAPACITY, **options}
        return starts(world_size, **given)

    return start


def test_the_names_are_gone_once_the_scheduler_is_in(volume: Path, own_starts: Starts) -> None:
    ranks = own_starts().attached()
    assert len(os.listdir(volume / "kvcellar")) == 3
    with ended(ranks.scheduler()) as scheduler:
        assert scheduler.hear() == look(ranks.rank[0]).num_chunks
        assert os.listdir(volume / "kvcellar") == []
        ranks.rank[0].ask(("mark", 1))
        assert scheduler.ask([1]) == {1}
        ranks.rank[1].ask(("fill", 2, b"still there"))
        assert used_bytes(volume) > 20 * MIB
        ranks.kill()
    assert used_bytes(volume) == 0


def test_an_engine_that_owns_too_small_a_region_is_told_its_own_setting(
    volume: Path, own_starts: Starts
) -> None:
    outcomes = own_starts(1, capacity_bytes=MIB).outcomes()
    assert "raise cpu_bytes_to_use" in str(outcomes[0])
    outcomes = own_starts(1, capacity_bytes=2**50).outcomes()
    assert isinstance(outcomes[0], DoesNotFit)
    assert "lower cpu_bytes_to_use" in str(outcomes[0])
    assert os.listdir(volume / "kvcellar") == []


def test_an_engine_without_a_scheduler_leaves_no_name_when_it_closes(
    volume: Path, own_starts: Starts
) -> None:
    ranks = own_starts().attached()
    assert ranks.rank[0].ask("close") == "closed"
    assert os.listdir(volume / "kvcellar") == []
    assert ranks.rank[1].ask("close") == "closed"
    assert used_bytes(volume) == 0


@pytest.mark.parametrize("seed", range(8))
def test_nothing_leaks_from_an_engine_killed_at_any_moment(
    volume: Path, own_starts: Starts, seed: int
) -> None:
    dice = random.Random(seed)
    ranks = own_starts()
    time.sleep(dice.random() * 0.08)
    ranks.kill()
    again = own_starts().attached()
    with ended(again.scheduler()) as scheduler:
        scheduler.hear()
        assert os.listdir(volume / "kvcellar") == []
        assert used_bytes(volume) <= 21 * MIB
    again.kill()
    assert used_bytes(volume) == 0


def test_a_failed_attach_takes_the_region_with_it(volume: Path, own_starts: Starts) -> None:
    outcomes = own_starts(chunk_bytes=lambda rank: CHUNK_BYTES + 4096 * rank).outcomes()
    assert isinstance(outcomes[0], NotReady)
    assert isinstance(outcomes[1], RanksDisagree)
    assert os.listdir(volume / "kvcellar") == []
    assert used_bytes(volume) == 0


def test_a_region_that_does_not_fit_is_refused_in_all_ranks(
    volume: Path, own_starts: Starts
) -> None:
    outcomes = own_starts(capacity_bytes=300 * MIB).outcomes()
    assert isinstance(outcomes[0], DoesNotFit)
    assert outcomes[0].binding_limit in ("tmpfs", "container", "hierarchy")
    assert isinstance(outcomes[1], NotReady)
    assert "rank 0 could not attach: region engine needs" in str(outcomes[1])
    assert os.listdir(volume / "kvcellar") == []


def test_a_region_without_a_capacity_is_refused(volume: Path, own_starts: Starts) -> None:
    outcomes = own_starts(capacity_bytes=None).outcomes()
    assert isinstance(outcomes[0], ConfigurationError)
    assert "cpu_bytes_to_use" in str(outcomes[0])


def test_a_second_start_waits_for_an_owner_that_lingers(volume: Path, own_starts: Starts) -> None:
    old = own_starts().attached()
    old.rank[1].kill()
    new = own_starts(timeout_s=20.0)
    with pytest.raises(TimeoutError):
        new.rank[0].hear(0.3)
    old.rank[0].kill()
    new.attached()


def test_a_living_engine_of_the_same_id_is_refused_at_the_deadline(
    volume: Path, own_starts: Starts
) -> None:
    old = own_starts().attached()
    outcomes = own_starts(timeout_s=0.3).outcomes()
    assert isinstance(outcomes[0], RegionHeld)
    assert look(old.rank[0]).generation == 1
    assert len(os.listdir(volume / "kvcellar")) == 3


def test_a_late_cleanup_leaves_the_region_of_the_next_start(
    volume: Path, own_starts: Starts
) -> None:
    old = own_starts().attached()
    with ended(old.scheduler()) as scheduler:
        scheduler.hear()
    new = own_starts().attached()
    names = sorted(os.listdir(volume / "kvcellar"))
    assert old.rank[0].ask("close") == "closed"
    assert sorted(os.listdir(volume / "kvcellar")) == names
    with ended(new.scheduler()) as scheduler:
        assert scheduler.hear() == look(new.rank[0]).num_chunks


def test_a_dead_engines_region_is_removed_by_another_engines_start(
    volume: Path, own_starts: Starts
) -> None:
    dead = own_starts(engine_id="dead").attached()
    dead.kill()
    assert len(os.listdir(volume / "kvcellar")) == 3
    alive = own_starts(engine_id="alive").attached()
    directory = RegionDirectory.open(volume / "kvcellar")
    assert [found.engine_id for found in survey(directory).regions] == ["alive"]
    alive.kill()


def test_a_slot_is_a_lock_of_the_data_file(region: OwnedRegion, volume: Path) -> None:
    attached = attach(ID, CHUNK_BYTES, options=AttachOptions(directory=volume / "kvcellar"))
    directory = RegionDirectory.open(volume / "kvcellar")
    fd = directory.open_file(data_name(ID, region.owner.nonce), os.O_RDONLY)
    assert locks.held_slots(fd, 64) == [0]
    assert attached.base_address % HUGE_PAGE_BYTES == 0
    attached.close()
    assert attached.base_address == 0
    assert locks.held_slots(fd, 64) == []
    os.close(fd)

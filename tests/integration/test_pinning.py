"""Pinning by all ranks of an engine: real processes, a real region, the simulated driver.

Every outcome is the same on all ranks, one rank registers at a time, and nothing stays registered.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcellar.contract import HugePages, Pin, parse_engine_id
from kvcellar.errors import KVCellarError
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import Layout
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.worker import pin
from kvcellar.worker.attached import Region
from kvcellar.worker.gpu_device import GpuDevice
from tests.support.gpus import CUDA, StubGpu
from tests.support.ranks import CHUNK_BYTES, Ranks

pytestmark = pytest.mark.integration

MIB = 1 << 20
CAPACITY = 40 * MIB


@dataclass(frozen=True)
class Order:
    """How a rank is to pin its region over the simulated driver."""

    driver: Path
    fails_at: int = 0
    """Which registration fails, from 1."""
    is_capturing: bool = False
    is_cut: bool = False
    """The data file loses its pages first."""
    dies: bool = False
    """The rank is killed while it registers."""
    piece_bytes: int = pin.PIECE_BYTES
    has_lock: bool = True
    marker: Path | None = None
    """A file that is there while a rank registers; two at a time are an error."""


@dataclass(frozen=True)
class Answer:
    """What came of it on one rank."""

    is_pinned: bool
    registered_bytes: int
    num_registered: int
    """Calls that registered something, whatever became of it."""
    lines: list[str]
    """What was logged."""


class Watched(GpuDevice):
    """Takes a while to register, so that ranks that do so at the same time meet."""

    order: Order

    def register_host(self, address: int, size_bytes: int) -> None:  # type: ignore[explicit-override]
        marker = self.order.marker
        if marker:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            time.sleep(0.05)
        try:
            super().register_host(address, size_bytes)
            if self.order.dies:
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            if marker:
                marker.unlink()


def pin_rank(region: Region, order: Order) -> Answer | str:
    """In a rank's process: pin, look, unpin; the answer, or the error."""
    pin.PIECE_BYTES = order.piece_bytes
    if not order.has_lock:
        pin.with_lock = lambda fd, total_bytes, step: step()
    gpu = StubGpu(CUDA, order.driver)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvcellar.worker.pin")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    stream = gpu.new_stream()
    device = Watched(gpu.vendor.load(gpu.path), lambda: stream)
    device.order = order
    if order.fails_at:
        gpu.fail("cuMemHostRegister", order.fails_at, 2)
    if order.is_capturing:
        gpu.begin_capture(stream)
    if order.is_cut:
        os.truncate(region._participant.data_fd, 0)
    try:
        is_pinned = region.pin(device)
    except KVCellarError as error:
        assert gpu.count("registrations") == 0
        return str(error)
    registered_bytes = gpu.count("registered_bytes")
    region.unpin()
    assert gpu.count("registrations") == 0
    assert gpu.violation == ""
    return Answer(is_pinned, registered_bytes, gpu.calls_of("cuMemHostUnregister"), lines)


@pytest.fixture
def region(volume: Path) -> Iterator[OwnedRegion]:
    """A region of 40 MiB, reserved, owned by this process as a sidecar owns it."""
    directory = RegionDirectory.create(volume / "kvcellar")
    request = RegionRequest(parse_engine_id("engine"), CAPACITY, huge_pages=HugePages.NEVER)
    owned = OwnedRegion.acquire(directory, request, list)
    owned.reserve(lambda: False)
    yield owned
    owned.close()


Starts = Callable[..., Ranks]


@pytest.fixture
def starts(region: OwnedRegion, volume: Path) -> Iterator[Starts]:
    """Starts engines whose ranks are attached; all their processes are killed after the test."""
    made: list[Ranks] = []

    def start(world_size: int = 2, **options: object) -> Ranks:
        made.append(Ranks.start(volume / "kvcellar", world_size, **options))  # type: ignore[arg-type]  # mixed options
        return made[-1].attached()

    yield start
    for ranks in made:
        ranks.kill()


def pin_all(ranks: Ranks, *orders: Order) -> list[Answer | str]:
    """Let all ranks pin at once, each by its order."""
    for child, order in zip(ranks.rank, orders, strict=True):
        child.tell((pin_rank, order))
    answers = []
    for child in ranks.rank:
        answer = child.hear()
        assert isinstance(answer, Answer | str)
        answers.append(answer)
    return answers


def all_pinned(answers: list[Answer | str]) -> list[Answer]:
    found = [answer for answer in answers if isinstance(answer, Answer)]
    assert len(found) == len(answers), answers
    return found


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_pins_its_own_chunks_one_at_a_time(
    driver: Path, starts: Starts, tmp_path: Path, world_size: int
) -> None:
    ranks = starts(world_size)
    order = Order(driver, marker=tmp_path / "registering")
    answers = all_pinned(pin_all(ranks, *[order] * world_size))
    stride = -(-CHUNK_BYTES // 4096) * 4096
    rank_bytes = CAPACITY // world_size // (2 * MIB) * 2 * MIB
    for answer in answers:
        assert answer.is_pinned
        assert answer.registered_bytes == rank_bytes // stride * stride
        assert answer.num_registered == 1
    assert [line for answer in answers[1:] for line in answer.lines] == []
    (line,) = answers[0].lines
    assert f"{answers[0].registered_bytes} bytes in 1 pieces are pinned on each of" in line


def test_without_the_lock_ranks_would_register_at_the_same_time(
    driver: Path, starts: Starts, tmp_path: Path
) -> None:
    order = Order(driver, marker=tmp_path / "registering", has_lock=False)
    answers = all_pinned(pin_all(starts(4), *[order] * 4))
    assert not any(answer.is_pinned for answer in answers)
    assert "File exists" in answers[0].lines[0]


def test_each_rank_pins_the_whole_where_it_is_the_same_for_all(
    driver: Path, starts: Starts
) -> None:
    ranks = starts(2, layout=Layout.REPLICATED)
    for answer in all_pinned(pin_all(ranks, Order(driver), Order(driver))):
        assert CAPACITY - CHUNK_BYTES < answer.registered_bytes <= CAPACITY


def test_pieces_end_between_chunks(driver: Path, starts: Starts) -> None:
    order = Order(driver, piece_bytes=10 * 303_104 + 5000)
    for answer in all_pinned(pin_all(starts(), order, order)):
        assert answer.num_registered == 7  # 69 chunks, 10 a piece
        assert answer.registered_bytes == 69 * 303_104


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("fails_at", [1, 3, 7])
def test_a_rank_that_cannot_pin_leaves_all_unpinned_and_it_is_said_once(
    driver: Path, starts: Starts, region: OwnedRegion, failing_rank: int, fails_at: int
) -> None:
    orders = [Order(driver, piece_bytes=10 * 303_104) for _ in range(2)]
    orders[failing_rank] = Order(driver, piece_bytes=10 * 303_104, fails_at=fails_at)
    answers = all_pinned(pin_all(starts(), *orders))
    assert [(answer.is_pinned, answer.registered_bytes) for answer in answers] == [(False, 0)] * 2
    assert answers[failing_rank].num_registered == fails_at - 1
    assert answers[1 - failing_rank].num_registered == 7
    assert answers[1].lines == []
    (line,) = answers[0].lines
    assert f"not pinned on any rank, so transfers are slower: rank {failing_rank}: CUDA" in line
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in line
    assert not any(row.pinned for _, row, _ in region.snapshot().rows)


def test_pinning_that_is_not_wanted_registers_nothing(driver: Path, starts: Starts) -> None:
    answers = all_pinned(pin_all(starts(pin=Pin.NEVER), Order(driver), Order(driver)))
    assert [answer.is_pinned for answer in answers] == [False, False]
    assert [answer.num_registered for answer in answers] == [0, 0]
    (line,) = answers[0].lines
    assert "KVCELLAR_PIN=never" in line


def test_nothing_is_registered_while_a_graph_is_captured(driver: Path, starts: Starts) -> None:
    answers = all_pinned(pin_all(starts(), Order(driver), Order(driver, is_capturing=True)))
    assert [answer.is_pinned for answer in answers] == [False, False]
    assert "graph is being captured" in answers[0].lines[0]


def test_memory_that_is_not_there_is_an_error_on_all_ranks(driver: Path, starts: Starts) -> None:
    heard = pin_all(starts(), Order(driver), Order(driver, is_cut=True))
    for what in heard:
        assert isinstance(what, str)
        assert "cannot read its part of region engine" in what
    assert "rank 1" in str(heard[1])


def test_a_rank_that_is_killed_while_it_pins_holds_nothing_up(
    driver: Path, starts: Starts, region: OwnedRegion, tmp_path: Path
) -> None:
    ranks = starts()
    ranks.rank[1].tell((pin_rank, Order(driver, dies=True)))
    ranks.rank[0].tell((pin_rank, Order(driver)))
    with pytest.raises(EOFError):
        ranks.rank[1].hear()
    with pytest.raises(
        (EOFError, BrokenPipeError)
    ):  # the collective call breaks, as a real one does
        ranks.rank[0].hear()
    ranks.kill()
    assert not region.held()
    again = all_pinned(pin_all(starts(), Order(driver), Order(driver)))
    assert [answer.is_pinned for answer in again] == [True, True]


def test_a_pinned_rank_is_shown_in_its_row(
    driver: Path, starts: Starts, region: OwnedRegion
) -> None:
    ranks = starts(1)
    ranks.rank[0].tell((show_pinned, driver))
    assert ranks.rank[0].hear() == "pinned"
    assert [row.pinned for _, row, is_held in region.snapshot().rows if is_held] == [True]
    ranks.kill()


def show_pinned(region: Region, driver: Path) -> str:
    gpu = StubGpu(CUDA, driver)
    region.pin(gpu.device(0))
    return "pinned"

"""The copier over a simulated device, which runs work in any allowed order, and over the CPU."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcellar.contract import Direction
from kvcellar.errors import ConfigurationError, TransferFailed
from kvcellar.worker.copier import Copier, Finished
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.devices import Device
from kvcellar.worker.plan import CopyPlan
from tests.fakes.faulty_device import Fault, FaultyDevice
from tests.fakes.simulated_device import SimulatedDevice

SEEDS = range(25)
PIECE = 64
N_PIECES = 8

Bytes = NDArray[np.uint8]


class Memory:
    """A device buffer and a host buffer of pieces."""

    def __init__(self) -> None:
        self.device: Bytes = np.arange(N_PIECES * PIECE, dtype=np.uint8)
        self.host: Bytes = np.zeros(N_PIECES * PIECE, dtype=np.uint8)

    def plan(self, pieces: list[int]) -> CopyPlan:
        """Copies of these pieces, each to the same place on the other side."""
        offsets = np.array(pieces, dtype=np.uint64) * np.uint64(PIECE)
        return CopyPlan(
            device=offsets + np.uint64(self.device.ctypes.data),
            host=offsets + np.uint64(self.host.ctypes.data),
            sizes=np.full(len(pieces), PIECE, dtype=np.uint64),
            total_bytes=PIECE * len(pieces),
        )


@pytest.fixture
def memory() -> Memory:
    return Memory()


def simulated() -> Device:
    return SimulatedDevice(seed=1)


@pytest.fixture(params=[simulated, CpuDevice], ids=["simulated", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    make: Callable[[], Device] = request.param
    device = make()
    yield device
    device.close()


def poll_until(copier: Copier, n_results: int) -> list[Finished]:
    results: list[Finished] = []
    while len(results) < n_results:
        results += copier.poll()
    return results


def test_a_store_copies_to_the_host_and_a_load_to_the_device(
    device: Device, memory: Memory
) -> None:
    stores, loads = Copier(device, Direction.STORE), Copier(device, Direction.LOAD)
    before = memory.device.copy()
    stores.submit(1, memory.plan([0, 3]))
    (stored,) = poll_until(stores, 1)
    assert (stored.job_id, stored.ok, stored.size_bytes, stored.error) == (1, True, 2 * PIECE, "")
    assert stored.seconds > 0
    assert (memory.host[:PIECE] == before[:PIECE]).all()
    assert not memory.host[PIECE : 3 * PIECE].any()
    assert (memory.device == before).all()
    memory.device[:] = 0
    loads.submit(2, memory.plan([3]))
    (loaded,) = poll_until(loads, 1)
    assert (loaded.job_id, loaded.ok, loaded.size_bytes) == (2, True, PIECE)
    piece = slice(3 * PIECE, 4 * PIECE)
    assert (memory.device[piece] == before[piece]).all()
    assert not memory.device[: 3 * PIECE].any()
    stores.close()
    loads.close()


def test_results_come_in_the_order_of_submit(device: Device, memory: Memory) -> None:
    copier = Copier(device, Direction.STORE)
    for job_id in (5, 3, 9, 1):
        copier.submit(job_id, memory.plan([job_id % N_PIECES]))
    assert [result.job_id for result in poll_until(copier, 4)] == [5, 3, 9, 1]
    copier.close()


def test_wait_leaves_the_result_to_poll_and_ignores_unknown_jobs(
    device: Device, memory: Memory
) -> None:
    copier = Copier(device, Direction.STORE)
    copier.submit(1, memory.plan([2]))
    copier.submit(2, memory.plan([4]))
    copier.wait({1, 2, 77})
    piece = slice(4 * PIECE, 5 * PIECE)
    assert (memory.host[piece] == memory.device[piece]).all()
    assert [result.job_id for result in copier.poll()] == [1, 2]
    copier.wait({1})
    assert copier.poll() == []
    copier.close()


def test_a_transfer_of_nothing_finishes(device: Device, memory: Memory) -> None:
    copier = Copier(device, Direction.LOAD)
    copier.submit(1, memory.plan([]))
    assert [(r.job_id, r.ok, r.size_bytes) for r in poll_until(copier, 1)] == [(1, True, 0)]
    copier.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_store_reads_what_the_engine_computed_before_it(seed: int) -> None:
    memory, device = Memory(), SimulatedDevice(seed)
    copier = Copier(device, Direction.STORE)
    for job_id in range(N_PIECES):
        piece = slice(job_id * PIECE, (job_id + 1) * PIECE)
        device.compute(partial(memory.device.__setitem__, piece, 100 + job_id))
        copier.submit(job_id, memory.plan([job_id]))
    copier.wait(range(N_PIECES))
    assert memory.host.reshape(N_PIECES, PIECE)[:, 0].tolist() == list(range(100, 100 + N_PIECES))
    copier.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_lands_after_the_work_that_was_queued_before_it(seed: int) -> None:
    memory, device = Memory(), SimulatedDevice(seed)
    memory.host[:] = 9
    copier = Copier(device, Direction.LOAD)
    seen: list[int] = []
    device.compute(lambda: seen.append(int(memory.device[PIECE])))  # still reads the old block
    device.compute(lambda: memory.device.fill(0))  # zeroes the blocks of a new request
    copier.submit(1, memory.plan([0, 1]))
    copier.wait({1})
    assert seen == [PIECE]
    assert (memory.device[: 2 * PIECE] == 9).all()
    assert not memory.device[2 * PIECE :].any()
    copier.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_descriptors_live_until_the_copies_are_done_and_events_are_used_again(seed: int) -> None:
    memory, device = Memory(), SimulatedDevice(seed)
    copier = Copier(device, Direction.STORE)
    results: list[Finished] = []
    for job_id in range(30):
        copier.submit(job_id, memory.plan([job_id % N_PIECES]))  # nobody else keeps the plan
        if job_id % 3 == 2:
            copier.wait({job_id})
            results += copier.poll()
    assert [result.job_id for result in results] == list(range(30))
    assert device.n_events <= 9
    assert device.n_streams == 1
    copier.close()
    assert (device.n_events, device.n_streams) == (0, 0)


def test_a_failed_store_is_reported_and_does_not_spoil_the_next(memory: Memory) -> None:
    device = SimulatedDevice(seed=3, failures=deque(["bus error"]))
    copier = Copier(device, Direction.STORE)
    copier.submit(1, memory.plan([0]))
    copier.submit(2, memory.plan([1]))
    failed, stored = poll_until(copier, 2)
    assert failed == Finished(1, False, 0, 0.0, "bus error")
    assert (stored.job_id, stored.ok, stored.size_bytes) == (2, True, PIECE)
    copier.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_load_is_tried_once_more_and_keeps_its_place(seed: int) -> None:
    memory = Memory()
    memory.host[:] = 9
    device = SimulatedDevice(seed, failures=deque(["bus error"]))
    copier = Copier(device, Direction.LOAD)
    copier.submit(1, memory.plan([0]))
    copier.submit(2, memory.plan([1]))
    assert [(r.job_id, r.ok) for r in poll_until(copier, 2)] == [(1, True), (2, True)]
    assert (memory.device[: 2 * PIECE] == 9).all()
    assert device.log.count("copy load") == 3
    copier.close()


def test_a_load_that_fails_twice_is_reported_once(memory: Memory) -> None:
    device = SimulatedDevice(seed=3, failures=deque(["bus error", "bus error again"]))
    copier = Copier(device, Direction.LOAD)
    copier.submit(1, memory.plan([0]))
    copier.wait({1})
    assert copier.poll() == [Finished(1, False, 0, 0.0, "bus error again")]
    assert copier.poll() == []
    copier.close()


def test_a_copy_that_cannot_be_queued_is_a_failed_transfer(memory: Memory) -> None:
    device = SimulatedDevice(seed=3, refusals=deque(["no memory", "", "no memory"]))
    loads, stores = Copier(device, Direction.LOAD), Copier(device, Direction.STORE)
    loads.submit(1, memory.plan([0]))
    assert [r.ok for r in poll_until(loads, 1)] == [True]
    stores.submit(2, memory.plan([1]))
    assert poll_until(stores, 1) == [Finished(2, False, 0, 0.0, "no memory")]
    loads.close()
    stores.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_close_waits_for_everything_and_gives_everything_back(seed: int) -> None:
    memory, device = Memory(), SimulatedDevice(seed, failures=deque(["", "bus error"]))
    copier = Copier(device, Direction.LOAD)
    memory.host[:] = 9
    for job_id in range(N_PIECES):
        copier.submit(job_id, memory.plan([job_id]))
    copier.close()
    pieces = memory.device.reshape(N_PIECES, PIECE)
    assert [job_id for job_id in range(N_PIECES) if (pieces[job_id] == 9).all()] == [
        0,
        *range(2, 8),
    ]
    assert (device.n_events, device.n_streams) == (0, 0)
    assert device.log[-1] == "destroy_stream"
    copier.close()
    assert copier.poll() == []


def test_close_releases_the_rest_when_the_device_fails(memory: Memory) -> None:
    device = SimulatedDevice(seed=3, destroy_fails=True, refusals=deque(["no memory"]))
    copier = Copier(device, Direction.STORE)
    copier.submit(1, memory.plan([0]))
    copier.submit(2, memory.plan([1]))
    with pytest.raises(TransferFailed, match="fails at release"):
        copier.close()
    assert (device.n_events, device.n_streams) == (0, 0)
    assert (memory.host[PIECE : 2 * PIECE] == memory.device[PIECE : 2 * PIECE]).all()


def test_a_job_in_flight_cannot_be_submitted_again_nor_any_after_close(
    device: Device, memory: Memory
) -> None:
    copier = Copier(device, Direction.STORE)
    copier.submit(1, memory.plan([0]))
    with pytest.raises(ConfigurationError, match="job 1 was submitted, but a job of this id"):
        copier.submit(1, memory.plan([1]))
    copier.wait({1})
    copier.poll()
    copier.submit(1, memory.plan([1]))
    copier.close()
    with pytest.raises(ConfigurationError, match="the copier is closed"):
        copier.submit(2, memory.plan([0]))


def test_a_copier_that_was_never_used_opens_no_stream() -> None:
    device = SimulatedDevice(seed=3)
    copier = Copier(device, Direction.STORE)
    assert copier.poll() == []
    copier.wait({1})
    copier.close()
    assert device.log == []


@pytest.mark.parametrize(
    ("fault", "is_ok", "is_copied"),
    [
        (Fault.NONE, True, True),
        (Fault.SKIP, True, False),
        (Fault.FAIL, False, False),
        (Fault.REFUSE, False, False),
    ],
)
def test_a_faulty_device_does_to_a_copy_what_was_chosen(
    device: Device, memory: Memory, fault: Fault, is_ok: bool, is_copied: bool
) -> None:
    asked: list[tuple[Direction, int]] = []

    def choose(direction: Direction, number: int) -> Fault:
        asked.append((direction, number))
        return fault if number == 1 else Fault.NONE

    copier = Copier(FaultyDevice(device, choose), Direction.STORE)
    for job_id in range(3):
        copier.submit(job_id, memory.plan([job_id]))
    assert [result.ok for result in poll_until(copier, 3)] == [True, is_ok, True]
    assert (memory.host[PIECE] == memory.device[PIECE]) == is_copied
    assert asked == [(Direction.STORE, number) for number in range(3)]
    copier.close()

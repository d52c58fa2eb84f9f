"""The whole transfer path over a GPU's driver, byte for byte.

Over the simulated drivers everywhere, and unchanged over a real GPU where the machine has one. The schedules
are those of tests/support/schedules.py; negative controls take a rule away and see the bytes differ.
"""

import random

import pytest

from kvcellar.contract import Direction
from kvcellar.errors import KVCellarError, TransferFailed
from kvcellar.region.geometry import Layout
from kvcellar.worker.copier import Copier
from kvcellar.worker.devices import Addresses, Device, Event, Stream
from kvcellar.worker.gpu_device import GpuDevice
from tests.fakes.kv_caches import CacheRef
from tests.support.gpus import Gpu, StubGpu
from tests.support.schedules import MakeDevice, Schedule, Shape, make_device

N_MOVES = 30


def run(gpu: Gpu, seed: int, make: MakeDevice = make_device) -> Schedule:
    """One schedule, to its end; every second one is shut down with transfers in flight."""
    schedule = Schedule(gpu, seed, make=make)
    schedule.run(N_MOVES)
    if seed % 2:
        schedule.finish()
    else:
        schedule.end()
    return schedule


def run_stub(stub: StubGpu, seed: int, *settings: tuple[str, int]) -> None:
    """A schedule after which nothing is left, and in which nothing undefined was done."""
    stub.reset(seed)
    for name, value in settings:
        stub.set(name, value)
    schedule = run(stub, seed)
    assert stub.violation == "", (seed, schedule.shape)
    assert stub.leaks == {}, (seed, schedule.shape)


def run_many(gpu: Gpu, seeds: range) -> None:
    for seed in seeds:
        if isinstance(gpu, StubGpu):
            run_stub(gpu, seed)
        else:
            run(gpu, seed)


# --- every byte


@pytest.mark.parametrize("part", range(4))
def test_every_byte_is_where_it_belongs(gpu: Gpu, part: int) -> None:
    run_many(gpu, range(part * 50, part * 50 + 50))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_byte_is_where_it_belongs_in_thousands_of_schedules(gpu: Gpu) -> None:
    run_many(gpu, range(1000, 5000))


@pytest.mark.parametrize(
    ("setting", "value", "has_batches"),
    [
        ("driver version", 12080, True),
        ("driver version", 12040, False),
        ("no address of the batch", 1, False),
        ("host pointers are not device pointers", 1, False),
        ("batch is not supported", 1, False),
    ],
)
def test_every_form_of_copy_moves_the_same_bytes(
    stub_cuda: StubGpu, setting: str, value: int, has_batches: bool
) -> None:
    n_batches = n_copies = 0
    for seed in range(15):
        run_stub(stub_cuda, seed, (setting, value))
        n_batches += stub_cuda.count("batches")
        n_copies += stub_cuda.count("descriptors")
        is_older = has_batches and value == 12080
        assert stub_cuda.count("batches with a fail index") == (
            stub_cuda.calls_of("cuMemcpyBatchAsync") if is_older else 0
        )
    assert (n_batches > 0) == has_batches
    assert n_copies


# --- what is asked of the driver

PLAIN = Shape(
    pages=[4096, 4096, 4096],
    groups=[[CacheRef(idx, 4096) for idx in range(3)]],
    blocks_per_chunk=4,
    num_blocks=24,
    num_chunks=8,
    gap=0,
    layout=Layout.SHARDED,
    world_size=2,
    is_pinned=True,
    in_batches=True,
    on_default_stream=True,
)


def test_a_transfer_is_one_call_with_a_copy_for_each_run(stub_cuda: StubGpu) -> None:
    stub_cuda.reset(1)
    schedule = Schedule(stub_cuda, 1, PLAIN)
    for rank in schedule.ranks:
        rank.worker.submit_store(1, [4, 5, 6, 7, 9, 8, 11, 10], [8], [0], [3, 6])
        rank.worker.wait({1})
    # A run of four blocks, then four blocks out of order, of three tensors on two ranks.
    assert stub_cuda.count("descriptors") == 2 * 3 * (1 + 4)
    assert stub_cuda.calls_of("cuMemcpyBatchAsync") == 2
    assert stub_cuda.count("copied_bytes") == 2 * 3 * 8 * 4096


def test_each_rank_pins_its_own_chunks_and_no_more(stub: StubGpu) -> None:
    schedule = Schedule(stub, 1, PLAIN)
    geometry = PLAIN.geometry
    rank_bytes = geometry.num_chunks * geometry.chunk_stride_bytes
    assert stub.count("registered_bytes") == 2 * rank_bytes < geometry.capacity_bytes
    assert stub.count("registrations") == 2
    schedule.end()
    assert stub.leaks == {}


def test_no_context_is_made_and_none_is_kept(stub_cuda: StubGpu) -> None:
    run_stub(stub_cuda, 3)
    assert stub_cuda.calls_of("cuDevicePrimaryCtxRetain") == 0
    assert stub_cuda.calls_of("cuCtxSetCurrent") == 0


# --- failures

WHILE_COPYING = {
    "cuda": [
        "cuStreamCreateWithPriority",
        "cuEventCreate",
        "cuEventRecord",
        "cuStreamWaitEvent",
        "cuMemcpyBatchAsync",
        "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuEventElapsedTime",
    ],
    "hip": [
        "hipStreamCreateWithPriority",
        "hipEventCreateWithFlags",
        "hipEventRecord",
        "hipStreamWaitEvent",
        "hipMemcpyBatchAsync",
        "hipMemcpyHtoDAsync",
        "hipMemcpyDtoHAsync",
        "hipEventQuery",
        "hipEventSynchronize",
        "hipEventElapsedTime",
    ],
}
AT_THE_END = {
    "cuda": ["cuStreamSynchronize", "cuStreamDestroy", "cuEventDestroy", "cuMemHostUnregister"],
    "hip": ["hipStreamSynchronize", "hipStreamDestroy", "hipEventDestroy", "hipHostUnregister"],
}
CODES = [1, 2, 4, 400, 700, 712, 801, 900, 999]


def run_with_failures(stub: StubGpu, seed: int) -> int:
    """A schedule in which one call in a few fails; the transfers that failed."""
    chance = random.Random(seed)
    stub.reset(seed)
    schedule = Schedule(stub, seed)
    schedule.may_fail = True
    for _ in range(4):
        function = chance.choice(WHILE_COPYING[stub.vendor.name])
        nth, times = chance.randint(1, 6), chance.randint(1, 3)
        stub.fail(function, nth, chance.choice(CODES), times=times)
        schedule.run(10)
    schedule.finish()
    assert stub.violation == "", (seed, schedule.shape)
    assert stub.leaks == {}, (seed, schedule.shape)
    return schedule.num_failed


@pytest.mark.parametrize("part", range(2))
def test_a_call_that_fails_costs_a_transfer_at_most_and_no_byte(stub: StubGpu, part: int) -> None:
    seeds = range(part * 40, part * 40 + 40)
    assert sum(run_with_failures(stub, seed) for seed in seeds) > 5


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_calls_that_fail_cost_no_byte_in_thousands_of_schedules(stub: StubGpu) -> None:
    for seed in range(1000, 3000):
        run_with_failures(stub, seed)


@pytest.mark.parametrize("function_idx", range(4))
@pytest.mark.parametrize("nth", [1, 2])
def test_a_shutdown_goes_on_whatever_call_fails(stub: StubGpu, function_idx: int, nth: int) -> None:
    schedule = Schedule(stub, 4, PLAIN)
    for rank in schedule.ranks:
        rank.worker.submit_store(1, [0, 1, 2, 3], [4], [0], [1])
        rank.worker.submit_load(2, [8, 9], [2], [0], [5])
    function = AT_THE_END[stub.vendor.name][function_idx]
    stub.fail(function, nth, 999)
    for rank in schedule.ranks:
        rank.worker.shutdown()
        assert rank.region.is_closed
    assert stub.violation == ""
    # What the driver refused to release is all that is left.
    assert sum(stub.leaks.values()) <= 1


@pytest.mark.parametrize("seed", range(12))
def test_a_device_that_breaks_fails_transfers_and_holds_nothing_up(
    stub: StubGpu, seed: int
) -> None:
    stub.reset(seed)
    schedule = Schedule(stub, seed)
    schedule.run(10)
    schedule.lose_device()
    no_blocks = [0] * (len(schedule.shape.groups) - 1)
    stub.fail_copy(1 + seed)
    for rank in schedule.ranks:
        rank.worker.wait(range(1, 50))
        for job in range(100, 104):
            rank.worker.submit_load(job, [0], [1, *no_blocks], [0, *no_blocks], [job % 3])
        rank.worker.wait(range(100, 104))
        rank.worker.get_finished()
    schedule.abandon()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_worker_whose_memory_cannot_be_pinned_is_not_made(stub: StubGpu, nth: int) -> None:
    register = "cuMemHostRegister" if stub.vendor.name == "cuda" else "hipHostRegister"
    stub.fail(register, nth, 2)
    with pytest.raises(TransferFailed, match="could not register"):
        Schedule(stub, 1, PLAIN)
    assert stub.count("registrations") == nth - 1  # those of the ranks before


# --- negative controls: each takes away one rule


class Deaf(GpuDevice):
    """Copies do not wait for the compute stream."""

    def wait_event(self, stream: Stream, event: Event) -> None:  # type: ignore[explicit-override]
        pass


class Hasty(GpuDevice):
    """The arrays of a batch are used again as soon as it is queued."""

    def copy_batch(  # type: ignore[explicit-override]
        self, dst: Addresses, src: Addresses, sizes: Addresses, stream: Stream, direction: Direction
    ) -> None:
        super().copy_batch(dst, src, sizes, stream, direction)
        dst[0] += 1


class Careless(GpuDevice):
    """A store reads blocks out of stream order."""

    def copy_batch(  # type: ignore[explicit-override]
        self, dst: Addresses, src: Addresses, sizes: Addresses, stream: Stream, direction: Direction
    ) -> None:
        super().copy_batch(dst, src, sizes, stream, Direction.LOAD)


class Optimist(GpuDevice):
    """Every event counts as reached."""

    def query(self, event: Event) -> bool:  # type: ignore[explicit-override]
        return True

    def synchronize(self, event: Event) -> None:  # type: ignore[explicit-override]
        pass

    def elapsed_s(self, start: Event, end: Event) -> float:  # type: ignore[explicit-override]
        return 0.001


class Lazy(GpuDevice):
    """The last copy of a batch is left out."""

    def copy_batch(  # type: ignore[explicit-override]
        self, dst: Addresses, src: Addresses, sizes: Addresses, stream: Stream, direction: Direction
    ) -> None:
        if len(sizes) > 1:
            super().copy_batch(dst[:-1], src[:-1], sizes[:-1], stream, direction)


class Impatient(Optimist):
    """A stream is released, and the memory behind it, while it has work left."""

    def destroy_stream(self, stream: Stream) -> None:  # type: ignore[explicit-override]
        self._calls.stream_destroy(stream)

    def synchronize_all(self) -> None:  # type: ignore[explicit-override]
        pass


@pytest.mark.parametrize("fault", [Deaf, Hasty, Careless, Optimist, Lazy, Impatient])
def test_without_one_of_the_rules_bytes_differ_or_the_driver_objects(
    stub_cuda: StubGpu, fault: type[GpuDevice]
) -> None:
    def make(gpu: Gpu, stream: int, in_batches: bool) -> Device:
        del in_batches
        return fault(gpu.vendor.load(gpu.path), lambda: stream)

    n_seen = 0
    for seed in range(12):
        stub_cuda.reset(seed)
        try:
            run(stub_cuda, seed, make)
        except AssertionError:
            n_seen += 1
        else:
            n_seen += stub_cuda.violation != ""
    assert n_seen >= 3, f"{fault.__doc__} Only {n_seen} of 12 schedules show it."


def test_a_failed_load_that_still_runs_would_be_seen(
    stub_cuda: StubGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copier, "_drain", lambda copier: None)
    n_seen = 0
    for seed in range(60):
        try:
            run_with_failures(stub_cuda, seed)
        except (AssertionError, KVCellarError):
            n_seen += 1
    assert n_seen

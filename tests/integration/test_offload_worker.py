"""The offloading worker end to end over host memory: byte for byte, both ways.

The same tests run over numpy arrays and, in an environment that has it, over torch tensors;
`test_the_same_tests_pass_over_torch_tensors` starts the latter in the engine's environment.
"""

import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcellar.contract import Direction
from kvcellar.errors import ConfigurationError, RegionMismatch, Unsupported
from kvcellar.region.geometry import Layout
from kvcellar.worker.copier import Finished
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.devices import Device
from kvcellar.worker.kv_caches import BlockTensor
from kvcellar.worker.offload import CPUOffloadingWorker
from kvcellar.worker.platforms import uses_region
from tests.fakes.faulty_device import Fault, FaultyDevice
from tests.fakes.kv_caches import CacheRef, Caches, CacheTensor, HostTensor, MemoryRegion

ROOT = Path(__file__).resolve().parents[2]
ENGINE_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

pytestmark = pytest.mark.integration

Blocks = NDArray[np.int8]  # (num_blocks, page_bytes), the memory of a tensor on the "device"

NUM_BLOCKS = 24
NUM_CHUNKS = 10


def numpy_tensor(array: Blocks) -> BlockTensor:
    return HostTensor(array)


def torch_tensor(array: Blocks) -> BlockTensor:
    import torch

    tensor: BlockTensor = torch.from_numpy(array)  # shares the memory, strides included
    return tensor


HAS_TORCH = importlib.util.find_spec("torch") is not None
MAKERS = {"numpy": numpy_tensor} | ({"torch": torch_tensor} if HAS_TORCH else {})


@pytest.fixture(params=list(MAKERS.values()), ids=list(MAKERS))
def make_tensor(request: pytest.FixtureRequest) -> Callable[[Blocks], BlockTensor]:
    maker: Callable[[Blocks], BlockTensor] = request.param
    return maker


class Rig:
    """A worker, the memory of its tensors, and the results so far."""

    def __init__(
        self,
        make_tensor: Callable[[Blocks], BlockTensor],
        pages: list[int],
        *,
        blocks_per_chunk: int = 1,
        groups: list[list[CacheRef]] | None = None,
        gap: int = 0,
        region: MemoryRegion | None = None,
        num_chunks: int = NUM_CHUNKS,
        device: Device | None = None,
    ) -> None:
        random = np.random.default_rng(len(pages) + pages[0])
        self.blocks: list[Blocks] = [
            random.integers(-128, 128, (NUM_BLOCKS, page + gap), dtype=np.int8)[:, :page]
            for page in pages
        ]
        self.pages = pages
        self.blocks_per_chunk = blocks_per_chunk
        self.groups = groups or [[CacheRef(idx, page) for idx, page in enumerate(pages)]]
        self.region = region
        caches = Caches(
            [
                CacheTensor(make_tensor(blocks), page)
                for blocks, page in zip(self.blocks, pages, strict=True)
            ],
            self.groups,
        )
        self.worker = CPUOffloadingWorker(
            caches, blocks_per_chunk, num_chunks, region, device=device
        )

    def copies(self) -> list[Blocks]:
        return [blocks.copy() for blocks in self.blocks]

    def finish(self, *job_ids: int) -> list[Finished]:
        self.worker.wait(set(job_ids))
        return self.worker.get_finished()


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        rig.worker.shutdown()


def region_for(pages: list[int], blocks_per_chunk: int) -> MemoryRegion:
    return MemoryRegion.of(sum(pages) * blocks_per_chunk, NUM_CHUNKS)


@pytest.mark.parametrize("has_region", [False, True], ids=["private", "region"])
@pytest.mark.parametrize("gap", [0, 64], ids=["dense", "packed"])
@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
@pytest.mark.parametrize("page", [512, 1024, 4096, 65536])
def test_blocks_come_back_byte_for_byte_and_nothing_else_changes(
    make_tensor: Callable[[Blocks], BlockTensor],
    rigs: list[Rig],
    page: int,
    blocks_per_chunk: int,
    gap: int,
    has_region: bool,
) -> None:
    pages = [page, page, 2 * page, page]
    region = region_for(pages, blocks_per_chunk) if has_region else None
    rig = Rig(make_tensor, pages, blocks_per_chunk=blocks_per_chunk, gap=gap, region=region)
    rigs.append(rig)
    before = rig.copies()
    blocks, chunks = np.array([9, 4, 5, 6, 1, 0]), [7, 2, 3, 0, 1, 9][: 6 // blocks_per_chunk]
    assert rig.worker.submit_store(1, blocks, [6], [0], chunks)
    (stored,) = rig.finish(1)
    assert (stored.job_id, stored.ok, stored.size_bytes) == (1, True, 6 * 5 * page)
    assert stored.seconds > 0
    for now, then in zip(rig.blocks, before, strict=True):
        assert (now == then).all()

    targets = np.array([20, 11, 12, 13, 3, 8])
    assert rig.worker.submit_load(2, targets, [6], [0], chunks)
    (loaded,) = rig.finish(2)
    assert (loaded.job_id, loaded.ok, loaded.size_bytes) == (2, True, 6 * 5 * page)
    for now, then in zip(rig.blocks, before, strict=True):
        then[targets] = then[blocks]
        assert (now == then).all()


def test_a_region_holds_a_chunk_tensor_by_tensor_and_no_other_byte_changes(
    make_tensor: Callable[[Blocks], BlockTensor], rigs: list[Rig]
) -> None:
    pages = [512, 256]
    region = region_for(pages, 3)
    rig = Rig(make_tensor, pages, blocks_per_chunk=3, region=region)
    rigs.append(rig)
    assert rig.worker.submit_store(1, [2, 7, 1], [3], [6], [4])
    rig.finish(1)
    expected = np.full_like(region.chunks, 77)
    expected[4, :1536] = rig.blocks[0][[2, 7, 1]].ravel()
    expected[4, 1536:2304] = rig.blocks[1][[2, 7, 1]].ravel()
    assert (region.chunks == expected).all()
    assert region.transfers == [(Direction.STORE, 3 * 768, True)]


@pytest.mark.parametrize("has_region", [False, True], ids=["private", "region"])
def test_groups_share_a_tensor_begin_inside_a_chunk_and_may_be_empty(
    make_tensor: Callable[[Blocks], BlockTensor], rigs: list[Rig], has_region: bool
) -> None:
    pages = [1024, 512]
    groups = [
        [CacheRef(0, 1024)],
        [CacheRef(1, 512)],
        [CacheRef(0, 1000), CacheRef(1, 512)],  # shares both; its pages are padded
    ]
    region = region_for(pages, 3) if has_region else None
    rig = Rig(make_tensor, pages, blocks_per_chunk=3, groups=groups, region=region)
    rigs.append(rig)
    before = rig.copies()
    # Group 0: 5 blocks from block 4 of the request on, so 1 is left out of its first chunk.
    stored = [1, 2, 3, 4, 5, 8, 9, 10]
    assert rig.worker.submit_store(1, stored, [5, 0, 3], [4, 2, 0], [6, 0, 3])
    (result,) = rig.finish(1)
    assert (result.ok, result.size_bytes) == (True, 5 * 1024 + 3 * 1512)
    # The load begins one block later in group 0, and ends inside the chunk of group 2.
    assert rig.worker.submit_load(2, [12, 13, 14, 15, 18, 19], [4, 0, 2], [5, 0, 3], [6, 0, 3])
    (result,) = rig.finish(2)
    assert (result.ok, result.size_bytes) == (True, 4 * 1024 + 2 * 1512)
    before[0][[12, 13, 14, 15]] = before[0][[2, 3, 4, 5]]
    before[0][[18, 19], :1000] = before[0][[8, 9], :1000]
    before[1][[18, 19]] = before[1][[8, 9]]
    for now, then in zip(rig.blocks, before, strict=True):
        assert (now == then).all()


def test_a_block_of_more_dimensions_is_one_page(rigs: list[Rig]) -> None:
    shaped: Blocks = np.random.default_rng(0).integers(0, 99, (8, 2, 16, 4), dtype=np.int8)
    caches = Caches([CacheTensor(HostTensor(shaped), 128)], [[CacheRef(0, 128)]])
    worker = CPUOffloadingWorker(caches, 1, 4)
    worker.submit_store(1, [3], [1], [0], [2])
    worker.wait({1})
    worker.submit_load(2, [5], [1], [0], [2])
    worker.wait({2})
    worker.shutdown()
    assert (shaped[5] == shaped[3]).all()


def test_results_of_a_direction_come_in_order_and_each_once(
    make_tensor: Callable[[Blocks], BlockTensor], rigs: list[Rig]
) -> None:
    rig = Rig(make_tensor, [512])
    rigs.append(rig)
    for job_id in (8, 2, 5):
        assert rig.worker.submit_store(job_id, [job_id], [1], [0], [job_id])
    rig.worker.wait({8, 2, 5, 1234})
    rig.worker.submit_load(3, [0], [1], [0], [8])
    assert [result.job_id for result in rig.finish(3)] == [8, 2, 5, 3]
    assert rig.worker.get_finished() == []


# --- replicated -----------------------------------------------------------------------------------


def test_of_a_replicated_region_rank_0_alone_stores_and_all_ranks_load(
    make_tensor: Callable[[Blocks], BlockTensor], rigs: list[Rig]
) -> None:
    pages = [512, 512]
    first = MemoryRegion.of(1024, NUM_CHUNKS, Layout.REPLICATED, rank=0)
    second = MemoryRegion(first.geometry, rank=1)
    second.chunks = first.chunks  # the ranks map one copy
    ranks = [Rig(make_tensor, pages, region=region) for region in (first, second)]
    rigs += ranks
    ranks[1].blocks[0][:] = 1
    ranks[1].blocks[1][:] = 2
    assert ranks[1].worker.submit_store(1, [3, 4], [2], [0], [0, 1])
    assert ranks[1].worker.get_finished() == [Finished(1, True, 0, 0.0, "")]
    assert (second.chunks == 77).all()
    assert second.transfers == []

    assert ranks[0].worker.submit_store(1, [3, 4], [2], [0], [0, 1])
    (stored,) = ranks[0].finish(1)
    assert (stored.ok, stored.size_bytes) == (True, 2048)
    for rig in ranks:
        assert rig.worker.submit_load(2, [10, 11], [2], [0], [0, 1])
        assert rig.finish(2)[0].ok
        for blocks, original in zip(rig.blocks, ranks[0].blocks, strict=True):
            assert (blocks[[10, 11]] == original[[3, 4]]).all()


# --- failures -------------------------------------------------------------------------------------


def faulty(*faults: tuple[Direction, int, Fault]) -> Device:
    chosen = {(direction, number): fault for direction, number, fault in faults}
    return FaultyDevice(
        CpuDevice(), lambda direction, number: chosen.get((direction, number), Fault.NONE)
    )


def test_a_failed_store_marks_its_chunks_in_the_region_and_counts_as_done(rigs: list[Rig]) -> None:
    region = region_for([512], 1)
    device = faulty((Direction.STORE, 1, Fault.FAIL))
    rig = Rig(numpy_tensor, [512], region=region, device=device)
    rigs.append(rig)
    rig.worker.submit_store(1, [0], [1], [0], [0])
    rig.worker.submit_store(2, [1, 2], [2], [0], [5, 3])
    done, failed = rig.finish(1, 2)
    assert done.ok
    assert (failed.job_id, failed.ok, failed.size_bytes) == (2, True, 0)
    assert "chosen to fail" in failed.error
    assert region.marked == {3, 5}
    assert region.transfers == [(Direction.STORE, 512, True), (Direction.STORE, 0, False)]


def test_a_failed_store_is_reported_where_it_cannot_be_marked(rigs: list[Rig]) -> None:
    region = region_for([512], 1)
    region.cannot_mark = True
    for place in (None, region):
        device = faulty((Direction.STORE, 0, Fault.REFUSE))
        rig = Rig(numpy_tensor, [512], region=place, device=device)
        rigs.append(rig)
        rig.worker.submit_store(1, [0], [1], [0], [0])
        (result,) = rig.finish(1)
        assert (result.ok, result.size_bytes) == (False, 0)
        assert "chosen to be refused" in result.error


def test_a_store_with_dropped_blocks_marks_its_chunks_and_copies_nothing(rigs: list[Rig]) -> None:
    region = region_for([512], 3)
    rig = Rig(numpy_tensor, [512], blocks_per_chunk=3, region=region)
    rigs.append(rig)
    assert rig.worker.submit_store(1, [4, 5, 6, 8], [4], [0], [0, 1])
    (result,) = rig.worker.get_finished()
    assert (result.ok, result.size_bytes) == (True, 0)
    assert "null blocks" in result.error
    assert region.marked == {0, 1}
    assert (region.chunks == 77).all()


def test_a_load_that_fails_once_succeeds_and_one_that_fails_twice_is_reported(
    rigs: list[Rig],
) -> None:
    region = region_for([512], 1)
    device = faulty(*((Direction.LOAD, number, Fault.FAIL) for number in (0, 2, 3)))
    rig = Rig(numpy_tensor, [512], region=region, device=device)
    rigs.append(rig)
    rig.worker.submit_store(1, [0], [1], [0], [0])
    rig.finish(1)
    rig.worker.submit_load(2, [8], [1], [0], [0])
    assert rig.finish(2)[0].ok
    assert (rig.blocks[0][8] == rig.blocks[0][0]).all()
    rig.worker.submit_load(3, [9], [1], [0], [0])
    (failed,) = rig.finish(3)
    assert (failed.ok, failed.error) == (False, "these copies were chosen to fail")
    assert region.transfers[1:] == [(Direction.LOAD, 512, True), (Direction.LOAD, 0, False)]
    assert region.marked == set()


def test_a_skipped_load_leaves_the_blocks_as_they_were(rigs: list[Rig]) -> None:
    rig = Rig(numpy_tensor, [512], device=faulty((Direction.LOAD, 0, Fault.SKIP)))
    rigs.append(rig)
    before = rig.copies()
    rig.worker.submit_store(1, [0], [1], [0], [0])
    rig.worker.submit_load(2, [8], [1], [0], [0])
    assert [result.ok for result in rig.finish(1, 2)] == [True, True]
    assert (rig.blocks[0] == before[0]).all()


def test_a_load_whose_counts_disagree_is_reported_and_copies_nothing(rigs: list[Rig]) -> None:
    rig = Rig(numpy_tensor, [512], blocks_per_chunk=3)
    rigs.append(rig)
    before = rig.copies()
    assert rig.worker.submit_load(1, [4, 5], [2], [2], [0])
    (result,) = rig.worker.get_finished()
    assert not result.ok
    assert "2 chunks of 3" in result.error
    assert (rig.blocks[0] == before[0]).all()


# --- memory, shutdown, refusals -------------------------------------------------------------------


def test_without_chunks_there_is_no_memory_and_a_transfer_is_refused(
    rigs: list[Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(numpy_tensor, [512], num_chunks=0)
    rigs.append(rig)
    assert not rig.worker.submit_store(1, [0], [1], [0], [0])
    assert not rig.worker.submit_load(2, [0], [1], [0], [0])
    assert "zero chunks" in caplog.text
    assert rig.worker.submit_store(3, [], [0], [0], [])
    assert [(r.job_id, r.ok) for r in rig.finish(3)] == [(3, True)]


def test_shutdown_lets_transfers_in_flight_arrive_before_the_region_goes(
    make_tensor: Callable[[Blocks], BlockTensor],
) -> None:
    page = 1 << 20
    region = region_for([page], 1)
    rig = Rig(make_tensor, [page], region=region)
    for job_id in range(NUM_CHUNKS):
        rig.worker.submit_store(job_id, [job_id], [1], [0], [job_id])
    rig.worker.submit_load(99, [20], [1], [0], [9])
    rig.worker.shutdown()
    assert (region.chunks[:NUM_CHUNKS, :page] == rig.blocks[0][:NUM_CHUNKS]).all()
    assert region.log == ["close"]
    rig.worker.shutdown()
    assert region.log == ["close"]
    assert rig.worker.get_finished() == []
    assert not rig.worker.submit_store(1, [0], [1], [0], [0])


class BrokenDevice(FaultyDevice):
    """Cannot release a stream; everything else is as usual."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(CpuDevice(), lambda direction, number: Fault.FAIL)
        self._log = log

    def destroy_stream(self, stream: int) -> None:  # type: ignore[explicit-override]
        self._log.append("destroy_stream")
        raise OSError(5, "the device is gone")

    def synchronize_all(self) -> None:  # type: ignore[explicit-override]  # typing's is 3.12
        self._log.append("synchronize_all")
        super().synchronize_all()


def test_shutdown_goes_on_when_the_device_fails(caplog: pytest.LogCaptureFixture) -> None:
    region = region_for([512], 1)
    rig = Rig(numpy_tensor, [512], region=region, device=BrokenDevice(region.log))
    rig.worker.submit_store(1, [0], [1], [0], [0])
    rig.worker.submit_load(2, [0], [1], [0], [0])
    rig.worker.shutdown()
    # Each failed transfer waits, since nobody can say which of its copies still run.
    drained = ["synchronize_all", "destroy_stream"]
    assert region.log == [*drained, *drained, "synchronize_all", "close"]
    assert "could not drain stores" in caplog.text
    assert "could not drain loads" in caplog.text


def test_a_worker_whose_region_is_too_small_is_refused() -> None:
    region = MemoryRegion.of(512, NUM_CHUNKS)
    with pytest.raises(RegionMismatch, match="chunks of 512 bytes a rank"):
        Rig(numpy_tensor, [512], blocks_per_chunk=2, region=region)
    with pytest.raises(RegionMismatch, match="1000000 chunks"):
        Rig(numpy_tensor, [512], region=region, num_chunks=1_000_000)


def test_tensors_that_cannot_be_offloaded_are_refused_by_name() -> None:
    memory: Blocks = np.zeros((4, 512), dtype=np.int8)
    refs = [[CacheRef(0, 512)]]
    with pytest.raises(ConfigurationError, match="256 bytes were announced"):
        CPUOffloadingWorker(Caches([CacheTensor(HostTensor(memory), 256)], refs), 1, 4)
    every_second = HostTensor(memory[:, ::2])
    with pytest.raises(ConfigurationError, match="has to be one piece"):
        CPUOffloadingWorker(Caches([CacheTensor(every_second, 256)], refs), 1, 4)
    with pytest.raises(ConfigurationError, match="-1 chunks"):
        CPUOffloadingWorker(Caches([CacheTensor(HostTensor(memory), 512)], refs), 1, -1)
    with pytest.raises(ConfigurationError, match="private host memory"):
        CPUOffloadingWorker(Caches([CacheTensor(HostTensor(memory), 512)], refs), 1, 1 << 50)


class OtherDevice:
    """Stands for torch.device."""

    type = "xpu"


class XpuTensor(HostTensor):
    """A tensor on a device that kvcellar does not know."""

    device = OtherDevice()


def test_tensors_on_an_unknown_device_are_refused_by_name() -> None:
    tensor = XpuTensor(np.zeros((4, 512), dtype=np.int8))
    with pytest.raises(Unsupported, match="'xpu'"):
        CPUOffloadingWorker(Caches([CacheTensor(tensor, 512)], [[CacheRef(0, 512)]]), 1, 4)


def test_a_region_is_used_on_the_platforms_that_were_tried() -> None:
    assert [uses_region(name) for name in ("cuda", "rocm", "cpu")] == [True] * 3
    assert [uses_region(name) for name in ("xpu", "tpu", "neuron", "")] == [False] * 4


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.skipif(HAS_TORCH, reason="this environment has torch itself")
def test_the_same_tests_pass_over_torch_tensors() -> None:
    if not ENGINE_PYTHON.exists():
        pytest.skip("no .venv-vllm: run make venv-vllm")
    argv = [
        str(ENGINE_PYTHON),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "torch",
        __file__,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "sidecar"), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        argv, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout

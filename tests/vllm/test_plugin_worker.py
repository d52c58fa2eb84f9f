"""The plug-in's worker over the simulated driver: vLLM's own types in, every byte where it belongs."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvcellar.vllm.manager import ChunkSpec
from kvcellar.vllm.worker import RegionWorker
from kvcellar.worker.copier import Finished
from kvcellar.worker.offload import CPUOffloadingWorker
from tests.support.gpus import CUDA, HIP, StubGpu, Vendor, build_stub
from tests.support.schedules import Schedule

pytestmark = pytest.mark.vllm


class ThroughVllm:
    """Calls the plug-in's worker as vLLM does, for a schedule."""

    def __init__(self, worker: CPUOffloadingWorker) -> None:
        self._worker = RegionWorker(worker, recomputes_failed_loads=True)

    def submit_store(
        self,
        job_id: int,
        block_ids: list[int],
        group_sizes: list[int],
        block_indices: list[int],
        chunk_ids: list[int],
    ) -> bool:
        blocks = GPULoadStoreSpec(block_ids, group_sizes, block_indices)
        return self._worker.submit_store(job_id, blocks, ChunkSpec(chunk_ids))

    def submit_load(
        self,
        job_id: int,
        block_ids: list[int],
        group_sizes: list[int],
        block_indices: list[int],
        chunk_ids: list[int],
    ) -> bool:
        blocks = GPULoadStoreSpec(block_ids, group_sizes, block_indices)
        return self._worker.submit_load(job_id, ChunkSpec(chunk_ids), blocks, expedited=True)

    def get_finished(self) -> list[Finished]:
        results = self._worker.get_finished()
        failed = self._worker.take_failed_loads()
        return [
            Finished(
                result.job_id,
                result.success and result.job_id not in failed,
                result.transfer_size or 0,
                result.transfer_time or 0.0,
                "",
            )
            for result in results
        ]

    def wait(self, job_ids: Iterable[int]) -> None:
        self._worker.wait(set(job_ids))

    def shutdown(self) -> None:
        self._worker.shutdown()


@pytest.mark.parametrize("vendor", [CUDA, HIP], ids=["cuda", "hip"])
def test_every_byte_is_where_it_belongs(vendor: Vendor, tmp_path: Path) -> None:
    path = build_stub(vendor, tmp_path)
    assert path is not None
    stub = StubGpu(vendor, path)
    for seed in range(40):
        stub.reset(seed)
        schedule = Schedule(stub, seed, wrap=ThroughVllm)
        schedule.run(30)
        if seed % 2:
            schedule.finish()
        else:
            schedule.end()
        assert stub.violation == "", (seed, schedule.shape)
        assert stub.leaks == {}, (seed, schedule.shape)
    stub.close()

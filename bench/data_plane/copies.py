"""Host copies: scattered blocks between ordinary memory and a region.

vLLM 0.32 has no copy between two host buffers, since its CPU backend does not offload. The nearest is what torch
makes of the views that its region hands out: one `copy_` a block. kvcellar's side is a whole transfer of its worker, by
the thread of its stream. One thread copies on either side: torch would share a block of 64 KiB or more among all
cores, which are the engine's. Both regions have 4 KiB pages.
"""

import random
import time
from functools import partial

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from bench.data_plane.measuring import Bench, Comparison, Unit
from bench.data_plane.regions import attach_to, our_region, shared_region
from kvcellar.contract import Direction, HugePages
from kvcellar.vllm.manager import ChunkSpec
from kvcellar.vllm.worker import RegionWorker
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.offload import CPUOffloadingWorker

PAGES_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)

Pairs = tuple[list[int], list[int]]
"""Blocks, and the chunks that they go to or come from."""


def compare(bench: Bench) -> None:
    """Stores and loads of blocks of several sizes."""
    torch.set_num_threads(1)
    bench.head(f"host copies of {bench.scale.copy_bytes / 2**20:g} MiB, scattered")
    for page_bytes in PAGES_BYTES:
        _Copies(bench, page_bytes).compare()


class _Copies:
    """Blocks of one size in both regions."""

    def __init__(self, bench: Bench, page_bytes: int) -> None:
        self._bench = bench
        self._page_bytes = page_bytes
        self._count = bench.scale.copy_bytes // page_bytes
        self._random = random.Random(1)  # noqa: S311 - picks ids, no secrets
        self._blocks = torch.ones((self._count, page_bytes), dtype=torch.int8)

    def compare(self) -> None:
        """Stores, then loads."""
        size_bytes = self._count * self._page_bytes
        region = shared_region("copies", size_bytes, self._page_bytes)
        view = region.create_next_worker_view(self._page_bytes)
        try:
            with our_region(size_bytes, HugePages.NEVER) as engine_id:
                worker = self._worker(engine_id)
                for direction in Direction:
                    self._bench.compare(
                        Comparison(
                            f"{direction} of {self._page_bytes // 1024} KiB blocks",
                            Unit.MS,
                            self._draw,
                            partial(self._copy_theirs_s, view, direction),
                            partial(self._copy_ours_s, worker, direction),
                        )
                    )
                worker.shutdown()
        finally:
            del view
            region.cleanup()

    def _worker(self, engine_id: str) -> RegionWorker:
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(self._blocks, self._page_bytes)],
            [[CanonicalKVCacheRef(0, self._page_bytes)]],
        )
        region = attach_to(engine_id, self._page_bytes)
        worker = CPUOffloadingWorker(caches, 1, self._count, region, device=CpuDevice())
        return RegionWorker(worker, recomputes_failed_loads=True)

    def _draw(self) -> Pairs:
        """Every block once, and every chunk, in random order."""
        ids = range(self._count)
        return self._random.sample(ids, self._count), self._random.sample(ids, self._count)

    def _copy_theirs_s(self, view: torch.Tensor, direction: Direction, pairs: Pairs) -> float:
        blocks = self._blocks
        began = time.perf_counter()
        for block, chunk in zip(*pairs, strict=True):
            if direction is Direction.STORE:
                view[chunk].copy_(blocks[block])
            else:
                blocks[block].copy_(view[chunk])
        return time.perf_counter() - began

    def _copy_ours_s(self, worker: RegionWorker, direction: Direction, pairs: Pairs) -> float:
        blocks, chunks = pairs
        of_device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        of_host = ChunkSpec(chunks)
        began = time.perf_counter()
        if direction is Direction.STORE:
            worker.submit_store(1, of_device, of_host)
        else:
            worker.submit_load(1, of_host, of_device)
        worker.wait({1})
        took_s = time.perf_counter() - began
        (result,) = worker.get_finished()
        if not result.success or result.transfer_size != len(blocks) * self._page_bytes:
            raise RuntimeError(f"the {direction} of {self._page_bytes} bytes failed: {result}")
        return took_s

"""Transfers without a device: the Python work of vLLM's copy handlers against kvcellar's worker.

Streams, events and the copies themselves do nothing on both sides. A *transfer* is submitted and heard of as
finished, which is all the work of one. *Descriptors* are the arrays of addresses alone: vLLM's
`compute_sub_block_ptrs` for each tensor and side against kvcellar's `Planner`. That favours vLLM, since the planner
also checks every id, merges neighbours and writes sizes; with one tensor these are most of the work, so there whole
transfers alone are compared.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler

from bench.data_plane.measuring import Bench, Comparison, Unit, thread_s
from kvcellar.contract import Direction
from kvcellar.vllm.manager import ChunkSpec
from kvcellar.vllm.worker import RegionWorker
from kvcellar.worker.chunk_layout import ChunkLayout, HostChunks, TensorRef
from kvcellar.worker.devices import Addresses, Event, Stream
from kvcellar.worker.kv_caches import device_tensor
from kvcellar.worker.offload import CPUOffloadingWorker
from kvcellar.worker.plan import BlockTransfer, IdArray, Planner

_PAGE_BYTES = 8 << 10
_NUM_BLOCKS = 4096
_TIMES = 100
"""Transfers in a round."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One transfer.

    Attributes:
        tensors: of the KV cache, one a layer.
        blocks: that are copied, of each tensor.
        blocks_per_chunk: of the offload configuration.
    """

    tensors: int
    blocks: int
    blocks_per_chunk: int

    @property
    def words(self) -> str:
        """The shape for people."""
        per_chunk = f", {self.blocks_per_chunk} a chunk" if self.blocks_per_chunk > 1 else ""
        tensors = "1 tensor" if self.tensors == 1 else f"{self.tensors} tensors"
        blocks = "1 block" if self.blocks == 1 else f"{self.blocks} blocks"
        return f"{tensors}, {blocks}{per_chunk}"


@dataclass(frozen=True, slots=True)
class Ids:
    """Blocks and chunks of one transfer, also as both sides get them from their managers."""

    blocks: IdArray
    chunks: IdArray
    of_device: GPULoadStoreSpec
    of_theirs: CPULoadStoreSpec
    of_ours: ChunkSpec


SHAPES = (
    Shape(80, 256, 1),
    Shape(80, 256, 16),
    Shape(61, 256, 1),
    Shape(32, 16, 1),
    Shape(80, 1, 1),
    Shape(1, 256, 1),
)
"""Long prefixes of large models, one of them with chunks of several blocks; MLA; a short prefix; one
block of a decode step; and a cache whose layers share one tensor."""


def compare(bench: Bench) -> None:
    """Descriptors and whole transfers of all shapes, in random order of blocks and chunks."""
    bench.head("a transfer without a device")
    for shape in SHAPES:
        with _vllm_without_a_device():
            sides = _Sides(shape)
            sides.compare(bench)
            sides.close()


class _Sides:
    """A KV cache of one shape, and what both sides make for it. Its memory is never touched."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._random = random.Random(1)  # noqa: S311 - picks ids, no secrets
        per_chunk = shape.blocks_per_chunk
        self._num_chunks = _NUM_BLOCKS // per_chunk
        size = (_NUM_BLOCKS, _PAGE_BYTES)
        self._blocks = [torch.empty(size, dtype=torch.int8) for _ in range(shape.tensors)]
        rows = torch.empty(
            (self._num_chunks, shape.tensors, per_chunk * _PAGE_BYTES), dtype=torch.int8
        )
        self._chunks = [rows[:, idx] for idx in range(shape.tensors)]
        refs = [CanonicalKVCacheRef(idx, _PAGE_BYTES) for idx in range(shape.tensors)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, _PAGE_BYTES) for tensor in self._blocks], [refs]
        )
        self._store_handler = self._handler(refs, gpu_to_cpu=True)
        self._load_handler = self._handler(refs, gpu_to_cpu=False)
        worker = CPUOffloadingWorker(caches, per_chunk, self._num_chunks, device=_NoDevice())
        self._worker = RegionWorker(worker, recomputes_failed_loads=True)
        self._planner = self._make_planner(caches, rows)
        copies = shape.tensors * shape.blocks
        self._buffers = np.empty(copies, dtype=np.int64), np.empty(copies, dtype=np.int64)

    def _handler(
        self, refs: list[CanonicalKVCacheRef], *, gpu_to_cpu: bool
    ) -> gpu_worker.SingleDirectionOffloadingHandler:
        """A handler of vLLM, over tensors that pass for a GPU's until it has looked."""
        handler = SingleDirectionOffloadingHandler(
            gpu_tensors=[tensor.as_subclass(_OnDevice) for tensor in self._blocks],
            cpu_tensors=list(self._chunks),
            blocks_per_chunk=self._shape.blocks_per_chunk,
            layer_refs_per_group=[refs],
            gpu_to_cpu=gpu_to_cpu,
            host_memory_is_pinned=False,
        )
        # A subclass answers slower than a tensor.
        if gpu_to_cpu:
            handler.src_tensors = list(self._blocks)
        else:
            handler.dst_tensors = list(self._blocks)
        return handler

    def _make_planner(self, caches: CanonicalKVCaches, rows: torch.Tensor) -> Planner:
        tensors = [device_tensor(idx, cache) for idx, cache in enumerate(caches.tensors)]
        layout = ChunkLayout.compute([t.page_bytes for t in tensors], self._shape.blocks_per_chunk)
        host = HostChunks(rows.data_ptr(), layout.chunk_bytes, self._num_chunks)
        refs = [TensorRef(idx, _PAGE_BYTES) for idx in range(len(tensors))]
        return Planner(tensors, [refs], layout, host)

    def close(self) -> None:
        """End both sides."""
        self._worker.shutdown()
        self._store_handler.shutdown()
        self._load_handler.shutdown()

    def compare(self, bench: Bench) -> None:
        """Descriptors and transfers, and how many copies come of blocks that lie in runs."""
        if self._shape.tensors > 1:
            self._compare_times(bench, "descriptors", self._build_theirs, self._build_ours)
        self._compare_times(bench, "store", self._store_theirs, self._store_ours)
        self._compare_times(bench, "load", self._load_theirs, self._load_ours)
        if self._shape.blocks_per_chunk > 1:
            bench.compare(
                Comparison(
                    f"copies of a store in runs: {self._shape.words}",
                    Unit.COPIES,
                    self._run,
                    lambda given: float(len(given.blocks) * self._shape.tensors),
                    lambda given: float(len(self._planner.store(_transfer(given)).sizes)),
                    most_rounds=1,
                )
            )

    def _compare_times(
        self, bench: Bench, name: str, theirs: Callable[[Ids], None], ours: Callable[[Ids], None]
    ) -> None:
        def side(do: Callable[[Ids], None], given: list[Ids]) -> float:
            def run() -> None:
                for ids in given:
                    do(ids)

            return thread_s(run) / len(given)

        bench.compare(
            Comparison(
                f"{name}: {self._shape.words}",
                Unit.US,
                lambda: [self._scattered() for _ in range(_TIMES)],
                partial(side, theirs),
                partial(side, ours),
            )
        )

    # --- what is drawn

    def _scattered(self) -> Ids:
        """Blocks and chunks in random order."""
        blocks = self._random.sample(range(_NUM_BLOCKS), self._shape.blocks)
        return self._ids(blocks)

    def _run(self) -> Ids:
        """Blocks that follow each other, as those of a prompt on an empty engine do."""
        return self._ids(list(range(self._shape.blocks)))

    def _ids(self, blocks: list[int]) -> Ids:
        n_chunks = -(-len(blocks) // self._shape.blocks_per_chunk)
        chunks = self._random.sample(range(self._num_chunks), n_chunks)
        of_device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        theirs, ours = CPULoadStoreSpec(chunks), ChunkSpec(chunks)
        return Ids(of_device.block_ids, theirs.block_ids, of_device, theirs, ours)

    # --- what both sides do with it

    def _build_theirs(self, ids: Ids) -> None:
        src, dst = self._buffers
        first = 0
        for block_tensor, chunk_tensor in zip(self._blocks, self._chunks, strict=True):
            part = slice(first, first := first + self._shape.blocks)
            gpu_worker.compute_sub_block_ptrs(ids.blocks, 1, src[part], block_tensor)
            gpu_worker.compute_sub_block_ptrs(
                ids.chunks, self._shape.blocks_per_chunk, dst[part], chunk_tensor
            )

    def _build_ours(self, ids: Ids) -> None:
        self._planner.store(_transfer(ids))

    def _store_theirs(self, ids: Ids) -> None:
        self._store_handler.transfer_async(1, ids.of_device, ids.of_theirs)
        self._store_handler.get_finished()

    def _store_ours(self, ids: Ids) -> None:
        self._worker.submit_store(1, ids.of_device, ids.of_ours)
        self._worker.get_finished()

    def _load_theirs(self, ids: Ids) -> None:
        self._load_handler.transfer_async(1, ids.of_theirs, ids.of_device)
        self._load_handler.get_finished()

    def _load_ours(self, ids: Ids) -> None:
        self._worker.submit_load(1, ids.of_ours, ids.of_device)
        self._worker.get_finished()


def _transfer(ids: Ids) -> BlockTransfer:
    return BlockTransfer(ids.blocks, [len(ids.blocks)], [0], ids.chunks)


class _NoDevice:
    """kvcellar's device seam with nothing behind it."""

    pins_host: ClassVar[bool] = False

    def new_stream(self) -> Stream:
        return Stream(1)

    def destroy_stream(self, stream: Stream) -> None:
        pass

    def current_stream(self) -> Stream:
        return Stream(0)

    def new_event(self, *, is_timed: bool = True) -> Event:
        return Event(1)

    def destroy_event(self, event: Event) -> None:
        pass

    def record(self, event: Event, stream: Stream) -> None:
        pass

    def wait_event(self, stream: Stream, event: Event) -> None:
        pass

    def query(self, event: Event) -> bool:
        return True

    def synchronize(self, event: Event) -> None:
        pass

    def elapsed_s(self, start: Event, end: Event) -> float:
        return 1.0

    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        pass

    def register_host(self, address: int, size_bytes: int) -> None:
        pass

    def unregister_host(self, address: int) -> None:
        pass

    def synchronize_all(self) -> None:
        pass

    def close(self) -> None:
        pass


class _NoStream:
    """A stream and an event of torch with nothing behind them."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 1.0


class _NoPlatform:
    """vLLM's platform as far as its copy handlers ask."""

    Stream = _NoStream
    _current = _NoStream()

    def is_xpu(self) -> bool:
        return False

    def current_stream(self) -> _NoStream:
        return self._current

    def stream(self, stream: object) -> "nullcontext[None]":
        return nullcontext()


def _copy_nothing(*_: object, is_src_access_order_any: bool) -> None:
    pass


class _OnDevice(torch.Tensor):  # type: ignore[misc] # mypy sees torch as Any here
    """A tensor that passes for one of a GPU."""

    is_cuda = True


@contextmanager
def _vllm_without_a_device() -> Iterator[None]:
    """The handlers of vLLM with nothing behind their streams, events and copies."""
    with (
        mock.patch.object(gpu_worker, "current_platform", _NoPlatform()),
        mock.patch.object(gpu_worker.ops, "swap_blocks_batch", _copy_nothing),
        mock.patch.object(torch, "Event", _NoStream),
    ):
        yield

"""The engine's side of offload: stores and loads of KV blocks, over a region or private memory.

`CPUOffloadingWorker` is made in each rank's process, once the KV cache tensors exist. It plans each
transfer (`plan`), gives it to the copier of its direction (`copier`) and hands out the results. Its
methods take what vLLM's offloading connector has, as plain ids, and its input is read by shape
(`kv_caches.KVCaches`), so it works with any engine and without torch.

**Failure.** Nothing that can happen to a transfer raises here; it comes out of `get_finished`:

- A failed *store* over a region marks its chunks there, and then counts as done: the scheduler's
  index reads the marks and forgets the keys, so these chunks are never loaded. If the marks cannot be
  written, or without a region, the result is not ok.
- A failed *load* is tried once more by the copier; then its result is not ok, and what becomes of the
  request is the caller's decision.

**Replicated layout.** All ranks load the one copy; rank 0 alone stores. The other ranks answer a store
at once, as vLLM waits for an answer of each rank.

One thread calls a worker. This module must not import vLLM.
"""

import logging
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np

from kvcellar.contract import Direction
from kvcellar.errors import ConfigurationError, KVCellarError, RegionMismatch
from kvcellar.region.geometry import Geometry, Layout
from kvcellar.worker import pin
from kvcellar.worker.chunk_layout import ChunkLayout, HostChunks, TensorRef
from kvcellar.worker.copier import Copier, Finished
from kvcellar.worker.devices import Device
from kvcellar.worker.kv_caches import KVCaches, device_tensor, device_type
from kvcellar.worker.plan import BlockTransfer, IdArray, Planner
from kvcellar.worker.platforms import device_for

logger = logging.getLogger(__name__)


class HostRegion(Protocol):
    """This rank's share of a region; `kvcellar.worker.attached.Region` in an engine."""

    @property
    def geometry(self) -> Geometry:
        """Where chunks lie."""
        ...

    @property
    def rank(self) -> int:
        """The rank of this process in its engine."""
        ...

    @property
    def base_address(self) -> int:
        """Address of chunk 0 of this rank."""
        ...

    def add_counters(self, direction: Direction, num_bytes: int, *, ok: bool) -> None:
        """Count a finished transfer."""
        ...

    def mark_failed_store(self, chunk: int) -> None:
        """Tell the scheduler that a chunk does not hold what its key says."""
        ...

    def pin(self, device: Device) -> bool:
        """Register the chunks with the device's driver, on all ranks or on none; whether they are."""
        ...

    def unpin(self) -> None:
        """Undo `pin`."""
        ...

    def close(self) -> None:
        """Detach from the region."""
        ...


class CPUOffloadingWorker:
    """Moves KV blocks of one rank between the device and chunks of host memory.

    Args:
        kv_caches: the tensors of this rank; they are kept until `shutdown`.
        blocks_per_chunk: blocks of every tensor in a chunk.
        num_cpu_chunks: chunks to use; 0 means that there is no host tier.
        region: where the chunks are; from here on it is the worker's own, which closes it, unless this
            raises. It is pinned here if that was not tried before (`Region.pin`, a collective call).
            Without one the worker allocates private memory of exactly this many chunks.
        device: makes the copies; by default the one that the tensors are on. It becomes the worker's.

    Raises:
        ConfigurationError: a layout that cannot be offloaded, or memory that cannot be had.
        RegionMismatch: the region was laid out for fewer or smaller chunks.
        Unsupported: the tensors are on a device that kvcellar cannot copy from.
        NotReady: some rank cannot read its part of the region.
        TransferFailed: the driver of the device gave an error.
    """

    def __init__(
        self,
        kv_caches: KVCaches,
        blocks_per_chunk: int,
        num_cpu_chunks: int,
        region: HostRegion | None = None,
        *,
        device: Device | None = None,
    ) -> None:
        tensors = [device_tensor(idx, cache) for idx, cache in enumerate(kv_caches.tensors)]
        layout = ChunkLayout.compute([t.page_bytes for t in tensors], blocks_per_chunk)
        if num_cpu_chunks < 0:
            raise ConfigurationError(
                f"{num_cpu_chunks} chunks of host memory were asked for; give 0 (no host tier) or more"
            )
        self._private: mmap.mmap | None = None
        if region is not None:
            host = _region_chunks(region, layout, num_cpu_chunks)
        else:
            self._private = _allocate(num_cpu_chunks * layout.chunk_bytes)
            host = HostChunks(_address_of(self._private), layout.chunk_bytes, num_cpu_chunks)
        groups = [
            [TensorRef(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._kv_caches: KVCaches | None = kv_caches
        self._planner = Planner(tensors, groups, layout, host)
        self._num_chunks = num_cpu_chunks
        self._region = region
        self._is_store_writer = (
            region is None or region.geometry.layout is Layout.SHARDED or region.rank == 0
        )
        self._device = device or device_for(device_type(kv_caches))
        self._stores = Copier(self._device, Direction.STORE)
        self._loads = Copier(self._device, Direction.LOAD)
        self._chunks_of_store: dict[int, IdArray] = {}
        self._settled: list[Finished] = []  # results of jobs that no copier has seen
        self._is_shut_down = False
        if region is not None:
            region.pin(self._device)

    def submit_store(
        self,
        job_id: int,
        block_ids: Sequence[int] | IdArray,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        chunk_ids: Sequence[int] | IdArray,
    ) -> bool:
        """Begin to copy blocks into chunks. Does not block.

        Args:
            job_id: of all stores and loads in flight, this one's.
            block_ids: blocks, one KV cache group after the other.
            group_sizes: how many blocks belong to each group.
            block_indices: place of each group's first block in its request, in blocks.
            chunk_ids: chunks that the blocks go to, one group after the other, each at most once.

        Returns:
            True if `get_finished` will report the job, whatever becomes of it. False if it is
            refused: there is no host tier (zero chunks), or the worker is shut down.

        Raises:
            ConfigurationError: a store of this id is in flight.
        """
        transfer = _transfer(block_ids, group_sizes, block_indices, chunk_ids)
        if not self._accepts(Direction.STORE, job_id, transfer):
            return False
        if not self._is_store_writer:
            self._settled.append(Finished(job_id, True, 0, 0.0, ""))
            return True
        try:
            plan = self._planner.store(transfer)
        except KVCellarError as error:
            failed = Finished(job_id, False, 0, 0.0, str(error))
            self._settled.append(self._finish_store(failed, transfer.chunk_ids))
            return True
        self._stores.submit(job_id, plan)
        self._chunks_of_store[job_id] = transfer.chunk_ids
        return True

    def submit_load(
        self,
        job_id: int,
        block_ids: Sequence[int] | IdArray,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        chunk_ids: Sequence[int] | IdArray,
    ) -> bool:
        """Begin to copy chunks into blocks. Does not block; arguments and result as `submit_store`."""
        transfer = _transfer(block_ids, group_sizes, block_indices, chunk_ids)
        if not self._accepts(Direction.LOAD, job_id, transfer):
            return False
        try:
            plan = self._planner.load(transfer)
        except KVCellarError as error:
            failed = Finished(job_id, False, 0, 0.0, str(error))
            self._settled.append(self._finish_load(failed))
            return True
        self._loads.submit(job_id, plan)
        return True

    def get_finished(self) -> list[Finished]:
        """Results since the last call, each job once, those of a direction in order. Does not block."""
        finished, self._settled = self._settled, []
        for result in self._stores.poll():
            finished.append(self._finish_store(result, self._chunks_of_store.pop(result.job_id)))
        for result in self._loads.poll():
            finished.append(self._finish_load(result))
        return finished

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until no copy of these jobs runs; `get_finished` still reports them.

        Ids of jobs that are not in flight are ignored.
        """
        job_ids = list(job_ids)
        self._stores.wait(job_ids)
        self._loads.wait(job_ids)

    def shutdown(self) -> None:
        """Drain the stores, then the loads, then unpin and let go of device, region and private memory.

        Blocks until no copy runs. An error is logged and the rest is released all the same. A second
        call does nothing.
        """
        if self._is_shut_down:
            return
        self._is_shut_down = True
        try:
            is_drained = [
                _try("drain stores", self._stores.close),
                _try("drain loads", self._loads.close),
            ]
            if not all(is_drained):
                # The memory must not go while something may still be copying to it.
                _try("wait for the device", self._device.synchronize_all)
            if self._region is not None:
                _try("unpin the region", self._region.unpin)
            _try("close the device", self._device.close)
        finally:
            self._kv_caches = None
            self._private = None
            if self._region is not None:
                _try("detach from the region", self._region.close)
                self._region = None

    def _accepts(self, direction: Direction, job_id: int, transfer: BlockTransfer) -> bool:
        if self._is_shut_down:
            logger.error("%s job %d refused: this worker is shut down", direction, job_id)
            return False
        if self._num_chunks == 0 and len(transfer.chunk_ids):
            logger.error(
                "%s job %d refused: it names %d chunks, and this worker has no host memory (zero "
                "chunks); the scheduler should have turned offload off",
                direction,
                job_id,
                len(transfer.chunk_ids),
            )
            return False
        return True

    def _finish_store(self, result: Finished, chunk_ids: IdArray) -> Finished:
        """Count a store; turn a failed one into marks on its chunks where that is possible."""
        if self._region is None:
            if not result.ok:
                logger.error("store job %d failed: %s", result.job_id, result.error)
            return result
        self._region.add_counters(Direction.STORE, result.size_bytes, ok=result.ok)
        if result.ok:
            return result
        try:
            for chunk in chunk_ids.tolist():
                self._region.mark_failed_store(chunk)
        except (KVCellarError, OSError) as error:
            logger.exception("store job %d failed, and so did marking its chunks", result.job_id)
            why = f"{result.error}; its chunks could not be marked as failed either: {error}"
            return Finished(result.job_id, False, 0, 0.0, why)
        logger.warning(
            "store job %d failed, its %d chunks will not be used: %s",
            result.job_id,
            len(chunk_ids),
            result.error,
        )
        return Finished(result.job_id, True, 0, 0.0, result.error)

    def _finish_load(self, result: Finished) -> Finished:
        if self._region is not None:
            self._region.add_counters(Direction.LOAD, result.size_bytes, ok=result.ok)
        if not result.ok:
            logger.error("load job %d failed: %s", result.job_id, result.error)
        return result


def _try(what: str, step: Callable[[], None]) -> bool:
    """Take a step of the shutdown; whether it went well."""
    try:
        step()
    except (KVCellarError, OSError):
        logger.exception("shutdown: could not %s; going on", what)
        return False
    return True


def _transfer(
    block_ids: Sequence[int] | IdArray,
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    chunk_ids: Sequence[int] | IdArray,
) -> BlockTransfer:
    return BlockTransfer(
        block_ids=np.asarray(block_ids),
        group_sizes=group_sizes,
        block_indices=block_indices,
        chunk_ids=np.asarray(chunk_ids),
    )


def _region_chunks(region: HostRegion, layout: ChunkLayout, num_chunks: int) -> HostChunks:
    geometry = region.geometry
    if num_chunks > geometry.num_chunks or layout.chunk_bytes > geometry.chunk_bytes:
        raise RegionMismatch(
            f"{num_chunks} chunks of {layout.chunk_bytes} bytes were asked for; the region has "
            f"{geometry.num_chunks} chunks of {geometry.chunk_bytes} bytes a rank: the engine computed "
            "its chunks from other KV cache sizes than the rank that laid the region out"
        )
    stride_bytes = geometry.chunk_stride_bytes
    return HostChunks(
        region.base_address, stride_bytes, num_chunks, pin.chunks_per_piece(stride_bytes)
    )


def _allocate(size_bytes: int) -> mmap.mmap | None:
    """Private, zeroed memory on a page boundary; pages cost nothing until they are written."""
    if not size_bytes:
        return None
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigurationError(
            f"{size_bytes} bytes of private host memory were asked for and refused ({error.strerror}): "
            "lower cpu_bytes_to_use"
        ) from error
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages; it is only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _address_of(memory: mmap.mmap | None) -> int:
    return 0 if memory is None else np.frombuffer(memory, dtype=np.uint8).ctypes.data

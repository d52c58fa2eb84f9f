"""KV caches and a region in plain host memory, with the shape of vLLM's and of ours.

`HostTensor` has the methods of a torch tensor that the worker calls, so the same tests run with and
without torch. `HostRegion` follows `kvcellar.worker.offload.HostRegion` and remembers what it was told.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcellar.contract import Direction
from kvcellar.errors import TransferFailed
from kvcellar.region.geometry import Geometry, Layout
from kvcellar.worker.devices import Device
from kvcellar.worker.kv_caches import BlockTensor
from kvcellar.worker.pin import PinnedMemory, cut


class HostTensor:
    """A numpy array that answers like a torch tensor."""

    def __init__(self, array: NDArray[np.int8]) -> None:
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self, dim: int, /) -> int:
        return self.array.strides[dim] // self.array.itemsize

    def element_size(self) -> int:
        return self.array.itemsize


@dataclass
class CacheTensor:
    """As vLLM's CanonicalKVCacheTensor."""

    tensor: BlockTensor
    page_size_bytes: int


@dataclass
class CacheRef:
    """As vLLM's CanonicalKVCacheRef."""

    tensor_idx: int
    page_size_bytes: int


@dataclass
class Caches:
    """As vLLM's CanonicalKVCaches."""

    tensors: Sequence[CacheTensor]
    group_data_refs: Sequence[Sequence[CacheRef]]


@dataclass
class MemoryRegion:
    """This rank's share of a region, in private memory."""

    geometry: Geometry
    rank: int = 0
    log: list[str] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    cannot_mark: bool = False
    transfers: list[tuple[Direction, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pinned: PinnedMemory | None = None
        shape = (self.geometry.num_chunks, self.geometry.chunk_stride_bytes)
        self.chunks: NDArray[np.int8] = np.full(shape, 77, dtype=np.int8)

    @classmethod
    def of(
        cls, chunk_bytes: int, num_chunks: int, layout: Layout = Layout.SHARDED, rank: int = 0
    ) -> "MemoryRegion":
        """A region of at least `num_chunks` chunks for one of two ranks."""
        copies = 1 if layout is Layout.REPLICATED else 2
        capacity = copies * (num_chunks * (chunk_bytes + 4096) + (1 << 21))
        return cls(Geometry.compute(capacity, chunk_bytes, 2, layout, 4096), rank)

    @property
    def base_address(self) -> int:
        return self.chunks.ctypes.data

    def add_counters(self, direction: Direction, num_bytes: int, *, ok: bool) -> None:
        self.transfers.append((direction, num_bytes, ok))

    def mark_failed_store(self, chunk: int) -> None:
        if self.cannot_mark:
            raise TransferFailed("marks cannot be written")
        self.marked.add(chunk)

    def pin(self, device: Device) -> bool:
        if not device.pins_host:
            return False
        stride = self.geometry.chunk_stride_bytes
        self._pinned = PinnedMemory(device)
        self._pinned.register(cut(self.base_address, stride, self.geometry.num_chunks))
        return True

    def unpin(self) -> None:
        if self._pinned is not None:
            self.log.append("unpin")
            self._pinned.close()

    def close(self) -> None:
        self.log.append("close")

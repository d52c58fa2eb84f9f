"""From block ids and chunk ids to copy descriptors: arrays in, arrays out.

Where a block lies in a chunk stands in `chunk_layout`.

**What vLLM hands over** (its `GPULoadStoreSpec`): block ids one group after the other,
`group_sizes[g]` of group `g`; `block_indices[g]` is the place of the group's first block in its
request, so `block_indices[g] % blocks_per_chunk` blocks of the group's first chunk are left out.
Chunk ids come one group after the other too, as many as the group's blocks reach into.

**Dropped blocks.** vLLM leaves null blocks (outside a sliding window, between states of a linear
attention) out of a store without saying where they were; the rest would move up and land in the
wrong place. A store is made of whole chunks and only its first block may begin inside one, so with
`d` blocks dropped of a group, `skip + size + d` is a multiple of `blocks_per_chunk`. If `d` is at
least `blocks_per_chunk` the group needs fewer chunks than were given; if it is less the blocks do
not end on a chunk. Both are refused, so no dropped block passes. A group's need is never above what
was given for it, so comparing the sums over all groups finds a difference in any. (A store of one
block is exact wherever it lies; vLLM makes such stores of partial tails.) Loads drop nothing, and
may end inside a chunk.

Invariants: of one plan no two descriptors overlap on the destination, if the ids are distinct; a
descriptor never crosses a tensor, nor a registered piece of host memory. This module must not know
files, devices, torch or vLLM.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcellar.errors import TransferFailed
from kvcellar.worker.chunk_layout import (
    ChunkLayout,
    DeviceTensor,
    HostChunks,
    TensorRef,
    check_tensors,
)

_INT64 = np.dtype(np.int64)
_UINT64 = np.dtype(np.uint64)

Addresses = NDArray[np.uint64]
"""Addresses or sizes in bytes, C contiguous, ready for a driver that takes raw pointers."""

IdArray = NDArray[np.integer]
"""Block or chunk ids of any integer type."""


class BlockTransfer(NamedTuple):
    """What a caller asks to be copied, in either direction; the module docstring says how it reads.

    A tuple, as the two below, because each transfer makes some of them and they are made fastest.

    Attributes:
        block_ids: blocks on the device, one group after the other.
        group_sizes: how many of them belong to each group.
        block_indices: place of each group's first block in its request, in blocks.
        chunk_ids: chunks on the host, one group after the other.
    """

    block_ids: IdArray
    group_sizes: Sequence[int]
    block_indices: Sequence[int]
    chunk_ids: IdArray


class CopyPlan(NamedTuple):
    """Copies between device and host: three arrays of the same length, one entry a descriptor.

    Attributes:
        device: addresses on the device.
        host: addresses on the host.
        sizes: bytes of each.
        total_bytes: their sum.
    """

    device: Addresses
    host: Addresses
    sizes: Addresses
    total_bytes: int


@dataclass(slots=True)
class _Shape:
    """The tensors of a group that share stride, page and used bytes: one broadcast serves them all."""

    device_bases: Addresses  # (n_tensors, 1)
    host_bases: Addresses  # (n_tensors, 1): address of the tensor in chunk 0
    stride_bytes: int
    page_bytes: int
    used_bytes: int
    has_no_gaps: bool  # blocks that are neighbours by number are so in memory, on both sides
    _sizes: Addresses = field(default_factory=lambda: np.empty(0, dtype=_UINT64))

    def sizes_of_blocks(self, count: int) -> Addresses:
        """The used bytes so many times: the same array for all plans, since nobody writes to it."""
        if len(self._sizes) < count:
            self._sizes = np.full(count, self.used_bytes, dtype=_UINT64)
            self._sizes.flags.writeable = False
        return self._sizes[:count]


class _Places(NamedTuple):
    """Places to copy, the same for all tensors of a group: one entry a block, or a run of blocks."""

    blocks: NDArray[np.int64]
    chunk_offsets: NDArray[np.int64]
    slots: NDArray[np.int64] | int  # an int is 0: one block a chunk
    lengths: NDArray[np.int64] | int


_Extent = tuple[int, int, int]
"""Of a group: its blocks, those to leave out of its first chunk, and the chunks that it reaches into."""


class Planner:
    """Makes copy plans for one set of tensors and one piece of host memory.

    Args:
        tensors: all tensors, in the order in which a chunk holds them.
        groups: what each KV cache group uses; a tensor may be used by several groups.
        layout: of a chunk.
        host: where the chunks are.

    Raises:
        ConfigurationError: a reference to a tensor that is not there or to more than its page,
            blocks that overlap, or chunks that do not fit their stride.
    """

    def __init__(
        self,
        tensors: Sequence[DeviceTensor],
        groups: Sequence[Sequence[TensorRef]],
        layout: ChunkLayout,
        host: HostChunks,
    ) -> None:
        check_tensors(tensors, groups, layout, host)
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._host = host
        self._shapes = [_shapes_of(tensors, refs, layout, host) for refs in groups]
        self._num_blocks = [
            min((tensors[ref.tensor_idx].num_blocks for ref in refs), default=0) for refs in groups
        ]
        # Only then is the last block of a chunk next to the first of the following one.
        self._chunks_touch = len(tensors) == 1 and layout.chunk_bytes == host.stride_bytes
        has_neighbours = layout.blocks_per_chunk > 1 or self._chunks_touch
        self._can_merge = [
            has_neighbours and any(shape.has_no_gaps for shape in shapes) for shapes in self._shapes
        ]

    def store(self, transfer: BlockTransfer) -> CopyPlan:
        """Descriptors that bring blocks into chunks.

        Raises:
            TransferFailed: an id out of range, or counts that do not agree: see the module.
        """
        extents = self._check(transfer)
        for group, (size, skip, _) in enumerate(extents):
            if size > 1 and (skip + size) % self._blocks_per_chunk:
                raise TransferFailed(
                    f"a store of {size} blocks of group {group} that begins {skip} blocks into a chunk "
                    f"of {self._blocks_per_chunk} does not end on a chunk, so null blocks were left "
                    "out of it and the place of the others is not known; these chunks are not kept, "
                    "and one block per chunk in the offload configuration avoids it"
                )
        return self._build(transfer, extents)

    def load(self, transfer: BlockTransfer) -> CopyPlan:
        """Descriptors that bring chunks back into blocks.

        Raises:
            TransferFailed: an id out of range, or counts that do not agree: see the module.
        """
        return self._build(transfer, self._check(transfer))

    def _check(self, transfer: BlockTransfer) -> list[_Extent]:
        """Compare all counts; what each group takes."""
        n_groups = len(self._shapes)
        sizes, indices = transfer.group_sizes, transfer.block_indices
        if (
            len(sizes) != n_groups
            or len(indices) != n_groups
            or min((*sizes, *indices), default=0) < 0
        ):
            raise TransferFailed(
                f"a transfer with group sizes {list(sizes)} and first blocks {list(indices)} was asked "
                f"for; this engine has {n_groups} KV cache groups and no count is negative"
            )
        per_chunk, needed = self._blocks_per_chunk, 0
        extents: list[_Extent] = []
        for size, index in zip(sizes, indices, strict=True):
            skip = index % per_chunk
            n_chunks = -(-(skip + size) // per_chunk) if size else 0
            needed += n_chunks
            extents.append((size, skip, n_chunks))
        if sum(sizes) != len(transfer.block_ids) or needed != len(transfer.chunk_ids):
            raise TransferFailed(
                f"a transfer of {len(transfer.block_ids)} blocks and {len(transfer.chunk_ids)} chunks "
                f"was asked for; group sizes {list(sizes)} and first blocks {list(indices)} make "
                f"{sum(sizes)} blocks and {needed} chunks of {self._blocks_per_chunk}: null blocks "
                "were left out, or the engine and kvcellar count chunks differently"
            )
        return extents

    def _build(self, transfer: BlockTransfer, extents: list[_Extent]) -> CopyPlan:
        blocks = np.asarray(transfer.block_ids, dtype=_INT64)
        chunks = np.asarray(transfer.chunk_ids, dtype=_INT64)
        _check_ids("chunk", chunks, self._host.num_chunks)
        parts: list[CopyPlan] = []
        for group, (size, skip, n_chunks) in enumerate(extents):
            if not size:
                continue
            _check_ids("block", blocks[:size], self._num_blocks[group])
            parts += self._build_group(group, blocks[:size], chunks[:n_chunks], skip)
            blocks, chunks = blocks[size:], chunks[n_chunks:]
        return _concatenate(parts)

    def _build_group(
        self, group: int, blocks: NDArray[np.int64], chunks: NDArray[np.int64], skip: int
    ) -> list[CopyPlan]:
        single = self._places(blocks, chunks, skip)
        runs = single
        if self._can_merge[group]:
            runs = self._merge(single)
        return [
            _broadcast(shape, runs if shape.has_no_gaps else single)
            for shape in self._shapes[group]
        ]

    def _places(self, blocks: NDArray[np.int64], chunks: NDArray[np.int64], skip: int) -> _Places:
        """One entry a block."""
        if self._blocks_per_chunk == 1:
            return _Places(blocks, chunks * self._host.stride_bytes, 0, 1)
        chunk_idx, slots = np.divmod(
            np.arange(skip, skip + len(blocks), dtype=np.int64), self._blocks_per_chunk
        )
        return _Places(blocks, (chunks * self._host.stride_bytes)[chunk_idx], slots, 1)

    def _merge(self, places: _Places) -> _Places:
        """One entry a run of blocks that are neighbours on both sides."""
        blocks, offsets, slots = places.blocks, places.chunk_offsets, places.slots
        is_next = blocks[1:] - blocks[:-1] == 1
        if not np.count_nonzero(is_next):
            return places
        is_next &= self._continues_on_host(offsets, slots)
        if not np.count_nonzero(is_next):
            return places
        starts = np.flatnonzero(np.concatenate(([True], ~is_next)))
        ends = np.empty_like(starts)
        ends[:-1], ends[-1] = starts[1:], len(blocks)
        return _Places(
            blocks=blocks[starts],
            chunk_offsets=offsets[starts],
            slots=slots if isinstance(slots, int) else slots[starts],
            lengths=ends - starts,
        )

    def _continues_on_host(
        self, offsets: NDArray[np.int64], slots: NDArray[np.int64] | int
    ) -> NDArray[np.bool_]:
        """Of each entry but the first, whether it lies right behind the one before it."""
        # Inside a chunk slots only rise by one, so a slot above 0 continues the entry before it.
        inside = np.False_ if isinstance(slots, int) else slots[1:] > 0
        if not self._chunks_touch:
            return np.asarray(inside)
        is_next_chunk = offsets[1:] - offsets[:-1] == self._host.stride_bytes
        if self._host.chunks_per_piece:
            piece_bytes = self._host.chunks_per_piece * self._host.stride_bytes
            is_next_chunk &= offsets[1:] % piece_bytes != 0
        continues: NDArray[np.bool_] = is_next_chunk | inside
        return continues


def _broadcast(shape: _Shape, places: _Places) -> CopyPlan:
    """Every place of every tensor: tensors by places, one addition a side."""
    n_tensors, n_places = len(shape.device_bases), len(places.blocks)
    device = shape.device_bases + (places.blocks * shape.stride_bytes).view(_UINT64)
    host_offsets = places.chunk_offsets
    if not isinstance(places.slots, int):
        host_offsets = host_offsets + places.slots * shape.page_bytes
    host = shape.host_bases + host_offsets.view(_UINT64)
    if isinstance(places.lengths, int):
        sizes, n_blocks = shape.sizes_of_blocks(n_tensors * n_places), n_places
    else:
        runs = np.empty((n_tensors, n_places), dtype=_UINT64)
        runs[:] = places.lengths * shape.used_bytes
        sizes, n_blocks = runs.ravel(), int(places.lengths.sum())
    return CopyPlan(device.ravel(), host.ravel(), sizes, n_tensors * n_blocks * shape.used_bytes)


def _concatenate(parts: Sequence[CopyPlan]) -> CopyPlan:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = np.empty(0, dtype=_UINT64)
        return CopyPlan(empty, empty, empty, 0)
    return CopyPlan(
        device=np.concatenate([part.device for part in parts]),
        host=np.concatenate([part.host for part in parts]),
        sizes=np.concatenate([part.sizes for part in parts]),
        total_bytes=sum(part.total_bytes for part in parts),
    )


def _shapes_of(
    tensors: Sequence[DeviceTensor],
    refs: Sequence[TensorRef],
    layout: ChunkLayout,
    host: HostChunks,
) -> list[_Shape]:
    """The tensors of a group by shape, in order; a tensor named twice is copied once."""
    used: dict[int, int] = {}
    for ref in refs:
        used[ref.tensor_idx] = max(ref.used_bytes, used.get(ref.tensor_idx, 0))
    by_shape: dict[tuple[int, int, int], list[int]] = {}
    for idx, used_bytes in used.items():
        key = (tensors[idx].stride_bytes, tensors[idx].page_bytes, used_bytes)
        by_shape.setdefault(key, []).append(idx)
    return [
        _Shape(
            device_bases=_column(tensors[idx].address for idx in members),
            host_bases=_column(host.address + layout.offsets_bytes[idx] for idx in members),
            stride_bytes=stride_bytes,
            page_bytes=page_bytes,
            used_bytes=used_bytes,
            has_no_gaps=stride_bytes == page_bytes == used_bytes,
        )
        for (stride_bytes, page_bytes, used_bytes), members in by_shape.items()
    ]


def _column(addresses: Iterable[int]) -> Addresses:
    return np.array(list(addresses), dtype=_UINT64)[:, np.newaxis]


def _check_ids(what: str, ids: NDArray[np.int64], limit: int) -> None:
    """Refuse ids outside `[0, limit)`: they would become addresses of somebody else's memory."""
    # One pass instead of two: a negative number read as unsigned is above every limit.
    if len(ids) and int(np.maximum.reduce(ids.view(_UINT64))) >= limit:
        raise TransferFailed(
            f"a transfer of {what}s {ids.min()} to {ids.max()} was asked for; there are {limit} "
            f"{what}s, counted from 0: the scheduler and this worker see different geometries"
        )

"""Copy plans against a triple loop that does the same one block at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.errors import ConfigurationError, TransferFailed
from kvcellar.worker.chunk_layout import ChunkLayout, DeviceTensor, HostChunks, TensorRef
from kvcellar.worker.plan import BlockTransfer, CopyPlan, Planner

NUM_BLOCKS = 24
NUM_CHUNKS = 40
ODD = 0xFF8
"""Addresses are sums: with these bits in them nothing else that looks like a sum is right."""
HOST_ADDRESS = (1 << 46) + ODD
TENSOR_SPACING = 1 << 20


@dataclass(frozen=True)
class Case:
    """A layout and one transfer over it."""

    tensors: list[DeviceTensor]
    groups: list[list[TensorRef]]
    layout: ChunkLayout
    host: HostChunks
    transfer: BlockTransfer

    @property
    def planner(self) -> Planner:
        return Planner(self.tensors, self.groups, self.layout, self.host)


def tensors_of(pages: Sequence[int], gaps: Sequence[int]) -> list[DeviceTensor]:
    return [
        DeviceTensor((1 << 45) + ODD + idx * TENSOR_SPACING, NUM_BLOCKS, page + gap, page)
        for idx, (page, gap) in enumerate(zip(pages, gaps, strict=True))
    ]


@st.composite
def cases(draw: st.DrawFn, *, ends_on_chunks: bool) -> Case:
    """Any layout with a transfer that is valid for it."""
    blocks_per_chunk = draw(st.integers(1, 4))
    pages = draw(st.lists(st.sampled_from([8, 8, 8, 12]), min_size=1, max_size=4))
    gaps = [draw(st.sampled_from([0, 0, 4])) for _ in pages]
    layout = ChunkLayout.compute(pages, blocks_per_chunk)
    stride = layout.chunk_bytes + draw(st.sampled_from([0, 0, 16]))
    host = HostChunks(HOST_ADDRESS, stride, NUM_CHUNKS, draw(st.sampled_from([0, 0, 1, 3])))
    groups: list[list[TensorRef]] = []
    sizes: list[int] = []
    indices: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        members = draw(st.sets(st.integers(0, len(pages) - 1), min_size=1))
        groups.append(
            [TensorRef(idx, pages[idx] - draw(st.sampled_from([0, 0, 3]))) for idx in members]
        )
        index = draw(st.integers(0, 9))
        size = draw(st.integers(0, 8))
        if ends_on_chunks and size > 1:
            size += -(index + size) % blocks_per_chunk
        sizes.append(size)
        indices.append(index)
    # Half in order, so that runs are common.
    block_pool = draw(st.one_of(st.just(range(NUM_BLOCKS)), st.permutations(range(NUM_BLOCKS))))
    chunk_pool = draw(st.one_of(st.just(range(NUM_CHUNKS)), st.permutations(range(NUM_CHUNKS))))
    block_ids: list[int] = []
    for size in sizes:  # a block id means another block in each group
        first = draw(st.integers(0, NUM_BLOCKS - size))
        block_ids += list(block_pool)[first : first + size]
    n_chunks = sum(
        -(-(index % blocks_per_chunk + size) // blocks_per_chunk)
        for index, size in zip(indices, sizes, strict=True)
        if size
    )
    transfer = BlockTransfer(
        np.array(block_ids, dtype=np.int32),
        sizes,
        indices,
        np.array(list(chunk_pool)[:n_chunks], dtype=np.int32),
    )
    return Case(tensors_of(pages, gaps), groups, layout, host, transfer)


def naive_bytes(case: Case) -> dict[int, int]:
    """Device byte of each host byte, by a loop over groups, tensors and blocks."""
    found: dict[int, int] = {}
    blocks, chunks = list(case.transfer.block_ids), list(case.transfer.chunk_ids)
    per_chunk = case.layout.blocks_per_chunk
    for refs, size, index in zip(
        case.groups, case.transfer.group_sizes, case.transfer.block_indices, strict=True
    ):
        if not size:
            continue
        for ref in refs:
            tensor = case.tensors[ref.tensor_idx]
            for number in range(size):
                chunk_idx, slot = divmod(index % per_chunk + number, per_chunk)
                device = tensor.address + int(blocks[number]) * tensor.stride_bytes
                host = (
                    case.host.address
                    + int(chunks[chunk_idx]) * case.host.stride_bytes
                    + case.layout.offsets_bytes[ref.tensor_idx]
                    + slot * tensor.page_bytes
                )
                for byte in range(ref.used_bytes):
                    found[host + byte] = device + byte
        blocks = blocks[size:]
        chunks = chunks[-(-(index % per_chunk + size) // per_chunk) :]
    return found


def planned_bytes(plan: CopyPlan) -> dict[int, int]:
    """Device byte of each host byte of a plan; fails if two descriptors share a host byte."""
    found: dict[int, int] = {}
    for device, host, size in zip(
        plan.device.tolist(), plan.host.tolist(), plan.sizes.tolist(), strict=True
    ):
        for byte in range(size):
            assert host + byte not in found
            found[host + byte] = device + byte
    return found


@given(cases(ends_on_chunks=True))
def test_a_store_plan_copies_the_bytes_of_the_triple_loop_and_no_byte_twice(case: Case) -> None:
    plan = case.planner.store(case.transfer)
    expected = naive_bytes(case)
    assert planned_bytes(plan) == expected
    assert plan.total_bytes == len(expected) == int(plan.sizes.sum())


@given(cases(ends_on_chunks=False))
def test_a_load_plan_copies_the_bytes_of_the_triple_loop(case: Case) -> None:
    plan = case.planner.load(case.transfer)
    assert planned_bytes(plan) == naive_bytes(case)


@given(cases(ends_on_chunks=False))
def test_no_two_descriptors_of_a_load_overlap_on_the_device(case: Case) -> None:
    # Two groups may name one tensor and block only if vLLM did; a real block has one group.
    for group, size in enumerate(case.transfer.group_sizes):
        if not size:
            continue
        first_block = sum(case.transfer.group_sizes[:group])
        index = case.transfer.block_indices[group]
        per_chunk = case.layout.blocks_per_chunk
        chunk_ids = np.arange(-(-(index % per_chunk + size) // per_chunk))
        alone = replace(
            case,
            groups=[case.groups[group]],
            transfer=BlockTransfer(
                case.transfer.block_ids[first_block : first_block + size],
                [size],
                [index],
                chunk_ids,
            ),
        )
        plan = alone.planner.load(alone.transfer)
        order = np.argsort(plan.device)
        ends = plan.device[order] + plan.sizes[order]
        assert (ends[:-1] <= plan.device[order][1:]).all()


@given(cases(ends_on_chunks=True))
def test_no_descriptor_crosses_a_chunk_of_many_tensors_or_a_registered_piece(case: Case) -> None:
    plan = case.planner.store(case.transfer)
    stride = case.host.stride_bytes
    limit = stride
    if len(case.tensors) == 1:
        limit = stride * (case.host.chunks_per_piece or NUM_CHUNKS)
    first = (plan.host - np.uint64(case.host.address)) // np.uint64(limit)
    last = (plan.host + plan.sizes - np.uint64(case.host.address + 1)) // np.uint64(limit)
    assert (first == last).all()


@given(cases(ends_on_chunks=False), st.integers(1, 3))
def test_a_load_with_one_chunk_too_many_or_too_few_is_refused(case: Case, extra: int) -> None:
    ids = case.transfer.chunk_ids
    more = case.transfer._replace(chunk_ids=np.append(ids, np.arange(extra, dtype=np.int32)))
    with pytest.raises(TransferFailed, match=f"{len(ids) + extra} chunks"):
        case.planner.load(more)
    if len(ids):
        with pytest.raises(TransferFailed, match="null blocks"):
            case.planner.load(case.transfer._replace(chunk_ids=ids[:-1]))


@given(st.data())
def test_every_store_from_which_null_blocks_were_dropped_is_refused(data: st.DataObject) -> None:
    per_chunk = data.draw(st.integers(2, 4))
    n_chunks = data.draw(st.integers(1, 4))
    skip = data.draw(st.integers(0, per_chunk - 1))
    # The first block is there (it gives the index), any later ones may be null.
    later = range(skip + 1, n_chunks * per_chunk)
    dropped = data.draw(st.sets(st.sampled_from(later), min_size=1)) if len(later) else set()
    size = n_chunks * per_chunk - skip - len(dropped)
    if not dropped or (size == 1 and n_chunks == 1):
        return  # nothing is dropped, or the only block is in its place
    layout = ChunkLayout.compute([8], per_chunk)
    planner = Planner(
        tensors_of([8], [0]), [[TensorRef(0, 8)]], layout, HostChunks(HOST_ADDRESS, 32, 8)
    )
    with pytest.raises(TransferFailed, match="null blocks"):
        planner.store(BlockTransfer(np.arange(size), [size], [skip], np.arange(n_chunks)))


def test_a_difference_in_one_group_is_not_hidden_by_another() -> None:
    layout = ChunkLayout.compute([8, 8], 2)
    planner = Planner(
        tensors_of([8, 8], [0, 0]),
        [[TensorRef(0, 8)], [TensorRef(1, 8)]],
        layout,
        HostChunks(HOST_ADDRESS, layout.chunk_bytes, 8),
    )
    # Two chunks each; the second group lost a whole chunk of null blocks.
    with pytest.raises(TransferFailed, match="make 6 blocks and 3 chunks"):
        planner.store(BlockTransfer(np.arange(6), [4, 2], [0, 0], np.arange(4)))


def simple_planner(n_tensors: int, blocks_per_chunk: int, pad_bytes: int = 0) -> Planner:
    pages = [16] * n_tensors
    layout = ChunkLayout.compute(pages, blocks_per_chunk)
    host = HostChunks(HOST_ADDRESS, layout.chunk_bytes + pad_bytes, NUM_CHUNKS)
    return Planner(
        tensors_of(pages, [0] * n_tensors),
        [[TensorRef(idx, 16) for idx in range(n_tensors)]],
        layout,
        host,
    )


def test_blocks_in_order_make_one_descriptor_for_each_tensor_of_a_chunk() -> None:
    plan = simple_planner(3, 4).store(BlockTransfer(np.arange(8, 16), [8], [0], np.array([5, 2])))
    assert plan.sizes.tolist() == [64] * 6


def test_a_chunk_of_one_whole_tensor_continues_the_one_before_it() -> None:
    transfer = BlockTransfer(np.arange(8, 16), [8], [0], np.array([5, 6, 7, 1]))
    assert simple_planner(1, 2).store(transfer).sizes.tolist() == [96, 32]
    for other in (simple_planner(1, 2, pad_bytes=16), simple_planner(2, 2)):
        assert set(other.store(transfer).sizes.tolist()) == {32}
    after_a_gap = transfer._replace(chunk_ids=np.array([5, 7, 9, 10]))
    assert simple_planner(1, 2).store(after_a_gap).sizes.tolist() == [32, 32, 64]


@pytest.mark.parametrize(
    ("chunks_per_piece", "sizes"),
    [
        (3, [32, 96, 96]),  # chunk 2, chunks 3 to 5, chunks 6 to 8
        (4, [64, 128, 32]),  # chunks 2 and 3, chunks 4 to 7, chunk 8
    ],
)
def test_no_descriptor_crosses_a_registered_piece_of_host_memory(
    chunks_per_piece: int, sizes: list[int]
) -> None:
    layout = ChunkLayout.compute([16], 2)
    host = HostChunks(HOST_ADDRESS, layout.chunk_bytes, NUM_CHUNKS, chunks_per_piece)
    planner = Planner(tensors_of([16], [0]), [[TensorRef(0, 16)]], layout, host)
    plan = planner.store(BlockTransfer(np.arange(14), [14], [0], np.arange(2, 9)))
    assert plan.sizes.tolist() == sizes


def test_large_pages_merge_as_small_ones_do() -> None:
    layout = ChunkLayout.compute([4096], 2)
    # Numbers that are equal, and not one and the same object.
    host = HostChunks(HOST_ADDRESS, int("8192"), NUM_CHUNKS)
    ref = TensorRef(0, int("4096"))
    planner = Planner([DeviceTensor(ODD, 8, int("4096"), 4096)], [[ref]], layout, host)
    plan = planner.store(BlockTransfer(np.arange(4), [4], [0], np.arange(2)))
    assert plan.sizes.tolist() == [4 * 4096]


def test_one_block_a_chunk_of_hundreds_of_groups_goes_to_its_own_chunk() -> None:
    layout = ChunkLayout.compute([8], 1)
    n = 300
    case = Case(
        tensors_of([8], [0]),
        [[TensorRef(0, 8)] for _ in range(n)],
        layout,
        HostChunks(HOST_ADDRESS, 24, n),
        BlockTransfer(np.arange(n) % NUM_BLOCKS, [1] * n, [0] * n, np.arange(n)[::-1]),
    )
    assert planned_bytes(case.planner.store(case.transfer)) == naive_bytes(case)


def test_all_plans_share_the_sizes_of_blocks_and_nobody_can_change_them() -> None:
    planner = simple_planner(2, 1)
    plans = [planner.load(BlockTransfer(np.arange(n), [n], [0], np.arange(n))) for n in (4, 4, 2)]
    for plan in plans:
        assert np.shares_memory(plan.sizes, plans[0].sizes)
        assert not plan.sizes.flags.writeable


def test_a_group_without_tensors_has_no_blocks() -> None:
    layout = ChunkLayout.compute([8], 1)
    host = HostChunks(HOST_ADDRESS, 8, NUM_CHUNKS)
    planner = Planner(tensors_of([8], [0]), [[TensorRef(0, 8)], []], layout, host)
    with pytest.raises(TransferFailed, match="there are 0 blocks"):
        planner.load(BlockTransfer(np.array([0]), [0, 1], [0, 0], np.array([0])))


def test_an_engine_without_groups_has_nothing_to_copy() -> None:
    planner = Planner([], [], ChunkLayout.compute([], 1), HostChunks(HOST_ADDRESS, 8, NUM_CHUNKS))
    empty = np.empty(0, dtype=np.int32)
    assert planner.store(BlockTransfer(empty, [], [], empty)).total_bytes == 0


def test_blocks_in_any_other_order_are_not_merged() -> None:
    transfer = BlockTransfer(np.array([3, 2, 5, 7]), [4], [0], np.array([0]))
    assert simple_planner(2, 4).store(transfer).sizes.tolist() == [16] * 8


def test_a_tensor_named_twice_by_a_group_is_copied_once() -> None:
    layout = ChunkLayout.compute([16], 1)
    planner = Planner(
        tensors_of([16], [0]),
        [[TensorRef(0, 8), TensorRef(0, 12)]],
        layout,
        HostChunks(HOST_ADDRESS, 16, 4),
    )
    plan = planner.load(BlockTransfer(np.array([3]), [1], [0], np.array([2])))
    assert plan.sizes.tolist() == [12]
    assert plan.total_bytes == 12


def test_a_transfer_of_nothing_is_an_empty_plan() -> None:
    empty = np.empty(0, dtype=np.int32)
    plan = simple_planner(2, 3).store(BlockTransfer(empty, [0], [5], empty))
    assert (len(plan.sizes), plan.total_bytes) == (0, 0)


def test_plans_are_arrays_that_a_driver_can_take_by_address() -> None:
    plan = simple_planner(3, 1).load(BlockTransfer(np.arange(4), [4], [0], np.arange(4)))
    for array in (plan.device, plan.host, plan.sizes):
        assert array.dtype == np.uint64
        assert array.ndim == 1
        assert array.flags.c_contiguous


@pytest.mark.parametrize(
    ("block_ids", "sizes", "indices", "chunk_ids", "message"),
    [
        ([NUM_BLOCKS], [1], [0], [0], f"blocks {NUM_BLOCKS} to {NUM_BLOCKS}"),
        ([-1], [1], [0], [0], "blocks -1 to -1"),
        ([0], [1], [0], [NUM_CHUNKS], f"there are {NUM_CHUNKS} chunks"),
        ([0], [1], [0], [-3], "chunks -3 to -3"),
        ([0, 1], [1], [0], [0, 1], "2 blocks and 2 chunks"),
        ([0, 1], [1], [0], [0], "2 blocks and 1 chunks"),
        ([0], [2], [0], [0, 1], "1 blocks and 2 chunks"),
        ([0], [1, 0], [0, 0], [0], "1 KV cache groups"),
        ([0], [1], [0, 0], [0], "1 KV cache groups"),
        ([0], [1, 0], [0], [0], "1 KV cache groups"),
        ([0], [1], [], [0], "1 KV cache groups"),
        ([0], [], [0], [0], "1 KV cache groups"),
        ([0], [1], [-1], [0], "no count is negative"),
    ],
)
def test_counts_and_ids_that_cannot_be_are_refused(
    block_ids: list[int], sizes: list[int], indices: list[int], chunk_ids: list[int], message: str
) -> None:
    transfer = BlockTransfer(np.array(block_ids), sizes, indices, np.array(chunk_ids))
    planner = simple_planner(1, 1)
    with pytest.raises(TransferFailed, match=message):
        planner.load(transfer)
    with pytest.raises(TransferFailed, match=message):
        planner.store(transfer)


def test_a_layout_puts_tensor_after_tensor() -> None:
    layout = ChunkLayout.compute([512, 1024, 256], 3)
    assert layout.offsets_bytes == (0, 1536, 4608)
    assert layout.chunk_bytes == 5376


@pytest.mark.parametrize(("pages", "blocks_per_chunk"), [([8], 0), ([8, 0], 1), ([-8], 1)])
def test_a_layout_of_nothing_is_refused(pages: list[int], blocks_per_chunk: int) -> None:
    with pytest.raises(ConfigurationError, match="one block or more"):
        ChunkLayout.compute(pages, blocks_per_chunk)


@pytest.mark.parametrize(
    ("ref", "stride", "chunk_stride", "message"),
    [
        (TensorRef(1, 8), 8, 8, "there are 1 tensors"),
        (TensorRef(0, 9), 8, 8, "refers to 9 bytes"),
        (TensorRef(0, 0), 8, 8, "refers to 0 bytes"),
        (TensorRef(0, 8), 4, 8, "blocks overlap"),
        (TensorRef(0, 8), 8, 7, "they would overlap"),
    ],
)
def test_a_planner_refuses_a_layout_that_would_mix_bytes(
    ref: TensorRef, stride: int, chunk_stride: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Planner(
            [DeviceTensor(4096, 4, stride, 8)],
            [[ref]],
            ChunkLayout.compute([8], 1),
            HostChunks(HOST_ADDRESS, chunk_stride, 4),
        )


def test_a_planner_refuses_a_layout_of_other_pages() -> None:
    with pytest.raises(ConfigurationError, match="compute it from the tensors"):
        Planner(
            tensors_of([8], [0]),
            [[TensorRef(0, 8)]],
            ChunkLayout.compute([16], 1),
            HostChunks(HOST_ADDRESS, 16, 4),
        )

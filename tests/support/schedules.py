"""Random schedules of stores and loads over a GPU, with a model that knows every byte.

A schedule is one engine: ranks with tensors on the device, groups, a region in shared memory, kvcellar's
workers, and a compute stream that writes and moves blocks. It keeps the promises that vLLM keeps, and no
others: the blocks of a transfer are not touched until every rank has answered, a chunk is loaded only after
its store was answered, and not stored to while it is being loaded. Work that was queued *before* a transfer
may still run when it is submitted. In the end every byte of every tensor and of the region has to be what
the model says, gaps and untouched chunks included.
"""

import mmap
import os
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvcellar.contract import Direction
from kvcellar.region.geometry import Geometry, Layout
from kvcellar.worker.copier import Finished
from kvcellar.worker.devices import Device
from kvcellar.worker.offload import CPUOffloadingWorker
from kvcellar.worker.pin import PinnedMemory, cut
from tests.fakes.kv_caches import CacheRef, Caches, CacheTensor
from tests.support.gpus import Bytes, Gpu

MIB = 1 << 20
UNTOUCHED = 77
PAGES = [512, 1024, 1536, 4096, 16384, 65536, 262144, 2 * MIB]


class DeviceTensor:
    """Device memory that answers like a torch tensor of bytes."""

    def __init__(self, address: int, num_blocks: int, page_bytes: int, stride_bytes: int) -> None:
        self.address, self.stride_bytes = address, stride_bytes
        self.shape = (num_blocks, page_bytes)

    def data_ptr(self) -> int:
        return self.address

    def stride(self, dim: int, /) -> int:
        return self.stride_bytes if dim == 0 else 1

    def element_size(self) -> int:
        return 1


@dataclass(frozen=True)
class Shape:
    """One engine."""

    pages: list[int]
    groups: list[list[CacheRef]]
    blocks_per_chunk: int
    num_blocks: int
    num_chunks: int
    gap: int
    layout: Layout
    world_size: int
    is_pinned: bool
    in_batches: bool
    on_default_stream: bool

    @classmethod
    def draw(cls, rng: random.Random, budget_bytes: int = 6 * MIB) -> "Shape":
        world_size = rng.choice([1, 1, 2, 3, 4, 8])
        budget = budget_bytes // world_size
        page = rng.choice([size for size in PAGES if 12 * size <= budget] or PAGES[:1])
        if world_size == 1 and rng.random() < 0.1:
            page = PAGES[-1]
        most = max(1, min(4, budget // (12 * page)))
        pages = [page * rng.choice([1, 1, 2]) for _ in range(rng.randint(1, most))]
        groups = [
            [
                CacheRef(idx, rng.choice([size, size, max(1, size - 24)]))
                for idx, size in enumerate(pages)
                if rng.random() < 0.7 or idx == 0
            ]
            for _ in range(rng.choice([1, 1, 2, 3]))
        ]
        num_blocks = max(6, min(40, budget // sum(pages)))
        return cls(
            pages=pages,
            groups=groups,
            blocks_per_chunk=rng.choice([1, 1, 2, 3, 4]),
            num_blocks=num_blocks,
            num_chunks=rng.randint(3, 14),
            gap=rng.choice([0, 0, 64, 4096]),
            layout=rng.choice([Layout.SHARDED, Layout.SHARDED, Layout.REPLICATED]),
            world_size=world_size,
            is_pinned=rng.random() < 0.8,
            in_batches=rng.random() < 0.8,
            on_default_stream=rng.random() < 0.3,
        )

    @property
    def geometry(self) -> Geometry:
        chunk_bytes = sum(self.pages) * self.blocks_per_chunk
        stride_bytes = -(-chunk_bytes // 4096) * 4096
        copies = 1 if self.layout is Layout.REPLICATED else self.world_size
        rank_bytes = -(-self.num_chunks * stride_bytes // (2 * MIB)) * 2 * MIB
        return Geometry.compute(rank_bytes * copies, chunk_bytes, self.world_size, self.layout)


class SharedRegion:
    """A rank's share of a region in memory that all ranks map, each for itself, as in an engine."""

    def __init__(self, fd: int, geometry: Geometry, rank: int, *, is_pinned: bool) -> None:
        self.geometry, self.rank = geometry, rank
        self._memory = mmap.mmap(
            fd, geometry.rank_bytes, offset=geometry.rank_offset_bytes(rank), flags=mmap.MAP_SHARED
        )
        self.base_address = np.frombuffer(self._memory, dtype=np.uint8).ctypes.data
        self._wish = is_pinned
        self._pinned: PinnedMemory | None = None
        self.marked: set[int] = set()
        self.is_closed = False

    def pin(self, device: Device) -> bool:
        if self._wish and self._pinned is None:
            geometry = self.geometry
            self._pinned = PinnedMemory(device)
            self._pinned.register(
                cut(self.base_address, geometry.chunk_stride_bytes, geometry.num_chunks)
            )
        return self._wish

    def unpin(self) -> None:
        if self._pinned is not None:
            self._pinned.close()

    def add_counters(self, direction: Direction, num_bytes: int, *, ok: bool) -> None:
        pass

    def mark_failed_store(self, chunk: int) -> None:
        self.marked.add(chunk)

    def close(self) -> None:
        self.is_closed = True
        self._memory.close()  # unmaps: a copy that still runs is seen by the simulated driver


class Worker(Protocol):
    """What a schedule calls: kvcellar's worker, or vLLM's view of it."""

    def submit_store(
        self,
        job_id: int,
        block_ids: list[int],
        group_sizes: list[int],
        block_indices: list[int],
        chunk_ids: list[int],
    ) -> bool: ...

    def submit_load(
        self,
        job_id: int,
        block_ids: list[int],
        group_sizes: list[int],
        block_indices: list[int],
        chunk_ids: list[int],
    ) -> bool: ...

    def get_finished(self) -> list[Finished]: ...

    def wait(self, job_ids: Iterable[int]) -> None: ...

    def shutdown(self) -> None: ...


Wrap = Callable[[CPUOffloadingWorker], Worker]
"""Makes the worker that the schedule calls of kvcellar's."""

MakeDevice = Callable[[Gpu, int, bool], Device]
"""Makes a rank's device of the GPU, the compute stream, and whether to copy in batches."""


def make_device(gpu: Gpu, stream: int, in_batches: bool) -> Device:
    return gpu.device(stream, in_batches=in_batches)


class Rank:
    """One rank: its device memory, what that should hold, its worker."""

    def __init__(self, gpu: Gpu, shape: Shape, rank: int, fd: int, seed: int) -> None:
        self.gpu, self.shape = gpu, shape
        # Under a replicated layout the ranks hold the same, so they draw the same.
        same = shape.layout is Layout.REPLICATED
        numbers = np.random.default_rng(seed if same else seed * 8 + rank)
        self.stream = 0 if shape.on_default_stream else gpu.new_stream()
        self.strides = [page + shape.gap for page in shape.pages]
        self.content = [
            numbers.integers(0, 256, shape.num_blocks * stride, dtype=np.uint8)
            for stride in self.strides
        ]
        self.known = [np.ones(len(content), dtype=bool) for content in self.content]
        self.addresses = [gpu.allocate(len(content)) for content in self.content]
        self.palette = numbers.integers(0, 256, MIB // 4 + max(shape.pages), dtype=np.uint8)
        self.palette_address = gpu.allocate(len(self.palette))
        for address, content in zip(self.addresses, self.content, strict=True):
            gpu.write(address, content)
        gpu.write(self.palette_address, self.palette)
        self.caches = Caches(
            [
                CacheTensor(DeviceTensor(address, shape.num_blocks, page, stride), page)
                for address, page, stride in zip(
                    self.addresses, shape.pages, self.strides, strict=True
                )
            ],
            shape.groups,
        )
        self.can_compute = True
        self.region = SharedRegion(fd, shape.geometry, rank, is_pinned=shape.is_pinned)

    def start(self, device: Device, wrap: Wrap) -> None:
        """Make the worker; from here on it owns region and device."""
        shape = self.shape
        self.worker = wrap(
            CPUOffloadingWorker(
                self.caches, shape.blocks_per_chunk, shape.num_chunks, self.region, device=device
            )
        )

    def _copy(self, dst: int, src: int, size_bytes: int) -> None:
        if self.can_compute:
            self.gpu.copy(dst, src, size_bytes, self.stream)

    def span(self, tensor: int, block: int, used: int | None = None) -> slice:
        start = block * self.strides[tensor]
        return slice(start, start + (used or self.shape.pages[tensor]))

    def compute(self, block: int, origin: int) -> None:
        """Write a block from the palette, on the compute stream."""
        for tensor, page in enumerate(self.shape.pages):
            offset = (origin * 8191 + tensor * 127) % (len(self.palette) - page)
            to = self.addresses[tensor] + block * self.strides[tensor]
            self._copy(to, self.palette_address + offset, page)
            self.content[tensor][self.span(tensor, block)] = self.palette[offset : offset + page]
            self.known[tensor][self.span(tensor, block)] = True

    def move(self, block: int, origin: int) -> None:
        """Copy a block to another, on the compute stream: it reads what was loaded."""
        for tensor, (address, page) in enumerate(
            zip(self.addresses, self.shape.pages, strict=True)
        ):
            stride = self.strides[tensor]
            self._copy(address + block * stride, address + origin * stride, page)
            to, source = self.span(tensor, block), self.span(tensor, origin)
            self.content[tensor][to] = self.content[tensor][source]
            self.known[tensor][to] = self.known[tensor][source]

    def check(self) -> None:
        for tensor, address in enumerate(self.addresses):
            content = self.gpu.read(address, len(self.content[tensor]))
            differs = (content != self.content[tensor]) & self.known[tensor]
            assert not differs.any(), (
                f"rank {self.region.rank}, tensor {tensor}: {differs.sum()} bytes differ, "
                f"from block {np.flatnonzero(differs)[0] // self.strides[tensor]} on"
            )

    def release(self) -> None:
        for address in (*self.addresses, self.palette_address):
            self.gpu.free(address)
        if self.stream:
            self.gpu.destroy_stream(self.stream)


@dataclass
class Part:
    """A group's share of a transfer."""

    group: int
    blocks: list[int]
    chunks: list[int]
    skip: int


@dataclass
class Job:
    """A transfer in flight on some ranks."""

    job_id: int
    direction: Direction
    parts: list[Part]
    waiting: set[int]
    failed_on: set[int] = field(default_factory=set)


class Schedule:
    """One engine and its model; see the module."""

    def __init__(
        self,
        gpu: Gpu,
        seed: int,
        shape: Shape | None = None,
        wrap: Wrap = lambda worker: worker,
        make: MakeDevice = make_device,
    ) -> None:
        self.gpu = gpu
        self.rng = random.Random(seed)
        self.shape = shape or Shape.draw(self.rng)
        geometry = self.shape.geometry
        self._fd = os.memfd_create("region")
        os.truncate(self._fd, geometry.capacity_bytes)
        self._view = mmap.mmap(self._fd, geometry.capacity_bytes)
        self.memory: Bytes = np.frombuffer(self._view, dtype=np.uint8)
        self.memory[:] = UNTOUCHED
        self.expected = self.memory.copy()
        self.known = np.ones(len(self.expected), dtype=bool)
        self.ranks = [
            Rank(gpu, self.shape, rank, self._fd, seed) for rank in range(self.shape.world_size)
        ]
        for rank in self.ranks:
            rank.start(make(gpu, rank.stream, self.shape.in_batches), wrap)
        self.jobs: dict[int, Job] = {}
        self.stored: list[Part] = []  # what can be loaded
        self.order: dict[tuple[int, Direction], list[int]] = {}
        self.num_failed = 0
        self.may_fail = False
        self._next_id = 1

    # --- moves

    def run(self, n_moves: int) -> None:
        moves = [self.compute, self.move, self.store, self.store, self.load, self.load]
        moves += [self.poll, self.poll, self.wait]
        for _ in range(n_moves):
            self.rng.choice(moves)()

    def compute(self) -> None:
        for block in self._free_blocks(self.rng.randint(1, 4)):
            origin = self.rng.randrange(10**6)
            for rank in self.ranks:
                rank.compute(block, origin)

    def move(self) -> None:
        blocks = self._free_blocks(2)
        if len(blocks) == 2:
            for rank in self.ranks:
                rank.move(*blocks)

    def store(self) -> None:
        free_blocks = self._free_blocks(self.shape.num_blocks, is_source=True)
        free_chunks = self._free_chunks()
        parts = []
        for group in range(len(self.shape.groups)):
            part = self._draw_store(group, free_blocks, free_chunks)
            free_blocks = [block for block in free_blocks if block not in part.blocks]
            free_chunks = [chunk for chunk in free_chunks if chunk not in part.chunks]
            parts.append(part)
        if not any(part.blocks for part in parts):
            return
        taken = {chunk for part in parts for chunk in part.chunks}
        self.stored = [part for part in self.stored if not taken & set(part.chunks)]
        # A block that is being stored already must not change.
        busy = {b for job in self._in_flight(Direction.STORE) for p in job.parts for b in p.blocks}
        if not any(busy & set(part.blocks) for part in parts):
            self._write_first(parts)
        self._submit(Direction.STORE, parts)

    def load(self) -> None:
        free = self._free_blocks(self.shape.num_blocks)
        busy = {c for job in self._in_flight(Direction.STORE) for p in job.parts for c in p.chunks}
        parts = []
        for group in range(len(self.shape.groups)):
            found = [p for p in self.stored if p.group == group and not busy & set(p.chunks)]
            part = self._draw_load(self.rng.choice(found), free) if found else None
            part = part if part and self.rng.random() < 0.8 else Part(group, [], [], 0)
            free = [block for block in free if block not in part.blocks]
            parts.append(part)
        if any(part.blocks for part in parts):
            self._write_first(parts)
            self._submit(Direction.LOAD, parts)

    def poll(self) -> None:
        rank = self.rng.randrange(len(self.ranks))
        self._take(rank, self.ranks[rank].worker.get_finished())

    def wait(self) -> None:
        rank = self.rng.randrange(len(self.ranks))
        waiting = [job.job_id for job in self.jobs.values() if rank in job.waiting]
        chosen = set(self.rng.sample(waiting, self.rng.randint(0, len(waiting))))
        self.ranks[rank].worker.wait(chosen | {987654})
        self._take(rank, self.ranks[rank].worker.get_finished())
        # A load that is tried again holds up the answers of those behind it.
        assert self.may_fail or not any(
            rank in self.jobs[job].waiting for job in chosen if job in self.jobs
        )

    # --- the end

    def finish(self) -> None:
        """Wait for everything, compare, and release."""
        for number, rank in enumerate(self.ranks):
            rank.worker.wait({job.job_id for job in self.jobs.values() if number in job.waiting})
            self._take(number, rank.worker.get_finished())
        assert not self.jobs
        self.gpu.synchronize()
        self.check()
        self.end()

    def end(self) -> None:
        """Shut down with whatever is in flight, compare, and release."""
        for rank in self.ranks:
            rank.worker.shutdown()
            assert rank.region.is_closed
        for job in list(self.jobs.values()):  # their results are dropped, their bytes are not
            self._apply(job)
        self.gpu.synchronize()
        self.check()
        self.release()

    def lose_device(self) -> None:
        """From here on the device answers nothing but errors, to the engine too."""
        for rank in self.ranks:
            rank.can_compute = False

    def abandon(self) -> None:
        """Shut down after the device broke: no byte is known any more."""
        for rank in self.ranks:
            rank.worker.shutdown()
            assert rank.region.is_closed
        self._close_memory()

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()
        differs = (self.memory != self.expected) & self.known
        assert not differs.any(), f"{differs.sum()} bytes of the region differ"

    def release(self) -> None:
        for rank in self.ranks:
            rank.release()
        self._close_memory()

    def _close_memory(self) -> None:
        self.memory = np.empty(0, dtype=np.uint8)
        with suppress(BufferError):
            self._view.close()
        os.close(self._fd)

    # --- choosing

    def _in_flight(self, direction: Direction) -> list[Job]:
        return [job for job in self.jobs.values() if job.direction is direction]

    def _free_blocks(self, n: int, *, is_source: bool = False) -> list[int]:
        """Blocks that no transfer uses, in random order; as a source a block may be stored twice."""
        used = self._in_flight(Direction.LOAD)
        used += [] if is_source else self._in_flight(Direction.STORE)
        busy = {block for job in used for part in job.parts for block in part.blocks}
        free = [block for block in range(self.shape.num_blocks) if block not in busy]
        start = self.rng.randrange(len(free)) if free else 0
        if self.rng.random() < 0.5:  # runs, which are merged
            return (free[start:] + free[:start])[:n]
        return self.rng.sample(free, min(n, len(free)))

    def _free_chunks(self) -> list[int]:
        busy = {chunk for job in self.jobs.values() for part in job.parts for chunk in part.chunks}
        free = [chunk for chunk in range(self.shape.num_chunks) if chunk not in busy]
        if self.rng.random() < 0.5:
            self.rng.shuffle(free)
        return free

    def _draw_store(self, group: int, blocks: list[int], chunks: list[int]) -> Part:
        per_chunk = self.shape.blocks_per_chunk
        n_chunks = min(self.rng.randint(0, 4), len(chunks))
        skip = self.rng.randrange(per_chunk)
        size = n_chunks * per_chunk - skip
        if n_chunks == 1 and self.rng.random() < 0.3:
            size = 1  # the partial tail of a request
        if not n_chunks or size > len(blocks):
            return Part(group, [], [], 0)
        return Part(group, blocks[:size], chunks[:n_chunks], skip)

    def _draw_load(self, stored: Part, blocks: list[int]) -> Part:
        per_chunk = self.shape.blocks_per_chunk
        first = self.rng.randrange(stored.skip, stored.skip + len(stored.blocks))
        size = self.rng.randint(1, stored.skip + len(stored.blocks) - first)
        size = min(size, len(blocks))
        chunks = stored.chunks[first // per_chunk : -(-(first + size) // per_chunk)]
        return Part(stored.group, blocks[:size], chunks if size else [], first % per_chunk)

    def _write_first(self, parts: list[Part]) -> None:
        """Let the compute stream write some of the blocks of a transfer just before it."""
        for block in [block for part in parts for block in part.blocks]:
            if self.rng.random() < 0.3:
                origin = self.rng.randrange(10**6)
                for rank in self.ranks:
                    rank.compute(block, origin)

    # --- the model

    def _submit(self, direction: Direction, parts: list[Part]) -> None:
        job = Job(self._next_id, direction, parts, set(range(len(self.ranks))))
        self._next_id += 1
        self.jobs[job.job_id] = job
        per_chunk = self.shape.blocks_per_chunk
        for number, rank in enumerate(self.ranks):
            self.order.setdefault((number, direction), []).append(job.job_id)
            worker = rank.worker
            submit = worker.submit_store if direction is Direction.STORE else worker.submit_load
            assert submit(
                job.job_id,
                [block for part in parts for block in part.blocks],
                [len(part.blocks) for part in parts],
                [part.skip + per_chunk * self.rng.randrange(5) for part in parts],
                [chunk for part in parts for chunk in part.chunks],
            )

    def _take(self, number: int, results: Iterable[Finished]) -> None:
        for result in results:
            job = self.jobs[result.job_id]
            job.waiting.remove(number)
            self._check_order(number, job)
            marked = self.ranks[number].region.marked
            chunks = {chunk for part in job.parts for chunk in part.chunks}
            if not result.ok or (job.direction is Direction.STORE and marked & chunks):
                job.failed_on.add(number)
                marked -= chunks
            elif job.direction is Direction.LOAD or result.size_bytes:
                assert result.size_bytes == self._bytes_of(job), "the size of a transfer is wrong"
            if not job.waiting:
                self._complete(job)

    def _check_order(self, number: int, job: Job) -> None:
        order = self.order[number, job.direction]
        # Ranks that do not store answer at once, so only those that copy are in order.
        if order[0] != job.job_id:
            raise AssertionError(f"job {job.job_id} was answered before job {order[0]}")
        order.pop(0)

    def _bytes_of(self, job: Job) -> int:
        used = [sum(ref.page_size_bytes for ref in group) for group in self.shape.groups]
        return sum(used[part.group] * len(part.blocks) for part in job.parts)

    def _complete(self, job: Job) -> None:
        """Every rank has answered: what the transfer wrote can be used, or is given up."""
        self._apply(job)
        del self.jobs[job.job_id]
        if job.failed_on:
            self.num_failed += 1
            if job.direction is Direction.LOAD:
                for block in [block for part in job.parts for block in part.blocks]:
                    for rank in self.ranks:  # the request is computed again
                        rank.compute(block, self.rng.randrange(10**6))
        elif job.direction is Direction.STORE:
            self.stored += [part for part in job.parts if part.blocks]

    def _apply(self, job: Job) -> None:
        for number, rank in enumerate(self.ranks):
            is_writer = self.shape.layout is Layout.SHARDED or number == 0
            if job.direction is Direction.LOAD or is_writer:
                for part in job.parts:
                    self._apply_part(job, part, rank, is_failed=number in job.failed_on)

    def _apply_part(self, job: Job, part: Part, rank: Rank, *, is_failed: bool) -> None:
        per_chunk, pages = self.shape.blocks_per_chunk, self.shape.pages
        geometry = self.shape.geometry
        base = geometry.rank_offset_bytes(rank.region.rank)
        for idx, block in enumerate(part.blocks):
            chunk = part.chunks[(part.skip + idx) // per_chunk]
            slot = (part.skip + idx) % per_chunk
            for ref in self.shape.groups[part.group]:
                tensor, used = ref.tensor_idx, ref.page_size_bytes
                start = base + chunk * geometry.chunk_stride_bytes
                start += per_chunk * sum(pages[:tensor]) + slot * pages[tensor]
                on_host = slice(start, start + used)
                on_device = rank.span(tensor, block, used)
                if job.direction is Direction.STORE:
                    self.expected[on_host] = rank.content[tensor][on_device]
                    self.known[on_host] = rank.known[tensor][on_device] & (not is_failed)
                else:
                    rank.content[tensor][on_device] = self.expected[on_host]
                    rank.known[tensor][on_device] = self.known[on_host] & (not is_failed)

"""vLLM's tiering spec at work without a GPU: a worker a rank, a scheduler, and a tier on disk.

A program, run inside a sandbox: `tiering_spec.py ENGINE_ID FOLDER FD`. It makes the spec as an engine does, in a
process a rank and in its own as the scheduler, and has the specs make worker and manager. Then chunks are
stored, go on to the disk by themselves, are dropped from memory, come back from the disk, and are loaded
into other blocks. vLLM decides everything: file, size, rows, addresses of every copy, what goes to the disk
and back. Four things are stood in for, each one that a device does: a tensor says that it is on one, events
have happened when they are recorded, the batch of copies is made at once, and a process has the device of its
rank's number.

It writes a `Told` to FD, as a line of JSON, when the chunks are stored and when they are loaded; before each it
waits for a line on stdin. FOLDER is the disk. What vLLM prints goes to stdout.
"""

import ctypes
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

RANKS = 2
LAYERS = 2
PAGE_BYTES = 4096
BLOCKS_PER_CHUNK = 2
CHUNKS = 6
"""How many are stored; the region has more."""
REGION_BYTES = 32 * 2**20
DEADLINE_S = 60.0


@dataclass
class Told:
    """What the program found.

    Attributes:
        creators: which of the processes made the file, the scheduler last.
        inodes: of the file that each of them has.
        chunk_ids: where the manager put the chunks.
        is_same: whether the ranks have loaded what they stored.
    """

    creators: tuple[bool, ...]
    inodes: tuple[int, ...]
    chunk_ids: list[int]
    is_same: bool = False


def byte_of(rank: int, layer: int, block: int) -> int:
    """What fills a block of a layer of a rank: no two have the same byte."""
    return 1 + (rank * LAYERS + layer) * CHUNKS * BLOCKS_PER_CHUNK + block


# --- in place of a device


class OnDevice(torch.Tensor):  # type: ignore[misc]  # torch is not installed where mypy runs
    """A tensor that passes for one on a GPU."""

    is_cuda = True


class Happened:
    """An event of a copy that was over when it was asked for."""

    def __init__(self, **_: object) -> None:
        pass

    def record(self, _stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _later: object) -> float:
        return 0.0

    def synchronize(self) -> None:
        pass


def copy_batch(
    sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, **_: object
) -> None:
    """What vLLM hands to the driver."""
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), sizes.tolist(), strict=True
    ):
        ctypes.memmove(target, source, size)


def stand_in(rank: int) -> None:
    """Put the four things in place in this process."""
    gpu_worker._select_swap_blocks_fn = lambda *_, **__: copy_batch
    gpu_worker.torch.Event = Happened
    torch.accelerator.current_device_index = lambda: rank


# --- an engine's processes


def make_spec(engine_id: str, rank: int, folder: str) -> TieringOffloadingSpec:
    """The spec, as an engine of two ranks makes it in each process."""
    return TieringOffloadingSpec(
        OffloadingConfig(
            groups=(OffloadingGroupConfig(16, tuple(map(str, range(LAYERS))), 0),),
            worker_kv_bytes_per_block=LAYERS * PAGE_BYTES,
            enable_kv_cache_events=False,
            extra_config={
                "cpu_bytes_to_use": REGION_BYTES,
                "secondary_tiers": [{"type": "fs", "root_dir": folder}],
            },
            engine_id=engine_id,
            model=OffloadingModelConfig("model", "float32"),
            cache=OffloadingCacheConfig(16, BLOCKS_PER_CHUNK),
            parallel=OffloadingParallelConfig(
                rank=rank,
                world_size=RANKS,
                tp_size=RANKS,
                pp_size=1,
                pcp_size=1,
                dcp_size=1,
                data_parallel_index=0,
                data_parallel_size=1,
                data_parallel_rank_local=0,
                is_parallelism_agnostic=False,
            ),
        )
    )


def run_rank(engine_id: str, rank: int, folder: str, connection: Connection) -> None:
    """A worker: makes its side of the region, then stores and loads what it is told."""
    stand_in(rank)
    n_blocks = CHUNKS * BLOCKS_PER_CHUNK
    # The second half is where the loads go.
    layers = [torch.zeros((2 * n_blocks, PAGE_BYTES), dtype=torch.int8) for _ in range(LAYERS)]
    for layer, tensor in enumerate(layers):
        for block in range(n_blocks):
            tensor[block].fill_(byte_of(rank, layer, block))
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor.as_subclass(OnDevice), PAGE_BYTES) for tensor in layers],
        [[CanonicalKVCacheRef(layer, PAGE_BYTES) for layer in range(LAYERS)]],
    )
    spec = make_spec(engine_id, rank, folder)
    worker = spec.create_worker(caches)
    connection.send(_identity(worker._mmap_region))
    store: LoadStoreSpec = connection.recv()
    worker.submit_store(1, _blocks(0), store)
    connection.send([result.success for result in worker.get_finished()])
    load: LoadStoreSpec = connection.recv()
    worker.submit_load(2, load, _blocks(n_blocks))
    done = [result.success for result in worker.get_finished()]
    is_same = all(torch.equal(tensor[:n_blocks], tensor[n_blocks:]) for tensor in layers)
    connection.send(done == [True] and is_same)
    connection.recv()


def _identity(region: Any) -> tuple[bool, int]:  # noqa: ANN401 - vLLM's class
    return region._creator, os.fstat(region.fd).st_ino


def _blocks(first: int) -> GPULoadStoreSpec:
    ids = list(range(first, first + CHUNKS * BLOCKS_PER_CHUNK))
    return GPULoadStoreSpec(ids, [len(ids)], [0])


class Scheduler:
    """The scheduler's side: the spec's manager, told what a scheduler tells it."""

    def __init__(self, engine_id: str, folder: str) -> None:
        spec = make_spec(engine_id, 0, folder)
        self._manager = spec.get_manager()
        self.identity = _identity(spec._scheduler_mmap)
        self._request = ReqContext(req_id="request")
        self._manager.on_new_request(self._request)
        self.keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(CHUNKS)]

    def prepare_store(self) -> LoadStoreSpec:
        """Where the chunks go."""
        prepared = self._manager.prepare_store(self.keys, self._request)
        assert prepared is not None
        assert prepared.keys_to_store == self.keys
        return prepared.store_spec

    def complete_store(self) -> None:
        """They have arrived; ends when they are on the disk as well."""
        self._manager.complete_store(self.keys, self._request, True)
        self._until(lambda: not self._manager.has_pending_work())

    def drop(self) -> None:
        """Forget what is in memory, as an engine that was asleep."""
        self._manager.reset_cache()
        assert self._look(self.keys[0]) is not LookupResult.HIT

    def prepare_load(self) -> LoadStoreSpec:
        """Where the chunks are, once they are back from the disk."""
        self._until(lambda: all(self._look(key) is LookupResult.HIT for key in self.keys))
        return self._manager.prepare_load(self.keys, self._request)

    def _look(self, key: OffloadKey) -> LookupResult:
        return self._manager.lookup(key, self._request)

    def _until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline
            self._manager.on_schedule_end(ScheduleEndContext([], []))
            time.sleep(0.01)


def main(engine_id: str, folder: str, answers: int) -> None:
    """Store to the disk and load from it, and tell what there was to see."""
    _wait()
    pipes = [multiprocessing.Pipe() for _ in range(RANKS)]
    fork = multiprocessing.get_context("fork")
    for rank, (_, theirs) in enumerate(pipes):
        fork.Process(target=run_rank, args=(engine_id, rank, folder, theirs), daemon=True).start()
    ranks = [ours for ours, _ in pipes]
    identities = [_hear(rank) for rank in ranks]
    scheduler = Scheduler(engine_id, folder)
    creators, inodes = zip(*identities, scheduler.identity, strict=True)

    store = scheduler.prepare_store()
    chunk_ids = list(map(int, store.block_ids))
    assert _tell_ranks(ranks, store) == [[True]] * RANKS
    scheduler.complete_store()
    _tell_test(answers, Told(creators, inodes, chunk_ids))

    # Only the disk has it now: what is loaded afterwards has been there.
    with Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").open("r+b") as file:
        file.write(bytes(REGION_BYTES))
    scheduler.drop()
    is_same = _tell_ranks(ranks, scheduler.prepare_load()) == [True] * RANKS
    _tell_test(answers, Told(creators, inodes, chunk_ids, is_same))


def _tell_ranks(ranks: list[Connection], spec: LoadStoreSpec) -> list[object]:
    for rank in ranks:
        rank.send(spec)
    return [_hear(rank) for rank in ranks]


def _hear(rank: Connection) -> Any:  # noqa: ANN401 - whatever a rank says
    """What a rank says; one that has failed has written why, and says nothing."""
    assert rank.poll(DEADLINE_S)
    return rank.recv()


def _tell_test(answers: int, told: Told) -> None:
    os.write(answers, (json.dumps(asdict(told)) + "\n").encode())
    _wait()


def _wait() -> None:
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

"""A spec whose copies fail, vanish or dawdle as a test wants, and that tells what it loaded.

Loaded by vLLM in place of kvcellar's own (`"spec_module_path": "faulty_spec"`; this folder
and the repository's are on the engine's PYTHONPATH). Two variables drive it:

- `KVCELLAR_TEST_CONTROL`: a JSON file, read before each batch of copies, so that a test can change it
  while the engine runs: `{"load": RULE, "store": RULE}`, a RULE being
  `{"fault": "fail"|"refuse"|"skip"|"none", "first": N, "last": N, "sleep_s": S}`, all of it optional.
  N counts the batches of a direction from 0, and a repeated one again. With `sleep_s` a batch stops
  half way for so long, which is where a kill hits a transfer.
- `KVCELLAR_TEST_LOADS`: a file to which each rank appends a JSON line for each chunk that it loaded
  whole: `{"rank": R, "chunk": I, "sha256": HEX}`, the hash of the bytes as they are on the *device*
  after the load. Lines of chunks that were loaded in part have no hash.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvcellar.contract import Direction
from kvcellar.vllm import KVCellarConnector, KVCellarOffloadingSpec
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.devices import Addresses, Device, Stream
from tests.fakes.faulty_device import Fault, FaultyDevice

__all__ = ["FaultySpec", "KVCellarConnector"]

NEVER = 1 << 62


class Control:
    """The file of rules, read anew at each question."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def rule(self, direction: Direction) -> Mapping[str, Any]:
        if self._path is None:
            return {}
        rules: dict[str, dict[str, Any]] = json.loads(Path(self._path).read_text())
        return rules.get(direction, {})

    def fault(self, direction: Direction, number: int) -> Fault:
        rule = self.rule(direction)
        is_hit = rule.get("first", 0) <= number <= rule.get("last", NEVER)
        return Fault(rule.get("fault", "none")) if is_hit else Fault.NONE


class SlowDevice(CpuDevice):
    """A CPU device that stops half way through a batch if the control says so."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control

    @override
    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        sleep_s = float(self._control.rule(direction).get("sleep_s", 0))
        if not sleep_s:
            super().copy_batch(dst, src, sizes, stream, direction)
            return
        half = len(sizes) // 2
        super().copy_batch(dst[:half], src[:half], sizes[:half], stream, direction)
        self._streams[stream].enqueue(lambda: time.sleep(sleep_s))
        super().copy_batch(dst[half:], src[half:], sizes[half:], stream, direction)


class FaultySpec(KVCellarOffloadingSpec):
    """kvcellar's spec with a faulty device and a log of loads."""

    @override
    def make_device(self, kv_caches: CanonicalKVCaches) -> Device:
        del kv_caches
        control = Control(os.environ.get("KVCELLAR_TEST_CONTROL"))
        return FaultyDevice(SlowDevice(control), control.fault)

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker = super().get_worker(kv_caches)
        log = os.environ.get("KVCELLAR_TEST_LOADS")
        if log is not None and not hasattr(worker, "is_logged"):
            _log_loads(worker, LoadLog(Path(log), self.config.parallel.rank, kv_caches, self))
        return worker


class LoadLog:
    """Hashes what arrived on the device."""

    def __init__(
        self, path: Path, rank: int, kv_caches: CanonicalKVCaches, spec: KVCellarOffloadingSpec
    ) -> None:
        self._path = path
        self._rank = rank
        self._tensors = [cache.tensor for cache in kv_caches.tensors]
        self._blocks_per_chunk: int = spec.blocks_per_chunk
        self.transfers: dict[int, tuple[LoadStoreSpec, GPULoadStoreSpec]] = {}

    def write(self, job_id: int) -> None:
        transfer = self.transfers.pop(job_id, None)
        if transfer is None:
            return
        chunks, blocks = transfer
        lines = [json.dumps(entry) for entry in self._entries(chunks, blocks)]
        with self._path.open("a") as log:
            log.write("".join(f"{line}\n" for line in lines))

    def _entries(self, source: LoadStoreSpec, target: GPULoadStoreSpec) -> list[dict[str, Any]]:
        chunks, blocks = source.block_ids.tolist(), target.block_ids.tolist()
        entries = []
        for size, index in zip(target.group_sizes, target.block_indices, strict=True):
            group, blocks = blocks[:size], blocks[size:]
            skip = index % self._blocks_per_chunk
            while group:
                of_chunk, group = _split(group, self._blocks_per_chunk - skip)
                entries.append(self._entry(chunks.pop(0), of_chunk))
                skip = 0
        return entries

    def _entry(self, chunk: int, blocks: list[int]) -> dict[str, Any]:
        entry = {"rank": self._rank, "chunk": chunk, "blocks": len(blocks)}
        if len(blocks) < self._blocks_per_chunk:
            return entry
        digest = hashlib.sha256()
        for tensor in self._tensors:
            digest.update(tensor[blocks].numpy().tobytes())
        return {**entry, "sha256": digest.hexdigest()}


def _split(items: list[int], n: int) -> tuple[list[int], list[int]]:
    return items[:n], items[n:]


def _log_loads(worker: OffloadingWorker, log: LoadLog) -> None:
    """Look over the worker's shoulder, so that it stays the object that the connector knows."""
    submit_load, get_finished = worker.submit_load, worker.get_finished

    def submit(job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        log.transfers[job_id] = (src_spec, dst_spec)
        return bool(submit_load(job_id, src_spec, dst_spec))

    def finish() -> list[TransferResult]:
        results: list[TransferResult] = get_finished()
        for result in results:
            log.write(result.job_id)
        return results

    worker.submit_load, worker.get_finished, worker.is_logged = submit, finish, True

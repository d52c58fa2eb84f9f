"""A spec whose copies go through the simulated CUDA driver, in the workers of a real CPU engine.

Loaded by vLLM in place of kvcellar's own (`"spec_module_path": "stubbed_spec"`). The engine's tensors pass
for device memory; everything else is as on a GPU: streams, events, batches, pinning on all ranks. Two
variables drive it:

- `KVCELLAR_TEST_STUB`: the simulated driver, which each worker opens for itself.
- `KVCELLAR_TEST_STUB_LOG`: a folder; rank R keeps in `R.json` what its driver has counted.
"""

import json
import os
from pathlib import Path

from typing_extensions import override
from vllm.v1.kv_offload.base import CanonicalKVCaches

from kvcellar.contract import Direction
from kvcellar.vllm import KVCellarOffloadingSpec
from kvcellar.worker.devices import Addresses, Device, Stream
from kvcellar.worker.gpu_device import GpuDevice
from tests.support.gpus import CUDA, StubGpu

COUNTED = ("registered_bytes", "registrations", "batches", "descriptors", "violations", "streams")


class LoggedDevice(GpuDevice):
    """Keeps a file of what the driver has counted."""

    def __init__(self, gpu: StubGpu, log: Path) -> None:
        super().__init__(gpu.vendor.load(gpu.path), lambda: 0)
        self._gpu = gpu
        self._log = log

    @override
    def copy_batch(
        self,
        dst: Addresses,
        src: Addresses,
        sizes: Addresses,
        stream: Stream,
        direction: Direction,
    ) -> None:
        super().copy_batch(dst, src, sizes, stream, direction)
        counted = {what: self._gpu.count(what) for what in COUNTED}
        new = self._log.with_suffix(".new")
        new.write_text(json.dumps({**counted, "violation": self._gpu.violation}))
        new.replace(self._log)


class StubbedSpec(KVCellarOffloadingSpec):
    """kvcellar's spec over the simulated driver."""

    @override
    def make_device(self, kv_caches: CanonicalKVCaches) -> Device:
        rank = self.config.parallel.rank
        gpu = StubGpu(CUDA, Path(os.environ["KVCELLAR_TEST_STUB"]))
        gpu.reset(5 + rank)
        gpu.set("steps per call", 3)  # an engine asks, and does not wait
        for cache in kv_caches.tensors:
            storage = cache.tensor.untyped_storage()
            gpu.adopt(storage.data_ptr(), storage.nbytes())
        return LoggedDevice(gpu, Path(os.environ["KVCELLAR_TEST_STUB_LOG"], f"{rank}.json"))

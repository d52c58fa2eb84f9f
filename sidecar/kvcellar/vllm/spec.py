"""The spec: what vLLM makes in each process of an engine.

In the workers vLLM asks it for a worker once the KV cache exists, in every rank at the same time; there
the ranks attach to the region together. Afterwards it asks the scheduler's spec for the manager, which
turns offload on only if every rank's slot is held in its own session: there is no other flag. Without a
region the engine serves without a host tier (`degrade`), or stops with the reason (`fail`).
"""

import logging
import os
import platform
from collections.abc import Mapping

import torch.distributed
import vllm.version
from vllm.config import ParallelConfig, VllmConfig, get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingParallelConfig

from kvcellar.contract import OnFailure, Owner
from kvcellar.errors import KVCellarError, RanksDisagree, Unsupported
from kvcellar.plugin.identity import core_pid_of_worker, fingerprint_of, session_of, weight_files
from kvcellar.plugin.ledger import Ledger, PrivateChunks
from kvcellar.plugin.settings import EngineNames, Settings
from kvcellar.region.geometry import Geometry, Layout, fold_rank
from kvcellar.vllm.manager import METRICS, OffManager, RegionManager
from kvcellar.vllm.worker import RegionWorker
from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from kvcellar.worker.attached import Region
from kvcellar.worker.devices import Device
from kvcellar.worker.offload import CPUOffloadingWorker
from kvcellar.worker.platforms import device_for, uses_region
from kvcellar.worker.ranks import Exchange, exchange_alone

logger = logging.getLogger(__name__)


class KVCellarOffloadingSpec(OffloadingSpec):
    """What vLLM makes in each process of an engine: settings, and the manager or the worker.

    Raises (constructor):
        ConfigurationError: a setting that cannot be used.
        Unsupported: a configuration that kvcellar refuses by name.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        _join_log_of_vllm()
        _refuse_parallelism(config.parallel)
        parallel = config.parallel
        names = EngineNames(
            config.engine_id, parallel.data_parallel_index, parallel.data_parallel_rank_local
        )
        self._settings = Settings.read(os.environ, config.extra_config, names)
        self._world_size: int = parallel.world_size
        self._chunk_bytes: int = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        self._has_region = uses_region(_platform())
        # vLLM reads it before it asks for a worker, so it is settled here and never changes.
        self.replicated_layout: bool = config.replicated_layout and self._has_region
        self.recomputes_failed_loads = False
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, object]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Declare the metrics of `RegionManager.get_stats`; called in API servers, without a spec."""
        del extra_config
        return dict(METRICS)

    def make_device(self, kv_caches: CanonicalKVCaches) -> Device:
        """The device that copies; a subclass may wrap it.

        Raises:
            Unsupported: kvcellar cannot copy from the KV cache's device.
        """
        return device_for(kv_caches.tensors[0].tensor.device.type)

    # --- in the scheduler

    def get_manager(self) -> OffloadingManager:
        """The manager, on or off; always the same.

        Raises:
            KVCellarError: there is no region and KVCELLAR_ON_FAILURE is `fail`.
        """
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def _make_manager(self) -> OffloadingManager:
        try:
            ledger = self._open_ledger()
        except KVCellarError as error:
            if self._settings.on_failure is OnFailure.FAIL:
                raise
            return _off(str(error))
        if not ledger.num_chunks:
            ledger.close()
            return _off(
                f"there is no room for one chunk of {self._chunk_bytes} bytes on each of "
                f"{self._world_size} ranks"
            )
        return RegionManager(ledger)

    def _open_ledger(self) -> Ledger:
        keeps_events = bool(self.kv_events_config.enable_kv_cache_events)
        settings = self._settings
        if not self._has_region:
            return Ledger(
                self._private_chunks(), settings.policy, PrivateChunks(), keeps_events=keeps_events
            )
        options = self._options(os.getpid(), exchange_alone, "")
        handle = attach_scheduler(settings.engine_id, world_size=self._world_size, options=options)
        geometry = handle.geometry
        if self._geometry(geometry.capacity_bytes) != geometry:
            handle.close()
            raise RanksDisagree(
                f"the scheduler computes {self._geometry(geometry.capacity_bytes)}, the ranks "
                f"{geometry}: they need the same vLLM, model and settings"
            )
        logger.info(
            "region %s: %d chunks of %d bytes on each of %d ranks (%s)",
            settings.engine_id,
            geometry.num_chunks,
            geometry.chunk_bytes,
            self._world_size,
            geometry.layout,
        )
        if settings.owner is Owner.SIDECAR and settings.cpu_bytes_to_use is not None:
            logger.info(
                "cpu_bytes_to_use=%d is not used: the sidecar's region has %d bytes",
                settings.cpu_bytes_to_use,
                geometry.capacity_bytes,
            )
        return Ledger(geometry.num_chunks, settings.policy, handle, keeps_events=keeps_events)

    # --- in a worker

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this rank; always the same. Blocks until all ranks are attached.

        Raises:
            KVCellarError: there is no region and KVCELLAR_ON_FAILURE is `fail`.
            Unsupported: a configuration that kvcellar refuses by name.
        """
        if self._worker is None:
            self._worker = RegionWorker(
                self._make_worker(kv_caches), recomputes_failed_loads=self.recomputes_failed_loads
            )
        return self._worker

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        device = self.make_device(kv_caches)
        region: Region | None = None
        num_chunks = self._private_chunks()
        if self._has_region:
            region = self._attach(device)
            num_chunks = region.num_chunks if region else 0
        try:
            return CPUOffloadingWorker(
                kv_caches, self.blocks_per_chunk, num_chunks, region, device=device
            )
        except KVCellarError:
            if region is not None:
                region.close()
            raise

    def _attach(self, device: Device) -> Region | None:
        """Attach and pin together with the other ranks; None if there is no region and that is allowed."""
        engine = get_current_vllm_config_or_none()
        if engine is None:
            raise Unsupported(
                "vLLM does not show its configuration while it makes a worker, as the versions that "
                "kvcellar was tested with do: use one of those"
            )
        rank = fold_rank(self.config.parallel.rank, self._world_size)
        core_pid = core_pid_of_worker(_executor(engine.parallel_config))
        options = self._options(
            core_pid, self._exchange(rank, engine.parallel_config), self._fingerprint(engine)
        )
        try:
            return self._attach_and_pin(rank, options, device)
        except KVCellarError as error:
            if self._settings.on_failure is OnFailure.FAIL:
                raise
            level = logging.WARNING if rank == 0 else logging.DEBUG
            logger.log(level, "rank %d is not attached to a region: %s", rank, error)
            return None

    def _attach_and_pin(self, rank: int, options: AttachOptions, device: Device) -> Region:
        region = attach(
            self._settings.engine_id,
            self._chunk_bytes,
            rank=rank,
            world_size=self._world_size,
            options=options,
        )
        try:
            region.pin(device)
        except BaseException:
            region.close()
            raise
        return region

    def _exchange(self, rank: int, parallel: ParallelConfig) -> Exchange:
        """The all-gather over the ranks of this engine, in rank order.

        Raises:
            Unsupported: the ranks are not one tensor-parallel group.
        """
        if parallel.enable_elastic_ep:
            raise Unsupported(
                "elastic expert parallelism is not supported: the ranks of an engine change while it "
                "runs, and a region is laid out for the ranks it started with; turn it off"
            )
        if self._world_size == 1:
            return exchange_alone
        group = get_tp_group()
        if (group.world_size, group.rank_in_group) != (self._world_size, rank):
            raise Unsupported(
                f"rank {rank} of {self._world_size} is rank {group.rank_in_group} of "
                f"{group.world_size} in its tensor-parallel group; kvcellar needs all ranks of an "
                "engine in one such group, in the same order"
            )

        def exchange(mine: object) -> list[object]:
            heard: list[object] = [None] * group.world_size
            torch.distributed.all_gather_object(heard, mine, group=group.cpu_group)
            return heard

        return exchange

    def _fingerprint(self, engine: VllmConfig) -> str:
        config = self.config
        model = engine.model_config
        return fingerprint_of(
            {
                "model": config.model.name,
                "revision": model.revision,
                # The revision that a name such as "main" stood for.
                "commit": getattr(model.hf_config, "_commit_hash", None),
                "weights": weight_files(config.model.name),
                "quantization": model.quantization,
                "dtype": str(model.dtype),
                "cache_dtype": config.model.dtype,
                "kv_cache_layout": config.kv_cache_layout,
                "attention_backend": str(engine.attention_config.backend),
                "groups": [
                    (group.group_id, group.tokens_per_block, group.layer_names)
                    for group in config.groups
                ],
                "bytes_per_block": config.worker_kv_bytes_per_block,
                "tokens_per_hash": self.tokens_per_hash,
                "blocks_per_chunk": self.blocks_per_chunk,
                "world_size": self._world_size,
                "layout": self._layout,
                "hash": engine.cache_config.prefix_caching_hash_algo,
                "hash_seed": os.environ.get("PYTHONHASHSEED"),
                "vllm": vllm.version.__version__,
                "python": platform.python_version(),
            }
        )

    # --- in both

    @property
    def _layout(self) -> Layout:
        return Layout.REPLICATED if self.replicated_layout else Layout.SHARDED

    def _geometry(self, capacity_bytes: int) -> Geometry:
        return Geometry.compute(capacity_bytes, self._chunk_bytes, self._world_size, self._layout)

    def _private_chunks(self) -> int:
        return self._geometry(self._settings.cpu_bytes_to_use or 0).num_chunks

    def _options(self, core_pid: int, exchange: Exchange, fingerprint: str) -> AttachOptions:
        settings = self._settings
        return AttachOptions(
            directory=settings.directory,
            session=session_of(self.config.engine_id, core_pid),
            layout=self._layout,
            fingerprint=fingerprint,
            owner=settings.owner,
            capacity_bytes=settings.cpu_bytes_to_use,
            timeout_s=settings.attach_timeout_s,
            exchange=exchange,
            pin=settings.pin,
        )


def _off(reason: str) -> OffManager:
    logger.warning("offload is off, the engine serves without its host tier: %s", reason)
    return OffManager()


def _platform() -> str:
    """The name that `uses_region` knows."""
    for name, is_it in (
        ("cuda", current_platform.is_cuda),
        ("rocm", current_platform.is_rocm),
        ("cpu", current_platform.is_cpu),
    ):
        if is_it():
            return name
    return str(current_platform.device_name)


def _executor(parallel: ParallelConfig) -> str:
    backend = parallel.distributed_executor_backend
    return backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))


def _refuse_parallelism(parallel: OffloadingParallelConfig) -> None:
    """Refuse ranks of unequal size, by name."""
    for name, size in (
        ("pipeline parallelism", parallel.pp_size),
        ("prefill context parallelism", parallel.pcp_size),
    ):
        if size > 1:
            raise Unsupported(
                f"{name} ({size}) is not supported: kvcellar needs ranks with equal shares of the KV "
                "cache in one tensor-parallel group; use tensor or data parallelism"
            )


def _join_log_of_vllm() -> None:
    """Send kvcellar's log lines where vLLM's go, unless somebody set kvcellar's logger up.

    vLLM configures its own logger only, so lines of others below WARNING would be lost. Called when a
    spec is made, never at import.
    """
    own, theirs = logging.getLogger("kvcellar"), logging.getLogger("vllm")
    if not own.handlers and not logging.getLogger().handlers:
        own.handlers[:] = theirs.handlers
        own.setLevel(theirs.getEffectiveLevel())
        own.propagate = False

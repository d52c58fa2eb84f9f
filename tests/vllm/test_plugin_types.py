"""The plug-in against vLLM's own classes, without an engine."""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingSpec,
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
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvcellar.contract import Direction
from kvcellar.errors import ConfigurationError, NotReady, TransferFailed, Unsupported
from kvcellar.plugin.ledger import Ledger, PrivateChunks
from kvcellar.vllm import KVCellarConnector, KVCellarOffloadingSpec
from kvcellar.vllm.manager import METRICS, ChunkSpec, OffManager, RegionManager
from kvcellar.vllm.worker import RegionWorker
from kvcellar.worker.cpu_device import CpuDevice
from kvcellar.worker.offload import CPUOffloadingWorker
from tests.fakes.faulty_device import Fault, FaultyDevice

pytestmark = pytest.mark.vllm

EXTRA = {"spec_name": "KVCellarOffloadingSpec", "spec_module_path": "kvcellar.vllm"}


def keys(*numbers: int) -> list[bytes]:
    return [make_offload_key(b"%032d" % number, 0) for number in numbers]


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


# --- importing


def test_another_version_is_refused_at_import_in_one_sentence() -> None:
    done = run("import vllm.version; vllm.version.__version__ = '0.33.0'; import kvcellar.vllm")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "kvcellar.errors.Unsupported: vLLM 0.33.0 is installed, and this kvcellar was tested with"
    )


def test_importing_has_no_side_effect_and_takes_another_version_if_allowed() -> None:
    code = """if True:
        import logging, threading
        import vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector
        vllm.version.__version__ = "0.33.0"
        handlers, threads = list(logging.getLogger().handlers), threading.active_count()
        import kvcellar.vllm
        assert threading.active_count() == threads
        assert logging.getLogger().handlers == handlers
        assert not logging.getLogger("kvcellar").handlers
    """
    # Settings that would stop an engine: an API server imports the module and reads none.
    bad = {"KVCELLAR_NO_SUCH_SETTING": "1", "KVCELLAR_ENGINE_ID": "a/b"}
    done = run(code, KVCELLAR_VLLM_UNTESTED="1", **bad)
    assert done.returncode == 0, done.stderr


# --- the manager


@pytest.fixture
def manager() -> RegionManager:
    return RegionManager(Ledger(4, "lru", PrivateChunks(), keeps_events=True))


def test_a_manager_speaks_vllms_types(manager: RegionManager) -> None:
    context = ReqContext("a")
    assert manager.on_new_request(context).policy.value == "chunk_level"
    first, second = keys(1, 2)
    assert manager.lookup(first, context) is LookupResult.MISS
    output = manager.prepare_store([first, second], context)
    assert output.keys_to_store == [first, second]
    assert output.store_spec.block_ids.dtype.name == "int32"
    assert manager.lookup(first, context) is LookupResult.HIT_PENDING
    manager.complete_store({second, first}, context)
    assert manager.lookup(first, context) is LookupResult.HIT
    assert manager.get_load_source(first, context) == "host"
    load = manager.prepare_load([second, first], context)
    assert load.block_ids.tolist() == output.store_spec.block_ids.tolist()[::-1]
    manager.complete_load({first, second}, context)
    assert len(manager.prepare_load([], context).block_ids) == 0
    (event,) = list(manager.take_events())
    assert (set(event.keys), event.medium, event.removed) == ({first, second}, Medium.CPU, False)
    manager.on_schedule_end(ScheduleEndContext((), ()))
    manager.on_request_finished(context)
    manager.reset_cache()
    assert manager.lookup(first, context) is LookupResult.MISS
    manager.shutdown()


def test_chunks_travel_to_the_workers() -> None:
    assert pickle.loads(pickle.dumps(ChunkSpec([3, 1]))).block_ids.tolist() == [3, 1]  # noqa: S301


def test_a_failed_load_drops_the_keys_of_its_request_only(manager: RegionManager) -> None:
    ours, theirs = ReqContext("ours"), ReqContext("theirs")
    stored = manager.prepare_store(keys(1, 2), ours)
    manager.complete_store(set(stored.keys_to_store), ours)
    manager.prepare_load(keys(1), ours)
    manager.prepare_load(keys(2), theirs)
    manager.drop_failed_loads({"ours"})
    manager.complete_load(set(keys(1)), ours)
    manager.complete_load(set(keys(2)), theirs)
    assert [manager.lookup(key, ours).name for key in keys(1, 2)] == ["MISS", "HIT"]


def test_a_manager_emits_declared_metrics_only_and_each_change_once(manager: RegionManager) -> None:
    context = ReqContext("a")
    manager.lookup(keys(1)[0], context)
    stats = manager.get_stats()
    assert stats is not None
    assert set(stats.data["data"]) == set(METRICS)
    for name, samples in stats.data["data"].items():
        assert name.startswith("vllm:kvcellar_")
        assert {len(labels) for labels in samples} == {len(METRICS[name].labelnames)}
    assert stats.data["data"]["vllm:kvcellar_lookup_chunks"]["miss",] == 1
    assert stats.data["data"]["vllm:kvcellar_chunks"][()] == 4
    assert manager.get_stats() is None
    assert KVCellarOffloadingSpec.build_metric_definitions({}) == METRICS


def test_the_off_manager_finds_nothing_stores_nothing_and_never_says_none() -> None:
    manager, context = OffManager(), ReqContext("a")
    manager.on_new_request(context)
    for key in keys(1, 2):
        assert manager.lookup(key, context) is LookupResult.MISS
    output = manager.prepare_store(keys(1, 2), context)
    assert output is not None
    assert output.keys_to_store == output.evicted_keys == []
    assert len(manager.prepare_load([], context).block_ids) == 0
    stats = manager.get_stats()
    assert stats is not None
    assert stats.data["data"] == {"vllm:kvcellar_enabled": {(): 0}}
    assert manager.get_stats() is None
    manager.reset_cache()
    manager.on_request_finished(context)
    manager.shutdown()


# --- the worker


@pytest.fixture
def tensor() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-128, 127, (8, 64), dtype=torch.int8, generator=generator)


def kv_caches(tensor: torch.Tensor) -> CanonicalKVCaches:
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1])],
        [[CanonicalKVCacheRef(0, tensor.shape[1])]],
    )


def make_worker(
    tensor: torch.Tensor, fault: dict[Direction, Fault], *, recomputes: bool
) -> RegionWorker:
    device = FaultyDevice(CpuDevice(), lambda direction, _: fault.get(direction, Fault.NONE))
    worker = CPUOffloadingWorker(kv_caches(tensor), 1, 4, device=device)
    return RegionWorker(worker, recomputes_failed_loads=recomputes)


def blocks(*ids: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(ids), group_sizes=[len(ids)], block_indices=[0])


def test_a_worker_stores_and_loads(tensor: torch.Tensor) -> None:
    worker = make_worker(tensor, {}, recomputes=False)
    before = tensor.clone()
    assert worker.submit_store(1, blocks(0, 5), ChunkSpec([2, 0]))
    worker.wait({1, 99})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.transfer_size) == (1, True, 128)
    assert result.transfer_time is not None
    # The extra argument is that of vLLM 0.33.
    assert worker.submit_load(2, ChunkSpec([0, 2]), blocks(6, 7), expedited=True)
    worker.wait({2})
    assert [result.job_id for result in worker.get_finished()] == [2]
    assert worker.take_failed_loads() == set()
    assert torch.equal(tensor[6], before[5])
    assert torch.equal(tensor[7], before[0])
    worker.shutdown()


def test_a_failed_load_is_named_where_vllm_can_recompute(tensor: torch.Tensor) -> None:
    worker = make_worker(tensor, {Direction.LOAD: Fault.FAIL}, recomputes=True)
    worker.submit_store(1, blocks(0), ChunkSpec([0]))
    worker.submit_load(2, ChunkSpec([0]), blocks(3))
    worker.wait({1, 2})
    results = {result.job_id: result for result in worker.get_finished()}
    assert results[2].success
    assert results[2].transfer_size is None
    assert worker.take_failed_loads() == {2}
    assert worker.take_failed_loads() == set()
    worker.shutdown()


def test_a_failed_load_stops_the_engine_with_advice_where_vllm_cannot(tensor: torch.Tensor) -> None:
    worker = make_worker(tensor, {Direction.LOAD: Fault.REFUSE}, recomputes=False)
    worker.submit_load(2, ChunkSpec([0]), blocks(3))
    worker.wait({2})
    with pytest.raises(TransferFailed, match='"kv_connector": "KVCellarConnector"'):
        worker.get_finished()
    worker.shutdown()


def test_a_failed_store_without_a_region_to_mark_stops_the_engine(tensor: torch.Tensor) -> None:
    worker = make_worker(tensor, {Direction.STORE: Fault.FAIL}, recomputes=True)
    worker.submit_store(1, blocks(0), ChunkSpec([0]))
    worker.wait({1})
    with pytest.raises(TransferFailed, match="store 1 failed and could not be marked"):
        worker.get_finished()
    worker.shutdown()


def test_a_transfer_after_shutdown_is_refused_with_a_sentence(tensor: torch.Tensor) -> None:
    worker = make_worker(tensor, {}, recomputes=True)
    worker.shutdown()
    worker.shutdown()
    with pytest.raises(TransferFailed, match="store 1 was refused"):
        worker.submit_store(1, blocks(0), ChunkSpec([0]))
    with pytest.raises(TransferFailed, match="load 2 was refused"):
        worker.submit_load(2, ChunkSpec([0]), blocks(0))


# --- the spec


def make_config(
    extra: Mapping[str, object] | None = None, parallel: Mapping[str, object] | None = None
) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer",), 0),),
        worker_kv_bytes_per_block=4096,
        enable_kv_cache_events=False,
        extra_config={**EXTRA, **(extra or {})},
        engine_id="engine",
        model=OffloadingModelConfig("model", "float32"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(
            **{
                "rank": 0,
                "world_size": 2,
                "tp_size": 2,
                "pp_size": 1,
                "pcp_size": 1,
                "dcp_size": 1,
                "data_parallel_index": 0,
                "data_parallel_size": 1,
                "data_parallel_rank_local": 0,
                "is_parallelism_agnostic": True,
                **(parallel or {}),
            }
        ),
    )


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An engine beside a sidecar that is not there."""
    monkeypatch.setenv("KVCELLAR_ROOT", str(tmp_path))
    monkeypatch.setenv("KVCELLAR_ENGINE_ID", "eng")
    monkeypatch.setenv("KVCELLAR_ATTACH_TIMEOUT", "1")
    return monkeypatch


def test_vllm_finds_the_spec_by_its_path_and_settles_the_layout_at_once(
    environ: pytest.MonkeyPatch,
) -> None:
    spec = OffloadingSpecFactory.create_spec(make_config())
    assert isinstance(spec, KVCellarOffloadingSpec)
    assert isinstance(spec, OffloadingSpec)
    assert spec.replicated_layout is False
    assert spec.tokens_per_block == (16,)
    replicated = OffloadingSpecFactory.create_spec(replace(make_config(), replicated_layout=True))
    assert replicated.replicated_layout is True


def test_the_connector_is_vllms_with_a_third_argument_by_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
    from vllm.utils.func_utils import supports_kw

    assert supports_hma(KVCellarConnector)
    assert supports_kw(KVCellarConnector, "kv_cache_config")


def test_without_a_region_the_manager_is_off_or_the_engine_stops(
    environ: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = KVCellarOffloadingSpec(make_config())
    manager = spec.get_manager()
    assert isinstance(manager, OffManager)
    assert spec.get_manager() is manager
    environ.setenv("KVCELLAR_ON_FAILURE", "fail")
    with pytest.raises(NotReady, match="there is no directory"):
        KVCellarOffloadingSpec(make_config()).get_manager()


@pytest.mark.parametrize(
    ("parallel", "name"),
    [({"pp_size": 2}, "pipeline parallelism"), ({"pcp_size": 2}, "prefill context parallelism")],
)
def test_ranks_of_unequal_size_are_refused_by_name(
    environ: pytest.MonkeyPatch, parallel: dict[str, int], name: str
) -> None:
    with pytest.raises(Unsupported, match=name):
        KVCellarOffloadingSpec(make_config(parallel=parallel))


def test_bad_settings_stop_the_engine_even_if_it_may_degrade(environ: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="canonical_layout"):
        KVCellarOffloadingSpec(make_config({"canonical_layout": True}))
    environ.setenv("KVCELLAR_ATTACH_TIMOUT", "1")
    with pytest.raises(ConfigurationError, match="KVCELLAR_ATTACH_TIMOUT"):
        KVCellarOffloadingSpec(make_config())

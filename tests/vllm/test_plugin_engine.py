"""Real engines with the plug-in: right tokens, and right ones only because bytes were loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcellar.contract import Direction, Role
from kvcellar.demo.client import Engine, EngineFailed
from kvcellar.demo.models import ModelKind
from kvcellar.demo.sandbox import Sandbox
from kvcellar.region.geometry import Layout
from tests.vllm.cellar import SHM, Cellar, prompts
from tests.vllm.conftest import checkpoint, engine_path

pytestmark = pytest.mark.vllm

Tokens = list[tuple[int, ...]]
MakeCellar = Callable[[ModelKind], Cellar]


@pytest.fixture
def make_cellar(sandbox: Sandbox, workshop: Path, tmp_path: Path) -> MakeCellar:
    def make(kind: ModelKind) -> Cellar:
        return Cellar(
            sandbox=sandbox,
            folder=tmp_path,
            model=checkpoint(workshop, kind),
            kind=kind,
            cache=workshop / "cache",
            pythonpath=engine_path(),
            env={"KVCELLAR_ROOT": SHM, "KVCELLAR_ENGINE_ID": "eng"},
        )

    return make


def answer(engine: Engine, asked: list[list[int]]) -> tuple[Tokens, int]:
    """Tokens of the answers, and how many prompt tokens came from the host; the device begins empty."""
    engine.reset_prefix_cache()
    answers = engine.generate(asked, max_tokens=8, together=True)
    engine.settle()
    assert {each.finish_reason for each in answers} == {"length"}
    return [each.token_ids for each in answers], sum(each.cached_tokens for each in answers)


def differing(left: Tokens, right: Tokens) -> int:
    return sum(a != b for a, b in zip(left, right, strict=True))


def check_faults(cellar: Cellar, engine: Engine, asked: list[list[int]], right: Tokens) -> None:
    """A skipped load changes the tokens; a failed one is computed again, and its keys are dropped."""
    cellar.control({Direction.LOAD: {"fault": "skip"}})
    skipped, cached = answer(engine, asked)
    assert cached > 0
    assert differing(skipped, right) == len(asked)

    used = engine.metrics().total("vllm:kvcellar_used_chunks")
    cellar.control({Direction.LOAD: {"fault": "fail"}})
    recomputed, _ = answer(engine, asked)
    assert recomputed == right
    metrics = engine.metrics()
    dropped = metrics.total("vllm:kvcellar_failed_chunks_total", direction="load")
    assert dropped > 0
    assert metrics.total("vllm:kvcellar_used_chunks") == used - dropped

    cellar.control()
    assert answer(engine, asked) == (right, 0)  # nothing was there, and it is stored again
    tokens, cached = answer(engine, asked)
    assert tokens == right
    assert cached > 0


def test_tokens_come_from_the_region_and_faults_never_change_them(make_cellar: MakeCellar) -> None:
    cellar = make_cellar(ModelKind.LLAMA)
    asked = prompts(8)
    with (
        cellar.sidecar("64Mi"),
        cellar.start(connector="KVCellarConnector", extra={"eviction_policy": "arc"}) as engine,
    ):
        engine.wait_ready()
        right, cached = answer(engine, asked)
        assert cached == 0
        assert differing(right, [right[0]] * len(right)) == len(right) - 1

        tokens, cached = answer(engine, asked)
        assert tokens == right
        # Each token that vLLM says it did not compute lies in a chunk that was seen to arrive, and
        # a program that knows the file format only finds the same bytes in the sidecar's file.
        loaded = cellar.loaded()
        assert cached == 32 * sum(entry["blocks"] for entry in loaded) > 0
        assert cellar.third_reader() == {"agreed": len(loaded), "disagreed": 0}
        scheduler = cellar.counters()[Role.SCHEDULER, 0]
        assert scheduler.lookup_hit >= len(loaded)
        assert scheduler.used_chunks == engine.metrics().total("vllm:kvcellar_used_chunks") > 0

        check_faults(cellar, engine, asked, right)

        others = prompts(4, seed=1)
        cellar.control({Direction.STORE: {"fault": "fail"}})
        right, cached = answer(engine, others)
        assert cached == 0
        assert engine.metrics().total("vllm:kvcellar_failed_chunks_total", direction="store") > 0
        assert answer(engine, others) == (right, 0)  # no failed chunk was listed
        cellar.control()
        assert answer(engine, others) == (right, 0)
        tokens, cached = answer(engine, others)
        assert tokens == right
        assert cached > 0
        engine.shutdown()
    assert cellar.lines(r"\d+ chunks of \d+ bytes on each of 1 ranks")


@pytest.mark.newest
def test_an_mla_engine_keeps_one_copy_that_rank_0_stores(make_cellar: MakeCellar) -> None:
    cellar = make_cellar(ModelKind.MLA)
    asked = prompts(4)
    with cellar.sidecar("64Mi"), cellar.start(ranks=2) as engine:
        engine.wait_ready()
        geometry = cellar.session().geometry
        assert (geometry.layout, geometry.world_size, geometry.copies) == (Layout.REPLICATED, 2, 1)
        right, _ = answer(engine, asked)
        tokens, cached = answer(engine, asked)
        assert tokens == right
        loaded = cellar.loaded()
        assert {entry["rank"] for entry in loaded} == {0, 1}
        assert 2 * cached == 16 * sum(entry["blocks"] for entry in loaded) > 0
        assert cellar.third_reader() == {"agreed": len(loaded), "disagreed": 0}
        counters = cellar.counters()
        first, second = counters[Role.WORKER, 0], counters[Role.WORKER, 1]
        assert first.store_bytes > 0
        assert (second.store_bytes, second.stores_ok, second.stores_failed) == (0, 0, 0)
        assert first.load_bytes == second.load_bytes > 0


@pytest.mark.newest
def test_sliding_windows_with_several_groups_and_large_chunks(make_cellar: MakeCellar) -> None:
    cellar = make_cellar(ModelKind.SLIDING)
    asked = prompts(6)
    with (
        cellar.sidecar("64Mi"),
        cellar.start(connector="KVCellarConnector", extra={"blocks_per_chunk": 2}) as engine,
    ):
        engine.wait_ready()
        right, _ = answer(engine, asked)
        tokens, cached = answer(engine, asked)
        assert tokens == right
        assert cached > 0
        assert cellar.third_reader()["disagreed"] == 0
        check_faults(cellar, engine, asked, right)


@pytest.mark.newest
def test_without_a_sidecar_a_degrading_engine_serves_and_says_so_once(
    make_cellar: MakeCellar,
) -> None:
    cellar = make_cellar(ModelKind.LLAMA)
    asked = prompts(2)
    with cellar.start(KVCELLAR_ATTACH_TIMEOUT="1") as engine:
        engine.wait_ready()
        right, cached = answer(engine, asked)
        assert answer(engine, asked) == (right, 0)
        assert engine.metrics().total("vllm:kvcellar_enabled") == 0
        assert "vllm:kvcellar_enabled" in engine.metrics().names()
    assert cached == 0
    (off,) = cellar.lines("offload is off")
    assert "WARNING" in off
    (why,) = cellar.lines("rank 0 is not attached")
    assert f"no directory {SHM}/kvcellar" in why
    assert not cellar.lines("cannot store chunks")
    assert list(cellar.sandbox.path(SHM).glob("kvcellar*")) == []


@pytest.mark.newest
def test_under_fail_an_engine_without_a_region_stops_with_the_reason(
    make_cellar: MakeCellar,
) -> None:
    cellar = make_cellar(ModelKind.LLAMA)
    with (
        cellar.start(KVCELLAR_ON_FAILURE="fail", KVCELLAR_ATTACH_TIMEOUT="1") as engine,
        pytest.raises(EngineFailed),
    ):
        engine.wait_ready()
    assert cellar.lines(f"NotReady: there is no directory {SHM}/kvcellar")

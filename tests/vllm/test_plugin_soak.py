"""The full counts: hundreds of requests with eviction, and starts that CI has no time for."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcellar.contract import Direction
from kvcellar.demo.client import Engine, EngineFailed, Part
from kvcellar.demo.models import ModelKind, random_prompt
from kvcellar.demo.sandbox import Sandbox
from kvcellar.demo.sidecar import free_port
from kvcellar.region import metafile
from tests.vllm.cellar import SHM, Cellar, prompts
from tests.vllm.conftest import checkpoint, engine_path

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(1800)]

N_REQUESTS = 200
BLOCK_TOKENS = 32
HITS = "vllm:external_prefix_cache_hits_total"

Tokens = list[tuple[int, ...]]
MakeCellar = Callable[[], Cellar]


@pytest.fixture
def make_cellar(sandbox: Sandbox, workshop: Path, tmp_path: Path) -> MakeCellar:
    def make() -> Cellar:
        return Cellar(
            sandbox=sandbox,
            folder=tmp_path,
            model=checkpoint(workshop, ModelKind.LLAMA),
            kind=ModelKind.LLAMA,
            cache=workshop / "cache",
            pythonpath=engine_path(),
        )

    return make


def answer(engine: Engine, asked: list[list[int]]) -> Tokens:
    """Tokens of the answers; the device begins empty, and is much smaller than the requests."""
    engine.reset_prefix_cache()
    answers = engine.generate(asked, together=True, timeout_s=600)
    engine.settle()
    return [each.token_ids for each in answers]


@pytest.mark.parametrize("ranks", [1, 2])
def test_hundreds_of_requests_get_the_tokens_that_they_get_without(
    make_cellar: MakeCellar, ranks: int
) -> None:
    cellar = make_cellar()
    asked = prompts(N_REQUESTS)
    with cellar.start_with(None, ranks=ranks) as engine:
        engine.wait_ready()
        right = answer(engine, asked)
    assert len(set(right)) == N_REQUESTS

    cellar.env |= {"KVCELLAR_ROOT": SHM, "KVCELLAR_ENGINE_ID": "eng"}
    with cellar.sidecar("160Mi"), cellar.start(ranks=ranks) as engine:
        engine.wait_ready()
        assert answer(engine, asked) == right
        before = engine.metrics().total(HITS)
        assert answer(engine, asked) == right
        # Every token that vLLM counts as a hit lies in chunks that arrived on each rank, and the
        # bytes on the device are those in the sidecar's file.
        claimed = engine.metrics().total(HITS) - before
        loaded = cellar.loaded()
        for rank in range(ranks):
            of_rank = [entry for entry in loaded if entry["rank"] == rank]
            assert claimed == BLOCK_TOKENS * len(of_rank) > 0
        assert cellar.third_reader() == {"agreed": len(loaded), "disagreed": 0}
        cellar.control({Direction.LOAD: {"fault": "skip"}})
        skipped = answer(engine, asked)
        assert all(wrong != token for wrong, token in zip(skipped, right, strict=True))
        engine.shutdown()

    with cellar.sidecar("40Mi"), cellar.start(ranks=ranks) as engine:
        engine.wait_ready()
        for _ in range(3):
            assert answer(engine, asked) == right
            # The last ones are still there, whatever had to make room.
            assert answer(engine, asked[-20:]) == right[-20:]
        metrics = engine.metrics()
        assert metrics.total(HITS) > 0
        assert metrics.total("vllm:kvcellar_evicted_chunks_total") > 0
        engine.shutdown()


@pytest.mark.newest
def test_a_failed_load_without_our_connector_stops_the_engine_with_advice(
    make_cellar: MakeCellar,
) -> None:
    cellar = make_cellar()
    asked = prompts(2)
    with cellar.start(extra={"cpu_bytes_to_use": "64Mi"}) as engine:
        engine.wait_ready()
        answer(engine, asked)
        cellar.control({Direction.LOAD: {"fault": "fail", "last": 0}})
        right = answer(engine, asked)  # once is made good by the second try
        assert answer(engine, asked) == right
        cellar.control({Direction.LOAD: {"fault": "fail"}})
        with pytest.raises(EngineFailed):
            answer(engine, asked)
    assert cellar.lines(
        r'TransferFailed: load \d+ failed twice .*"kv_connector": "KVCellarConnector"'
    )


@pytest.mark.newest
def test_a_region_of_the_engines_own_leaves_nothing_behind(make_cellar: MakeCellar) -> None:
    cellar = make_cellar()
    asked = prompts(2)

    def used_bytes() -> int:
        return sum(
            path.stat().st_blocks * 512 for path in cellar.directory.glob("*") if path.is_file()
        )

    with cellar.start(ranks=2, extra={"cpu_bytes_to_use": "64Mi"}) as engine:
        engine.wait_ready()
        assert list(cellar.directory.iterdir()) == []
        right = answer(engine, asked)
        assert answer(engine, asked) == right
        assert engine.metrics().total(HITS) > 0
        engine.kill(Part.EVERYTHING)
        engine.wait_gone()
    assert used_bytes() == 0


@pytest.mark.newest
def test_data_parallel_engines_have_a_region_each(make_cellar: MakeCellar) -> None:
    cellar = make_cellar()
    port = free_port()
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVCellarOffloadingSpec",
            "spec_module_path": "kvcellar.vllm",
        },
    }
    with (
        cellar.sidecar("32Mi", KVCELLAR_ENGINES="2"),
        cellar.log.open("ab") as log,
    ):
        server = cellar.sandbox.popen(
            [
                *[sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"],
                *["--model", str(cellar.model), "--dtype", "float32", "--enforce-eager"],
                *["--skip-tokenizer-init", "--block-size", "32", "--max-model-len", "512"],
                *["--num-gpu-blocks-override", "48", "--kv-cache-memory-bytes", str(64 << 20)],
                *["--data-parallel-size", "2", "--host", "127.0.0.1", "--port", str(port)],
                *["--kv-transfer-config", json.dumps(transfer)],
            ],
            env=_server_environment(cellar),
            stdout=log,
            stderr=log,
        )
        deadline = time.monotonic() + 600
        while not _asks(port, "/health"):
            assert server.poll() is None, cellar.log.read_text()[-4000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        for number in range(8):
            body = {"model": str(cellar.model), "max_tokens": 4, "ignore_eos": True}
            prompt = random_prompt(200, number)
            assert _asks(port, "/v1/completions", {**body, "prompt": prompt, "detokenize": False})
        for engine in range(2):
            path = cellar.directory / f"eng_dp{engine}.meta"
            with path.open("rb") as file:
                rows = metafile.read_contents(file.fileno()).rows.values()
            assert sorted(row.role for row in rows) == ["scheduler", "worker"]
            assert sum(row.counters.store_bytes for row in rows) > 0
        assert len({path.name for path in cellar.directory.glob("*.meta")}) == 2
        server.kill()
        server.wait()


def _server_environment(cellar: Cellar) -> dict[str, str]:
    scratch = str(cellar.sandbox.scratch)
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": scratch,
        "TMPDIR": scratch,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(cellar.cache),
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": cellar.pythonpath,
        "KVCELLAR_ROOT": SHM,
        "KVCELLAR_ENGINE_ID": "eng",
        "KVCELLAR_ENGINES": "2",
    }


def _asks(port: int, path: str, body: dict[str, object] | None = None) -> bool:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310
            return bool(response.status == 200)
    except OSError:
        return False

"""A real engine of two ranks whose copies go through the simulated CUDA driver."""

import json
from pathlib import Path

import pytest

from kvcellar.contract import Role
from kvcellar.demo.models import ModelKind
from kvcellar.demo.sandbox import Sandbox
from tests.support.gpus import CUDA, build_stub
from tests.vllm.cellar import SHM, Cellar, prompts
from tests.vllm.conftest import checkpoint, engine_path
from tests.vllm.test_plugin_engine import answer

pytestmark = [pytest.mark.vllm, pytest.mark.newest, pytest.mark.timeout(600)]


def test_tokens_come_back_through_the_driver_from_memory_that_both_ranks_pinned(
    sandbox: Sandbox, workshop: Path, tmp_path: Path
) -> None:
    library = build_stub(CUDA, tmp_path)
    assert library is not None
    cellar = Cellar(
        sandbox=sandbox,
        folder=tmp_path,
        model=checkpoint(workshop, ModelKind.LLAMA),
        kind=ModelKind.LLAMA,
        cache=workshop / "cache",
        pythonpath=engine_path(),
        env={
            "KVCELLAR_ROOT": SHM,
            "KVCELLAR_ENGINE_ID": "eng",
            "KVCELLAR_TEST_STUB": str(library),
            "KVCELLAR_TEST_STUB_LOG": str(tmp_path),
        },
    )
    asked = prompts(6)
    spec = {"spec_name": "StubbedSpec", "spec_module_path": "stubbed_spec"}
    with cellar.sidecar("64Mi"), cellar.start(ranks=2, extra=spec) as engine:
        engine.wait_ready()
        right, _ = answer(engine, asked)
        tokens, cached = answer(engine, asked)
        assert tokens == right
        assert cached > 0
        counters = cellar.counters()
        for rank in range(2):
            seen = json.loads((tmp_path / f"{rank}.json").read_text())
            assert seen["violation"] == ""
            assert seen["registrations"] == 1
            assert seen["registered_bytes"] == _pinnable(cellar)
            assert seen["batches"] >= 2
            assert counters[Role.WORKER, rank].loads_ok > 0
        engine.shutdown()
    assert len(cellar.lines(r"pieces are pinned on each of 2 ranks")) == 1


def _pinnable(cellar: Cellar) -> int:
    geometry = cellar.session().geometry
    return geometry.num_chunks * geometry.chunk_stride_bytes

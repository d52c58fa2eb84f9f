"""Parts of a real engine are killed with SIGKILL at random moments; the next start just works."""

import random
import sys
import time
from pathlib import Path

import pytest

from kvcellar.demo.client import Engine, Part
from kvcellar.demo.engine_config import (
    KV_TRANSFER,
    VLLM_LEFT_BYTES,
    VLLM_SHM_BYTES,
    EngineConfig,
)
from kvcellar.demo.measure import region_bytes
from kvcellar.demo.models import ModelKind, random_prompt, write_checkpoint
from kvcellar.demo.sandbox import SHM, Sandbox
from kvcellar.demo.sidecar import Sidecar
from tests.vllm.cellar import SIDECAR_PYTHON

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

CAPACITY_BYTES = 48 << 20
RANKS = 2
PROMPTS = [random_prompt(170, seed) for seed in range(32)]
HITS = "vllm:external_prefix_cache_hits_total"


def _engine(sandbox: Sandbox, folder: Path) -> Engine:
    config = EngineConfig(
        python=Path(sys.executable),
        model=folder / "model",
        kind=ModelKind.LLAMA,
        ranks=RANKS,
        kv_transfer=KV_TRANSFER,
        env={"KVCELLAR_ROOT": str(SHM), "KVCELLAR_ENGINE_ID": "killed"},
        cache=folder / "vllm-cache",
    )
    return Engine.start(config, sandbox, folder / "engine.log")


def _kill_and_restart(folder: Path, parts: list[Part], seed: int) -> None:
    """Start, kill at a random moment of a load and store mix, check; once more for each part."""
    rng = random.Random(seed)
    write_checkpoint(ModelKind.LLAMA, folder / "model")
    left_bytes = len(parts) * VLLM_LEFT_BYTES
    with Sandbox.open(CAPACITY_BYTES + VLLM_SHM_BYTES + left_bytes) as sandbox:
        sidecar = Sidecar.start(
            sandbox, folder / "sidecar.log", "killed", str(CAPACITY_BYTES), SIDECAR_PYTHON
        )
        sidecar.wait_for("Ready", lambda body: body["state"] == "Ready")
        for number, part in enumerate(parts, start=1):
            with _engine(sandbox, folder) as engine:
                engine.wait_ready()
                engine.generate(PROMPTS, together=True)
                engine.reset_prefix_cache()
                engine.begin_generate(
                    [*PROMPTS, *(random_prompt(480, number) for _ in range(8))], together=True
                )
                time.sleep(rng.uniform(0.0, 1.0))
                if part is Part.WORKERS:
                    engine.kill_worker(rng.randrange(RANKS))
                else:
                    engine.kill(part)
            region = sidecar.wait_for("unheld", lambda body: not body["participants"])
            assert (region["state"], region["engineStarts"]) == ("Ready", number)
            assert region_bytes(sandbox) == CAPACITY_BYTES
        with _engine(sandbox, folder) as engine:
            engine.wait_ready()
            wanted = engine.generate(PROMPTS, together=True)
            engine.reset_prefix_cache()
            before = engine.metrics().total(HITS)
            assert engine.generate(PROMPTS, together=True) != []
            engine.settle()
            assert engine.metrics().total(HITS) > before
            engine.reset_prefix_cache()
            again = engine.generate(PROMPTS, together=True)
            assert [each.token_ids for each in again] == [each.token_ids for each in wanted]
            assert region_bytes(sandbox) == CAPACITY_BYTES
            engine.shutdown()
        sidecar.terminate()
        assert not sandbox.processes()


@pytest.mark.timeout(900)
def test_a_start_after_a_killed_worker_and_a_killed_scheduler_just_works(tmp_path: Path) -> None:
    # A kill of everything at once is a step of the demo, which runs beside these tests.
    _kill_and_restart(tmp_path, [Part.WORKERS, Part.SCHEDULER], seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", [Part.WORKERS, Part.SCHEDULER, Part.EVERYTHING])
def test_ten_kills_of_each_part_leave_nothing_behind(tmp_path: Path, part: Part) -> None:
    _kill_and_restart(tmp_path, [part] * 10, seed=2)

"""What the demo does and checks, step by step: `Story`."""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvcellar.contract import EngineId
from kvcellar.demo import measure
from kvcellar.demo.answers import Started
from kvcellar.demo.client import Engine, Part
from kvcellar.demo.engine_config import (
    KV_TRANSFER,
    VLLM_LEFT_BYTES,
    VLLM_SHM_BYTES,
    EngineConfig,
)
from kvcellar.demo.models import TRAITS, ModelKind, random_prompt, write_checkpoint
from kvcellar.demo.passes import Pass
from kvcellar.demo.report import Report, mib
from kvcellar.demo.sandbox import SHM, Sandbox
from kvcellar.demo.sidecar import Sidecar
from kvcellar.errors import KVCellarError

ENGINE_ID = EngineId("demo")
CAPACITY_BYTES = 80 << 20
SHM_BYTES = CAPACITY_BYTES + VLLM_SHM_BYTES


@dataclass(frozen=True, slots=True)
class StoryOptions:
    """What a demo runs with.

    Attributes:
        engine_python: interpreter of an environment with vLLM and kvcellar.
        ranks: tensor-parallel size.
        requests: prompts of each pass; far more blocks than the device holds.
        folder: for the checkpoint, logs and vLLM's own cache.
    """

    engine_python: Path
    ranks: int
    requests: int
    folder: Path


class Story:
    """The story, step by step. Make it and call `run` once."""

    def __init__(self, options: StoryOptions) -> None:
        """Prepare nothing yet."""
        self._options = options
        self._report = Report()
        self._block_tokens = TRAITS[ModelKind.LLAMA].block_size
        # Five whole blocks and a rest, so that all five can be found again.
        length = 5 * self._block_tokens + 10
        self._prompts = [random_prompt(length, seed) for seed in range(options.requests)]
        self._wanted: list[tuple[int, ...]] = []
        self._used_before = 0

    def run(self) -> bool:
        """Run it all; True if every check held."""
        report = self._report
        report.say("writing a checkpoint with random weights")
        model = write_checkpoint(ModelKind.LLAMA, self._options.folder / "model")
        with Sandbox.open(SHM_BYTES) as sandbox:
            self._run_in(sandbox, model)
        verdict = "all of it held" if report.all_held else "NOT all of it held"
        took_s = time.monotonic() - report.began
        sys.stdout.write(
            f"\nkvcellar demo, {self._options.ranks} ranks, {self._options.requests} requests a pass\n\n"
            f"{report.table()}\n\n{verdict}; {took_s:.0f} s\n"
        )
        return report.all_held

    def _run_in(self, sandbox: Sandbox, model: Path) -> None:
        sidecar = self._start_sidecar(sandbox)
        self._run_without_offload(sandbox, model)
        with self._engine(sandbox, model, offload=True) as engine:
            first = engine.wait_ready()
            self._offload_and_load(sandbox, sidecar, engine)
            self._kill_engine(sandbox, sidecar, engine)
        with self._engine(sandbox, model, offload=True) as engine:
            self._restart_engine(sandbox, sidecar, engine, first)
            sidecar = self._kill_sidecar(sandbox, sidecar, engine)
            engine.shutdown()
        self._end(sandbox, sidecar)

    # --- the steps ---------------------------------------------------------------------------------------

    def _start_sidecar(self, sandbox: Sandbox) -> Sidecar:
        self._report.say("starting the sidecar")
        began = time.monotonic()
        sidecar = self._new_sidecar(sandbox)
        region = sidecar.wait_for("Ready", lambda body: body["state"] == "Ready")
        took_s = time.monotonic() - began
        used = measure.region_bytes(sandbox)
        self._report.check(
            "the sidecar made a region of exactly what was asked",
            f"{mib(used)} in {took_s:.1f} s, {mib(region['hugePageBytes'])} of it in huge pages",
            is_ok=used == region["capacityBytes"] == CAPACITY_BYTES,
        )
        return sidecar

    def _run_without_offload(self, sandbox: Sandbox, model: Path) -> None:
        self._report.say("starting vLLM without offload, for the tokens to compare with")
        with self._engine(sandbox, model, offload=False) as engine:
            started = engine.wait_ready()
            self._wanted = [
                each.token_ids for each in engine.generate(self._prompts, together=True)
            ]
            engine.shutdown()
        distinct = len(set(self._wanted))
        self._report.check(
            f"vLLM {started.version} answers differ from prompt to prompt",
            f"{distinct} different answers to {len(self._wanted)} prompts",
            is_ok=distinct > len(self._wanted) // 2,
        )
        self._report.say("starting vLLM with kvcellar")

    def _offload_and_load(self, sandbox: Sandbox, sidecar: Sidecar, engine: Engine) -> None:
        region = sidecar.wait_for(
            "held", lambda body: len(body["participants"]) > self._options.ranks
        )
        geometry = region["geometry"]
        mapped = [measure.mapped_bytes(worker.pid) for worker in engine.tree.workers]
        self._report.check(
            "each rank maps its own share, and all count alike",
            f"{geometry['numChunks']} chunks of {geometry['chunkStrideBytes']} bytes a rank, "
            f"{' and '.join(mib(size) for size in mapped)} mapped",
            is_ok=geometry["numChunks"] == geometry["rankBytes"] // geometry["chunkStrideBytes"]
            and mapped == [geometry["rankBytes"]] * self._options.ranks
            and geometry["rankBytes"] == CAPACITY_BYTES // self._options.ranks,
        )
        self._check_pass("tokens are the same while blocks are stored", self._pass(engine))
        engine.reset_prefix_cache()
        loaded = self._pass(engine)
        self._check_pass("tokens are the same when blocks come back", loaded)
        self._check_loads("vLLM counts every block as loaded from the region", loaded)
        self._report.check(
            "the region did not grow",
            mib(measure.region_bytes(sandbox)),
            is_ok=measure.region_bytes(sandbox) == CAPACITY_BYTES,
        )

    def _kill_engine(self, sandbox: Sandbox, sidecar: Sidecar, engine: Engine) -> None:
        self._used_before = measure.used_bytes(sandbox)
        fresh = [random_prompt(480, 10_000 + seed) for seed in range(64)]
        before = measure.stored_bytes(sandbox, ENGINE_ID)
        engine.begin_generate(fresh, together=True)
        deadline = time.monotonic() + 30.0
        while measure.stored_bytes(sandbox, ENGINE_ID) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        engine.kill(Part.EVERYTHING)
        moved = measure.stored_bytes(sandbox, ENGINE_ID) - before
        engine.wait_gone()
        # Every whole block of each prompt, on each rank, had it been left alone.
        whole = (
            len(fresh)
            * (480 // self._block_tokens)
            * self._chunk_bytes(sidecar)
            * self._options.ranks
        )
        self._report.check(
            "the engine was killed (SIGKILL) between its first store and its last",
            f"{mib(moved)} of {mib(whole)} stored",
            is_ok=0 < moved < whole,
        )
        region = sidecar.wait_for("unheld", lambda body: not body["participants"])
        self._report.check(
            "the region outlives it, and nobody holds it",
            f"{region['state']}, {mib(measure.region_bytes(sandbox))}",
            is_ok=region["state"] == "Ready" and measure.region_bytes(sandbox) == CAPACITY_BYTES,
        )

    def _restart_engine(
        self, sandbox: Sandbox, sidecar: Sidecar, engine: Engine, first: Started
    ) -> None:
        self._report.say("starting vLLM again beside the same sidecar")
        again = engine.wait_ready()
        region = sidecar.wait_for(
            "held", lambda body: len(body["participants"]) > self._options.ranks
        )
        self._report.check(
            "the next start just works, in no more memory",
            f"{again.start_s:.1f} s (first {first.start_s:.1f} s), region "
            f"{mib(measure.region_bytes(sandbox))}, /dev/shm {mib(self._used_before)} before the kill "
            f"and {mib(measure.used_bytes(sandbox))} now, start {region['engineStarts']}",
            is_ok=(region["generation"], region["engineStarts"]) == (2, 2)
            and measure.region_bytes(sandbox) == CAPACITY_BYTES
            and measure.used_bytes(sandbox) <= self._used_before + VLLM_LEFT_BYTES,
        )
        self._pass(engine)
        engine.reset_prefix_cache()
        loaded = self._pass(engine)
        self._check_pass("its tokens are the same", loaded)
        self._check_loads("its blocks come from the region", loaded)

    def _kill_sidecar(self, sandbox: Sandbox, sidecar: Sidecar, engine: Engine) -> Sidecar:
        self._report.say("killing the sidecar under the living engine")
        before = sidecar.wait_for("held", lambda body: bool(body["participants"]))
        inode = measure.data_file(sandbox).stat().st_ino
        sidecar.kill()
        engine.reset_prefix_cache()
        alone = self._pass(engine)
        self._check_pass("without a sidecar the engine goes on, tokens are the same", alone)
        sidecar = self._new_sidecar(sandbox)
        after = sidecar.wait_for(
            "adopted", lambda body: body["state"] == "Ready" and bool(body["participants"])
        )
        same = ("generation", "session", "capacityBytes", "participants")
        self._report.check(
            "a new sidecar adopts the held region",
            f"same file, generation {after['generation']}, {len(after['participants'])} participants",
            is_ok=all(before[key] == after[key] for key in same)
            and measure.data_file(sandbox).stat().st_ino == inode
            and measure.region_bytes(sandbox) == CAPACITY_BYTES,
        )
        engine.reset_prefix_cache()
        loaded = self._pass(engine)
        self._check_pass("the engine does not notice: tokens are the same", loaded)
        self._check_loads("and its blocks still come from the region", loaded)
        return sidecar

    def _end(self, sandbox: Sandbox, sidecar: Sidecar) -> None:
        took_s = sidecar.terminate()
        kept = measure.region_bytes(sandbox)
        self._report.check(
            "the sidecar ends at SIGTERM and keeps the region for the next one",
            f"{took_s:.2f} s, {mib(kept)}",
            is_ok=took_s < 2.0 and kept == CAPACITY_BYTES,
        )
        env = {"PATH": os.environ.get("PATH", os.defpath), "KVCELLAR_ROOT": str(SHM)}
        cleaned = sandbox.run(
            [sys.executable, "-P", "-m", "kvcellar.cli", "clean"], timeout_s=30.0, env=env
        )
        left = sorted(entry.name for entry in measure.directory(sandbox).iterdir())
        processes = sandbox.processes()
        self._report.check(
            "`kvcellar clean` removes what nobody holds; no file and no process is left",
            f"status {cleaned.returncode}, {len(left)} files, {len(processes)} processes",
            is_ok=cleaned.returncode == 0 and not left and not processes,
        )

    # --- parts of steps -----------------------------------------------------------------------------------

    def _new_sidecar(self, sandbox: Sandbox) -> Sidecar:
        log = self._options.folder / "sidecar.log"
        return Sidecar.start(sandbox, log, ENGINE_ID, str(CAPACITY_BYTES))

    def _engine(self, sandbox: Sandbox, model: Path, *, offload: bool) -> Engine:
        config = EngineConfig(
            python=self._options.engine_python,
            model=model,
            kind=ModelKind.LLAMA,
            ranks=self._options.ranks,
            kv_transfer=KV_TRANSFER if offload else None,
            env={"KVCELLAR_ROOT": str(SHM), "KVCELLAR_ENGINE_ID": ENGINE_ID} if offload else {},
            cache=self._options.folder / "vllm-cache",
        )
        return Engine.start(config, sandbox, self._options.folder / "engine.log")

    def _pass(self, engine: Engine) -> Pass:
        return Pass.over(engine, self._prompts)

    def _check_pass(self, statement: str, done: Pass) -> None:
        pairs = zip(done.answers, self._wanted, strict=True)
        same = sum(got.token_ids == want for got, want in pairs)
        self._report.check(
            statement,
            f"{same} of {len(self._wanted)} answers, {mib(done.stored_bytes)} stored, "
            f"{mib(done.loaded_bytes)} loaded, {done.seconds:.1f} s",
            is_ok=same == len(self._wanted),
        )

    def _check_loads(self, statement: str, done: Pass) -> None:
        """Every whole block of every prompt was found in the region: nothing was computed again."""
        wanted = len(self._prompts) * 5 * self._block_tokens
        self._report.check(
            statement,
            f"{done.hit_tokens / self._block_tokens:.0f} blocks, {done.hit_tokens:.0f} of {wanted} tokens",
            is_ok=done.hit_tokens == wanted and done.loaded_bytes > 0,
        )

    def _chunk_bytes(self, sidecar: Sidecar) -> int:
        region = sidecar.region()
        if region is None or region["geometry"] is None:
            raise KVCellarError("the sidecar shows no geometry")
        return int(region["geometry"]["chunkStrideBytes"])

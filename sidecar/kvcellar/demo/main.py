"""`kvcellar demo`: the main job with a real engine, in a few minutes, on any Linux machine.

A sidecar owns a region; a real vLLM (CPU build, two ranks, a tiny model with random weights) offloads
into it through the plug-in and loads back; engine and sidecar are killed at bad moments and started
again. Every claim is compared with a run that does not offload, with vLLM's own counters, or with the
kernel's. Exit status 0 only if all of it held.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcellar.contract import DIRECTORY_NAME, EngineId
from kvcellar.demo.client import Answer, Engine, EngineConfig, Part, Started
from kvcellar.demo.models import TRAITS, ModelKind, random_prompt, write_checkpoint
from kvcellar.demo.report import Report, mib
from kvcellar.demo.sandbox import SHM, Sandbox
from kvcellar.demo.sidecar import Sidecar
from kvcellar.errors import ConfigurationError, KVCellarError
from kvcellar.region import metafile
from kvcellar.region.directory import meta_name

ENGINE_ID = EngineId("demo")
CAPACITY_BYTES = 80 << 20
SHM_BYTES = 352 << 20
"""The region, and the 240 MiB that vLLM 0.32 wants to find free in /dev/shm for its message queues."""

VLLM_LEFT_BYTES = 16 << 20
"""What one SIGKILL may leave of vLLM's own message queues in /dev/shm (its files, not ours)."""

KV_TRANSFER: dict[str, Any] = {
    "kv_connector": "KVCellarConnector",
    "kv_connector_module_path": "kvcellar.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {
        "spec_name": "KVCellarOffloadingSpec",
        "spec_module_path": "kvcellar.vllm",
    },
}
"""What a user gives vLLM as `--kv-transfer-config` (docs/how-to/use-with-vllm.md)."""

_HITS = "vllm:external_prefix_cache_hits_total"
_STORED = "vllm:kv_offload_store_bytes_total"
_LOADED = "vllm:kv_offload_load_bytes_total"


@dataclass(frozen=True, slots=True)
class DemoOptions:
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


def run(arguments: Sequence[str]) -> int:
    """The command `kvcellar demo`; returns the exit status.

    Raises:
        KVCellarError: the machine cannot run it, or an engine did not start.
    """
    parser = argparse.ArgumentParser(prog="kvcellar demo", description=__doc__)
    parser.add_argument(
        "--engine-python",
        type=Path,
        default=Path(sys.executable),
        help="interpreter of an environment with vLLM and kvcellar (default: this one)",
    )
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2), help="tensor-parallel size")
    parser.add_argument("--requests", type=int, default=208, help="requests of each pass")
    parser.add_argument("--logs", type=Path, help="keep logs and checkpoint in this folder")
    given = parser.parse_args(arguments)
    _check_interpreter(given.engine_python)
    with ExitStack() as stack:
        folder = given.logs or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvc-demo-"))
        )
        folder.mkdir(parents=True, exist_ok=True)
        # Not resolved: the link in a virtual environment is what makes it one.
        python = Path(os.path.abspath(given.engine_python))
        options = DemoOptions(python, given.ranks, given.requests, Path(os.path.abspath(folder)))
        return 0 if Demo(options).run() else 1


def _check_interpreter(python: Path) -> None:
    """Refuse an interpreter without vLLM before anything is started."""
    if python == Path(sys.executable):
        missing = [name for name in ("vllm", "kvcellar") if importlib.util.find_spec(name) is None]
    else:
        code = (
            "import importlib.util as u; "
            "print(*[n for n in ('vllm', 'kvcellar') if u.find_spec(n) is None])"
        )
        try:
            ended = subprocess.run(  # noqa: S603 - the interpreter that the user named
                [python, "-P", "-c", code], capture_output=True, text=True, check=False, timeout=60
            )
        except OSError as error:
            raise ConfigurationError(f"{python} cannot be run: {error.strerror}") from error
        missing = ended.stdout.split() if ended.returncode == 0 else [ended.stderr.strip()]
    if missing:
        raise ConfigurationError(
            f"{python} lacks {', '.join(missing)}: name an interpreter that has vLLM and kvcellar with "
            "--engine-python (`make demo` makes one)"
        )


@dataclass(frozen=True, slots=True)
class _Passed:
    """What one pass over the prompts gave."""

    answers: list[Answer]
    seconds: float
    hit_tokens: float
    loaded_bytes: float
    stored_bytes: float


class Demo:
    """The story, step by step. Make it and call `run` once."""

    def __init__(self, options: DemoOptions) -> None:
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
        used = self._region_bytes(sandbox)
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
        mapped = [self._mapped_bytes(worker.pid) for worker in engine.tree.workers]
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
            mib(self._region_bytes(sandbox)),
            is_ok=self._region_bytes(sandbox) == CAPACITY_BYTES,
        )

    def _kill_engine(self, sandbox: Sandbox, sidecar: Sidecar, engine: Engine) -> None:
        self._used_before = _used_bytes(sandbox)
        fresh = [random_prompt(480, 10_000 + seed) for seed in range(64)]
        before = self._stored_bytes(sandbox)
        engine.begin_generate(fresh, together=True)
        deadline = time.monotonic() + 30.0
        while self._stored_bytes(sandbox) == before and time.monotonic() < deadline:
            time.sleep(0.001)
        engine.kill(Part.EVERYTHING)
        moved = self._stored_bytes(sandbox) - before
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
            f"{region['state']}, {mib(self._region_bytes(sandbox))}",
            is_ok=region["state"] == "Ready" and self._region_bytes(sandbox) == CAPACITY_BYTES,
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
            f"{mib(self._region_bytes(sandbox))}, /dev/shm {mib(self._used_before)} before the kill "
            f"and {mib(_used_bytes(sandbox))} now, start {region['engineStarts']}",
            is_ok=(region["generation"], region["engineStarts"]) == (2, 2)
            and self._region_bytes(sandbox) == CAPACITY_BYTES
            and _used_bytes(sandbox) <= self._used_before + VLLM_LEFT_BYTES,
        )
        self._pass(engine)
        engine.reset_prefix_cache()
        loaded = self._pass(engine)
        self._check_pass("its tokens are the same", loaded)
        self._check_loads("its blocks come from the region", loaded)

    def _kill_sidecar(self, sandbox: Sandbox, sidecar: Sidecar, engine: Engine) -> Sidecar:
        self._report.say("killing the sidecar under the living engine")
        before = sidecar.wait_for("held", lambda body: bool(body["participants"]))
        inode = self._data_file(sandbox).stat().st_ino
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
            and self._data_file(sandbox).stat().st_ino == inode
            and self._region_bytes(sandbox) == CAPACITY_BYTES,
        )
        engine.reset_prefix_cache()
        loaded = self._pass(engine)
        self._check_pass("the engine does not notice: tokens are the same", loaded)
        self._check_loads("and its blocks still come from the region", loaded)
        return sidecar

    def _end(self, sandbox: Sandbox, sidecar: Sidecar) -> None:
        took_s = sidecar.terminate()
        kept = self._region_bytes(sandbox)
        self._report.check(
            "the sidecar ends at SIGTERM and keeps the region for the next one",
            f"{took_s:.2f} s, {mib(kept)}",
            is_ok=took_s < 2.0 and kept == CAPACITY_BYTES,
        )
        env = {"PATH": os.environ.get("PATH", os.defpath), "KVCELLAR_ROOT": str(SHM)}
        cleaned = sandbox.run(
            [sys.executable, "-P", "-m", "kvcellar.cli", "clean"], timeout_s=30.0, env=env
        )
        left = sorted(entry.name for entry in (sandbox.path(SHM) / DIRECTORY_NAME).iterdir())
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

    def _pass(self, engine: Engine) -> _Passed:
        """All prompts once, and by how much vLLM's counters rose."""
        before = engine.metrics()
        began = time.monotonic()
        answers = engine.generate(self._prompts, together=True)
        seconds = time.monotonic() - began
        engine.settle()
        after = engine.metrics()
        return _Passed(
            answers,
            seconds,
            hit_tokens=after.total(_HITS) - before.total(_HITS),
            loaded_bytes=after.total(_LOADED) - before.total(_LOADED),
            stored_bytes=after.total(_STORED) - before.total(_STORED),
        )

    def _check_pass(self, statement: str, done: _Passed) -> None:
        pairs = zip(done.answers, self._wanted, strict=True)
        same = sum(got.token_ids == want for got, want in pairs)
        self._report.check(
            statement,
            f"{same} of {len(self._wanted)} answers, {mib(done.stored_bytes)} stored, "
            f"{mib(done.loaded_bytes)} loaded, {done.seconds:.1f} s",
            is_ok=same == len(self._wanted),
        )

    def _check_loads(self, statement: str, done: _Passed) -> None:
        """Every whole block of every prompt was found in the region: nothing was computed again."""
        wanted = len(self._prompts) * 5 * self._block_tokens
        self._report.check(
            statement,
            f"{done.hit_tokens / self._block_tokens:.0f} blocks, {done.hit_tokens:.0f} of {wanted} tokens",
            is_ok=done.hit_tokens == wanted and done.loaded_bytes > 0,
        )

    def _stored_bytes(self, sandbox: Sandbox) -> int:
        """Bytes stored by the engine that holds, or last held, the region, by the page itself."""
        page = sandbox.path(SHM) / DIRECTORY_NAME / meta_name(ENGINE_ID)
        fd = os.open(page, os.O_RDONLY)
        try:
            return sum(row.counters.store_bytes for row in metafile.read_contents(fd).rows.values())
        finally:
            os.close(fd)

    def _mapped_bytes(self, pid: int) -> int:
        """Bytes of the data file that a process maps, by the kernel's own list."""
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
        ranges = [line.split()[0].split("-") for line in lines if line.endswith(".data")]
        return sum(int(end, 16) - int(start, 16) for start, end in ranges)

    def _chunk_bytes(self, sidecar: Sidecar) -> int:
        region = sidecar.region()
        if region is None or region["geometry"] is None:
            raise KVCellarError("the sidecar shows no geometry")
        return int(region["geometry"]["chunkStrideBytes"])

    def _data_file(self, sandbox: Sandbox) -> Path:
        found = list((sandbox.path(SHM) / DIRECTORY_NAME).glob("*.data"))
        if len(found) != 1:
            raise KVCellarError(f"one data file was expected, there are {len(found)}")
        return found[0]

    def _region_bytes(self, sandbox: Sandbox) -> int:
        """Bytes that the file system has promised to all data files together."""
        files = (sandbox.path(SHM) / DIRECTORY_NAME).glob("*.data")
        return sum(file.stat().st_blocks * 512 for file in files)


def _used_bytes(sandbox: Sandbox) -> int:
    """Bytes in use on the sandbox's `/dev/shm`, whoever uses them."""
    status = os.statvfs(sandbox.path(SHM))
    return (status.f_blocks - status.f_bfree) * status.f_frsize

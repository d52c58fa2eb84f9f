"""The start gate: what a region costs an engine's start while the sidecar reserves beside it.

Engines start three ways in turn, each `--rounds` times:

- *alone*: no offload and no sidecar;
- *gated*: sidecar and engine start together, as in a pod whose start gate is `plan`: pages are reserved
  while the engine loads, and the engine attaches to what is ready;
- *after*: the engine starts once the region is ready, to show what waiting would have cost.

Printed: medians, the reserve time, and the median of (gated - alone) / reserve time. The claim is that this is at most
0.10, for an engine that loads for longer than the reserve takes. Run it on a quiet machine.
"""

import argparse
import enum
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from kvcellar.demo.client import Engine
from kvcellar.demo.engine_config import KV_TRANSFER, EngineConfig
from kvcellar.demo.models import ModelKind, write_checkpoint
from kvcellar.demo.sandbox import SHM, Sandbox
from kvcellar.demo.sidecar import Sidecar
from kvcellar.demo.story import ENGINE_ID

_HEAD_ROOM_BYTES = 1 << 30


class Kind(enum.Enum):
    """How an engine starts."""

    ALONE = "alone"
    GATED = "gated"
    AFTER = "after"


class Bench:
    """One bench run: settings, and the seconds that were measured."""

    def __init__(self, python: Path, capacity_bytes: int, folder: Path) -> None:
        """Prepare a checkpoint."""
        self._python = python
        self._capacity_bytes = capacity_bytes
        self._folder = folder
        self._model = write_checkpoint(ModelKind.LLAMA, folder / "model")
        self.seconds: dict[Kind, list[float]] = {kind: [] for kind in Kind}
        self.reserve_s: list[float] = []

    def warm_up(self) -> None:
        """A start that does not count: vLLM keeps what it learns of the model's class."""
        self._start(Kind.ALONE)

    def round(self) -> None:
        """One start of each kind."""
        for kind in Kind:
            took_s = self._start(kind)
            self.seconds[kind].append(took_s)
            sys.stdout.write(f"{kind.value:8} {took_s:6.2f} s\n")
            sys.stdout.flush()

    def _start(self, kind: Kind) -> float:
        """Seconds until an engine serves, counted from where the sidecar starts, if there is one."""
        capacity_bytes = 0 if kind is Kind.ALONE else self._capacity_bytes
        with Sandbox.open(capacity_bytes + _HEAD_ROOM_BYTES) as sandbox:
            began = time.monotonic()
            sidecar = self._sidecar(sandbox, capacity_bytes) if capacity_bytes else None
            if sidecar is not None and kind is Kind.AFTER:
                sidecar.wait_for("Ready", lambda body: body["state"] == "Ready", timeout_s=600.0)
            with self._engine(sandbox, offload=sidecar is not None) as engine:
                engine.wait_ready()
                took_s = time.monotonic() - began
                if sidecar is not None:
                    sidecar.wait_for("held", lambda body: len(body["participants"]) == 2)
                    self._note_reserve(sidecar)
                engine.shutdown()
            if sidecar is not None:
                sidecar.terminate()
        return took_s

    def _note_reserve(self, sidecar: Sidecar) -> None:
        sidecar.wait_for("Ready", lambda body: body["state"] == "Ready", timeout_s=600.0)
        log = (self._folder / "sidecar.log").read_text().splitlines()
        ready = [json.loads(line) for line in log if '"region ready"' in line][-1]
        self.reserve_s.append(ready["reserve_seconds"] + ready["settle_seconds"])

    def _sidecar(self, sandbox: Sandbox, capacity_bytes: int) -> Sidecar:
        log = self._folder / "sidecar.log"
        return Sidecar.start(sandbox, log, ENGINE_ID, str(capacity_bytes))

    def _engine(self, sandbox: Sandbox, *, offload: bool) -> Engine:
        config = EngineConfig(
            python=self._python,
            model=self._model,
            kind=ModelKind.LLAMA,
            kv_transfer=KV_TRANSFER if offload else None,
            env={"KVCELLAR_ROOT": str(SHM), "KVCELLAR_ENGINE_ID": ENGINE_ID} if offload else {},
            cache=self._folder / "vllm-cache",
        )
        return Engine.start(config, sandbox, self._folder / "engine.log")


def report(bench: Bench, capacity_bytes: int) -> str:
    """The figures as text: medians, and the median over rounds of what the region cost."""
    extra_s = statistics.median(
        gated - alone
        for alone, gated in zip(bench.seconds[Kind.ALONE], bench.seconds[Kind.GATED], strict=True)
    )
    reserve_s = statistics.median(bench.reserve_s)
    medians = [f"{kind.value} {statistics.median(bench.seconds[kind]):.1f} s" for kind in Kind]
    return (
        f"medians: {', '.join(medians)}; reserve and settle {reserve_s:.1f} s\n"
        f"region of {capacity_bytes / 2**30:.1f} GiB: the gated start took {extra_s:+.2f} s, "
        f"{extra_s / reserve_s:+.2f} of the reserve time"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the rounds and print the figures; always 0, since it measures and does not judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-python", type=Path, required=True)
    parser.add_argument("--capacity", type=int, default=6 << 30, help="bytes of the region")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kvc-bench-") as folder:
        bench = Bench(given.engine_python.absolute(), given.capacity, Path(folder))
        bench.warm_up()
        for _ in range(given.rounds):
            bench.round()
    sys.stdout.write(report(bench, given.capacity) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

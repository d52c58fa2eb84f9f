"""A place where an engine meets a sidecar: sandbox, control file, log of loads, and what they show."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcellar.contract import Direction, Role
from kvcellar.demo import measure
from kvcellar.demo.client import Engine
from kvcellar.demo.engine_config import EngineConfig
from kvcellar.demo.models import TRAITS, ModelKind, random_prompt
from kvcellar.demo.sandbox import Sandbox
from kvcellar.demo.sidecar import Sidecar
from kvcellar.region import metafile
from kvcellar.region.metadata import Counters, SessionSection

ROOT = Path(__file__).resolve().parents[2]
ENGINE_ID = "eng"
SHM = "/dev/shm"

SIDECAR_PYTHON = ROOT / ".venv/bin/python"
"""The engines' environments have no web stack."""


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 180 to 300 tokens without a common prefix."""
    return [random_prompt(180 + 17 * (i % 8), seed * 1000 + i) for i in range(n)]


@dataclass
class Cellar:
    """One engine's surroundings.

    Attributes:
        sandbox: where everything runs.
        folder: of the test; holds logs and the control file.
        model: a checkpoint.
        kind: which model it is.
        cache: for what vLLM keeps between starts.
        pythonpath: of the engine.
    """

    sandbox: Sandbox
    folder: Path
    model: Path
    kind: ModelKind
    cache: Path
    pythonpath: str
    env: dict[str, str] = field(default_factory=dict)

    @property
    def loads(self) -> Path:
        """The log of chunks loaded."""
        return self.folder / "loads.jsonl"

    @property
    def log(self) -> Path:
        """What the engine printed."""
        return self.folder / "engine.log"

    @property
    def directory(self) -> Path:
        """The regions' directory, as seen from outside the sandbox."""
        return measure.directory(self.sandbox)

    def control(self, rules: Mapping[Direction, Mapping[str, object]] | None = None) -> None:
        """Set the rules of `faulty_spec`, for the next batch of copies on."""
        path = self.folder / "control.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(rules or {}))
        new.replace(path)

    def sidecar(self, capacity: str, **variables: str) -> Sidecar:
        """A real sidecar in the sandbox, with one region for the engine; use it in a `with`."""
        log = self.folder / "sidecar.log"
        return Sidecar.start(self.sandbox, log, ENGINE_ID, capacity, SIDECAR_PYTHON, **variables)

    def start(
        self,
        *,
        ranks: int = 1,
        connector: str = "OffloadingConnector",
        extra: Mapping[str, object] | None = None,
        **variables: str,
    ) -> Engine:
        """Start an engine with the plug-in, or its faulty kin; `wait_ready` must come next."""
        transfer: dict[str, Any] = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "FaultySpec",
                "spec_module_path": "faulty_spec",
                **(extra or {}),
            },
        }
        if connector == "KVCellarConnector":
            transfer["kv_connector_module_path"] = "kvcellar.vllm"
            transfer["kv_load_failure_policy"] = "recompute"
        return self.start_with(transfer, ranks=ranks, **variables)

    def start_with(
        self, transfer: Mapping[str, object] | None, *, ranks: int = 1, **variables: str
    ) -> Engine:
        """Start an engine with this KV transfer configuration."""
        self.control()
        config = EngineConfig(
            python=Path(sys.executable),
            model=self.model,
            kind=self.kind,
            ranks=ranks,
            kv_transfer=transfer,
            # Few, so that a batch fills the device, but each KV group needs a sequence's worth.
            n_blocks=48 * TRAITS[self.kind].kv_groups,
            env={
                "PYTHONPATH": self.pythonpath,
                "KVCELLAR_TEST_CONTROL": str(self.folder / "control.json"),
                "KVCELLAR_TEST_LOADS": str(self.loads),
                **self.env,
                **variables,
            },
            cache=self.cache,
        )
        return Engine.start(config, self.sandbox, self.log)

    # --- what it shows

    def loaded(self) -> list[dict[str, Any]]:
        """The chunks that were loaded so far."""
        text = self.loads.read_text() if self.loads.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    def forget_loads(self) -> None:
        """Begin the log of loads anew."""
        self.loads.unlink(missing_ok=True)

    def third_reader(self) -> dict[str, int]:
        """Compare the loaded chunks with the region, by a program that knows the format only."""
        done = subprocess.run(
            [sys.executable, ROOT / "tests/vllm/third_reader.py", self._meta(), self.loads],
            capture_output=True,
            text=True,
            check=True,
        )
        found: dict[str, int] = json.loads(done.stdout)
        return found

    def session(self) -> SessionSection:
        """What rank 0 wrote about this engine start."""
        with self._meta().open("rb") as file:
            session = metafile.read_contents(file.fileno()).session
        assert session is not None
        return session

    def counters(self) -> dict[tuple[Role, int], Counters]:
        """What the participants of the present session count."""
        with self._meta().open("rb") as file:
            contents = metafile.read_contents(file.fileno())
        assert contents.session is not None
        return {
            (row.role, row.rank): row.counters
            for row in contents.rows.values()
            if row.session == contents.session.session
        }

    def lines(self, pattern: str) -> list[str]:
        """Lines of the engine's log."""
        return [line for line in self.log.read_text().splitlines() if re.search(pattern, line)]

    def _meta(self) -> Path:
        return self.directory / f"{ENGINE_ID}.meta"

"""Change the pure modules one place at a time, and see that their tests notice each change.

cosmic-ray makes the mutants (one operator, number, condition or loop at a time) and runs a module's tests
over each, in copies of this tree: the tree itself stays as it is. A mutant that every test passes has
survived, and fails the run unless `mutants.toml` says why nobody could notice it; an explanation of a mutant
that did not survive fails the run as well, so the list never grows old.

Run it by `make mutation`, with names of modules (`plan`) for fewer than all.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COSMIC_RAY = ROOT / ".tools" / "mutation" / "bin" / "cosmic-ray"
EXPLAINED = Path(__file__).with_name("mutants.toml")
COPIED = ("sidecar", "operator", "tests/unit", "tests/fakes", "tests/support", "pyproject.toml")
TIMEOUT_S = 60.0
"""How long the tests of a module may take, which take 3 s: a mutant that never ends counts as noticed."""

MODULES = {
    "geometry": ("kvcellar/region/geometry.py", "test_geometry.py"),
    "plan": ("kvcellar/worker/plan.py", "test_plan.py"),
    "chunks": ("kvcellar/index/chunks.py", "test_index_chunks.py", "test_index_model.py"),
}
"""Each module with its tests in tests/unit."""


@dataclass(frozen=True, slots=True, order=True)
class Mutant:
    """A change of a module, told by the lines that it replaces, so that it outlives changes elsewhere."""

    module: str
    function: str
    before: str
    after: str

    def entry(self) -> str:
        """As an entry of the list, without its reason."""
        words = {"module": self.module, "function": self.function}
        words |= {"before": self.before, "after": self.after, "reason": ""}
        lines = [f"{key} = {json.dumps(value)}" for key, value in words.items()]
        return "\n".join(["[[survivor]]", *lines])


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the mutants of one module."""

    module: str
    total: int
    survivors: list[Mutant]


def explained(text: str | None = None) -> dict[Mutant, str]:
    """The listed survivors, each with its reason; of another list than the one checked in, if one is given.

    Raises:
        ValueError: one has no reason, or is there twice.
    """
    entries = tomllib.loads(EXPLAINED.read_text() if text is None else text).get("survivor", [])
    found: dict[Mutant, str] = {}
    for entry in entries:
        reason = entry.pop("reason")
        mutant = Mutant(**entry)
        if not reason.strip() or mutant in found:
            raise ValueError(f"no reason, or listed twice:\n{mutant.entry()}")
        found[mutant] = reason
    return found


def run_module(module: str) -> Outcome:
    """Make every mutant of a module, and run its tests over each."""
    with tempfile.TemporaryDirectory(prefix="kvcellar-mutants-") as folder:
        tree = Path(folder)
        _copy_to(tree)
        source, *tests = MODULES[module]
        _configure(tree, f"sidecar/{source}", [f"tests/unit/{name}" for name in tests])
        _cosmic_ray(tree, "init", "mutants.toml", "session.sqlite")
        _cosmic_ray(tree, "baseline", "mutants.toml")
        _cosmic_ray(tree, "exec", "mutants.toml", "session.sqlite")
        dump = _cosmic_ray(tree, "dump", "session.sqlite")
    jobs = [json.loads(line) for line in dump.splitlines()]
    survivors = [_mutant(module, *job) for job in jobs if _survived(*job)]
    return Outcome(module, len(jobs), sorted(survivors))


def _copy_to(tree: Path) -> None:
    for name in COPIED:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)


def _configure(tree: Path, source: str, tests: list[str]) -> None:
    # A seed, so that a property tries the same examples each time.
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--hypothesis-seed=0",
        "--hypothesis-profile=mutants",
        "--assert=plain",
    ]
    (tree / "mutants.toml").write_text(
        f"""[cosmic-ray]
module-path = {json.dumps(source)}
timeout = {TIMEOUT_S}
excluded-modules = []
test-command = {json.dumps(" ".join([*argv, *tests]))}
[cosmic-ray.distributor]
name = "local"
"""
    )


def _cosmic_ray(tree: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": "sidecar", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [COSMIC_RAY, *words], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"cosmic-ray {words[0]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _survived(item: dict[str, Any], result: dict[str, Any] | None) -> bool:
    if result is None or result["worker_outcome"] != "normal":
        raise RuntimeError(f"a mutant was not tried: {item}: {result}")
    return bool(result["test_outcome"] == "survived")


def _mutant(module: str, item: dict[str, Any], result: dict[str, Any]) -> Mutant:
    changes = [line for line in result["diff"].splitlines() if line[:3] not in ("---", "+++")]
    before, after = (
        " ".join(line[1:].strip() for line in changes if line.startswith(sign)) for sign in "-+"
    )
    return Mutant(module, item["mutations"][0]["definition_name"] or "", before, after)


def problems(survivors: set[Mutant], reasons: dict[Mutant, str]) -> list[str]:
    """What is wrong with the list: survivors that it lacks, and mutants that it has and that were noticed."""
    return [
        *(f"nobody noticed:\n{mutant.entry()}" for mutant in sorted(survivors - reasons.keys())),
        *(
            f"explained in {EXPLAINED.name}, and noticed all the same:\n{mutant.entry()}"
            for mutant in sorted(reasons.keys() - survivors)
        ),
    ]


def main() -> int:
    """Try all mutants; 1 if one survived unexplained, or an explanation is of none."""
    modules = sys.argv[1:] or list(MODULES)
    reasons = {mutant: why for mutant, why in explained().items() if mutant.module in modules}
    with ThreadPoolExecutor(len(modules)) as pool:
        outcomes = list(pool.map(run_module, modules))
    for outcome in outcomes:
        sys.stdout.write(
            f"{outcome.module}: {outcome.total} mutants, {len(outcome.survivors)} survived\n"
        )
    found = problems({mutant for outcome in outcomes for mutant in outcome.survivors}, reasons)
    for problem in found:
        sys.stdout.write(f"\n{problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

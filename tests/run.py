"""Run the project's test steps in order, and end with one line that counts them all.

Each step's own output streams through. The end of the output names what was left
out and why, and its last line reads ``N passed, N failed, N skipped`` (an error
counts as a failure). The exit status is 1 if anything failed or nothing ran.

With ``CI=true`` a skipped test fails the run too: CI's machine is set up by this
project, so a test that it could have run and did not is a hole. The exceptions are
in ``CI_MAY_SKIP``. A set of tests that no machine runs by default is never started
here, and is named at the end instead.

Standard library only, so that the interpreter of any environment can start it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CI_MAY_SKIP = (
    "no GPU on this machine",
    "no cgroup v2 memory controller on this machine",
    "no free huge pages on this machine",
)
"""How the reason of a skip begins that CI lets pass: what no setup can give a machine."""

FIGURES = "KVCELLAR_TEST_FIGURES"
"""Names the variable with the file to which the tests of the stories append what they measure."""

PYTEST_NOTHING_COLLECTED = 5
"""Source: pytest.ExitCode.NO_TESTS_COLLECTED."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one folder, run by pytest in one environment."""

    name: str
    folder: str
    venv: str
    soak_options: tuple[str, ...] = ()
    """More arguments of pytest when the soak tests run."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command that counts as one test: it passes if it exits with 0."""

    name: str
    argv: tuple[str, ...]
    timeout_s: float


STEPS: tuple[Suite | Command, ...] = (
    Suite("unit", folder="tests/unit", venv=".venv", soak_options=("--hypothesis-profile=full",)),
    Suite("integration", folder="tests/integration", venv=".venv"),
    Suite("gpu", folder="tests/gpu", venv=".venv"),
    Command(
        "demo",
        (".venv/bin/kvcellar", "demo", "--engine-python", ".venv-vllm/bin/python"),
        timeout_s=900.0,
    ),
    Suite("vllm", folder="tests/vllm", venv=".venv-vllm"),
    Suite("vllm31", folder="tests/vllm", venv=".venv-vllm31"),
    Suite("cluster", folder="tests/cluster", venv=".venv"),
)
"""In the order they run: the quick ones first."""

SOAK_STEPS: tuple[Suite | Command, ...] = (
    *(step for step in STEPS if isinstance(step, Suite)),
    *(
        Command(
            f"demo of {venv} with {ranks} ranks",
            (
                ".venv/bin/kvcellar",
                "demo",
                "--engine-python",
                f"{venv}/bin/python",
                "--ranks",
                str(ranks),
            ),
            timeout_s=900.0,
        )
        for venv in (".venv-vllm", ".venv-vllm31")
        for ranks in (1, 2)
    ),
    Command("mutation", (".venv/bin/python", "tests/mutants.py"), timeout_s=4 * 3600.0),
)
"""The suites again for their tests marked soak, the demo on both versions of vLLM, and the mutants."""


@dataclass(slots=True)
class Tally:
    """What came out so far."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    left_out: list[str] = field(default_factory=list)
    refused_skips: list[str] = field(default_factory=list)
    """Skips that CI does not allow, each as ``step: test - reason``."""

    def add_report(self, step_name: str, report: Path) -> None:
        """Count the test cases of a JUnit file that pytest wrote."""
        for case in ET.parse(report).getroot().iter("testcase"):
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                self.failed += 1
            elif skip is None:
                self.passed += 1
            else:
                self.skipped += 1
                reason = skip.get("message", "")
                is_xfail = skip.get("type") == "pytest.xfail"
                if not is_xfail and not reason.startswith(CI_MAY_SKIP):
                    test = f"{case.get('classname')}.{case.get('name')}"
                    self.refused_skips.append(f"{step_name}: {test} - {reason}")


def clean_environment() -> dict[str, str]:
    """This process's environment without kvcellar's settings: a test brings its own.

    `KVCELLAR_TEST_*` is kept: it speaks to the tests, such as which cluster to use.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("KVCELLAR_TEST_") or not name.startswith("KVCELLAR_")
    }


def run_suite(suite: Suite, tally: Tally, *, is_soak: bool) -> None:
    """Run one suite's tests: those marked soak, or all the others."""
    if not any((ROOT / suite.folder).rglob("test_*.py")):
        tally.left_out.append(f"{suite.name} - no tests in {suite.folder} yet")
        return
    python = ROOT / suite.venv / "bin" / "python"
    if not python.exists():
        print(f"no {python.relative_to(ROOT)}: run make {suite.venv.removeprefix('.')}", flush=True)
        tally.failed += 1
        return
    marks = "soak" if is_soak else "not soak"
    options = suite.soak_options if is_soak else ()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        argv = [str(python), "-m", "pytest", suite.folder, "-m", marks, *options]
        argv.append(f"--junitxml={report}")
        status = subprocess.run(argv, cwd=ROOT, env=clean_environment(), check=False).returncode
        if status == PYTEST_NOTHING_COLLECTED:
            tally.left_out.append(f"{suite.name} - no test matches: {marks}")
            return
        failed_before = tally.failed
        if report.exists():
            tally.add_report(suite.name, report)
        if status != 0 and tally.failed == failed_before:
            print(f"{suite.name}: pytest ended with status {status}", flush=True)
            tally.failed += 1


def run_command(command: Command, tally: Tally) -> None:
    """Run one command as one test."""
    argv = (str(ROOT / command.argv[0]), *command.argv[1:])
    try:
        status = subprocess.run(
            argv, cwd=ROOT, env=clean_environment(), timeout=command.timeout_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"{command.name}: not done after {command.timeout_s:.0f} s", flush=True)
        tally.failed += 1
        return
    if status == 0:
        tally.passed += 1
    else:
        print(f"{command.name}: ended with status {status}", flush=True)
        tally.failed += 1


def run_steps(steps: Sequence[Suite | Command], tally: Tally, *, is_soak: bool) -> None:
    """Run the steps one after the other; a failed one does not stop the rest."""
    for step in steps:
        print(f"==== {step.name}", flush=True)
        match step:
            case Suite():
                run_suite(step, tally, is_soak=is_soak)
            case Command():
                run_command(step, tally)


def print_summary(tally: Tally, is_ci: bool) -> None:
    """Print what was left out, the skips that CI refuses, and the count as the last line."""
    for reason in tally.left_out:
        print(f"left out: {reason}")
    if is_ci:
        for skip in tally.refused_skips:
            print(f"CI may not skip: {skip}")
    counts = f"{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped"
    print(counts, flush=True)


def main() -> int:
    """Run what the arguments name and return the exit status."""
    parser = argparse.ArgumentParser(description="Run kvcellar's tests.")
    names = sorted({step.name for step in (*STEPS, *SOAK_STEPS)})
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"default: all of {names}")
    parser.add_argument("--soak", action="store_true", help="run the tests marked soak instead")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.steps) - set(names))
    if unknown:
        parser.error(f"unknown steps {unknown}: known are {names}")

    os.environ.setdefault(FIGURES, str(ROOT / ".tools" / "figures.jsonl"))
    tally = Tally()
    chosen = SOAK_STEPS if arguments.soak else STEPS
    steps = [step for step in chosen if not arguments.steps or step.name in arguments.steps]
    run_steps(steps, tally, is_soak=arguments.soak)
    if not arguments.steps and not arguments.soak:
        tally.left_out.append("soak - run make soak")

    is_ci = os.environ.get("CI") == "true"
    print_summary(tally, is_ci)
    has_run = tally.passed + tally.failed > 0
    return 1 if tally.failed or not has_run or (is_ci and tally.refused_skips) else 0


if __name__ == "__main__":
    sys.exit(main())

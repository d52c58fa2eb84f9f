"""The counts of tests/run.py, from a real report that pytest wrote."""

import os
import subprocess
import sys

import pytest

from tests import run

SAMPLE = """
import pytest

def test_good(): pass
def test_bad(): assert False
@pytest.fixture
def broken(): raise OSError("no")
def test_error(broken): pass
def test_skipped(): pytest.skip("forgot to install it")
def test_no_gpu(): pytest.skip("no GPU on this machine")
@pytest.mark.xfail(reason="a known fault")
def test_known(): assert False
"""


@pytest.fixture(scope="module")
def tally(tmp_path_factory: pytest.TempPathFactory) -> run.Tally:
    """The tally of the sample's report."""
    folder = tmp_path_factory.mktemp("sample")
    (folder / "test_sample.py").write_text(SAMPLE)
    report = folder / "report.xml"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run(
        [*argv, f"--rootdir={folder}", f"--junitxml={report}", folder],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        check=False,
    )
    tally = run.Tally()
    tally.add_report("sample", report)
    return tally


def test_errors_count_as_failures(tally: run.Tally) -> None:
    assert (tally.passed, tally.failed, tally.skipped) == (1, 2, 3)


def test_ci_refuses_only_a_skip_that_a_setup_could_have_avoided(tally: run.Tally) -> None:
    assert tally.refused_skips == ["sample: test_sample.test_skipped - forgot to install it"]


def test_the_last_line_is_the_count(tally: run.Tally, capsys: pytest.CaptureFixture[str]) -> None:
    run.print_summary(tally, is_ci=True)

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 passed, 2 failed, 3 skipped"
    assert lines[-2].startswith("CI may not skip: sample")


@pytest.mark.parametrize(("program", "counts"), [("true", (1, 0)), ("false", (0, 1))])
def test_a_command_counts_as_one_test(program: str, counts: tuple[int, int]) -> None:
    tally = run.Tally()

    run.run_command(run.Command("sample", (f"/usr/bin/{program}",), timeout_s=10), tally)

    assert (tally.passed, tally.failed) == counts


def test_a_command_that_hangs_fails() -> None:
    tally = run.Tally()

    run.run_command(run.Command("sample", ("/usr/bin/sleep", "60"), timeout_s=0.1), tally)

    assert (tally.passed, tally.failed) == (0, 1)

"""What the tests with a real vLLM stand on: a sandbox that leaves nothing, and tokens that repeat."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvcellar.demo import processes
from kvcellar.demo.client import Engine, EngineFailed, Part
from kvcellar.demo.engine_config import EngineConfig
from kvcellar.demo.models import ModelKind, random_prompt
from kvcellar.demo.processes import ProcessId
from kvcellar.demo.sandbox import SHM, Sandbox
from tests.vllm.conftest import checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

MAKER = """
import os, sys, time
from kvcellar.demo.sandbox import Sandbox
box = Sandbox.open(1 << 20)
box.popen(["sh", "-c", "sleep 1000 & exec sleep 1000"])
while len(box.processes()) < 2:
    time.sleep(0.01)
print(box.scratch, *[process.pid for process in box.processes()], flush=True)
time.sleep(1000)
"""


def test_a_command_in_a_sandbox_has_its_own_shm_and_ends_as_it_would_outside(
    sandbox: Sandbox,
) -> None:
    wrote = sandbox.run(
        ["sh", "-c", f"echo seen > {SHM}/here && stat -f -c %b {SHM}"], timeout_s=10
    )
    assert (wrote.returncode, wrote.stderr) == (0, "")
    assert int(wrote.stdout) * os.sysconf("SC_PAGE_SIZE") == 512 << 20
    assert sandbox.path(SHM / "here").read_text() == "seen\n"
    assert not (SHM / "here").exists()

    # Whatever the command's environment says, the sandbox finds its own program.
    shown = sandbox.run(["env"], env={"PATH": os.environ["PATH"], "PYTHONHOME": "/"}, timeout_s=10)
    assert sorted(shown.stdout.split()) == [f"PATH={os.environ['PATH']}", "PYTHONHOME=/"]

    assert sandbox.run(["sh", "-c", "exit 7"], timeout_s=10).returncode == 7
    assert sandbox.run(["sh", "-c", "kill -USR1 $$"], timeout_s=10).returncode == -signal.SIGUSR1
    sleeper = sandbox.popen(["sleep", "1000"])
    while not sandbox.processes():
        time.sleep(0.01)
    sleeper.terminate()
    assert sleeper.wait(10) == -signal.SIGTERM
    assert sandbox.processes() == []


def test_a_sandbox_dies_with_the_process_that_made_it() -> None:
    maker = subprocess.Popen([sys.executable, "-P", "-c", MAKER], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    with maker.stdout:
        scratch, *pids = maker.stdout.readline().split()
    inside = [_identified(int(pid)) for pid in pids]
    assert (len(inside), Path(scratch).is_dir()) == (2, True)
    maker.kill()
    maker.wait()
    assert processes.wait_gone(inside, timeout_s=10) == []
    assert not Path(scratch).exists()


def test_an_engine_repeats_its_tokens_counts_hits_and_leaves_nothing(
    sandbox: Sandbox, workshop: Path, tmp_path: Path
) -> None:
    config = EngineConfig(
        python=Path(sys.executable),
        model=checkpoint(workshop, ModelKind.LLAMA),
        kind=ModelKind.LLAMA,
        cache=workshop / "cache",
    )
    prompts = [random_prompt(200, seed) for seed in range(3)]
    with Engine.start(config, sandbox, tmp_path / "engine.log") as engine:
        engine.wait_ready()
        one_by_one = engine.generate(prompts)
        assert [each.cached_tokens for each in one_by_one] == [0, 0, 0]
        assert len({each.token_ids for each in one_by_one}) == 3
        engine.reset_prefix_cache()
        assert engine.generate(prompts, together=True) == one_by_one
        again = engine.generate(prompts)
        assert [each.token_ids for each in again] == [each.token_ids for each in one_by_one]
        assert [each.cached_tokens for each in again] == [192, 192, 192]
        assert engine.metrics().total("vllm:prefix_cache_hits_total") == 3 * 192
        queues = [path.name for path in sandbox.path(SHM).iterdir()]
        assert [name for name in queues if (SHM / name).exists()] == []

        engine.begin_generate([random_prompt(200, 9)], max_tokens=300)
        engine.kill(Part.WORKERS)
        with pytest.raises(EngineFailed, match=r"end of .*engine\.log"):
            engine.finish_generate(timeout_s=60)
    assert processes.wait_gone(sandbox.processes(), timeout_s=10) == []


def _identified(pid: int) -> ProcessId:
    identity = processes.identify(pid)
    assert identity is not None
    return identity

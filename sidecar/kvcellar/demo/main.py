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
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvcellar.demo.story import Story, StoryOptions
from kvcellar.errors import ConfigurationError


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
        options = StoryOptions(python, given.ranks, given.requests, Path(os.path.abspath(folder)))
        return 0 if Story(options).run() else 1


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

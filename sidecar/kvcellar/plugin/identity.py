"""Which engine start this is, and what its bytes mean.

The *session* is the same in every process of one engine start and in no other: the scheduler turns
offload on only if all ranks hold slots in it. The *fingerprint* is equal for two engine starts only if
one may read the bytes that the other wrote.

Reads `/proc` of the engine's own processes and the names of weight files; must not know vLLM.
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

from kvcellar.errors import Unsupported

FINGERPRINT_VERSION = 1
"""Raised when kvcellar lays out the bytes of a chunk in another way."""

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json"})
"""Weights, and the configuration beside them that decides what they compute."""


def session_of(engine_id: str, core_pid: int) -> str:
    """The session of one engine start: 32 hexadecimal digits.

    vLLM's engine id is a new one at each start, unless the user set it; the process that runs the
    scheduler is mixed in, so that a pinned id gives a new session too.

    Args:
        engine_id: vLLM's, the same in all processes of an engine.
        core_pid: the process of the scheduler, see `core_pid_of_worker`.
    """
    text = f"{engine_id}\0{core_pid}\0{_start_ticks(core_pid)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def core_pid_of_worker(executor: str) -> int:
    """In a worker: the process that runs the scheduler of its engine.

    Args:
        executor: vLLM's executor backend: `mp` starts a process for each rank from that of the
            scheduler, `uni` runs the only rank in it.

    Raises:
        Unsupported: with another executor no process of the engine is known to be the scheduler's.
    """
    if executor == "uni":
        return os.getpid()
    if executor == "mp":
        parent = multiprocessing.parent_process()
        # The parent that started this process, even if it has died since.
        return os.getppid() if parent is None or parent.pid is None else parent.pid
    raise Unsupported(
        f"the executor {executor!r} is not supported: kvcellar needs all ranks of an engine started by "
        "the process of its scheduler; set distributed_executor_backend to mp"
    )


def fingerprint_of(meaning: Mapping[str, object]) -> str:
    """64 hexadecimal digits over everything that gives the bytes their meaning."""
    text = json.dumps({"version": FINGERPRINT_VERSION, **meaning}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def weight_files(model: str) -> list[tuple[str, int, int]]:
    """Name, size and modification time (ns) of each weight file, if the model is a local path."""
    path = Path(model)
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    weights = [file for file in files if file.suffix in _WEIGHT_SUFFIXES and file.exists()]
    stats = [(file.name, file.stat()) for file in weights]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def _start_ticks(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if it is gone.

    Source: proc_pid_stat(5), field 22; the name in field 2 may hold blanks and brackets.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]

"""The parent's side of an engine: start it in a sandbox, talk to it, kill parts of it.

`Engine` owns one engine process tree and its control socket. Every wait has a deadline, and
every failure carries the end of the engine's log. Standard library only.
"""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvcellar.demo import engine as engine_program
from kvcellar.demo import processes
from kvcellar.demo.answers import Answer, Metrics, Started
from kvcellar.demo.engine_config import EngineConfig, environment, vllm_arguments
from kvcellar.demo.processes import ProcessId
from kvcellar.demo.sandbox import ProcessesLeft, Sandbox
from kvcellar.errors import KVCellarError

START_TIMEOUT_S = 300.0
"""An engine takes 20 s on two free cores; others may be using them."""

COMMAND_TIMEOUT_S = 120.0

_LOG_TAIL_LINES = 60


class EngineFailed(KVCellarError):
    """An engine did not start, answer or stop as asked; the message ends with its log."""


class Part(Enum):
    """A part of an engine that can be killed."""

    FRONT = "front"
    SCHEDULER = "scheduler"
    WORKERS = "workers"
    EVERYTHING = "everything"


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """The processes of an engine, as numbered outside its sandbox.

    Attributes:
        front: the API side.
        scheduler: vLLM's EngineCore.
        workers: by rank.
        others: helpers, such as multiprocessing's resource trackers.
    """

    front: ProcessId
    scheduler: ProcessId
    workers: tuple[ProcessId, ...]
    others: tuple[ProcessId, ...]

    def of(self, part: Part) -> tuple[ProcessId, ...]:
        """The processes that a part consists of."""
        match part:
            case Part.FRONT:
                return (self.front,)
            case Part.SCHEDULER:
                return (self.scheduler,)
            case Part.WORKERS:
                return self.workers
            case Part.EVERYTHING:
                return (self.front, self.scheduler, *self.workers, *self.others)


class Engine:
    """A running engine. Make it by `start`; use it as a context manager to be rid of it."""

    def __init__(self, entry: subprocess.Popen[bytes], channel: socket.socket, log: Path) -> None:
        """Keep what `start` has started."""
        self._entry = entry
        self._channel = channel
        self._unread = b""
        self._log = log
        self._tree: EngineProcesses | None = None

    @classmethod
    def start(cls, config: EngineConfig, sandbox: Sandbox, log: Path) -> Self:
        """Start an engine and return at once; `wait_ready` must come next.

        Args:
            config: what to start.
            sandbox: where to start it.
            log: file for all that its processes print; appended to, so that a restart's log
                follows the first one's.

        Raises:
            EngineFailed: it ended before it read its arguments.
        """
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            entry = sandbox.popen(
                [config.python, "-P", engine_program.__file__, str(theirs.fileno())],
                env=environment(config, sandbox.scratch),
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self = cls(entry, ours, log)
        try:
            self._send(vllm_arguments(config))
        except EngineFailed:
            self.destroy()
            raise
        return self

    def __enter__(self) -> Self:
        """Nothing happens: the engine is started already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill what is left of it; no orderly shutdown."""
        self.destroy()

    @property
    def tree(self) -> EngineProcesses:
        """The processes as they were when the engine became ready."""
        if self._tree is None:
            raise EngineFailed("the engine's processes are known once it is ready")
        return self._tree

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Started:
        """Wait until the engine serves.

        Raises:
            EngineFailed: it ended, said why it cannot start, or took too long.
        """
        result = self._receive(timeout_s)
        self._tree = self._find_processes()
        return Started(str(result["version"]), float(result["import_s"]), float(result["start_s"]))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 16,
        *,
        together: bool = False,
        timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> list[Answer]:
        """Greedy answers, in the order of the prompts.

        Args:
            prompts: token ids.
            max_tokens: tokens of each answer.
            together: send all at once; otherwise each waits for the one before.
            timeout_s: for all of them.

        Raises:
            EngineFailed: no answer in time, or the engine died.
        """
        self.begin_generate(prompts, max_tokens, together=together)
        return self.finish_generate(timeout_s)

    def begin_generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, *, together: bool = False
    ) -> None:
        """Send what `generate` sends and return; `finish_generate` must come next.

        In between the engine works, and can be killed.
        """
        self._send(
            {
                "command": "generate",
                "prompts": [list(prompt) for prompt in prompts],
                "max_tokens": max_tokens,
                "together": together,
            }
        )

    def finish_generate(self, timeout_s: float = COMMAND_TIMEOUT_S) -> list[Answer]:
        """Wait for the answers of `begin_generate`."""
        return [
            Answer(tuple(each["token_ids"]), int(each["cached_tokens"]), each["finish_reason"])
            for each in self._receive(timeout_s)["answers"]
        ]

    def reset_prefix_cache(self, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Empty the device's prefix cache; a connector keeps what it has.

        Raises:
            EngineFailed: vLLM refused, since requests hold blocks.
        """
        if not self._call("reset_prefix_cache", timeout_s)["done"]:
            raise EngineFailed(
                "vLLM did not reset its prefix cache: some request still holds blocks"
            )

    def settle(self, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """Let pending stores end and be counted; adds a request of two tokens to the counters."""
        self._call("settle", timeout_s)

    def metrics(self, timeout_s: float = COMMAND_TIMEOUT_S) -> Metrics:
        """Read vLLM's counters; call `settle` first when stores matter."""
        samples = self._call("metrics", timeout_s)["samples"]
        return Metrics(
            tuple((each["name"], each["labels"], float(each["value"])) for each in samples)
        )

    def kill(self, part: Part = Part.EVERYTHING) -> None:
        """Send SIGKILL to a part and return at once."""
        for process in self.tree.of(part):
            processes.send(process, signal.SIGKILL)

    def kill_worker(self, rank: int) -> None:
        """Send SIGKILL to the worker of one rank and return at once."""
        processes.send(self.tree.workers[rank], signal.SIGKILL)

    def wait_gone(self, timeout_s: float = 60.0) -> None:
        """Wait until every process of the engine has ended.

        Raises:
            ProcessesLeft: some still run at the deadline.
        """
        left = processes.wait_gone(self.tree.of(Part.EVERYTHING), timeout_s)
        if left:
            names = ", ".join(f"{process.pid} ({processes.title(process)})" for process in left)
            raise ProcessesLeft(f"still running after {timeout_s:.0f} s: {names}")

    def shutdown(self, timeout_s: float = 60.0) -> None:
        """End the engine in order, scheduler and workers first, and wait until all have gone.

        Raises:
            EngineFailed: it did not answer in time.
            ProcessesLeft: it answered, but some process still runs.
        """
        self._call("shutdown", timeout_s)
        self.wait_gone(timeout_s)
        self.destroy()

    def destroy(self) -> None:
        """Kill all processes of the engine that are left, and wait; a dead engine is fine.

        Raises:
            ProcessesLeft: some process does not die.
        """
        # Once the entry has been waited for, its number may be anybody's.
        found = processes.descendants(self._entry.pid) if self._entry.poll() is None else []
        known = self._tree.of(Part.EVERYTHING) if self._tree is not None else ()
        doomed = {*found, *known}
        for process in doomed:
            processes.send(process, signal.SIGKILL)
        self._channel.close()
        self._entry.wait()
        left = processes.wait_gone(doomed, 30.0)
        if left:
            raise ProcessesLeft(f"still running after SIGKILL: {[process.pid for process in left]}")

    def log_tail(self, n_lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-n_lines:])

    def _find_processes(self) -> EngineProcesses:
        front, *below = processes.descendants(self._entry.pid)
        titles = {process: processes.title(process) for process in below}
        schedulers = [process for process in below if "EngineCore" in titles[process]]
        workers = [process for process in below if "VLLM::Worker" in titles[process]]
        if len(schedulers) != 1 or not workers:
            raise self._failure(
                f"cannot tell the engine's processes apart: {list(titles.values())}"
            )
        return EngineProcesses(
            front=front,
            scheduler=schedulers[0],
            # Titles are Worker for one rank, and Worker_TP0, Worker_TP1, ... for more.
            workers=tuple(sorted(workers, key=lambda process: titles[process])),
            others=tuple(process for process in below if process not in {*schedulers, *workers}),
        )

    def _call(self, command: str, timeout_s: float) -> dict[str, Any]:
        self._send({"command": command})
        return self._receive(timeout_s)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._failure("the engine is gone") from error

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer's result."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                chunk = self._channel.recv(1 << 16)
            except TimeoutError as error:
                raise self._failure(f"no answer within {timeout_s:.0f} s") from error
            except ConnectionError as error:
                raise self._failure("the engine is gone") from error
            if not chunk:
                raise self._failure("the engine ended")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        self._channel.settimeout(None)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._failure(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _failure(self, what: str) -> EngineFailed:
        return EngineFailed(f"{what}; end of {self._log}:\n{self.log_tail()}")

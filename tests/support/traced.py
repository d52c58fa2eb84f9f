"""Stop a real process at its n-th system call: kill it there, or make that call fail.

A child is forked, waits until `strace` has attached, and then runs one action between two marks, calls
of access(2) on names that nobody has. What it does before (imports, what the action needs) is not
counted. A clean run gives the calls between the marks; every other run is about one of them.

`strace` stops a process at the entry of a call, so a kill at call n finds calls 1 to n-1 done and n not.
The call with which the child waits is the only one that is not traced, since how often it is begun
anew while strace attaches is chance; nothing under test receives from a socket.
"""

import gc
import os
import re
import socket
import subprocess
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvcellar.errors import KVCellarError

BEGIN = "/kvcellar-mark-begin"
END = "/kvcellar-mark-end"
KILLED = -9
INJECTED = "(INJECTED)"
"""What strace writes behind a call that it made to fail."""

_WAIT_CALL = "recvfrom"
_LINE = re.compile(r"\d+ +(?P<name>\w+)\((?P<arguments>.*)")

Action = Callable[[], object]
"""What is traced; its answer is not looked at, its error is."""


@dataclass(frozen=True, slots=True)
class Call:
    """A system call of a clean run between the marks.

    Attributes:
        position: its number behind the first mark, from 1, for people.
        occurrence: its number among all traced calls of this name, from 1: what strace counts by.
    """

    name: str
    arguments: str
    position: int
    occurrence: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a traced child ended.

    Attributes:
        status: its exit status, or minus the signal that ended it.
        log: what strace wrote.
        error: the traceback of what the action raised; empty if nothing, or if it was killed.
        is_typed: whether that was a `KVCellarError`.
        exit_status: that error's exit status; -1 if there is none.
        leaked: descriptors that the action left open when it raised.
    """

    status: int
    log: str
    error: str
    is_typed: bool
    exit_status: int
    leaked: tuple[str, ...]

    @property
    def killed_at(self) -> str:
        """Name of the call between the marks at whose entry it was killed; empty if it was not, or elsewhere."""
        *before, last, end = ["", "", *self.log.splitlines()]
        match = _LINE.match(last)
        if match is None or not end.endswith("+++ killed by SIGKILL +++"):
            return ""
        is_between = any(BEGIN in line for line in before) and not any(
            END in line for line in before
        )
        return match["name"] if is_between else ""


class Traced:
    """A child that runs an action under strace. Use it once: `run`, or `start` and `finish`."""

    def __init__(self, prepare: Callable[[], Action]) -> None:
        """Fork the child; `prepare` runs in it before it is traced, and returns the action."""
        self._here, there = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self._here.close()
                _live(prepare, there)
                status = 0
            except BaseException:  # noqa: BLE001 - the child of a test must not go on as the test
                traceback.print_exc()
            finally:
                os._exit(status)
        there.close()

    def run(self, *options: str) -> Ending:
        """Trace it to its end, with more options of strace."""
        return self.finish(*options, then=lambda: None)

    def finish(self, *options: str, then: Callable[[], None]) -> Ending:
        """Trace the action, call `then` while the child still lives if the action raised, and end it."""
        self._here.settimeout(60.0)
        assert self._here.recv(1) == b"p", "the child could not prepare"
        with tempfile.TemporaryDirectory() as scratch:
            log = Path(scratch, "log")
            tracer = self._attach(log, options)
            try:
                self._here.send(b"g")
                told = self._hear()
                if told and told[0] != "done":
                    then()
            finally:
                self._here.close()  # the child ends
                status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                tracer.communicate()
            kind, exit_status, leaked, error = told or ("", "-1", "", "")
            return Ending(
                status,
                log.read_text(errors="replace"),
                error,
                kind == "typed",
                int(exit_status),
                tuple(filter(None, leaked.split("|"))),
            )

    def _attach(self, log: Path, options: tuple[str, ...]) -> "subprocess.Popen[bytes]":
        argv = ["strace", "-f", "-s", "40", "-o", str(log), "-e", f"trace=!{_WAIT_CALL}"]
        tracer = subprocess.Popen([*argv, *options, "-p", str(self.pid)], stderr=subprocess.PIPE)
        # It says so once the child cannot make a call any more that it would not see.
        said = tracer.stderr.readline() if tracer.stderr else b""
        assert b"attached" in said, f"strace did not attach: {said.decode()}"
        return tracer

    def _hear(self) -> tuple[str, str, str, str] | None:
        heard = b""
        try:
            while not heard.endswith(b"\0"):
                if not (part := self._here.recv(65536)):
                    return None
                heard += part
        except ConnectionResetError:
            return None
        return cast("tuple[str, str, str, str]", tuple(heard[:-1].decode().split("\1")))


def _live(prepare: Callable[[], Action], there: socket.socket) -> None:
    """The child: prepare, wait for the tracer, act, tell, and wait to be let go."""
    gc.disable()
    action = prepare()
    there.send(b"p")
    there.recv(1)
    before = _open_files()
    os.access(BEGIN, os.F_OK)
    told = ("done", "-1", "", "")
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - every kind is told
        typed = isinstance(error, KVCellarError)
        status = error.exit_status if isinstance(error, KVCellarError) else -1
        told = ("typed" if typed else "other", str(status), "", traceback.format_exc())
        del error
    finally:
        os.access(END, os.F_OK)
    if told[0] != "done":
        after = _open_files()
        leaked = [
            name for fd, (name, file) in after.items() if before.get(fd, ("", None))[1] != file
        ]
        told = (told[0], told[1], "|".join(leaked), told[3])
    there.send("\1".join(told).encode() + b"\0")
    there.recv(1)


def _open_files() -> dict[int, tuple[str, tuple[int, int]]]:
    """The open descriptors: the name of each, for people, and which file it is, whatever its name is by now."""
    found = {}
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            status = os.fstat(fd)
            name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            continue
        found[fd] = name, (status.st_dev, status.st_ino)
    return found


def calls_between_marks(log: str) -> list[Call]:
    """The calls of a clean run behind the first mark, up to the second one and with it."""
    found: list[Call] = []
    seen: dict[str, int] = {}
    is_between = False
    for line in log.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, arguments = match["name"], match["arguments"]
        seen[name] = seen.get(name, 0) + 1
        if is_between:
            found.append(Call(name, arguments, len(found) + 1, seen[name]))
        if BEGIN in arguments:
            is_between = True
        if END in arguments:
            return found
    raise AssertionError(f"the clean run did not reach its end:\n{log[-2000:]}")


def kill_at(call: Call) -> tuple[str, str]:
    """Options of strace that end a process by signal 9 when it enters that call."""
    return "-e", f"inject={call.name}:signal=SIGKILL:when={call.occurrence}"


def fail_at(call: Call, error: str) -> tuple[str, str]:
    """Options of strace that make that call fail without being run."""
    return "-e", f"inject={call.name}:error={error}:when={call.occurrence}"

"""Processes that are stepped system call by system call, on real files: the machinery.

Each simulated process is a thread that runs the project's real code. Before every system call that
others can see it stops and waits for its turn, so a seeded random number generator decides every
interleaving. A process can be killed at any such stop: no further call of it does anything, not even
one of its clean-up, and its descriptors are closed as the kernel would. Or a child that it forked
lives on, with all of its descriptors and so with its locks.

Locks belong to open file descriptions and not to processes, so processes inside one real process are
as separate as the code is. Time is virtual: a call takes 0.1 ms, and a process that sleeps gets no turn
before its time; if all sleep, the clock jumps.
"""

import fcntl
import os
import random
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import ParamSpec, TypeVar

from kvcellar.region import syscalls
from kvcellar.region.locks import SLOT_BASE

MODULES = (
    "kvcellar.region.directory",
    "kvcellar.region.file",
    "kvcellar.region.index_file",
    "kvcellar.region.joining",
    "kvcellar.region.locks",
    "kvcellar.region.making",
    "kvcellar.region.metafile",
    "kvcellar.region.owner",
    "kvcellar.region.participants",
    "kvcellar.region.promises",
    "kvcellar.region.survey",
    "kvcellar.worker.attach",
    "kvcellar.worker.attached",
)
_STEPPED_OS = (
    *("open", "unlink", "mkdir", "fchmod", "ftruncate"),
    *("posix_fallocate", "pwrite", "pread", "listdir"),
)
"""Calls before which a process stops. Closing is no stop: a kill before it and after it are the same."""


_CALL_S = 0.0001
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Killed(BaseException):
    """The process that sees this is dead."""


class Violation(AssertionError):
    """An invariant of the protocol does not hold."""


class Process:
    """A simulated process: a thread that runs `program` one step at a time."""

    def __init__(self, world: "World", name: str, program: Callable[["Process"], None]) -> None:
        self.world = world
        self.name = name
        self.fds: set[int] = set()
        self.wakes_s = 0.0
        self.locked_tick = 0
        """When it took the big lock last."""
        self.at = ""
        """The call before which it stopped last."""
        self.is_killed = False
        self.is_over = False
        self.error: BaseException | None = None
        self._turn = threading.Lock()
        self._turn.acquire()
        self._program = program
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def step(self, at: str) -> None:
        """Stop before the call `at` until the world gives a turn. Called on the process's own thread."""
        if not self.is_killed:
            self.at = at
            self.world.back.release()
            self._turn.acquire()
        if self.is_killed:
            raise Killed

    def advance(self) -> None:
        """Let the process run to its next stop. Called by the world."""
        self.world.current = self
        self.world.tick += 1
        self._turn.release()
        self.world.back.acquire()
        self.world.current = None
        if self.error is not None:
            raise self.error

    def kill(self) -> set[int]:
        """Kill the process; returns the descriptors that it had, which the caller closes or keeps."""
        if not self.is_over:
            self.is_killed = True
            self.advance()
        fds, self.fds = self.fds, set()
        return fds

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self.is_killed:
                self._program(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the world raises it on the main thread
            self.error = error
        self.is_over = True
        self.world.back.release()


class World:
    """All processes, children that outlived them, the clock, and the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.processes: list[Process] = []
        self.children: list[set[int]] = []
        self.clock_s = 1000.0
        self.current: Process | None = None
        self.back = threading.Lock()
        self.back.acquire()
        self.slots: dict[int, Process] = {}
        """Descriptors that hold a slot, however long, and the process that took it."""
        self.left: dict[Process, int] = {}
        """When a process, or a child of it, gave its slot up."""
        self.made: dict[tuple[int, int], tuple[Process, int]] = {}
        """Who made a file, and the descriptor of it."""
        self.tick = 0
        self.before_unlink: Callable[[str, int], None] = lambda name, dir_fd: None
        self.after_slot: Callable[[Process], None] = lambda process: None

    def start(self, name: str, program: Callable[[Process], None]) -> Process:
        process = Process(self, name, program)
        self.processes.append(process)
        return process

    def kill(self, process: Process, *, leaves_child: bool = False) -> None:
        fds = process.kill()
        if process in self.processes:
            self.processes.remove(process)
        if leaves_child and fds:
            self.children.append(fds)
        else:
            self._close(fds)

    def end_child(self, child: set[int]) -> None:
        self.children.remove(child)
        self._close(child)

    def end_all(self) -> None:
        for process in list(self.processes):
            self.kill(process)
        for child in list(self.children):
            self.end_child(child)

    def reap(self) -> None:
        """Forget processes that have ended by themselves; what they left open is closed."""
        for process in [process for process in self.processes if process.is_over]:
            self.kill(process)

    def sleep(self, seconds: float) -> None:
        """The running process gets no turn for that long."""
        if self.current is not None:
            self.current.wakes_s = self.clock_s + seconds
        self.stop("sleep")

    def awake(self) -> list[Process]:
        """The processes that may have a turn now; the clock moves on until there is one."""
        self.clock_s += _CALL_S
        if self.processes:
            self.clock_s = max(self.clock_s, min(p.wakes_s for p in self.processes))
        return [process for process in self.processes if process.wakes_s <= self.clock_s]

    def stop(self, at: str) -> None:
        """The running process waits for its next turn, before the call `at`."""
        if self.current is not None:
            self.current.step(at)

    def token_hex(self, num_bytes: int) -> str:
        """Nonces that the seed decides."""
        return self.dice.randbytes(num_bytes).hex()

    def close(self, fd: int) -> None:
        """Close a descriptor of the running process, or of none."""
        if self.current is not None:
            if self.current.is_killed:
                raise Killed
            self.current.fds.discard(fd)
        self._close({fd})

    def _close(self, fds: set[int]) -> None:
        for fd in fds:
            if process := self.slots.pop(fd, None):
                self.left[process] = self.tick
            os.close(fd)


def identity(status: os.stat_result) -> tuple[int, int]:
    """Which file it is, whatever it is called."""
    return status.st_dev, status.st_ino


class _Stand:
    """Stands for a module: some of its functions are replaced, the rest is the real one."""

    def __init__(self, real: ModuleType, **replaced: object) -> None:
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


def _stepped(world: World, function: Callable[_P, _T]) -> Callable[_P, _T]:
    def call(*arguments: _P.args, **named: _P.kwargs) -> _T:
        world.stop(function.__name__)
        return function(*arguments, **named)

    return call


def _os(world: World) -> _Stand:
    def open_(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        world.stop("open")
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        if world.current is not None:
            world.current.fds.add(fd)
            if flags & os.O_CREAT:
                world.made[identity(os.fstat(fd))] = world.current, fd
        return fd

    def unlink(name: str, *, dir_fd: int) -> None:
        world.stop("unlink")
        world.before_unlink(name, dir_fd)
        os.unlink(name, dir_fd=dir_fd)

    replaced = {name: _stepped(world, getattr(os, name)) for name in _STEPPED_OS}
    return _Stand(os, **{**replaced, "open": open_, "close": world.close, "unlink": unlink})


def _fcntl(world: World) -> _Stand:
    def call(fd: int, command: int, argument: bytes) -> bytes:
        if command == fcntl.F_OFD_SETLK:
            world.stop("lock")
        result = fcntl.fcntl(fd, command, argument)
        kind, _, byte, *_ = struct.unpack("@hhqqi4x", argument)
        if (command, kind) == (fcntl.F_OFD_SETLK, fcntl.F_WRLCK) and byte >= SLOT_BASE:
            process = world.current
            if process is not None:
                world.slots[fd] = process
                world.after_slot(process)
        return result

    def flock(fd: int, operation: int) -> None:
        world.stop("flock")
        fcntl.flock(fd, operation)
        if world.current is not None and operation & fcntl.LOCK_EX:
            world.current.locked_tick = world.tick

    return _Stand(fcntl, fcntl=call, flock=flock)


def _syscalls(world: World) -> _Stand:
    def rename_no_replace(dir_fd: int, old: str, new: str) -> None:
        world.stop("rename")
        syscalls.rename_no_replace(dir_fd, old, new)

    return _Stand(syscalls, rename_no_replace=rename_no_replace)


class _Unmapped:
    """Stands for `Mapping`: without one a killed process's locks go with its descriptors alone."""

    def __init__(self, length_bytes: int) -> None:
        self.address = 2**40
        self.length_bytes = length_bytes

    @classmethod
    def map_range(cls, fd: int, offset_bytes: int, length_bytes: int) -> "_Unmapped":
        return cls(length_bytes)

    def close(self) -> None:
        self.length_bytes = 0


def _forget(holder: object) -> None:
    """Stands for `close_in_children`."""


@contextmanager
def stepping(world: World) -> Iterator[None]:
    """Let the real modules run on the world's system calls and clock."""
    stands: dict[str, object] = {
        "os": _os(world),
        "fcntl": _fcntl(world),
        "time": _Stand(time, monotonic=lambda: world.clock_s, sleep=world.sleep),
        "syscalls": _syscalls(world),
        "secrets": _Stand(secrets, token_hex=world.token_hex),
    }
    saved: list[tuple[ModuleType, str, object]] = []

    def replace(module: ModuleType, name: str, stand: object) -> None:
        saved.append((module, name, getattr(module, name)))
        setattr(module, name, stand)

    try:
        for module in map(import_module, MODULES):
            for name, stand in stands.items():
                if hasattr(module, name) and isinstance(getattr(module, name), ModuleType):
                    replace(module, name, stand)
            # The descriptors of a killed process are closed behind its back: a real child that is
            # forked later must not close those numbers again.
            if hasattr(module, "close_in_children"):
                replace(module, "close_in_children", _forget)
        replace(import_module("kvcellar.worker.attach"), "Mapping", _Unmapped)
        replace(import_module("kvcellar.region.file"), "STEP_BYTES", 2**20)
        yield
    finally:
        world.end_all()
        for module, name, value in reversed(saved):
            setattr(module, name, value)

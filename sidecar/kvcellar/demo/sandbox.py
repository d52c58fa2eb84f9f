"""A private /dev/shm, and a process tree that cannot outlive it.

A sandbox is a mount namespace and a PID namespace (and a user namespace when the caller is
not root). Inside it ``/dev/shm`` is a tmpfs of its own with a size of the caller's choice, as
in a pod; everything else is the machine's. Two processes make it:

- the *holder* is process 1 of the PID namespace. It makes the mounts, reaps orphans, and ends
  when its standard input is closed, which happens at the latest when the caller dies, however
  it dies. The kernel then kills all that lives in the namespace, and the mounts go with it.
- the *entry*, one for each command, joins the namespaces, starts the command and stands for
  it: it passes signals on, ends as the command ends, and takes it along when it is killed. So
  `subprocess.Popen` works as usual, but ``Popen.pid`` is the entry's: the command is its child.

From outside, files in the sandbox are seen through `Sandbox.path`. Those paths go through
``/proc/<holder>/root``, a link that only the kernel can follow: never resolve them
(`os.path.realpath`, `Path.resolve`), or they turn into the machine's own ``/dev/shm``.

The program of both processes is `kvcellar.demo.inside`.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from kvcellar.demo import processes
from kvcellar.demo.inside import Mounts
from kvcellar.demo.processes import ProcessId
from kvcellar.errors import KVCellarError, Unsupported

SHM = Path("/dev/shm")  # noqa: S108  the path that engines use, private here
"""Where the tmpfs is mounted."""

_READY_TIMEOUT_S = 20.0
_END_TIMEOUT_S = 20.0
_SCRATCH_BYTES = 1 << 30

_INSIDE = (sys.executable, "-P", "-m", "kvcellar.demo.inside")


class ProcessesLeft(KVCellarError):
    """Processes outlived the sandbox they ran in, or the engine they belonged to."""


class Sandbox:
    """A running sandbox. Make it by `open`, or as a context manager.

    Attributes:
        scratch: a short path to an empty tmpfs inside, for TMPDIR, HOME and Unix sockets
            (their names may have 107 bytes only). From outside, use ``path(scratch)``.
    """

    def __init__(self, holder: subprocess.Popen[str], first: ProcessId, scratch: Path) -> None:
        """Keep what `open` has started."""
        self._holder = holder
        self._first = first
        self._pid_namespace = Path(f"/proc/{first.pid}/ns/pid").stat().st_ino
        self._entries: list[subprocess.Popen[bytes]] = []
        self._is_open = True
        self.scratch = scratch

    @classmethod
    def open(cls, shm_bytes: int, tmpfs: Mapping[Path, int] | None = None) -> Self:
        """Make a sandbox.

        Args:
            shm_bytes: size of ``/dev/shm`` inside, as a pod's sizeLimit.
            tmpfs: more mounts, size in bytes by mount point; each must be a directory. An
                engine and a sidecar that shall share a region get its root here, or use
                ``/dev/shm``.

        Raises:
            Unsupported: namespaces or mounts are not allowed here; the message says which.
        """
        scratch = Path(tempfile.mkdtemp(prefix="kvc-"))
        sizes = {str(SHM): shm_bytes, str(scratch): _SCRATCH_BYTES}
        sizes |= {str(path): size_bytes for path, size_bytes in (tmpfs or {}).items()}
        command = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--propagation",
            "private",
        ]
        if os.geteuid() != 0:
            command += ["--user", "--map-root-user"]
        command += ["--", *_INSIDE, "hold", Mounts(str(scratch), sizes).encode()]
        try:
            holder = subprocess.Popen(  # noqa: S603  our own program
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_own_environment(),
                text=True,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            scratch.rmdir()
            raise Unsupported("a sandbox needs unshare(1), from the package util-linux") from error
        try:
            return cls(holder, _first_process(holder), scratch)
        except KVCellarError:
            _end(holder)
            with contextlib.suppress(FileNotFoundError):
                scratch.rmdir()
            raise

    def __enter__(self) -> Self:
        """Nothing happens: the sandbox runs already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """`close`."""
        self.close()

    def path(self, inside: Path | str) -> Path:
        """The path by which processes outside reach an absolute path of the sandbox.

        It works while the sandbox lives, and must not be resolved (module docstring).
        """
        return Path(f"/proc/{self._first.pid}/root") / str(inside).lstrip("/")

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a command inside, in a session of its own.

        Args:
            command: program and arguments; no shell.
            env: the whole environment of the command; the caller's when None.
            stdin: as for `subprocess.Popen`; nothing by default.
            stdout: as for `subprocess.Popen`.
            stderr: as for `subprocess.Popen`.
            pass_fds: descriptors that the command inherits under the same numbers.

        Returns:
            The entry. Signals that it is sent reach the command (SIGTERM, SIGINT, SIGHUP,
            SIGUSR1, SIGUSR2, and SIGKILL in effect), and its status is the command's.
        """
        first = self._first
        # The entry's environment is not the command's, which may hide this package from it.
        with _sealed(os.environ if env is None else env) as environment:
            where = (first.pid, first.started_ticks, environment)
            entry = subprocess.Popen(  # noqa: S603  the caller's command, no shell
                [*_INSIDE, "enter", *map(str, (*where, *command))],
                env=_own_environment(),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[environment, *pass_fds],
                start_new_session=True,
            )
        self._entries.append(entry)
        return entry

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end and capture what it prints.

        Raises:
            subprocess.TimeoutExpired: it ran too long, and was killed.
        """
        process = self.popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(
            list(map(str, command)),
            process.returncode,
            stdout.decode(errors="replace"),
            stderr.decode(errors="replace"),
        )

    def processes(self) -> list[ProcessId]:
        """All living processes inside, as numbered outside, but for the holder."""
        inside = processes.in_pid_namespace(self._pid_namespace)
        return [process for process in inside if process != self._first]

    def close(self) -> None:
        """Kill whatever still runs inside and drop the mounts. Calling it again does nothing.

        Raises:
            ProcessesLeft: some process is still there 20 s later (in uninterruptible sleep).
        """
        if not self._is_open:
            return
        self._is_open = False
        inside = processes.in_pid_namespace(self._pid_namespace)
        _end(self._holder)
        left = processes.wait_gone(inside, _END_TIMEOUT_S)
        if not left:
            for entry in self._entries:
                entry.wait()
        with contextlib.suppress(FileNotFoundError):
            self.scratch.rmdir()
        if left:
            names = ", ".join(f"{process.pid} ({processes.title(process)})" for process in left)
            raise ProcessesLeft(
                f"still running {_END_TIMEOUT_S:.0f} s after their sandbox was closed: {names}"
            )


def _own_environment() -> dict[str, str]:
    """Of the holder and the entries: they find this package where this process has found it."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@contextlib.contextmanager
def _sealed(environment: Mapping[str, str]) -> Iterator[int]:
    """A descriptor to read these variables from, as JSON; open as long as the context."""
    descriptor = os.memfd_create("environment")
    try:
        os.write(descriptor, json.dumps(dict(environment)).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _first_process(holder: subprocess.Popen[str]) -> ProcessId:
    """Wait for the holder's line, which is the number of process 1 as seen from here."""
    line = ""
    if holder.stdout is not None and select.select([holder.stdout], [], [], _READY_TIMEOUT_S)[0]:
        line = holder.stdout.readline().strip()
    first = processes.identify(int(line)) if line.isdigit() else None
    if first is None:
        raise Unsupported(
            "this machine refuses a private mount and PID namespace, which a sandbox needs "
            f"(as root, or with unprivileged user namespaces allowed): {line or 'no answer'}"
        )
    return first


def _end(holder: subprocess.Popen[str]) -> None:
    """Let process 1 end, and with it all the others."""
    for pipe in (holder.stdin, holder.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        holder.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()

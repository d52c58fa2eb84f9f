"""Real processes for tests: forked, told what to do over a pipe, and killed."""

import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection

TIMEOUT_S = 30.0


class Child:
    """A forked process that runs `program(connection)`; an exception of it is raised by `hear`."""

    def __init__(
        self, program: Callable[[Connection], None], close: Sequence[Connection] = ()
    ) -> None:
        """Fork. `close`: connections that the child must not keep, so that their ends are seen."""
        self._connection, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self._connection.close()
                for connection in close:
                    connection.close()
                status = _run(program, theirs)
            finally:
                os._exit(status)
        theirs.close()
        self._status: int | None = None

    def hear(self, timeout_s: float = TIMEOUT_S) -> object:
        """What the child sends next.

        Raises:
            BaseException: the one that ended the child.
            EOFError: it died without a word.
            TimeoutError: it said nothing in time.
        """
        if not self._connection.poll(timeout_s):
            raise TimeoutError(f"process {self.pid} said nothing for {timeout_s} s")
        said: object = self._connection.recv()
        if isinstance(said, BaseException):
            raise said
        return said

    def tell(self, said: object) -> None:
        """Send to the child."""
        self._connection.send(said)

    def ask(self, said: object) -> object:
        """Send, and hear the answer."""
        self.tell(said)
        return self.hear()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Safe for a child that has ended."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for its end; its exit status, or minus the signal that ended it."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            self._connection.close()
        return self._status


def _run(program: Callable[[Connection], None], connection: Connection) -> int:
    try:
        program(connection)
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        try:
            connection.send(error)
        except BrokenPipeError:
            traceback.print_exc()
        except Exception:  # noqa: BLE001 - it cannot be pickled
            connection.send(RuntimeError(traceback.format_exc()))
        return 1
    return 0

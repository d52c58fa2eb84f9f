"""The command `kvcellar`: reads arguments and settings, calls one function, maps errors to statuses.

Each subcommand imports what it needs when it runs, so that `kvcellar --help` costs nothing and a base
install without the sidecar's packages can say what is missing. Reference: docs/reference/cli.md.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from kvcellar.cli.arguments import parser
from kvcellar.contract import printable
from kvcellar.errors import KVCellarError, Unsupported
from kvcellar.region import leases

_TERMINATED = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Args:
        arguments: without the program's name; the process's own if None.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    leases.ignore_breaks()
    _leave_on_sigterm(0 if given[:1] == ["sidecar"] else _TERMINATED)
    try:
        status = _run(given)
        sys.stdout.flush()
    except KVCellarError as error:
        _say(str(error))
        return error.exit_status
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvcellar"):
            raise
        _say(f"{error.name} is not installed: pip install 'kvcellar[cli]' brings it")
        return Unsupported.exit_status
    except BrokenPipeError:  # whoever read the answer has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        _say(str(error))
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _say(error: str) -> None:
    """Write an error; what is no line end may come from elsewhere, and must not move the terminal."""
    sys.stderr.write("\n".join(map(printable, f"kvcellar: {error}".split("\n"))) + "\n")


def _run(given: list[str]) -> int:
    if given[:1] == ["sidecar"]:  # it reads its own arguments, as `python -m kvcellar.daemon` does
        from kvcellar.daemon import app

        return app.main(given[1:])
    if given[:1] == ["demo"]:
        from kvcellar.demo import main as demo

        return demo.run(given[1:])
    options = parser().parse_args(given)
    command: Callable[[argparse.Namespace], int] = options.run
    return command(options)


def _leave_on_sigterm(status: int) -> None:
    """End at once, also as PID 1 of a container, which would ignore the signal."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(status)

    signal.signal(signal.SIGTERM, leave)

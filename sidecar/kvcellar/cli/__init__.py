"""The command `kvcellar`: reads arguments and settings, calls one function, maps errors to statuses.

Each subcommand imports what it needs when it runs, so that `kvcellar --help` costs nothing and a base
install without the sidecar's packages can say what is missing. Reference: docs/reference/cli.md.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from kvcellar import __version__
from kvcellar.contract import StartGate, printable
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
    options = _parser().parse_args(given)
    match options.command:
        case "wait":
            from kvcellar.cli import wait

            return wait.run(StartGate(options.gate), options.timeout)
        case "status":
            from kvcellar.cli import status

            return status.run(as_json=options.json)
        case "install-library":
            from kvcellar.cli import install_library

            return install_library.run(options.directory)
        case _:
            from kvcellar.cli import clean

            return clean.run(is_dry=options.dry_run)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcellar",
        description="Own the host memory that vLLM engines offload their KV cache to. "
        "Settings come from KVCELLAR_* variables.",
    )
    parser.add_argument("--version", action="version", version=f"kvcellar {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("sidecar", help="own the regions of this pod", add_help=False)
    wait = commands.add_parser("wait", help="wait until an engine may start")
    wait.add_argument(
        "--for",
        dest="gate",
        required=True,
        choices=[str(gate) for gate in StartGate],
        help="what has to be done: the plan, reserving, or settling",
    )
    wait.add_argument(
        "--timeout", type=_seconds, metavar="S", help="give up after S seconds (default: never)"
    )
    status = commands.add_parser("status", help="show the regions")
    status.add_argument("--json", action="store_true", help="print what /v1/regions gives")
    clean = commands.add_parser("clean", help="remove what nobody owns or holds")
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    install = commands.add_parser("install-library", help="put the library where engines find it")
    install.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="engines get PYTHONPATH=DIR/current; its parent has to exist",
    )
    commands.add_parser("demo", help="show it with a real engine", add_help=False)
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def _leave_on_sigterm(status: int) -> None:
    """End at once, also as PID 1 of a container, which would ignore the signal."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        sys.exit(status)

    signal.signal(signal.SIGTERM, leave)

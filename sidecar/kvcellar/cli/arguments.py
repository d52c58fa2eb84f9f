"""The arguments of each command, and which function they go to.

A command's module is imported when the command runs, so that `--help` costs nothing and a command needs
no package that only another one uses.
"""

import argparse
import contextlib
from pathlib import Path

from kvcellar import __version__
from kvcellar.contract import StartGate


def parser() -> argparse.ArgumentParser:
    """The parser; what it returns has the function to call as `run`."""
    made = argparse.ArgumentParser(
        prog="kvcellar",
        description="Own the host memory that vLLM engines offload their KV cache to. "
        "Settings come from KVCELLAR_* variables.",
    )
    made.add_argument("--version", action="version", version=f"kvcellar {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("sidecar", help="own the regions of this pod", add_help=False)
    _add_wait(commands.add_parser("wait", help="wait until an engine may start"))
    _add_status(commands.add_parser("status", help="show the regions"))
    _add_plan(commands.add_parser("plan", help="say whether regions would fit, and make none"))
    _add_doctor(commands.add_parser("doctor", help="check this machine or container"))
    _add_inject(commands.add_parser("inject", help="show a manifest as the webhook would admit it"))
    _add_clean(commands.add_parser("clean", help="remove what nobody owns or holds"))
    _add_install(
        commands.add_parser("install-library", help="put the library where engines find it")
    )
    commands.add_parser("demo", help="show it with a real engine", add_help=False)
    return made


def _add_wait(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_wait)
    command.add_argument(
        "--for",
        dest="gate",
        required=True,
        choices=[str(gate) for gate in StartGate],
        help="what has to be done: the plan, reserving, or settling",
    )
    command.add_argument(
        "--timeout", type=_seconds, metavar="S", help="give up after S seconds (default: never)"
    )


def _wait(options: argparse.Namespace) -> int:
    from kvcellar.cli import wait

    return wait.run(StartGate(options.gate), options.timeout)


def _add_status(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_status)
    command.add_argument("--json", action="store_true", help="print what /v1/regions gives")


def _status(options: argparse.Namespace) -> int:
    from kvcellar.cli import status

    return status.run(as_json=options.json)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_plan)
    command.add_argument("--json", action="store_true", help="print what /v1/plan gives")
    for option, variable, metavar in _PLAN_OPTIONS:
        text = f"instead of {variable}"
        command.add_argument(option, dest=variable, metavar=metavar, help=text)


_PLAN_OPTIONS = (
    ("--dir", "KVCELLAR_DIR", "DIR"),
    ("--capacity", "KVCELLAR_CAPACITY", "SIZE"),
    ("--engine-id", "KVCELLAR_ENGINE_ID", "ID"),
    ("--engines", "KVCELLAR_ENGINES", "N"),
    ("--mode", "KVCELLAR_MODE", "MODE"),
)


def _plan(options: argparse.Namespace) -> int:
    from kvcellar.cli import plan

    given = {variable: getattr(options, variable) for _, variable, _ in _PLAN_OPTIONS}
    settings = {variable: text for variable, text in given.items() if text is not None}
    return plan.run(settings, as_json=options.json)


def _add_doctor(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_doctor)
    command.add_argument("--json", action="store_true", help="print the findings as JSON")


def _doctor(options: argparse.Namespace) -> int:
    from kvcellar.cli.doctor import run

    return run(as_json=options.json)


def _add_inject(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_inject)
    add = command.add_argument
    add("-f", "--filename", required=True, metavar="FILE", help="the manifest; - is stdin")
    add("--explain", action="store_true", help="say why, instead of printing the manifest")
    add("--profile", default="", metavar="FILE", help="OffloadProfiles, or the spec of one")
    add("-n", "--namespace", default="default", metavar="NAME", help="of objects that name none")
    add("--image", default="", help="kvcellar's image, for what is injected")
    add("--capacity", default="", metavar="SIZE", help="instead of the profile's")


def _inject(options: argparse.Namespace) -> int:
    from kvcellar.cli import inject

    given = inject.InjectOptions(
        file=options.filename,
        profile_file=options.profile,
        namespace=options.namespace,
        image=options.image or inject.DEFAULT_IMAGE,
        capacity=options.capacity,
    )
    return inject.run(given, is_explained=options.explain)


def _add_clean(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_clean)
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _clean(options: argparse.Namespace) -> int:
    from kvcellar.cli import clean

    return clean.run(is_dry=options.dry_run)


def _add_install(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_install)
    command.add_argument(
        "directory",
        type=_directory,
        metavar="DIR",
        help="engines get PYTHONPATH=DIR/current; its parent has to exist",
    )


def _install(options: argparse.Namespace) -> int:
    from kvcellar.cli import install_library

    return install_library.run(options.directory)


def _directory(text: str) -> Path:
    if not text:  # a variable that is not set; the path would be that of the working directory
        raise argparse.ArgumentTypeError(
            "it is empty; give the directory that is to hold the library"
        )
    return Path(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")

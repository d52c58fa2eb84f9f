"""The box from the command line: ``python -m tests.cluster.box``, from the root of the project.

- ``up``: leave a cluster running; ``down``: remove it.
- ``keep``: wait for the end of standard input, then remove the cluster; a cluster starts it itself.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

from tests.cluster.box.cluster import Cluster
from tests.cluster.box.errors import BoxError
from tests.cluster.box.programs import programs
from tests.cluster.box.record import Record
from tests.cluster.box.settings import Settings
from tests.cluster.images import recipes


def up(folder: Path, *, bridge: bool, node: bool) -> None:
    """Leave a cluster running in `folder`, or the one that runs there; print how to reach it."""
    if node and os.geteuid() != 0:
        raise BoxError(
            "a cluster with a node takes namespaces, mounts and cgroups: run this as root"
        )
    record = Record.load(folder)
    if record is not None and not all(
        process.is_running() for process in record.processes.values()
    ):
        # Such as after a reboot.
        record.remove_all()
        record = None
    found = programs()
    if record is None:
        made = []
        if node:
            _say("images of kvcellar and of an engine")
            made = [image.archive for image in recipes.images()]
        _say("a cluster")
        cluster = Cluster(Settings.choose(folder, bridge=bridge, node=node), found)
        cluster.start(keep_running=True)
        for archive in made:
            _say(f"the image {archive.name}, for its node")
            cluster.node.import_image(archive)
    sys.stdout.write(f"export KUBECONFIG={shlex.quote(str(folder / 'kubeconfig'))}\n")
    sys.stdout.write(f"export PATH={shlex.quote(str(found))}:$PATH\n")


def _say(what: str) -> None:
    """Tell a person what the next part of a minute is spent on; stdout is for the shell."""
    sys.stderr.write(f"{what} ...\n")


def down(folder: Path) -> None:
    """Remove the cluster in `folder`, if there is one."""
    record = Record.load(folder)
    if record is not None:
        record.remove_all()


def keep(folder: Path) -> None:
    """Remove the cluster in `folder` once the process that holds our standard input has ended."""
    sys.stdin.buffer.read()
    down(folder)


def main() -> int:
    """Run what the arguments name and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.box", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    starter = commands.add_parser("up")
    starter.add_argument("--bridge", action="store_true", help="with a bridge; needs root")
    starter.add_argument("--node", action="store_true", help="with a real node; needs root")
    for command in (starter, commands.add_parser("down"), commands.add_parser("keep")):
        command.add_argument("folder", type=Path, help="the cluster's own; made and removed")
    arguments = parser.parse_args()
    try:
        match arguments.command:
            case "up":
                up(arguments.folder.resolve(), bridge=arguments.bridge, node=arguments.node)
            case "down":
                down(arguments.folder.resolve())
            case _:
                keep(arguments.folder)
    except BoxError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

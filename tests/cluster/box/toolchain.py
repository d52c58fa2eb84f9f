"""The Go that the programs are built with: the machine's own, or a newer one that it fetches.

A Go from 1.21 on fetches by itself what go.mod asks for. An older one, such as that of Debian 12, fetches
it on our behalf: toolchains are modules, with a checksum like any other.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.box.errors import BoxError, NoGoToolchain

_FETCHES_BY_ITSELF = (1, 21)
_MODULE = "golang.org/toolchain"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_FETCH_TIMEOUT_S = 900.0


def go(go_mod: Path) -> str:
    """The program ``go`` to build a module with.

    Raises:
        NoGoToolchain: there is no Go at all on this machine.
        BoxError: it is an old one that could not fetch the one that is needed.
    """
    found = shutil.which("go")
    if found is None:
        raise NoGoToolchain(
            "no Go on this machine: the test cluster is built with it; install any, such as Debian's"
            " golang-go (make system-cluster does so), and it fetches the version that is needed"
        )
    if _version(found) >= _FETCHES_BY_ITSELF:
        return found
    return str(_fetch(found, _wanted(go_mod.read_text())))


def _version(program: str) -> tuple[int, int]:
    # Not that of a go.mod in this folder.
    environment = os.environ | {"GOTOOLCHAIN": "local"}
    said = _run([program, "env", "GOVERSION"], Path("/"), environment)
    found = re.match(r"go(\d+)\.(\d+)", said)
    if found is None:
        raise BoxError(f"{program} env GOVERSION says {said!r}, which is no version")
    return int(found[1]), int(found[2])


def _wanted(go_mod: str) -> str:
    """The version that a go.mod asks for, such as ``1.26.0``."""
    found = re.search(r"^go (\S+)$", go_mod, re.MULTILINE)
    if found is None:
        raise BoxError("go.mod asks for no version of Go")
    return found[1]


def _fetch(old: str, version: str) -> Path:
    """Have an old Go download a newer one into its cache of modules; returns the newer's program."""
    machine = platform.machine()
    name = f"v0.0.1-go{version}.linux-{_ARCHITECTURES.get(machine, machine)}"
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "go.mod").write_text("module fetch\n")
        argv = [old, "mod", "download", "-json", f"{_MODULE}@{name}"]
        said = _run(argv, Path(scratch), os.environ | {"GOFLAGS": "-modcacherw", "GOWORK": "off"})
    folder = Path(json.loads(said)["Dir"])
    # An old one does not know that a module may hold programs.
    for program in (*(folder / "bin").iterdir(), *(folder / "pkg" / "tool").glob("*/*")):
        program.chmod(0o755)
    return folder / "bin" / "go"


def _run(argv: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_FETCH_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise BoxError(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()

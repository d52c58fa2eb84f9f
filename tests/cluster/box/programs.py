"""The box's programs: built from Go modules once per machine, and kept in the user's cache.

A result lies in ``<cache>/kvcellar/box/<key>``, where the key is the hash of all that it is made
from. It is built under a lock beside it and renamed into place when it is whole, so a folder of that
name is never half a result, and two that need it at once build it once.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.box.errors import BoxError
from tests.cluster.box.toolchain import go

logger = logging.getLogger(__name__)

MODULE = Path(__file__).resolve().parent
INPUTS = ("go.mod", "go.sum", "main.go")

PROGRAMS = (
    "etcd",
    "helm",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
"""What the binary can be called as; main.go has the same list."""

_BINARY = "box"
_CONTAINERD = "github.com/containerd/containerd/v2/cmd"
PACKAGES = (
    ".",
    *(f"{_CONTAINERD}/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")),
)
"""What is built: containerd's programs by themselves, since every pod has a shim, which has to be small,
and takes each plug-in that is linked into it for one of its own."""
_TAGS = "no_aufs,no_btrfs,no_devmapper,no_zfs"
_BUILD_ENVIRONMENT = {
    "CGO_ENABLED": "0",
    "GOFLAGS": "-mod=readonly",
    # An older Go, from 1.21 on, fetches the one that go.mod asks for.
    "GOTOOLCHAIN": "auto",
    "GOWORK": "off",
}
_BUILD_TIMEOUT_S = 3600.0
"""Measured cold on 2 cores: 5 minutes with nothing else running, 40 beside ten busy processes."""


def cache_folder() -> Path:
    """Where results are kept, for this user of this machine."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root, "kvcellar", "box")


def kubernetes_version(go_mod: str) -> str:
    """The version of Kubernetes that a go.mod asks for, such as ``v1.36.3``."""
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", go_mod, re.MULTILINE)
    if found is None:
        raise BoxError("go.mod asks for no k8s.io/kubernetes")
    return found[1]


def build_flags(version: str) -> list[str]:
    """The flags of ``go build``; without its version linked in, a server calls itself v0.0.0."""
    major, minor, _ = version.removeprefix("v").split(".", 2)
    variables = {"gitVersion": version, "gitMajor": major, "gitMinor": minor}
    linked = [
        f"-X k8s.io/component-base/version.{name}={value}" for name, value in variables.items()
    ]
    flags = ["-trimpath", "-buildvcs=false", "-tags", _TAGS]
    return [*flags, "-ldflags", " ".join(["-s", "-w", *linked])]


def programs() -> Path:
    """The folder of the programs; builds them first if this machine has not yet.

    Blocks for minutes then.

    Raises:
        NoGoToolchain: they have to be built, and there is no ``go`` on the PATH.
        BoxError: the build failed.
    """
    folder = programs_folder()
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if not folder.is_dir():
            _build(folder, _flags())
    return folder


def programs_folder() -> Path:
    """Where they are, or will be once they are built."""
    return cache_folder() / _key(_flags())


def _flags() -> list[str]:
    return build_flags(kubernetes_version((MODULE / "go.mod").read_text()))


def _key(flags: list[str]) -> str:
    """The hash of everything that a result is made from."""
    digest = hashlib.sha256()
    for name in INPUTS:
        digest.update((MODULE / name).read_bytes() + b"\0")
    for setting in (*flags, *_BUILD_ENVIRONMENT.items(), platform.machine(), *PACKAGES, *PROGRAMS):
        digest.update(repr(setting).encode())
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; it goes however the process ends."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path, flags: list[str]) -> None:
    """Build into a folder beside the result's, and rename it into place."""
    program = go(MODULE / "go.mod")
    logger.warning("building the programs of the test cluster: minutes, once per machine")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        # It may run beside other people's tests, so they come first.
        argv = ["nice", "-n", "10", program, "build", *flags, "-o", f"{made}/", *PACKAGES]
        done = subprocess.run(
            argv,
            cwd=MODULE,
            env=os.environ | _BUILD_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise BoxError(f"go build in {MODULE} failed:\n{done.stderr[-4000:]}")
        for program in PROGRAMS:
            (made / program).symlink_to(_BINARY)
        made.rename(folder)

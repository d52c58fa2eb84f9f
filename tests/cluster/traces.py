"""What a run of cluster tests leaves on this machine: nothing, and the run itself looks whether that is so.

A run has a tag, which its processes carry in their environment and its clusters in the names of their links,
nodes and cgroups (`Settings.choose`). So what is left is known for its own, whatever other runs do meanwhile.
Its processes get a folder of its own for their temporary files.

What is made without the tag is what the programs of a node make where they were not told to, or were told
wrongly. It is looked for by kind, before and after: a kind that was there before belongs to somebody else, such
as a container runtime of the machine.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.box.cgroups import ROOT as CGROUPS
from tests.cluster.box.settings import RUN_VARIABLE, name_prefix

_SETTLE_S = 10.0
"""How long what is ending may take: the kernel takes a namespace apart after its last process."""

_FOLDERS = ("/dev/shm", "/run", "/var/lib", "/var/log", "/etc/cni")
_DEPTH = 3

_KINDS = {
    "cgroup": ("kubepods", "k8s.io"),
    "chain": ("KUBE-", "CNI-"),
    "file": (
        "/dev/shm/kvcellar",
        "/dev/shm/vllm_offload_",
        "/etc/cni/",
        "/run/containerd",
        "/run/flannel",
        "/run/netns/cni-",
        "/run/runc",
        "/var/lib/cni/",
        "/var/lib/containerd",
        "/var/lib/etcd",
        "/var/lib/kubelet",
        "/var/log/containers/",
        "/var/log/pods",
    ),
    "mount": ("/run/containerd", "/run/netns/", "kubernetes.io~"),
}
"""What a node's programs make, by a part of its name. What the name ends with a slash for is a folder that is there,
empty, while any box has a node (`Record.folders`)."""

_BOX = re.compile(r"\bkvc(?:[0-9a-f]{4})?-\d")
"""In the name of what a box made; one of this run has its tag."""

Machine = dict[str, set[str]]
"""What there is on this machine, by what it is: ``interface``, ``mount``, ``cgroup``, ``chain``, ``file``."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of tests.

    Attributes:
        tag: what the names of all its things carry.
        scratch: where its processes make temporary files.
        folder: where pytest has its tests make theirs; what pytest keeps of it is no trace.
    """

    tag: str
    scratch: Path
    folder: Path

    @classmethod
    def begin(cls, folder: Path) -> "Run":
        """Choose a tag that no other run has, and make its folder of temporary files."""
        while True:
            tag = secrets.token_hex(2)
            scratch = Path(tempfile.gettempdir(), name_prefix(tag).rstrip("-"))
            with contextlib.suppress(FileExistsError):
                scratch.mkdir()
                scratch.chmod(0o1777)
                return cls(tag, scratch, folder)

    def traces(self, before: Machine) -> list[str]:
        """What there is of the run, in words."""
        now = look()
        left = [f"process {each}" for each in self._processes()]
        for kind, names in now.items():
            parts = _parts(kind, before)
            left += [
                f"{kind} {name}"
                for name in sorted(names - before[kind])
                if self._is_own(name)
                or (not _BOX.search(name) and any(part in name for part in parts))
            ]
        return [*left, *(f"file {path}" for path in sorted(self.scratch.rglob("*")))]

    def _is_own(self, name: str) -> bool:
        parts = (name_prefix(self.tag), f"{self.folder}/", f"{self.scratch}/")
        return any(part in name for part in parts)

    def _processes(self) -> Iterator[str]:
        mark = f"{RUN_VARIABLE}={self.tag}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            if int(folder.name) == os.getpid():
                continue
            # Gone by now, or somebody else's.
            with contextlib.suppress(OSError):
                marked = mark in (folder / "environ").read_bytes().split(b"\0")
                if marked or name_prefix(self.tag) in (folder / "cgroup").read_text():
                    words = (folder / "cmdline").read_bytes().decode(errors="replace")
                    yield f"{folder.name} ({words.replace(chr(0), ' ').strip()[:120]})"


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[Run]:
    """A run for the length of a block; its variables are those of this process meanwhile.

    Raises:
        AssertionError: something is left of it, named in the message.
    """
    run = Run.begin(folder)
    before = look()
    with _environment({RUN_VARIABLE: run.tag, "TMPDIR": str(run.scratch)}):
        yield run
    deadline = time.monotonic() + _SETTLE_S
    while (left := run.traces(before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        raise AssertionError("this run leaves on the machine:\n" + "\n".join(left))
    run.scratch.rmdir()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    # It remembers what TMPDIR was.
    tempfile.tempdir = None
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None


# ---- what there is


def look() -> Machine:
    """Look at this machine, as this process sees it."""
    return {
        "cgroup": {path for path, _, _ in os.walk(CGROUPS)},
        "chain": set(_chains()),
        "file": {path for folder in _FOLDERS for path in _below(folder, _DEPTH)},
        "interface": {name for _, name in socket.if_nameindex()},
        "mount": set(_mounts()),
    }


def _parts(kind: str, before: Machine) -> list[str]:
    """The parts of names that tell a thing of this kind, but for those that somebody else makes as well."""
    there = [name for name in before[kind] if not _BOX.search(name)]
    return [part for part in _KINDS.get(kind, ()) if not any(part in name for name in there)]


def _mounts() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        yield f"{fields[4]} ({fields[fields.index('-') + 1]})"


def _below(folder: str, depth: int) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry.path
            if depth > 1 and entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, depth - 1)


def _chains() -> Iterator[str]:
    """The chains of all tables, of both kinds of iptables; none without the rights to see them."""
    for program in ("iptables-save", "iptables-legacy-save", "ip6tables-save"):
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        if path is None:
            continue
        done = subprocess.run([path], capture_output=True, text=True, timeout=30, check=False)
        yield from re.findall(r"^:(\S+)", done.stdout, re.MULTILINE)

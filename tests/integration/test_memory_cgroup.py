"""Limits read inside real memory cgroups, of whichever version this machine has."""

import errno
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

MIB = 2**20
OUTER_BYTES = 192 * MIB
OWN_BYTES = 128 * MIB

# Enters the cgroup before Python starts, so that all of its memory is charged there.
ENTER = 'echo $$ > "$1/cgroup.procs"; shift; exec "$@"'

PROGRAM = """
import json, os, sys
from dataclasses import asdict
from kvcellar.region.cgroups import cgroup_limits
from kvcellar.region.memory import plan

def show():
    return {limit.name: asdict(limit) for limit in cgroup_limits()}

taken = int(sys.argv[1])
before = show()
fd = os.memfd_create("region")
if taken:
    os.posix_fallocate(fd, 0, taken)
after = show()
print(json.dumps([before, after, plan(taken, cgroup_limits()).fits]))
"""

# A container's view on version 1: an own cgroup namespace, and a mount made inside it.
CONTAINER_V1 = 'mount -t cgroup -o memory none "$1"; shift; exec "$@"'

Limits = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Nested:
    """A cgroup with a limit inside another one with a limit."""

    version: int
    outer: Path
    own: Path
    limit_file: str

    def limit(self, directory: Path, size_bytes: int) -> None:
        (directory / self.limit_file).write_text(str(size_bytes))

    def run(self, taken_bytes: int, *wrapper: str) -> tuple[Limits, Limits, bool]:
        python = [sys.executable, "-c", PROGRAM, str(taken_bytes)]
        result = subprocess.run(
            ["sh", "-ec", ENTER, "sh", str(self.own), *wrapper, *python],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        before, after, fits = json.loads(result.stdout)
        return before, after, fits


def _memory_mount() -> tuple[int, Path] | None:
    """Version and mount point of the hierarchy that has the memory controller."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        point, kind = Path(left.split()[4]), right.split()
        if kind[0] == "cgroup" and "memory" in kind[2].split(","):
            return 1, point
        controllers = point / "cgroup.controllers"
        has_list = kind[0] == "cgroup2" and controllers.is_file()
        if has_list and "memory" in controllers.read_text().split():
            return 2, point
    return None


def _remove(directory: Path) -> None:
    """Remove a cgroup; it stays busy for a moment after its last process has gone."""
    deadline = time.monotonic() + 10
    while True:
        try:
            directory.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


@pytest.fixture
def nested() -> Iterator[Nested]:
    if os.geteuid() != 0:
        pytest.skip("making a cgroup needs root")
    mount = _memory_mount()
    if mount is None:
        pytest.skip("no cgroup hierarchy with the memory controller is mounted here")
    version, point = mount
    outer = point / f"kvcellar-test-{uuid.uuid4().hex[:12]}"
    try:
        outer.mkdir()
    except OSError as error:
        pytest.skip(f"this container may not make a memory cgroup: {error}")
    own = outer / "own"
    try:
        if version == 2:
            for directory in (point, outer):
                (directory / "cgroup.subtree_control").write_text("+memory")
        own.mkdir()
        limit_file = "memory.limit_in_bytes" if version == 1 else "memory.max"
        made = Nested(version, outer, own, limit_file)
        made.limit(outer, OUTER_BYTES)
        made.limit(own, OWN_BYTES)
        yield made
    finally:
        if own.exists():
            _remove(own)
        _remove(outer)


def test_a_process_sees_its_own_limit_and_that_of_its_ancestor(nested: Nested) -> None:
    limits, _, _ = nested.run(0)
    assert limits["container"]["limit_bytes"] == OWN_BYTES
    assert 0 < limits["container"]["usage_bytes"] < OWN_BYTES
    assert limits[f"ancestor:{nested.outer.name}"]["limit_bytes"] == OUTER_BYTES
    assert "hierarchy" not in limits


def test_a_group_without_a_limit_is_bound_by_its_ancestor_only(nested: Nested) -> None:
    (nested.own / nested.limit_file).write_text("-1" if nested.version == 1 else "max")
    limits, _, _ = nested.run(0)
    assert "container" not in limits
    assert limits[f"ancestor:{nested.outer.name}"]["limit_bytes"] == OUTER_BYTES
    assert "hierarchy" not in limits


def test_reserved_shared_memory_is_charged_at_every_level_with_the_assumed_overhead(
    nested: Nested,
) -> None:
    taken = 64 * MIB
    before, after, fits_again = nested.run(taken)
    for name in ("container", f"ancestor:{nested.outer.name}"):
        grown = after[name]["usage_bytes"] - before[name]["usage_bytes"]
        # 1 MiB for Python's own memory and the kernel's batches of charges.
        assert taken <= grown + MIB
        assert grown <= taken * 1.003 + MIB
    assert not fits_again


def test_memory_high_is_a_limit_of_its_own(nested: Nested) -> None:
    if nested.version == 1:
        pytest.skip("no cgroup v2 memory controller on this machine: memory.high is of version 2")
    (nested.own / "memory.high").write_text(str(96 * MIB))
    limits, _, _ = nested.run(0)
    assert limits["container:high"]["limit_bytes"] == 96 * MIB


def test_a_v1_container_sees_the_hidden_limit_above_it(nested: Nested, tmp_path: Path) -> None:
    if nested.version == 2:
        pytest.skip("hierarchical_memory_limit is of cgroup version 1")
    if not shutil.which("unshare"):
        pytest.skip("unshare (util-linux) is not installed")
    nested.limit(nested.outer, 96 * MIB)
    inside = ["sh", "-ec", CONTAINER_V1, "sh", str(tmp_path)]
    limits, _, _ = nested.run(0, "unshare", "--cgroup", "--mount", *inside)
    assert set(limits) == {"container", "hierarchy"}
    assert limits["container"]["limit_bytes"] == OWN_BYTES
    assert limits["hierarchy"]["limit_bytes"] == 96 * MIB
    # The use of the hidden cgroup cannot be read: our own stands for it, read a moment later.
    apart = limits["hierarchy"]["usage_bytes"] - limits["container"]["usage_bytes"]
    assert abs(apart) < MIB

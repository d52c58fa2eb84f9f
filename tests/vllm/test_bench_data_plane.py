"""The bench of the data plane, with tiny counts: it runs, and tells a ratio for every operation."""

import re
import subprocess
import sys

import pytest

from tests.vllm.cellar import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.newest]

TINY = {"rounds": 1, "chunks": 512, "keys": 256, "region-bytes": 8 << 20, "copy-bytes": 4 << 20}
REGIONS = {
    f"{what}, {pages}"
    for what in ("make it and attach", "attach to it")
    for pages in ("4 KiB pages", "kvcellar with huge pages")
}
TRANSFERS = {
    f"{what}: {tensors} tensors, 256 blocks"
    for what in ("descriptors", "store", "load")
    for tensors in (61, 80)
} | {"store: 1 tensor, 256 blocks", "load: 1 tensor, 256 blocks"}
COPIES = {
    f"{direction} of {size} KiB blocks"
    for direction in ("store", "load")
    for size in (4, 16, 64, 256, 2048)
}
MANAGERS = {
    f"{what}, {size} a call"
    for what in (
        "lookup, hit",
        "lookup, miss",
        "lookup of a prefix",
        "load",
        "store with eviction",
    )
    for size in (1, 16, 256)
} | {"longest call", "store of one key, beside 256 pinned chunks", "memory of a chunk"}
POLICIES = 2


def test_every_operation_gets_a_ratio() -> None:
    options = [f"--{name}={value}" for name, value in TINY.items()]
    done = subprocess.run(
        [sys.executable, "-m", "bench.data_plane", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = re.findall(
        r"^\| (.+?) \| ([\d,.]+ \S+) \| ([\d,.]+ \S+) \| (\d+\.\d\d) \|$", done.stdout, re.M
    )
    names = [name for name, *_ in rows]
    assert all(float(ratio) > 0 for *_, ratio in rows)
    assert set(names) >= REGIONS | TRANSFERS | COPIES | MANAGERS
    for name in MANAGERS:
        assert names.count(name) == POLICIES
    assert "copies of a store in runs: 80 tensors, 256 blocks, 16 a chunk" in names


def test_a_part_can_be_run_alone() -> None:
    options = [f"--{name}={value}" for name, value in TINY.items()]
    done = subprocess.run(
        [sys.executable, "-m", "bench.data_plane", *options, "--only", "regions"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert set(re.findall(r"^\| (.+?) \| [\d,.]+ ", done.stdout, re.M)) == REGIONS

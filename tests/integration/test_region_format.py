"""A third program, which knows only docs/reference/region-format.md, reads a region."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from kvcellar.contract import Direction, EngineId
from kvcellar.region import metafile
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import Layout
from kvcellar.region.metadata import Counters
from kvcellar.region.names import data_name, meta_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from tests.fakes.simulated_device import SimulatedDevice
from tests.support import region_reader
from tests.support.ranks import CHUNK_BYTES, Ranks

pytestmark = pytest.mark.integration

MIB = 2**20
ID = EngineId("some.engine-0_dp1")


@pytest.fixture
def owned(volume: Path) -> Iterator[OwnedRegion]:
    directory = RegionDirectory.create(volume / "kvcellar")
    region = OwnedRegion.acquire(directory, RegionRequest(ID, 21 * MIB), list)
    region.reserve(lambda: False)
    region.settle(lambda: False)
    yield region
    region.close()


def test_the_reader_knows_nothing_of_kvcellar() -> None:
    tree = ast.parse(Path(region_reader.__file__).read_text())
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in node.names
    } | {
        (node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert imported <= set(sys.stdlib_module_names)


def _run(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    program = [sys.executable, "-I", region_reader.__file__, *map(str, arguments)]
    return subprocess.run(program, capture_output=True, timeout=30, check=False)


def test_it_reads_what_the_owner_published(owned: OwnedRegion, volume: Path) -> None:
    page = json.loads(_run(volume / "kvcellar", ID).stdout)
    mine = owned.owner
    assert page["session"] is None
    assert page["slots"] == {}
    assert page["owner"] == {
        "state": "Ready",
        "mode": "plugin",
        "kind": "sidecar",
        "nonce": mine.nonce,
        "capacity_bytes": 20 * MIB,
        "page_bytes": mine.page_bytes,
        "device": mine.data_device,
        "inode": mine.data_inode,
        "settled_bytes": 20 * MIB,
        "huge_page_bytes": mine.huge_page_bytes,
        "reserve_seconds": mine.reserve_seconds,
        "settle_seconds": mine.settle_seconds,
        "reason": "",
    }
    owned.fail("no more möglich")
    owner = region_reader.read_page(volume / "kvcellar", ID)["owner"]
    assert isinstance(owner, dict)
    assert (owner["state"], owner["reason"]) == ("Failed", "no more möglich")


@pytest.mark.parametrize("layout", list(Layout))
def test_it_reads_every_chunk_that_the_ranks_wrote(
    owned: OwnedRegion, volume: Path, layout: Layout
) -> None:
    path = volume / "kvcellar"
    ranks = Ranks.start(path, 2, ID, layout=layout).attached()
    try:
        writers = ranks.rank if layout is Layout.SHARDED else ranks.rank[:1]
        session = region_reader.read_page(path, ID)["session"]
        assert isinstance(session, dict)
        for chunk in range(session["num_chunks"]):
            for rank, child in enumerate(writers):
                child.ask(("fill", chunk, b"%d/%d " % (rank, chunk)))
    finally:
        ranks.kill()
    for chunk in range(session["num_chunks"]):
        for rank in (0, 1):
            pattern = b"%d/%d " % (rank if layout is Layout.SHARDED else 0, chunk)
            expected = (pattern * CHUNK_BYTES)[:CHUNK_BYTES]
            assert region_reader.read_chunk(path, ID, rank, chunk) == expected
    last = session["num_chunks"] - 1
    assert _run(path, ID, 1, last).stdout == region_reader.read_chunk(path, ID, 1, last)
    outside = _run(path, ID, 0, last + 1)
    assert (outside.returncode, outside.stdout) == (1, b"")


def test_it_reads_session_slots_counters_and_marks(owned: OwnedRegion, volume: Path) -> None:
    path = volume / "kvcellar"
    options = AttachOptions(directory=path, fingerprint="ab" * 32)
    region = attach(ID, CHUNK_BYTES, options=options)
    scheduler = attach_scheduler(ID, world_size=1, options=options)
    region.add_counters(Direction.STORE, 1000, ok=True)
    region.add_counters(Direction.LOAD, 500, ok=False)
    assert region.pin(SimulatedDevice(seed=1))
    scheduler.report(Counters(lookup_hit=5, lookup_miss=6, lookup_pending=7, used_chunks=8))
    for chunk in (0, 7):
        region.mark_failed_store(chunk)

    page = region_reader.read_page(path, ID)
    fd = os.open(path / meta_name(ID), os.O_RDONLY)
    contents = metafile.read_contents(fd)
    os.close(fd)
    assert contents.session is not None
    geometry = asdict(contents.session.geometry)
    session = page["session"]
    assert isinstance(session, dict)
    del geometry["copies"]
    assert session.items() >= geometry.items()
    assert (session["session"], session["fingerprint"]) == (options.session, "ab" * 32)
    assert (session["generation"], session["engine_starts"]) == (1, 1)

    assert page["slots"] == {
        slot: {
            "session": row.session,
            "role": row.role,
            "pinned": row.pinned,
            "rank": row.rank,
            "since_unix_s": row.since_unix_s,
            **asdict(row.counters),
        }
        for slot, row in contents.rows.items()
    }
    worker, manager = contents.rows[0], contents.rows[1]
    assert worker.pinned
    assert worker.counters == Counters(store_bytes=1000, stores_ok=1, loads_failed=1)
    assert manager.counters.used_chunks == 8
    assert region_reader.read_failed(path, ID) == [(0, 0), (0, 7)]
    scheduler.close()
    region.close()


def test_it_takes_the_good_copy_and_refuses_what_is_not_the_region(
    owned: OwnedRegion, volume: Path
) -> None:
    path = volume / "kvcellar"
    page = path / meta_name(ID)
    whole = page.read_bytes()
    before = region_reader.read_page(path, ID)["owner"]
    for at in (1024, 1024 + 64 + 30, 1024 + 64 + 1024 + 30):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        page.write_bytes(damaged)
        owner = region_reader.read_page(path, ID)["owner"]
        assert isinstance(owner, dict)
        assert isinstance(before, dict)
        assert owner["nonce"] == before["nonce"]
    damaged = bytearray(whole)
    for at in (1024 + 64 + 30, 1024 + 64 + 1024 + 30):
        damaged[at] ^= 0xFF
    for bad in (bytes(damaged), whole[:1000], bytes(65536), b"X" + whole[1:]):
        page.write_bytes(bad)
        with pytest.raises(region_reader.NotARegion):
            region_reader.read_page(path, ID)
    page.write_bytes(whole)

    attach(ID, CHUNK_BYTES, options=AttachOptions(directory=path)).close()
    region_reader.read_chunk(path, ID, 0, 0)
    data = path / data_name(ID, owned.owner.nonce)
    os.truncate(data, 10 * MIB)
    with pytest.raises(region_reader.NotARegion, match="another file"):
        region_reader.read_chunk(path, ID, 0, 0)

"""vLLM's own region class beside the janitor and beside a stock region; no engine is needed for either."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcellar.demo import measure
from kvcellar.demo.sandbox import SHM, Sandbox
from kvcellar.demo.sidecar import Sidecar
from kvcellar.region import leases
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.janitor import Janitor
from tests.vllm.cellar import ENGINE_ID, SIDECAR_PYTHON

MIB = 2**20
SLOT = 16 * 1024
ROW = 2 * SLOT
CHUNKS = 32 * MIB // ROW
NAME = f"vllm_offload_{ENGINE_ID}.mmap"
WAIT_S = 0.02


class RegionClass:
    """The processes of `region_class`."""

    def __init__(self, sandbox: Sandbox, log: Path) -> None:
        ours, theirs = os.pipe()
        program = Path(__file__).with_name("region_class.py")
        with log.open("wb") as output:
            self._entry = sandbox.popen(
                [sys.executable, "-P", program, str(theirs)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
            )
        os.close(theirs)
        self._answers = os.fdopen(ours)

    def tell(self, **request: object) -> None:
        assert self._entry.stdin is not None
        self._entry.stdin.write((json.dumps(request) + "\n").encode())
        self._entry.stdin.flush()

    def hear(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._answers.readline())
        return answer

    def ask(self, **request: object) -> dict[str, Any]:
        self.tell(**request)
        return self.hear()

    def open(self, engine_id: str, rank: int | None = 0, **more: object) -> dict[str, Any]:
        """A process that makes or joins the region of an engine of two ranks."""
        geometry = {"chunks": CHUNKS, "row": ROW, "slot": SLOT, **more}
        return self.ask(open=engine_id, rank=rank, **geometry)

    def kill(self, pid: int) -> None:
        assert self.ask(kill=pid) == {"killed": pid}

    def close(self) -> None:
        assert self._entry.stdin is not None
        self._entry.stdin.close()
        self._answers.close()
        self._entry.kill()
        self._entry.wait()


@contextmanager
def _region_class(sandbox: Sandbox, folder: Path) -> Iterator[RegionClass]:
    opened = RegionClass(sandbox, folder / "class.log")
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(autouse=True)
def _no_sigio() -> Iterator[None]:
    before = signal.getsignal(signal.SIGIO)
    leases.ignore_breaks()
    yield
    signal.signal(signal.SIGIO, before)


# --- stock mode ---------------------------------------------------------------------------------------


def test_unmodified_vllm_joins_the_file_of_the_sidecar_and_thirty_kills_leak_nothing(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    stock = {"KVCELLAR_MODE": "stock"}
    log = tmp_path / "sidecar.log"
    with (
        Sidecar.start(sandbox, log, ENGINE_ID, "32Mi", SIDECAR_PYTHON, **stock) as sidecar,
        _region_class(sandbox, tmp_path) as vllm,
    ):
        sidecar.wait_for("ready", lambda region: region["state"] == "Ready")
        shm = sandbox.path(SHM)
        path = shm / NAME
        inode, used = path.stat().st_ino, measure.used_bytes(sandbox)
        assert path.stat().st_blocks * 512 == 32 * MIB
        for n in range(10):
            low, high = 2 * n + 1, 2 * n + 2
            # Two workers, and the scheduler's side of a region with tiers: no rank, all rows.
            first = vllm.open(ENGINE_ID, 0, write=low)
            second = vllm.open(ENGINE_ID, 1, write=high)
            scheduler = vllm.open(ENGINE_ID, None)
            for opened in (first, second, scheduler):
                assert (opened["creator"], opened["inode"]) == (False, inode)
            assert scheduler["columns"] == [low] * CHUNKS
            assert scheduler["others"] == [high] * CHUNKS
            row = path.read_bytes()[5 * ROW : 6 * ROW]
            assert row == bytes([low]) * SLOT + bytes([high]) * SLOT
            assert sorted(os.listdir(shm)) == ["kvcellar", NAME]
            assert (path.stat().st_blocks * 512, measure.used_bytes(sandbox)) == (32 * MIB, used)
            if n == 0:
                region = sidecar.wait_for("held", lambda region: bool(region["participants"]))
                assert region["state"] == "Ready"
            for opened in (first, second, scheduler):
                vllm.kill(opened["pid"])
        assert (path.stat().st_ino, measure.used_bytes(sandbox)) == (inode, used)
        region = sidecar.wait_for("unheld", lambda region: not region["participants"])
        assert (region["state"], region["reason"], region["orphans"]) == ("Ready", "", [])


@contextmanager
def _stock(sandbox: Sandbox, folder: Path, capacity: str) -> Iterator[RegionClass]:
    log, settings = folder / "sidecar.log", {"KVCELLAR_MODE": "stock"}
    with (
        Sidecar.start(sandbox, log, ENGINE_ID, capacity, SIDECAR_PYTHON, **settings) as sidecar,
        _region_class(sandbox, folder) as vllm,
    ):
        sidecar.wait_for("ready", lambda region: region["state"] == "Ready")
        yield vllm


def test_a_region_of_vllm_may_be_smaller_than_the_file(sandbox: Sandbox, tmp_path: Path) -> None:
    with _stock(sandbox, tmp_path, "8Mi") as vllm:
        assert vllm.open(ENGINE_ID, chunks=3)["creator"] is False


@pytest.mark.soak
def test_a_region_of_vllm_that_is_larger_waits_in_vain_for_thirty_seconds(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    with _stock(sandbox, tmp_path, "8Mi") as vllm:
        assert "Timed out" in vllm.open(ENGINE_ID)["error"]


# --- with tiers -----------------------------------------------------------------------------------------


@contextmanager
def _tiering(
    sandbox: Sandbox, folder: Path, engine_id: str
) -> Iterator[Callable[[], dict[str, Any]]]:
    """The program `tiering_spec`; each call lets it go on, and gives what it tells next."""
    ours, theirs = os.pipe()
    disk = folder / engine_id
    disk.mkdir()
    program = Path(__file__).with_name("tiering_spec.py")
    with (folder / f"{engine_id}.log").open("wb") as output:
        entry = sandbox.popen(
            [sys.executable, "-P", program, engine_id, disk, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
        )
    os.close(theirs)
    assert entry.stdin is not None
    with os.fdopen(ours) as answers, entry.stdin as lines:

        def go_on() -> dict[str, Any]:
            lines.write(b"\n")
            lines.flush()
            told: dict[str, Any] = json.loads(answers.readline())
            return told

        try:
            yield go_on
        finally:
            entry.kill()
            entry.wait()


def _tiered_row(chunk: int) -> bytes:
    """What `tiering_spec` stores in its n-th chunk: of each rank, of each layer, two blocks."""
    places = itertools.product(range(2), range(2), (2 * chunk, 2 * chunk + 1))
    return b"".join(
        bytes([1 + (2 * rank + layer) * 12 + block]) * 4096 for rank, layer, block in places
    )


def test_the_tiering_spec_of_vllm_works_in_the_file_of_the_sidecar(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    expected = [_tiered_row(chunk) for chunk in range(6)]
    with _stock(sandbox, tmp_path, "32Mi"):
        path = sandbox.path(SHM) / NAME
        inode, used = path.stat().st_ino, measure.used_bytes(sandbox)
        with _tiering(sandbox, tmp_path, ENGINE_ID) as go_on:
            stored = go_on()
            # Two workers, and the manager's own view of all rows.
            assert (stored["creators"], stored["inodes"]) == ([False] * 3, [inode] * 3)
            with path.open("rb") as file:
                rows = [os.pread(file.fileno(), ROW, n * ROW) for n in stored["chunk_ids"]]
            assert rows == expected
            # The manager reads and writes whole rows: to the disk, and back from it.
            on_disk = [file.read_bytes() for file in (tmp_path / ENGINE_ID).rglob("*.bin")]
            assert sorted(on_disk) == sorted(expected)
            assert go_on()["is_same"]
            assert sorted(os.listdir(sandbox.path(SHM))) == ["kvcellar", NAME]
            assert (path.stat().st_blocks * 512, measure.used_bytes(sandbox)) == (32 * MIB, used)
        assert (path.stat().st_ino, measure.used_bytes(sandbox)) == (inode, used)
        # A file that nobody has made for it, it makes and pays for.
        with _tiering(sandbox, tmp_path, "another") as go_on:
            assert sum(go_on()["creators"]) == 1
            assert measure.used_bytes(sandbox) == used + 32 * MIB


# --- the janitor --------------------------------------------------------------------------------------


class Rounds:
    """Random files of vLLM's class, and the janitor among them."""

    def __init__(self, sandbox: Sandbox, vllm: RegionClass, seed: int) -> None:
        self._shm = sandbox.path(SHM)
        self._vllm = vllm
        self._rng = random.Random(seed)
        self._directory = RegionDirectory.create(measure.directory(sandbox))
        self._janitor = Janitor(self._shm, wait_s=WAIT_S, young_s=0.0)
        self.reclaimed = self.came_back = self.missed = 0

    def close(self) -> None:
        self._janitor.close()
        self._directory.close()

    def _open(self, kind: str, engine_id: str) -> dict[str, Any]:
        more: dict[str, dict[str, object]] = {
            "orphan": {},
            "live": {"write": 7},
            "nameless": {"unlink": True},
            "empty": {"bare": 0},
            "sized": {"bare": 4 * MIB},
        }
        opened = self._vllm.open(engine_id, 0, chunks=64, **more[kind])
        assert opened["creator"], opened
        return opened

    def run(self, number: int) -> None:
        kinds = self._rng.choices(["orphan", "live", "nameless", "empty", "sized"], k=4)
        files = {
            f"{number}-{n}-{kind}": self._open(kind, f"{number}-{n}-{kind}")
            for n, kind in enumerate(kinds)
        }
        orphans = [engine_id for engine_id in files if engine_id.endswith("orphan")]
        for engine_id in orphans:
            self._vllm.kill(files[engine_id]["pid"])
        # The engine of one orphan starts again while the janitor is at it.
        again = self._rng.choice(orphans) if orphans and self._rng.random() < 0.7 else ""
        if again:
            self._vllm.tell(open=again, chunks=64, rank=0, row=ROW, slot=SLOT, write=9)
            time.sleep(self._rng.uniform(0, 0.06))
        gone = self._pass()
        if again:
            files[again] = self._vllm.hear()
            self._check_restarted(again, files[again], gone)
            orphans.remove(again)
        assert {name for name in gone if again not in name or not again} == {
            f"vllm_offload_{engine_id}.mmap" for engine_id in orphans
        }
        for engine_id, opened in files.items():
            if engine_id in orphans or "error" in opened:
                continue
            if not engine_id.endswith("nameless"):
                assert self._path(engine_id).stat().st_ino == opened["inode"]
            self._vllm.kill(opened["pid"])
        self._pass()
        left = [name for name in os.listdir(self._shm) if name != "kvcellar"]
        assert all(name.endswith("empty.mmap") for name in left), left
        for name in left:
            (self._shm / name).unlink()
        assert os.listdir(self._directory.path) == []

    def _check_restarted(self, engine_id: str, opened: dict[str, Any], gone: list[str]) -> None:
        if "error" in opened:
            # vLLM found the name, and not the file a moment later: it starts again.
            assert "FileNotFoundError" in opened["error"]
            self.missed += 1
            return
        assert self._path(engine_id).stat().st_ino == opened["inode"]
        self.came_back += f"vllm_offload_{engine_id}.mmap" not in gone

    def _path(self, engine_id: str) -> Path:
        return self._shm / f"vllm_offload_{engine_id}.mmap"

    def _pass(self) -> list[str]:
        self._janitor.set_aside(self._directory)
        time.sleep(WAIT_S * 1.1)
        gone = [file.name for file in self._janitor.finish(self._directory)]
        self.reclaimed += len(gone)
        return gone


def _rounds(sandbox: Sandbox, folder: Path, count: int, seed: int) -> None:
    with _region_class(sandbox, folder) as vllm:
        used = measure.used_bytes(sandbox)
        rounds = Rounds(sandbox, vllm, seed)
        try:
            for number in range(count):
                rounds.run(number)
        finally:
            rounds.close()
        assert rounds.reclaimed > count
        assert measure.used_bytes(sandbox) == used
        sys.stdout.write(
            f"{count} rounds: {rounds.reclaimed} reclaimed, {rounds.came_back} joined by their engine, "
            f"{rounds.missed} missed by it\n"
        )


def test_only_what_no_process_has_goes_in_fifty_random_rounds(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    _rounds(sandbox, tmp_path, 50, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_only_what_no_process_has_goes_in_a_thousand_random_rounds(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    _rounds(sandbox, tmp_path, 1000, seed=2)

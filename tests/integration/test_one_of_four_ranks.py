"""One of four ranks dies while all attach, by an error or by SIGKILL: the others know, and the next start works."""

import errno
import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcellar.contract import EngineId
from kvcellar.errors import KVCellarError, NotReady
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import Geometry, Layout
from kvcellar.region.joining import JoinRequest
from kvcellar.region.mapping import Mapping
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.participants import GeometryOf, Participant
from kvcellar.region.states import RegionRequest
from tests.support.ranks import CHUNK_BYTES, Ranks

attaching = importlib.import_module("kvcellar.worker.attach")
"""The module; in the package its name is that of the function."""

CAPACITY = 16 * 2**20
WORLD = 4
VICTIM = 2
KNOWS_S = 5.0
"""Within it every other rank has its own error; it takes milliseconds."""


@pytest.fixture
def region(volume: Path) -> Iterator[OwnedRegion]:
    directory = RegionDirectory.create(volume / "kvcellar")
    owned = OwnedRegion.acquire(directory, RegionRequest(EngineId("engine"), CAPACITY), list)
    owned.reserve(lambda: False)
    owned.settle(lambda: False)
    yield owned
    owned.close()
    directory.close()


def fail() -> None:
    raise OSError(errno.EIO, "the rank was asked to fail")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_it_opens(patch: pytest.MonkeyPatch, end: Callable[[], None]) -> None:
    real: Callable[..., Participant] = attaching.join_session

    def join(
        directory: RegionDirectory, request: JoinRequest, geometry_of: GeometryOf
    ) -> Participant:
        if request.rank == VICTIM:
            end()
        return real(directory, request, geometry_of)

    patch.setattr(attaching, "join_session", join)


def after_it_opened(patch: pytest.MonkeyPatch, end: Callable[[], None]) -> None:
    real: Callable[..., Participant] = attaching.join_session

    def join(
        directory: RegionDirectory, request: JoinRequest, geometry_of: GeometryOf
    ) -> Participant:
        joined = real(directory, request, geometry_of)
        if request.rank == VICTIM:
            try:
                end()
            except OSError:
                joined.close()
                raise
        return joined

    patch.setattr(attaching, "join_session", join)


def after_it_mapped(patch: pytest.MonkeyPatch, end: Callable[[], None]) -> None:
    geometry = Geometry.compute(CAPACITY, CHUNK_BYTES, WORLD, Layout.SHARDED)
    real = Mapping.map_range

    def map_range(fd: int, offset_bytes: int, length_bytes: int) -> Mapping:
        mapped = real(fd, offset_bytes, length_bytes)
        if offset_bytes == geometry.rank_offset_bytes(VICTIM):
            try:
                end()
            except OSError:
                mapped.close()
                raise
        return mapped

    patch.setattr(Mapping, "map_range", map_range)


@pytest.mark.parametrize("end", [fail, die])
@pytest.mark.parametrize("when", [before_it_opens, after_it_opened, after_it_mapped])
def test_the_others_know_at_once_and_the_next_start_works(
    region: OwnedRegion,
    volume: Path,
    monkeypatch: pytest.MonkeyPatch,
    when: Callable[[pytest.MonkeyPatch, Callable[[], None]], None],
    end: Callable[[], None],
) -> None:
    with monkeypatch.context() as patch:
        when(patch, end)
        began = time.monotonic()
        ranks = Ranks.start(volume / "kvcellar", WORLD)
        outcomes = ranks.outcomes()
        assert time.monotonic() - began < KNOWS_S
    try:
        if end is fail:
            assert all(isinstance(outcome, NotReady) for outcome in outcomes), outcomes
            assert "rank 2 cannot attach: " in str(outcomes[VICTIM])
            for rank in (0, 1, 3):
                assert "rank 2 could not attach: rank 2 cannot attach" in str(outcomes[rank])
        else:
            # The all-gather that breaks is the engine's own, and so is its error.
            assert all(isinstance(o, (KVCellarError, EOFError, OSError)) for o in outcomes), (
                outcomes
            )
        # The pipe that ends an outcome is closed before the victim's locks are gone: they are with its end.
        ranks.rank[VICTIM].wait()
        assert not region.held()
        following = Ranks.start(volume / "kvcellar", WORLD).attached()
        following.kill()
    finally:
        ranks.kill()
    assert region.release()
    assert os.listdir(volume / "kvcellar") == []

"""What integration tests share."""

import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import pytest

from kvcellar.region import leases
from kvcellar.region.directory import RegionDirectory
from tests.support.children import Child
from tests.support.gpus import CUDA, build_stub
from tests.support.sidecars import Sidecar, end_all
from tests.support.volumes import mount_tmpfs, unmount

MIB = 2**20


class MakeVolume(Protocol):
    """Mounts another tmpfs, with a size and mount options such as `huge=always`; returns its path."""

    def __call__(self, size_bytes: int, options: str = "") -> Path: ...


@pytest.fixture
def make_volume(tmp_path: Path) -> Iterator[MakeVolume]:
    """Mounts tmpfs volumes of the test's own under `tmp_path`; all are gone after the test."""
    mounted: list[Path] = []

    def make(size_bytes: int, options: str = "") -> Path:
        path = tmp_path / f"volume-{len(mounted)}"
        mount_tmpfs(path, size_bytes, options)
        mounted.append(path)
        return path

    yield make
    for path in reversed(mounted):
        unmount(path)


@pytest.fixture
def volume(make_volume: MakeVolume) -> Path:
    """A tmpfs of 256 MiB of the test's own: what KVCELLAR_ROOT points at."""
    return make_volume(256 * MIB)


@pytest.fixture
def directory(volume: Path) -> Iterator[RegionDirectory]:
    """The directory of regions on that volume, as an owner makes it."""
    opened = RegionDirectory.create(volume / "kvcellar")
    yield opened
    opened.close()


@pytest.fixture
def sigio_ignored() -> Iterator[None]:
    """Leases may be broken, as in every program of kvcellar from its start on."""
    before = signal.getsignal(signal.SIGIO)
    leases.ignore_breaks()
    yield
    signal.signal(signal.SIGIO, before)


MakeSidecar = Callable[..., Sidecar]


@pytest.fixture
def make_sidecar(volume: Path) -> Iterator[MakeSidecar]:
    """Makes sidecars, by default on the test's own volume of 256 MiB."""
    made: list[Sidecar] = []

    def make(*options: str, on: Path | None = None, **variables: str) -> Sidecar:
        made.append(Sidecar(on or volume, *options, **variables))
        return made[-1]

    yield make
    end_all(made)


Fork = Callable[[Callable[[Connection], None]], Child]


@pytest.fixture
def fork() -> Iterator[Fork]:
    """Starts processes that are killed after the test, if they are still there."""
    children: list[Child] = []

    def start(program: Callable[[Connection], None]) -> Child:
        children.append(Child(program))
        return children[-1]

    yield start
    for child in children:
        child.kill()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated CUDA driver, as a shared library."""
    path = build_stub(CUDA, tmp_path_factory.mktemp("stub"))
    if path is None:
        pytest.skip(f"no {CUDA.header} in any environment: make venv")
    return path

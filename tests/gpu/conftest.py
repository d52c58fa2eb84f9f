"""The GPUs that the tests of this folder run on: simulated CUDA and HIP, and a real CUDA GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpus import CUDA, HIP, Gpu, StubGpu, Vendor, build_stub, missing_gpu


@pytest.fixture(scope="session")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path | None]:
    """The simulated drivers by vendor, compiled once."""
    folder = tmp_path_factory.mktemp("stubs")
    return {vendor.name: build_stub(vendor, folder) for vendor in (CUDA, HIP)}


def open_stub(stubs: dict[str, Path | None], vendor: Vendor) -> StubGpu:
    path = stubs[vendor.name]
    if path is None:
        pytest.skip(f"no {vendor.header} in any environment: make venv venv-vllm")
    return StubGpu(vendor, path)


@pytest.fixture(scope="session")
def stub_cuda(stubs: dict[str, Path | None]) -> Iterator[StubGpu]:
    gpu = open_stub(stubs, CUDA)
    yield gpu
    gpu.close()


@pytest.fixture(scope="session")
def stub_hip(stubs: dict[str, Path | None]) -> Iterator[StubGpu]:
    gpu = open_stub(stubs, HIP)
    yield gpu
    gpu.close()


@pytest.fixture(scope="session")
def real_cuda() -> Iterator[Gpu]:
    if reason := missing_gpu():
        pytest.skip(reason)
    gpu = Gpu(CUDA, "libcuda.so.1", is_real=True)
    yield gpu
    gpu.close()


@pytest.fixture(params=["stub_cuda", "stub_hip", pytest.param("real_cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """Each driver in turn; a simulated one is fresh for each test."""
    found: Gpu = request.getfixturevalue(request.param)
    if isinstance(found, StubGpu):
        found.reset(1)
    return found


@pytest.fixture(params=["stub_cuda", "stub_hip"])
def stub(request: pytest.FixtureRequest) -> StubGpu:
    """Each simulated driver in turn, for what only it can be made to do."""
    found: StubGpu = request.getfixturevalue(request.param)
    found.reset(1)
    return found

"""Making a region and attaching to one: vLLM's `SharedOffloadRegion` against kvcellar's region and `attach`.

Both ways end alike: a file in /dev/shm with all its pages, mapped into this process with its page tables
filled, as pinning wants it. Neither side pins, for want of a GPU. vLLM fills the page tables a chunk at a time with
MADV_POPULATE_WRITE, kvcellar by what `Region.pin` does before it registers.
"""

import mmap
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

import numpy as np
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from bench.data_plane.measuring import Bench, Comparison, Unit, nothing
from kvcellar.contract import DIRECTORY_NAME, HugePages, parse_engine_id
from kvcellar.demo.sandbox import SHM
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.memory import read_limits
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.worker.attach import AttachOptions, attach
from kvcellar.worker.attached import Region
from kvcellar.worker.cpu_device import CpuDevice

CHUNK_BYTES = 2 << 20
"""Large, so that vLLM has few calls to make: one for each chunk."""
_MORE_BYTES = 256 << 20


class PinningCpu(CpuDevice):
    """A device that wants host memory pinned, and has nothing to pin it with."""

    pins_host: ClassVar[bool] = True


def compare(bench: Bench) -> None:
    """Making and attaching, with small pages as vLLM has them, and with what kvcellar makes by default."""
    size_bytes = bench.scale.region_bytes
    bench.head(f"a region of {size_bytes / 2**30:g} GiB")
    for huge_pages, words in (
        (HugePages.NEVER, "4 KiB pages"),
        (HugePages.AUTO, "kvcellar with huge pages"),
    ):
        bench.compare(
            Comparison(
                f"make it and attach, {words}",
                Unit.MS,
                nothing,
                partial(_make_theirs_s, size_bytes),
                partial(_make_ours_s, size_bytes, huge_pages),
            )
        )
        with their_region(size_bytes) as name, our_region(size_bytes, huge_pages) as engine_id:
            bench.compare(
                Comparison(
                    f"attach to it, {words}",
                    Unit.MS,
                    nothing,
                    partial(_attach_theirs_s, name, size_bytes),
                    partial(_attach_ours_s, engine_id),
                )
            )


def _warm(size_bytes: int) -> None:
    """Take and give back as much memory and some more.

    A virtual machine may have lent free memory to its host, and to get it back takes longer than all that is
    measured here. It is lent again after some seconds only.
    """
    with mmap.mmap(-1, size_bytes + _MORE_BYTES) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 1


def shared_region(
    name: str, size_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> SharedOffloadRegion:
    """The region of vLLM, made or joined."""
    return SharedOffloadRegion(name, size_bytes // chunk_bytes, 0, chunk_bytes, chunk_bytes)


@contextmanager
def their_region(size_bytes: int) -> Iterator[str]:
    """A region of vLLM's that exists, by name."""
    name = secrets.token_hex(4)
    region = shared_region(name, size_bytes)
    try:
        yield name
    finally:
        region.cleanup()


@contextmanager
def our_region(size_bytes: int, huge_pages: HugePages) -> Iterator[str]:
    """A region of a sidecar's that is ready, by engine id."""
    engine_id = secrets.token_hex(4)
    region = _own(engine_id, size_bytes, huge_pages)
    try:
        yield engine_id
    finally:
        region.release()


def _own(engine_id: str, size_bytes: int, huge_pages: HugePages) -> OwnedRegion:
    """What a sidecar does at its start."""
    directory = RegionDirectory.create(SHM / DIRECTORY_NAME)
    request = RegionRequest(parse_engine_id(engine_id), size_bytes, huge_pages=huge_pages)
    region = OwnedRegion.acquire(directory, request, lambda: read_limits(directory.fd))
    region.reserve(_never)
    region.settle(_never)
    return region


def _never() -> bool:
    return False


def attach_to(engine_id: str, chunk_bytes: int = CHUNK_BYTES) -> Region:
    """What a rank does at its start, but for the driver's own part of pinning."""
    options = AttachOptions(directory=SHM / DIRECTORY_NAME)
    region = attach(engine_id, chunk_bytes, options=options)
    region.pin(PinningCpu())
    return region


def _make_theirs_s(size_bytes: int, _: None) -> float:
    _warm(size_bytes)
    began = time.perf_counter()
    region = shared_region(secrets.token_hex(4), size_bytes)
    took_s = time.perf_counter() - began
    region.cleanup()
    return took_s


def _make_ours_s(size_bytes: int, huge_pages: HugePages, _: None) -> float:
    _warm(size_bytes)
    began = time.perf_counter()
    engine_id = secrets.token_hex(4)
    owned = _own(engine_id, size_bytes, huge_pages)
    region = attach_to(engine_id)
    took_s = time.perf_counter() - began
    region.close()
    owned.release()
    return took_s


def _attach_theirs_s(name: str, size_bytes: int, _: None) -> float:
    began = time.perf_counter()
    region = shared_region(name, size_bytes)
    took_s = time.perf_counter() - began
    region.cleanup()
    return took_s


def _attach_ours_s(engine_id: str, _: None) -> float:
    began = time.perf_counter()
    region = attach_to(engine_id)
    took_s = time.perf_counter() - began
    region.close()
    return took_s

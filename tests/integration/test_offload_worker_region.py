"""The offloading worker over a real region: attached, marked, counted, detached."""

import errno
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcellar.contract import Direction, Owner
from kvcellar.region import metafile
from kvcellar.region.metadata import SlotRow
from kvcellar.worker import CPUOffloadingWorker, Region, attach
from kvcellar.worker.attach import AttachOptions, attach_scheduler
from kvcellar.worker.cpu_device import CpuDevice
from tests.fakes.faulty_device import Fault, FaultyDevice
from tests.fakes.kv_caches import CacheRef, Caches, CacheTensor, HostTensor

pytestmark = pytest.mark.integration

MIB = 2**20
PAGE = 1536
BLOCKS_PER_CHUNK = 3


def caches_of(blocks: NDArray[np.int8]) -> Caches:
    return Caches([CacheTensor(HostTensor(blocks), PAGE)], [[CacheRef(0, PAGE)]])


def options_for(volume: Path) -> AttachOptions:
    return AttachOptions(
        directory=volume / "kvcellar", owner=Owner.ENGINE, capacity_bytes=8 * MIB, timeout_s=20
    )


def attached(options: AttachOptions) -> Region:
    return attach("engine-1", PAGE * BLOCKS_PER_CHUNK, options=options)


def test_blocks_survive_in_the_region_and_a_failed_store_reaches_the_scheduler(
    volume: Path,
) -> None:
    options = options_for(volume)
    region = attached(options)
    scheduler = attach_scheduler("engine-1", world_size=1, options=options)
    blocks = np.random.default_rng(5).integers(-128, 128, (12, PAGE), dtype=np.int8)
    before = blocks.copy()

    def second_store_fails(direction: Direction, number: int) -> Fault:
        return Fault.FAIL if (direction, number) == (Direction.STORE, 1) else Fault.NONE

    worker = CPUOffloadingWorker(
        caches_of(blocks),
        BLOCKS_PER_CHUNK,
        region.num_chunks,
        region,
        device=FaultyDevice(CpuDevice(), second_store_fails),
    )
    last = region.num_chunks - 1
    worker.submit_store(1, [4, 1, 2, 5, 6, 7], [6], [0], [0, last])
    worker.submit_store(2, [8, 9, 10], [3], [0], [7])
    worker.wait({1, 2})
    assert [(r.job_id, r.ok) for r in worker.get_finished()] == [(1, True), (2, True)]
    assert scheduler.take_failed([0, 7, last]) == {7}

    worker.submit_load(3, [0, 3, 11], [3], [0], [last])
    worker.wait({3})
    assert [r.ok for r in worker.get_finished()] == [True]
    before[[0, 3, 11]] = before[[5, 6, 7]]
    assert (blocks == before).all()
    worker.shutdown()
    assert region.base_address == 0
    scheduler.close()


def test_counters_that_cannot_be_published_stop_no_transfer(
    volume: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(fd: int, slot: int, row: SlotRow) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    region = attached(options_for(volume))
    blocks = np.zeros((6, PAGE), dtype=np.int8)
    worker = CPUOffloadingWorker(caches_of(blocks), BLOCKS_PER_CHUNK, region.num_chunks, region)
    monkeypatch.setattr(metafile, "write_slot", full)
    for job_id in range(3):
        worker.submit_store(job_id, np.arange(6), [6], [0], np.arange(2))
        worker.wait({job_id})
        assert [r.ok for r in worker.get_finished()] == [True]
    assert [record.message for record in caplog.records if "not published" in record.message] == [
        "counters of region engine-1 are not published: [Errno 28] No space left on device"
    ]
    worker.shutdown()


def test_shutdown_with_transfers_in_flight_detaches_after_the_last_of_them(volume: Path) -> None:
    options = options_for(volume)
    region = attached(options)
    blocks = np.zeros((600, PAGE), dtype=np.int8)
    worker = CPUOffloadingWorker(caches_of(blocks), BLOCKS_PER_CHUNK, region.num_chunks, region)
    ids = np.arange(600)
    for job_id in range(20):  # unmapped memory under a copy would end this process
        worker.submit_store(job_id, ids, [600], [0], np.arange(200))
    worker.shutdown()
    assert region.base_address == 0

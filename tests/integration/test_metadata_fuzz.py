"""A real metadata page with any byte flipped: the second copy serves and the first is repaired, or exit status 5.

And one that its owner changes while it is read.
"""

import itertools
import os
import random
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvcellar.contract import EngineId, RegionState
from kvcellar.errors import MetadataDamaged
from kvcellar.region import frame, metafile
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.names import meta_name
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from tests.integration.conftest import Fork
from tests.support.ranks import Ranks

ID = EngineId("engine")
CAPACITY = 2 * 2**20
TRIES = 120


def own(directory: RegionDirectory) -> OwnedRegion:
    region = OwnedRegion.acquire(directory, RegionRequest(ID, CAPACITY), list)
    region.reserve(lambda: False)
    region.settle(lambda: False)
    return region


def flip(fd: int, at: int, dice: random.Random) -> None:
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ dice.randrange(1, 256)]), at)


def test_one_bad_byte_of_the_owner_s_section_is_served_over_and_repaired(volume: Path) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    region = own(directory)
    fd = directory.open_file(meta_name(ID))
    for seed in range(TRIES):
        dice = random.Random(seed)
        section = frame.OWNER_AT
        at = dice.randrange(section.copy_offset(0), section.end)
        flip(fd, at, dice)
        assert region.snapshot().damage != "", f"byte {at}, seed {seed}"
        if seed % 20 == 0:
            Ranks.start(volume / "kvcellar", 1).attached().kill()
        if seed % 3 == 0:  # the next owner reads over it as well
            region.close()
            region = own(directory)
            assert region.owner.state is RegionState.READY
        region.repair()
        assert region.snapshot().damage == "", f"byte {at}, seed {seed}"
    assert region.release()
    os.close(fd)
    directory.close()


def test_a_bad_byte_in_both_copies_is_exit_status_5_and_nothing_is_removed(volume: Path) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    own(directory).close()
    fd = directory.open_file(meta_name(ID))
    whole, names = os.pread(fd, frame.META_BYTES, 0), directory.names()
    for seed in range(TRIES):
        dice = random.Random(seed)
        for which in (0, 1):
            begin = frame.OWNER_AT.copy_offset(which)
            flip(fd, dice.randrange(begin, begin + frame.OWNER_AT.copy_bytes), dice)
        with pytest.raises(MetadataDamaged) as told:
            own(directory)
        assert told.value.exit_status == 5
        assert directory.names() == names
        os.pwrite(fd, whole, 0)
    region = own(directory)
    assert region.is_adopted
    assert region.release()
    os.close(fd)
    directory.close()


def test_a_page_that_is_changed_under_a_reader_gives_each_time_what_was_written(
    volume: Path, fork: Fork
) -> None:
    directory = RegionDirectory.create(volume / "kvcellar")
    region = own(directory)
    fd = directory.open_file(meta_name(ID))

    def write_without_end(connection: Connection) -> None:
        connection.send("writing")
        for number in itertools.count():
            metafile.write_owner(
                fd, replace(region.owner, settled_bytes=number, huge_page_bytes=number)
            )
            time.sleep(0.00005)

    writer = fork(write_without_end)
    assert writer.hear() == "writing"
    seen: list[int] = []
    deadline = time.monotonic() + 20.0
    while len(set(seen)) <= 100 and time.monotonic() < deadline:
        for _ in range(1000):
            owner = metafile.read_owner(fd)
            # The region's own numbers are those of before the first write.
            if owner != region.owner:
                assert owner.settled_bytes == owner.huge_page_bytes
                seen.append(owner.settled_bytes)
    assert seen == sorted(seen)
    assert len(set(seen)) > 100
    writer.kill()
    assert metafile.read_owner(fd).settled_bytes >= seen[-1]
    os.close(fd)
    region.close()
    directory.close()

"""What the other regions of a directory have been promised but have not taken yet.

A plan that looked only at free bytes would let two owners that start together both pass; the second
one counts what the first still has to reserve.
"""

import os

from kvcellar.contract import RegionState
from kvcellar.errors import KVCellarError
from kvcellar.region import file, metafile
from kvcellar.region.directory import RegionDirectory, data_name, engine_of_meta


def promised_bytes(directory: RegionDirectory) -> int:
    """Sum of capacity minus reserved bytes over all regions in state Reserving. Call it under the lock.

    A region that cannot be read promises nothing: its owner will not go on reserving it.
    """
    return sum(_outstanding(directory, name) for name in directory.names())


def _outstanding(directory: RegionDirectory, name: str) -> int:
    engine_id = engine_of_meta(name)
    if engine_id is None:
        return 0
    try:
        meta_fd = directory.open_file(name, os.O_RDONLY)
        try:
            owner = metafile.read_owner(meta_fd)
        finally:
            os.close(meta_fd)
        if owner.state is not RegionState.RESERVING:
            return 0
        data_fd = directory.open_file(data_name(engine_id, owner.nonce), os.O_RDONLY)
        try:
            return max(owner.capacity_bytes - file.reserved_bytes(data_fd), 0)
        finally:
            os.close(data_fd)
    except (KVCellarError, FileNotFoundError):
        return 0

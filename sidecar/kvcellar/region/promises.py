"""What a region takes in all, and what regions have been promised but have not taken yet.

A plan that looked only at free bytes would let two owners that start together both pass; the second
one counts what the first still has to reserve. The index file is promised to every region: rank 0 of
its engine sizes it, long after the plan.
"""

import os
from collections.abc import Callable

from kvcellar.contract import Mode, RegionState
from kvcellar.errors import KVCellarError
from kvcellar.region import file, metafile
from kvcellar.region.cgroups import Limit
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.frame import META_BYTES
from kvcellar.region.index_file import index_bound_bytes
from kvcellar.region.memory import Plan, plan
from kvcellar.region.names import data_name, engine_of_meta, index_name

LimitReader = Callable[[], list[Limit]]
"""Reads the limits now; called again at each step, since neighbours grow meanwhile."""
_PLAN_TRIES = 5


def needed_bytes(capacity_bytes: int, mode: Mode = Mode.PLUGIN) -> int:
    """What a new region of that capacity takes of the volume: data, metadata page and index file."""
    return capacity_bytes + META_BYTES + index_bytes(capacity_bytes, mode)


def index_bytes(capacity_bytes: int, mode: Mode) -> int:
    """What its index file takes at most; a stock region has none."""
    return 0 if mode is Mode.STOCK else index_bound_bytes(capacity_bytes)


def plan_beside_others(
    directory: RegionDirectory, asked_bytes: int, read_limits: LimitReader
) -> Plan:
    """Plan `asked_bytes` beside what all regions have yet to take. Under the lock.

    Others reserve meanwhile, so promises read after the limits would miss what moved in between: the
    limits are read between two equal looks at the promises, or else behind the larger one.
    """
    promised = promised_bytes(directory)
    limits = read_limits()
    for _ in range(_PLAN_TRIES):
        again = promised_bytes(directory)
        if again == promised:
            break
        promised, limits = again, read_limits()
    return plan(asked_bytes, limits, promised)


def promised_bytes(directory: RegionDirectory) -> int:
    """What all regions have yet to take: the data of those still Reserving, and index files. Under the lock.

    A region that cannot be read promises nothing: its owner will not go on reserving it.
    """
    return sum(outstanding_bytes(directory, name) for name in directory.names())


def outstanding_bytes(directory: RegionDirectory, name: str) -> int:
    """What the region of a metadata page has yet to take; 0 for any other name. Under the lock."""
    engine_id = engine_of_meta(name)
    if engine_id is None:
        return 0
    try:
        meta_fd = directory.open_file(name, os.O_RDONLY)
        try:
            owner = metafile.read_owner(meta_fd)
        finally:
            os.close(meta_fd)
        missing = 0
        if owner.mode is Mode.PLUGIN:
            index = index_name(engine_id, owner.nonce)
            missing = _missing(directory, index, index_bound_bytes(owner.capacity_bytes))
        if owner.state is RegionState.RESERVING:
            missing += _missing(directory, data_name(engine_id, owner.nonce), owner.capacity_bytes)
    except (KVCellarError, FileNotFoundError):
        return 0
    return missing


def _missing(directory: RegionDirectory, name: str, whole_bytes: int) -> int:
    fd = directory.open_file(name, os.O_RDONLY)
    try:
        return max(whole_bytes - file.reserved_bytes(fd), 0)
    finally:
        os.close(fd)

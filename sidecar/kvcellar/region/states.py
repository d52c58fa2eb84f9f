"""The states of a region, and what an owner asks for.

States and who makes each move (`LEGAL_MOVES`; all are made by the owner):

========== ================================================ ============================================
state      meaning                                          next
========== ================================================ ============================================
Planned    nothing on disk yet                              Reserving (`acquire` accepted the plan)
Reserving  names are published, pages are being promised    Reserved (`reserve`), Failed (`fail`)
Reserved   every page is promised: engines may attach       Ready (`settle`), Failed, Released
Ready      every page is zeroed and resident                Failed (file lost pages or its name), Released
Failed     no engine may attach; the reason says why        Reserving (`retry`, or the next owner), Released
Released   the names are gone                               none
========== ================================================ ============================================

InUse and Idle are no states: whether anybody is attached is told by the slots alone.
"""

from dataclasses import dataclass

from kvcellar.contract import ENV_CAPACITY, EngineId, HugePages, Mode, Owner, RegionState
from kvcellar.region.geometry import BLOCK_SIZE_ALIGNMENT

LEGAL_MOVES: dict[RegionState, frozenset[RegionState]] = {
    RegionState.PLANNED: frozenset({RegionState.RESERVING, RegionState.FAILED}),
    RegionState.RESERVING: frozenset(
        {RegionState.RESERVED, RegionState.FAILED, RegionState.RELEASED}
    ),
    RegionState.RESERVED: frozenset({RegionState.READY, RegionState.FAILED, RegionState.RELEASED}),
    RegionState.READY: frozenset({RegionState.FAILED, RegionState.RELEASED}),
    RegionState.FAILED: frozenset(
        {RegionState.RESERVING, RegionState.FAILED, RegionState.RELEASED}
    ),
    RegionState.RELEASED: frozenset(),
}

ATTACHABLE = frozenset({RegionState.RESERVED, RegionState.READY})
"""States in which every page is promised, so that an engine may attach."""


@dataclass(frozen=True, slots=True)
class RegionRequest:
    """What an owner wants: one region of `capacity_bytes` (floored to 2 MiB) for one engine.

    Attributes:
        capacity_setting: the setting that the capacity came from, for sentences that ask to change it.
    """

    engine_id: EngineId
    capacity_bytes: int
    mode: Mode = Mode.PLUGIN
    huge_pages: HugePages = HugePages.AUTO
    settle_threads: int = 1
    page_bytes: int = BLOCK_SIZE_ALIGNMENT
    kind: Owner = Owner.SIDECAR
    capacity_setting: str = ENV_CAPACITY

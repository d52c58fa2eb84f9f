"""Whether a region fits, as `/v1/plan` shows it: what it was granted, or refused.

The decision itself is made by the region package under the directory's lock; here its numbers are read
for people.
"""

from dataclasses import replace

from kvcellar.contract import PlanBody, RegionState
from kvcellar.errors import DoesNotFit
from kvcellar.region import memory
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.promises import (
    LimitReader,
    index_bytes,
    plan_beside_others,
    promised_bytes,
)


def granted(region: OwnedRegion, directory: RegionDirectory, read_limits: LimitReader) -> PlanBody:
    """The plan of a region that was just acquired: what it still needs, and what there is for it."""
    missing = max(region.capacity_bytes - region.reserved_bytes(), 0)
    index = 0 if region.is_adopted else index_bytes(region.capacity_bytes, region.owner.mode)
    with directory.lock():
        promised = promised_bytes(directory)
    # Its own promise is what is asked for here.
    own = index + (missing if region.owner.state is RegionState.RESERVING else 0)
    decided = memory.plan(missing + index, read_limits(), max(promised - own, 0))
    return replace(memory.to_body(decided), fits=True)


def plan_again(
    region: OwnedRegion, directory: RegionDirectory, read_limits: LimitReader
) -> PlanBody:
    """Plan a region that has failed once more, and let it go on if it fits now.

    Raises:
        DoesNotFit: it does not; the region stays in state Failed.
    """
    with directory.lock():
        missing = max(region.capacity_bytes - region.reserved_bytes(), 0)
        decided = plan_beside_others(directory, missing, read_limits)
        if not decided.fits:
            raise decided.refusal(region.engine_id)
        region.retry()
    return memory.to_body(decided)


def refused(error: DoesNotFit, read_limits: LimitReader) -> PlanBody:
    """The plan behind a refusal, with the limits as they are now."""
    limits = [
        replace(body, binding=body.name == error.binding_limit)
        for body in memory.to_body(memory.plan(0, read_limits())).limits
    ]
    return PlanBody(False, error.asked_bytes, error.free_bytes, error.binding_limit, limits)

"""A look at a region that its keeper goes on with: sound, or put right, or an error that says what is wrong."""

import logging

from kvcellar.errors import KVCellarError, RegionMismatch
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.snapshot import RegionSnapshot

logger = logging.getLogger(__name__)


def sound_snapshot(region: OwnedRegion) -> RegionSnapshot:
    """The region as it is now; what its owner can put right, the page and the modes, is put right.

    Raises:
        RegionMismatch: its files are damaged.
        KVCellarError: it cannot be looked at.
    """
    seen = region.snapshot()
    if not seen.damage:
        return seen
    try:
        region.repair()
    except KVCellarError as error:  # such as a page that was cut, on a volume that is full
        raise RegionMismatch(seen.damage) from error
    again = region.snapshot()
    if again.damage:
        raise RegionMismatch(again.damage)
    logger.warning("region repaired", extra={"engine_id": region.engine_id, "damage": seen.damage})
    return again

"""A region that another process owns, as far as it can be read."""

from kvcellar.contract import EngineId
from kvcellar.daemon.counters import CounterTotals
from kvcellar.daemon.status import RegionView, found_view
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.survey import survey


def observed(
    directory: RegionDirectory, engine_id: EngineId, totals: CounterTotals
) -> RegionView | None:
    """What its page and its slots say; None if there is no page that can be read.

    Raises:
        KVCellarError, OSError: the directory cannot be looked at.
    """
    for region in survey(directory).regions:
        if region.engine_id == engine_id and region.contents is not None:
            rows = region.contents.rows.items()
            held = tuple((slot, row, slot in region.held) for slot, row in rows)
            return found_view(region, totals.add(held))
    return None

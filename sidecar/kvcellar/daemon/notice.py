"""A notice in the directory: why there is no region, for engines that would wait for one."""

import logging
from dataclasses import replace

from kvcellar.contract import Mode
from kvcellar.errors import KVCellarError
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import HUGE_PAGE_BYTES
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest

logger = logging.getLogger(__name__)


class Notice:
    """A region of the least capacity, without a page reserved, in state Failed. For one thread."""

    def __init__(self, request: RegionRequest) -> None:
        self._request = replace(request, capacity_bytes=HUGE_PAGE_BYTES)
        self._region: OwnedRegion | None = None

    def put_up(self, directory: RegionDirectory, reason: str) -> None:
        """Show why, unless that is up already; where it fails, engines wait as long as they do without."""
        if self._request.mode is Mode.STOCK:
            return  # a stock vLLM reads no page: it makes its own file at once
        try:
            if self._region is not None:
                if not self._region.snapshot().damage:
                    return
                self.take_down()
            region = OwnedRegion.acquire(directory, self._request, list)
            if region.is_adopted:
                region.close()  # somebody has made one meanwhile: it is no notice, and may be held
                return
            self._region = region
            region.fail(reason)
        except (KVCellarError, OSError) as error:
            logger.debug("failure not published", extra={"error": str(error)})

    def take_down(self) -> None:
        """Remove it, if it is up; one that cannot be removed is left to the next owner."""
        region, self._region = self._region, None
        if region is None:
            return
        try:
            if region.release():
                return
        except (KVCellarError, OSError) as error:
            logger.warning(
                "notice not removed", extra={"engine_id": region.engine_id, "error": str(error)}
            )
        region.close()

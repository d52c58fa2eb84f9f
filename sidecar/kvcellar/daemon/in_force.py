"""What holds for one region now: its start settings, or what is desired instead."""

import logging

from kvcellar.contract import Contents, DesiredRegion
from kvcellar.daemon.retention import NOW, Retention, parse_retention

logger = logging.getLogger(__name__)

CONTENTS_NOT_KEPT = "contents are not kept yet: each engine start discards them"
"""Event of the line that says so where `keep` was asked for."""


class InForce:
    """What is desired of one region, from the moment its keeper takes it up.

    `offer` may be called by any thread; the rest is for the keeper's own.
    """

    def __init__(self, start: Retention) -> None:
        self.desired: DesiredRegion | None = None
        """What is applied; None: the start settings are."""
        self._start = start
        self._offered: DesiredRegion | None = None
        self._released_under = start

    def offer(self, desired: DesiredRegion | None) -> bool:
        """Say what is desired now, or that nothing is; whether that is new."""
        is_new = desired != self._offered
        self._offered = desired
        return is_new

    def take(self, fields: dict[str, object]) -> None:
        """Apply what was offered last.

        Args:
            fields: name the region in the log.
        """
        desired = self._offered
        if desired == self.desired:
            return
        self.desired = desired
        if desired is None:
            logger.info("desired state withdrawn", extra=fields)
            return
        wishes = {"contents": desired.contents, "retention": desired.retention}
        logger.info(
            "desired state applied", extra={**fields, "generation": desired.generation, **wishes}
        )
        if desired.contents == Contents.KEEP:
            logger.warning(CONTENTS_NOT_KEPT, extra=fields)

    @property
    def retention(self) -> Retention:
        """The retention in force."""
        text = self.desired.retention if self.desired else None
        return (parse_retention(text) if text else None) or self._start

    @property
    def frees_unused(self) -> bool:
        """Whether the region has to go as soon as nobody holds it, also if no engine has used it yet.

        As a start setting `now` waits for the first engine; else there would never be a region.
        """
        return self.desired is not None and self.desired.retention == NOW

    def was_released(self) -> None:
        """The region was freed under the retention in force."""
        self._released_under = self.retention

    @property
    def why_released(self) -> str:
        """Why there is no region any more, and what to do, for an engine that asks for one."""
        return (
            f"it was freed under the retention {self._released_under.text}: ask for another retention, or restart the "
            "sidecar container, and start the engine again"
        )

    @property
    def wants_it_again(self) -> bool:
        """Whether a region that was released is to be made anew: another retention than that is in force."""
        return self.retention.text != NOW and self.retention != self._released_under

"""How long a region outlives its last holder. Pure, but for the clock that is passed in."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcellar.contract import is_retention, parse_duration_s

NOW = "now"
"""As soon as nobody holds it."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a region outlives its last holder.

    Attributes:
        text: as it was set, and as `/v1/regions` shows it.
        seconds: 0 for `now`; None for `keep`: as long as the pod.
    """

    text: str
    seconds: float | None


def parse_retention(text: str) -> Retention | None:
    """`keep`, `now`, or a duration above zero; None if it is neither."""
    if not is_retention(text):
        return None
    # Neither of the words is a duration.
    return Retention(text, 0.0 if text == NOW else parse_duration_s(text))


class RetentionClock:
    """Tells when the time of one region is over.

    It runs while a region that an engine has used is held by nobody: from the moment the last holder
    was seen to be gone, or from the adoption of a region that nobody holds. It runs under `keep` as well,
    so that another retention counts from the last holder, and not from when it was set.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._unheld_since: float | None = None

    def is_over(self, retention: Retention, *, was_used: bool, is_held: bool) -> bool:
        """Look at the region as it is now; call it again and again."""
        if is_held or not was_used:
            self._unheld_since = None
            return False
        now = self._now()
        self._unheld_since = now if self._unheld_since is None else self._unheld_since
        return retention.seconds is not None and now - self._unheld_since >= retention.seconds

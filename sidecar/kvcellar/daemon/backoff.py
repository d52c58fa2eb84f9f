"""How long a region that failed waits before it is tried again. Pure, but for chance."""

import random

_FIRST_S = 1.0
_LAST_S = 30.0


class BackOff:
    """Pauses of 1, 2, 4 ... 30 s, give or take a quarter.

    By that two sidecars that compete for the same memory do not keep step.
    """

    def __init__(self) -> None:
        self._failures = 0

    def next_s(self) -> float:
        """The pause after one more failure, in seconds."""
        pause_s = min(_FIRST_S * (1 << self._failures), _LAST_S)
        self._failures = min(self._failures + 1, 16)
        return pause_s * random.uniform(0.75, 1.25)  # noqa: S311 - no secret depends on it

    def reset(self) -> None:
        """It went well: the next pause is short again."""
        self._failures = 0

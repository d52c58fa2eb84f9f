"""How the ranks of an engine talk to each other: one all-gather, which the engine brings along."""

from collections.abc import Callable

Exchange = Callable[[object], list[object]]
"""All-gather of one picklable object over the ranks of the engine; the result is in rank order."""


def exchange_alone(mine: object) -> list[object]:
    """The all-gather of an engine with one rank."""
    return [mine]

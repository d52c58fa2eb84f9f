"""Two ways of doing the same, measured in turn in one process.

A *round* draws its input, and gives the same to both sides. Rounds alternate in which side goes first, so that
whatever else the machine does hits both alike. The ratio of a comparison is the median of the ratios of its
rounds: what vLLM took divided by what kvcellar took, so above 1 kvcellar is better. The first round warms up
and does not count. The garbage collector rests meanwhile.
"""

import enum
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Unit(enum.Enum):
    """How figures are written: the word, and what one is in seconds, or in itself."""

    NS = ("ns", 1e-9)
    US = ("µs", 1e-6)
    MS = ("ms", 1e-3)
    BYTES = ("bytes", 1.0)
    COPIES = ("copies", 1.0)

    def write(self, figure: float) -> str:
        """A figure in this unit, with three digits or more."""
        word, one = self.value
        scaled = figure / one
        digits = 0 if scaled >= 100 else 1 if scaled >= 10 else 2
        return f"{scaled:,.{digits}f} {word}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured.

    Attributes:
        rounds: of each comparison, besides the one that does not count.
        chunks: of the managers.
        keys: that one round of an operation on managers takes.
        region_bytes: of a region.
        copy_bytes: that one round of host copies moves.
    """

    rounds: int = 11
    chunks: int = 100_000
    keys: int = 8192
    region_bytes: int = 1 << 30
    copy_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Comparison(Generic[T]):
    """One operation of both sides.

    Attributes:
        name: of the operation, for people.
        unit: of the figures; less is better.
        draw: makes the input of a round; it is not measured.
        theirs: vLLM's side, from input to figure.
        ours: kvcellar's.
        most_rounds: for what is slow, or the same each time.
    """

    name: str
    unit: Unit
    draw: Callable[[], T]
    theirs: Callable[[T], float]
    ours: Callable[[T], float]
    most_rounds: int = sys.maxsize


class Bench:
    """Runs comparisons, and writes a row of a Markdown table for each as soon as it is known."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale

    def head(self, title: str) -> None:
        """Begin a table."""
        sys.stdout.write(f"\n| {title} | vLLM | kvcellar | ratio |\n|---|---|---|---|\n")

    def compare(self, comparison: Comparison[T]) -> None:
        """Measure both sides in turn."""
        n_rounds = min(self.scale.rounds, comparison.most_rounds)
        yours, mine = zip(*(_round(comparison, turn) for turn in range(n_rounds + 1)), strict=True)
        counted = list(zip(yours[1:], mine[1:], strict=True))
        cells = (
            comparison.name,
            comparison.unit.write(statistics.median(yours[1:])),
            comparison.unit.write(statistics.median(mine[1:])),
            f"{statistics.median(their / our for their, our in counted):.2f}",
        )
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()


def _round(comparison: Comparison[T], turn: int) -> tuple[float, float]:
    """The figures of vLLM and of kvcellar; every other turn kvcellar goes first."""
    given = comparison.draw()
    gc.collect()
    gc.disable()
    try:
        if turn % 2:
            ours, theirs = comparison.ours(given), comparison.theirs(given)
        else:
            theirs, ours = comparison.theirs(given), comparison.ours(given)
    finally:
        gc.enable()
    return theirs, ours


def nothing() -> None:
    """The input of an operation that needs none."""


def wall_s(step: Callable[[], object]) -> float:
    """Seconds that a step takes."""
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def thread_s(step: Callable[[], object]) -> float:
    """Seconds of processor time that a step takes of this thread: others on the machine count little."""
    began = time.thread_time()
    step()
    return time.thread_time() - began

"""Totals of the participants' counters that never fall, although engines come and go. Pure.

A participant counts from 0 in its own row of the metadata page, and the next holder of the slot
overwrites the row. Prometheus needs counters that only rise for as long as this process lives.
"""

from dataclasses import astuple

from kvcellar.region.metadata import Counters, SlotRow

_Holder = tuple[str, str, int, float]


class CounterTotals:
    """Adds up the rows of one region over all the engine starts that this process sees.

    A holder is known by (session, role, rank, since): when another one takes the slot, what the last
    one had counted goes into the base. A row that falls back for the same holder (a torn or hostile
    write) is held at its highest values.
    """

    def __init__(self) -> None:
        self._base = Counters()
        self._current: dict[int, tuple[_Holder, Counters]] = {}

    def add(self, rows: tuple[tuple[int, SlotRow, bool], ...]) -> Counters:
        """Take in the rows of one snapshot and return the totals.

        `used_chunks` is a gauge and means nothing in the totals.
        """
        for slot, row, _ in rows:
            holder = (row.session, str(row.role), row.rank, row.since_unix_s)
            last_holder, counted = self._current.get(slot, (holder, Counters()))
            if last_holder != holder:
                self._base = _sum(self._base, counted)
                counted = Counters()
            self._current[slot] = (holder, _highest(counted, row.counters))
        totals = self._base
        for _, counted in self._current.values():
            totals = _sum(totals, counted)
        return totals


def _sum(left: Counters, right: Counters) -> Counters:
    return Counters(*(a + b for a, b in zip(astuple(left), astuple(right), strict=True)))


def _highest(left: Counters, right: Counters) -> Counters:
    return Counters(*(max(a, b) for a, b in zip(astuple(left), astuple(right), strict=True)))

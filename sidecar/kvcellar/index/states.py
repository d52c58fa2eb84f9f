"""The state of each chunk, and what a lookup answers for it.

A chunk is in one state::

    state        key  lookup   meaning
    -----------  ---  -------  ------------------------------------------------------------------
    FREE         no            waits for a key; first in, first out
    FORGOTTEN    yes  MISS     dropped while loads still read it
    STALE_LOAD   yes  MISS     a reset came while loads still read it
    STALE_STORE  yes  MISS     a reset came while a store into it was in flight
    WRITING      yes  PENDING  a store into it is in flight
    IDLE         yes  HIT      no load reads it: it may be evicted
    PINNED       yes  HIT      loads in flight read it: it must stay

The legal moves stand in `chunks`, whose `ChunkIndex` makes them all.
"""

from collections.abc import Sequence
from enum import IntEnum

NUM_STATES = 7
FREE, FORGOTTEN, STALE_LOAD, STALE_STORE, WRITING, IDLE, PINNED = range(NUM_STATES)
"""Plain ints, not an enum, because they are compared once a key on the hot path; the order makes
"may be loaded" one comparison: `state >= IDLE`."""


class Lookup(IntEnum):
    """What the index knows of a key. Integers, so that a caller can index a table of its own answers."""

    MISS = 0
    """Nothing to load."""
    PENDING = 1
    """Not yet: a store is in flight. It becomes a hit, or a miss if the store fails."""
    HIT = 2
    """`prepare_load` may be called."""


ANSWERS = (*[Lookup.MISS] * 4, Lookup.PENDING, Lookup.HIT, Lookup.HIT)
"""What a lookup answers, by state."""


class ChunkStates:
    """One state per chunk.

    Attributes:
        of: the states by chunk, for reading only. It has a spare entry at its end that is always FREE,
            so that `of[keytable.ABSENT]` is a state in which nothing can be loaded or completed; and one
            for each slot of the key table that is a ghost's, behind those of the chunks, also FREE.
    """

    def __init__(self, num_slots: int) -> None:
        """Start with everything FREE."""
        self.of = bytearray(num_slots + 1)

    def having(self, chunks: Sequence[int], state: int) -> list[int]:
        """Those of the chunks that are in a state, in the order given; ABSENT is in none but FREE."""
        of = self.of
        return [chunk for chunk in chunks if of[chunk] == state]

    def all_having(self, state: int) -> list[int]:
        """All chunks in a state other than FREE, ascending; finds them at the speed of `memchr`."""
        found = []
        chunk = self.of.find(state)
        while chunk >= 0:
            found.append(chunk)
            chunk = self.of.find(state, chunk + 1)
        return found

    def change(self, chunks: Sequence[int], state: int) -> None:
        """Put chunks into a state."""
        of = self.of
        for chunk in chunks:
            of[chunk] = state

    def change_all(self, source: int, target: int) -> None:
        """Put every chunk that is in `source`, not FREE, into `target`: one pass over a byte a chunk."""
        self.of = self.of.replace(bytes([source]), bytes([target]))

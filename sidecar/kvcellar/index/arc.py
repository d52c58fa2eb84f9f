"""ARC, the adaptive replacement cache, over chunks that may be pinned.

Source: N. Megiddo, D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003,
figure 4. What is served once is in T1, what is served again in T2; B1 and B2 are the keys lately
evicted from them, here called ghosts. The target is the size that T1 should have: a key that returns
from B1 raises it, one that returns from B2 lowers it.

Where this goes beyond the paper:

    - a request for a key that is missing is a key of a `prepare_store`; a hit is a use;
    - held chunks count in the sizes of T1 and T2 but are no victims: if the tier whose turn it is has
      nothing listed, the other one gives the victim;
    - free chunks are used before any is evicted;
    - B1 and B2 together never exceed the number of chunks, even while fewer are resident.

This module must not know what a transfer is, nor where chunks lie.
"""

from collections.abc import Sequence

from kvcellar.index.idlists import IdLists
from kvcellar.index.keytable import ABSENT, Key, KeyTable
from kvcellar.index.policy import (
    FREE_LIST,
    FREQUENT,
    FREQUENT_GHOSTS,
    RECENT,
    RECENT_GHOSTS,
    SPARE_GHOSTS,
)

_NO_TIER = 0
_LEAVES_NONE = -1
_GHOSTS = (SPARE_GHOSTS, RECENT_GHOSTS, FREQUENT_GHOSTS)
"""The list of ghosts by tier."""


class ArcPolicy:
    """Adaptive replacement of chunks. Tier `RECENT` is T1, tier `FREQUENT` is T2."""

    def __init__(self, lists: IdLists, table: KeyTable, num_chunks: int) -> None:
        """Take the ids and slots `[num_chunks, 2 * num_chunks)` of lists and table for the ghosts."""
        self._lists = lists
        self._table = table
        self._num_chunks = num_chunks
        self._lists.append(SPARE_GHOSTS, range(num_chunks, 2 * num_chunks))
        self._tier = bytearray(2 * num_chunks)  # of resident chunks and of ghosts
        self._resident = [0, 0, 0]  # number of chunks by tier, held ones included
        self._target = 0.0

    @property
    def evictable(self) -> int:
        """Number of listed chunks."""
        return self._lists.sizes[RECENT] + self._lists.sizes[FREQUENT]

    def refresh(self, chunks: Sequence[int]) -> None:
        """Move chunks to the ends of their own tiers, the first of them last."""
        if len(chunks) == 1:
            self._lists.move_to_end(self._tier[chunks[0]], chunks)
            return
        recent, frequent = self._split(chunks[::-1])
        if recent:
            self._lists.move_to_end(RECENT, recent)
        if frequent:
            self._lists.move_to_end(FREQUENT, frequent)

    def hold(self, chunks: Sequence[int]) -> None:
        """Take chunks out of their lists; from now on they are of T2."""
        self._promote(chunks)
        self._lists.remove(FREQUENT, chunks)
        self._lists.stamp(chunks)

    def release(self, chunks: Sequence[int]) -> None:
        """Append chunks to the lists of their tiers by their last use."""
        if len(chunks) == 1:  # that of a decode step, for one
            self._lists.append(self._tier[chunks[0]], chunks)
            return
        recent, frequent = self._split(self._lists.by_stamp(chunks))
        if recent:
            self._lists.append(RECENT, recent)
        if frequent:
            self._lists.append(FREQUENT, frequent)

    def admit(
        self, keys: Sequence[Key], slots: Sequence[int], free: Sequence[int]
    ) -> tuple[list[int], list[Key]]:
        """Serve one miss after the other; keys without a ghost come in runs."""
        placed: list[int] = []
        evicted: list[Key] = []
        if slots.count(ABSENT) < len(slots):
            for position, slot in enumerate(slots):
                if slot != ABSENT:
                    self._admit_new(position - len(placed), free, placed, evicted)
                    # The keys before may have dropped the ghost, so the table is asked again.
                    ghost = self._table.find(keys[position])
                    if ghost != ABSENT:
                        self._admit_returning(ghost, free, placed, evicted)
        self._admit_new(len(keys) - len(placed), free, placed, evicted)
        self._lists.stamp(placed)
        return placed, evicted

    def drop_held(self, chunks: Sequence[int]) -> None:
        """Forget chunks; no ghost, for they were not evicted."""
        for chunk in chunks:
            self._resident[self._tier[chunk]] -= 1
            self._tier[chunk] = _NO_TIER

    def drop_listed(self, chunks: Sequence[int]) -> None:
        """Forget chunks, and take them out of their lists."""
        recent, frequent = self._split(chunks)
        self._lists.remove(RECENT, recent)
        self._lists.remove(FREQUENT, frequent)
        self.drop_held(chunks)

    def clear(self) -> None:
        """Free both lists; forget tiers, ghosts and target."""
        self._lists.move_all(RECENT, FREE_LIST)
        self._lists.move_all(FREQUENT, FREE_LIST)
        self._lists.move_all(RECENT_GHOSTS, SPARE_GHOSTS)
        self._lists.move_all(FREQUENT_GHOSTS, SPARE_GHOSTS)
        self._tier = bytearray(2 * self._num_chunks)
        self._resident = [0, 0, 0]
        self._target = 0.0

    def _split(self, chunks: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The chunks of T1 and those of T2, each in the order given."""
        tier_of = self._tier
        recent = [chunk for chunk in chunks if tier_of[chunk] == RECENT]
        if not recent:
            return recent, chunks
        if len(recent) == len(chunks):
            return chunks, ()
        return recent, [chunk for chunk in chunks if tier_of[chunk] == FREQUENT]

    def _promote(self, chunks: Sequence[int]) -> None:
        """Count those of the listed chunks that are of T1 to T2; the caller takes all of them out."""
        tier_of = self._tier
        count = 0
        for chunk in chunks:
            if tier_of[chunk] == RECENT:
                tier_of[chunk] = FREQUENT
                count += 1
        if count:
            self._lists.recount(RECENT, FREQUENT, count)
            self._resident[RECENT] -= count
            self._resident[FREQUENT] += count

    def _enter(self, tier: int, chunks: Sequence[int]) -> None:
        """Count chunks to a tier."""
        tier_of = self._tier
        for chunk in chunks:
            tier_of[chunk] = tier
        self._resident[tier] += len(chunks)

    def _admit_new(
        self, count: int, free: Sequence[int], placed: list[int], evicted: list[Key]
    ) -> None:
        """Serve `count` keys without a ghost: into T1.

        What is decided for the next key, from the sizes alone, holds for some keys after it: all of these
        are served at once.
        """
        while count > 0:
            chunks = free[len(placed) : len(placed) + count]
            drops, steps = self._trim(evicts=not chunks)
            if chunks:
                chunks = chunks[:steps]
                self._forget_ghosts(drops, len(chunks))
            else:
                tier, limit = self._choose(tie_is_recent=False)
                chunks = self._evict(tier, drops, min(steps, limit, count), evicted)
            self._enter(RECENT, chunks)
            placed += chunks
            count -= len(chunks)

    def _admit_returning(
        self, ghost: int, free: Sequence[int], placed: list[int], evicted: list[Key]
    ) -> None:
        """Serve a key that returns from B1 or B2: adapt the target, and into T2."""
        tier = self._tier[ghost]
        _, _, _, in_b1, in_b2, _ = self._lists.sizes
        if tier == RECENT:
            self._target = min(self._target + max(1.0, in_b2 / in_b1), float(self._num_chunks))
        else:
            self._target = max(self._target - max(1.0, in_b1 / in_b2), 0.0)
        self._lists.remove(_GHOSTS[tier], (ghost,))
        self._lists.append(SPARE_GHOSTS, (ghost,))
        self._table.clear((ghost,))  # the key itself is about to be a chunk's
        chunks = free[len(placed) : len(placed) + 1]
        if not chunks:
            victim_tier, _ = self._choose(tie_is_recent=tier == FREQUENT)
            chunks = self._evict(victim_tier, _NO_TIER, 1, evicted)
        self._enter(FREQUENT, chunks)
        placed += chunks

    def _trim(self, *, evicts: bool) -> tuple[int, int]:
        """Decide which ghosts go so that keys without a ghost can enter T1, one ghost a key.

        T1 + B1 fit into the cache; if the keys evict, and so leave ghosts, B1 + B2 do as well, and all
        four into twice the cache.

        Returns the tier of the ghosts, and for how many keys that holds (at least one). The tier is
        `_NO_TIER` while there is room, and `_LEAVES_NONE` if T1 alone is the cache: then no ghost goes,
        and none comes.
        """
        _, in_t1, in_t2 = self._resident
        _, _, _, in_b1, in_b2, spare = self._lists.sizes
        recent_room = self._num_chunks - in_t1 - in_b1
        if recent_room <= 0:
            return (RECENT, in_b1) if in_b1 else (_LEAVES_NONE, self._num_chunks)
        if not evicts:
            return _NO_TIER, recent_room
        room = min(spare, 2 * self._num_chunks - in_t1 - in_t2 - in_b1 - in_b2)
        if room > 0:
            return _NO_TIER, min(room, recent_room)
        return FREQUENT, min(in_b2, recent_room)  # B2 has some, or T1 + B1 would be full

    def _choose(self, *, tie_is_recent: bool) -> tuple[int, int]:
        """Decide which tier gives the victim; returns it, and for how many new keys that holds."""
        _, recent, frequent, _, _, _ = self._lists.sizes
        in_t1 = self._resident[RECENT]
        if in_t1 > self._target or (tie_is_recent and in_t1 == self._target):
            return (RECENT, recent) if recent else (FREQUENT, frequent)
        if frequent:
            return FREQUENT, min(frequent, int(self._target) - in_t1 + 1)
        return RECENT, recent

    def _evict(self, tier: int, drops: int, count: int, evicted: list[Key]) -> list[int]:
        """Take `count` victims from a tier; their keys become ghosts in place of those that go."""
        victims = self._lists.take(tier, count)
        keys = self._table.keys_of(victims)
        self._resident[tier] -= count
        evicted += keys
        if drops == _LEAVES_NONE:
            self._table.remove(keys)
            return victims
        ghosts = self._lists.transfer(_GHOSTS[drops], _GHOSTS[tier], count)
        if drops != _NO_TIER:
            self._table.remove(self._table.keys_of(ghosts))
        self._table.assign(ghosts, keys)
        tier_of = self._tier
        for ghost in ghosts:
            tier_of[ghost] = tier
        return victims

    def _forget_ghosts(self, tier: int, count: int) -> None:
        """Forget the oldest ghosts of a tier; none of `_NO_TIER`."""
        if tier != _NO_TIER:
            ghosts = self._lists.transfer(_GHOSTS[tier], SPARE_GHOSTS, count)
            self._table.remove(self._table.keys_of(ghosts))
            self._table.clear(ghosts)

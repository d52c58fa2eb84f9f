"""Replacement: which chunk makes room for which key. The protocol, and LRU; ARC is in `arc`.

To a policy a chunk is

    ======== ======================================== ===========================================
    absent   not known                                -> held by `admit`
    held     resident but no victim: in no list       -> listed by `release`; absent by `drop_held`
    listed   resident and evictable: in `RECENT` or,  -> held by `hold`; held, under another key,
             with ARC, `FREQUENT`                        by `admit`; absent by `drop_listed`
    ======== ======================================== ===========================================

and `clear` makes all absent. `chunks.ChunkIndex` makes all moves. Held chunks are outside of the
lists, so a search for a victim never meets one: eviction looks at one chunk per victim, whatever is
pinned.

Order. A batch is given head of the prefix first, and its head is to be evicted last, for the tail is
of no use without it. So of one batch the first key counts as the most recently used. Held chunks
bear a stamp of their last use: `release` lists a batch in the order of the stamps, whatever order it
comes in, and so a completion that names keys as a set loses nothing.

Ghosts. A policy may remember keys whose chunks are gone. They are in the same key table, in slots
behind those of the chunks, and their entries in the same lists.

This module must not know what a transfer is, nor where chunks lie.
"""

from collections.abc import Sequence
from typing import Protocol

from kvcellar.index.idlists import IdLists
from kvcellar.index.keytable import Key, KeyTable

FREE_LIST, RECENT, FREQUENT, RECENT_GHOSTS, FREQUENT_GHOSTS, SPARE_GHOSTS = range(6)
"""The lists that index and policy share, so that a chunk is in one of them or in none. `FREE_LIST`
is the index's; the others are the policy's, least recently used first."""
NUM_LISTS = 6


class Policy(Protocol):
    """What the chunk index asks of a replacement policy. Batches hold no chunk twice, but for `refresh`."""

    @property
    def evictable(self) -> int:
        """Number of listed chunks."""

    def refresh(self, chunks: Sequence[int]) -> None:
        """Make listed chunks recent without counting a use."""

    def hold(self, chunks: Sequence[int]) -> None:
        """Count a use of listed chunks and make them held."""

    def release(self, chunks: Sequence[int]) -> None:
        """Make held chunks listed: most recent of all, among themselves by their stamps."""

    def admit(
        self, keys: Sequence[Key], slots: Sequence[int], free: Sequence[int]
    ) -> tuple[list[int], list[Key]]:
        """Find a chunk for each key, in order: first the free ones, then one evicted for each further key.

        `slots` are those of the keys in the table: ghosts or `ABSENT`. At least `len(keys) - len(free)`
        chunks have to be listed. Returns the chunks, now held, and the evicted keys, which are no longer
        those of a chunk; the caller assigns the new ones.
        """

    def drop_held(self, chunks: Sequence[int]) -> None:
        """Forget held chunks without trace."""

    def drop_listed(self, chunks: Sequence[int]) -> None:
        """Forget listed chunks without trace, and take them out of their lists."""

    def clear(self) -> None:
        """Forget everything, and put the listed chunks in front of the free list.

        The caller drops the keys of all but the held chunks from the table, ghosts included.
        """


class LruPolicy:
    """Least recently used: one list."""

    def __init__(self, lists: IdLists, table: KeyTable) -> None:
        """Take `RECENT` of the shared lists; victims lose their keys in `table`."""
        self._lists = lists
        self._table = table

    @property
    def evictable(self) -> int:
        """Number of listed chunks."""
        return self._lists.sizes[RECENT]

    def refresh(self, chunks: Sequence[int]) -> None:
        """Move chunks to the end of the list, the first of them last."""
        self._lists.move_to_end(RECENT, chunks[::-1])

    def hold(self, chunks: Sequence[int]) -> None:
        """Take chunks out of the list."""
        self._lists.remove(RECENT, chunks)
        self._lists.stamp(chunks)

    def release(self, chunks: Sequence[int]) -> None:
        """Append chunks by their last use."""
        self._lists.append(RECENT, self._lists.by_stamp(chunks))

    def admit(
        self, keys: Sequence[Key], slots: Sequence[int], free: Sequence[int]
    ) -> tuple[list[int], list[Key]]:
        """Evict from the front of the list."""
        del slots  # LRU has no ghosts
        victims = self._lists.take(RECENT, len(keys) - len(free))
        evicted = self._table.keys_of(victims)
        self._table.remove(evicted)
        chunks = [*free, *victims]
        self._lists.stamp(chunks)
        return chunks, evicted

    def drop_held(self, chunks: Sequence[int]) -> None:
        """Do nothing: nothing is known of a held chunk."""

    def drop_listed(self, chunks: Sequence[int]) -> None:
        """Take chunks out of the list."""
        self._lists.remove(RECENT, chunks)

    def clear(self) -> None:
        """Free the whole list."""
        self._lists.move_all(RECENT, FREE_LIST)

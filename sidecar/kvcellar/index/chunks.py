"""The chunk index: which KV chunk, named by a key, lies in which chunk of the region.

It lives in the scheduler and is called by its one thread. It moves no bytes: it hands out chunk ids
for copies that others make, and is told when they are over. The states of a chunk stand in `states`.

Legal moves, and who makes them:

    - FREE or IDLE -> WRITING: `prepare_store`, which evicts the key of an idle chunk;
    - WRITING -> IDLE: `complete_store`; WRITING -> FREE for the keys that it names as failed;
    - IDLE -> PINNED, and one more pin: `prepare_load`;
    - one pin less, and PINNED -> IDLE with the last: `complete_load`;
    - IDLE -> FREE, PINNED -> FORGOTTEN: `forget`;
    - IDLE -> FREE, PINNED or FORGOTTEN -> STALE_LOAD, WRITING -> STALE_STORE: `reset`;
    - FORGOTTEN or STALE_LOAD -> FREE: `complete_load` with the last pin;
    - STALE_STORE -> FREE: `complete_store`, failed or not;
    - STALE_LOAD or STALE_STORE -> FREE: `abandon_stale`.

Why a late completion is harmless: a key keeps its chunk until the last transfer that knows of it is
over, and `prepare_store` passes over a key that has one. So at any time a key means one chunk, and a
completion, which names keys only, cannot be taken for that of another transfer.

Why chunks return to the *end* of the free list: a copy that was reported as failed or given up may
still write for a moment; the end is where a chunk waits longest.

Time: every call takes time proportional to its own batch, whatever the number of chunks, pinned or
not. Exceptions are the constructor, `reset` and `abandon_stale`; and now and then the key table
rebuilds a 256th of itself (0.3 ms of a million chunks). All calls are atomic: one that raises, or
answers None, has changed nothing.

This module must not know vLLM, requests, tensors or files.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcellar.errors import ConfigurationError
from kvcellar.index.idlists import IdLists
from kvcellar.index.keytable import ABSENT, Key, KeyTable
from kvcellar.index.misuse import require_loadable, require_named, require_pinned, require_storing
from kvcellar.index.policies import PolicyName, make_policy, num_slots
from kvcellar.index.policy import FREE_LIST, NUM_LISTS
from kvcellar.index.states import (
    ANSWERS,
    FORGOTTEN,
    FREE,
    IDLE,
    NUM_STATES,
    PINNED,
    STALE_LOAD,
    STALE_STORE,
    WRITING,
    ChunkStates,
    Lookup,
)

ChunkIds = npt.NDArray[np.int32]
"""Chunk ids: (n,) int32, owned by the receiver."""
_INT32 = np.dtype(np.int32)


class StorePlan(NamedTuple):
    """What `prepare_store` decided. A tuple, because one is made on each call and it is made fastest.

    Attributes:
        keys: the keys to store, in the order given, each once; those that have a chunk are left out.
        chunk_ids: (len(keys),) int32, the chunk to write for each of `keys`.
        evicted: the keys that had to go, in the order of their eviction.
    """

    keys: list[Key]
    chunk_ids: ChunkIds
    evicted: list[Key]


class ChunkIndex:
    """The keys of the chunks `[0, num_chunks)` of one region. The module tells states and moves."""

    def __init__(self, num_chunks: int, policy: PolicyName = "lru") -> None:
        """Start with every chunk free. With 0 chunks nothing is ever found, and no store fits.

        Raises:
            ConfigurationError: a negative number of chunks, or no policy has that name.
        """
        if num_chunks < 0:
            raise ConfigurationError(
                f"a chunk index of {num_chunks} chunks was asked for; it has 0 or more"
            )
        slots = num_slots(policy, num_chunks)
        self._num_chunks = num_chunks
        self._table = KeyTable(slots)
        self._lists = IdLists(slots, NUM_LISTS)
        self._lists.append(FREE_LIST, range(num_chunks))
        self._policy = make_policy(policy, self._lists, self._table, num_chunks)
        self._states = ChunkStates(slots)
        self._shards = self._table.shards
        self._lookups = [0] * NUM_STATES
        self._unknown = 0  # lookups of keys that the table does not have
        self._more_pins: dict[int, int] = {}  # pins beyond the first, of chunks that have several
        self._pinned = 0
        self._lingering = 0
        self._evictions = 0

    # --- counts -----------------------------------------------------------------------------------

    @property
    def num_chunks(self) -> int:
        """Chunks of the region. Always `used_chunks + lingering + free`."""
        return self._num_chunks

    @property
    def used_chunks(self) -> int:
        """Chunks that hold KV data or are about to: `loadable + pending`."""
        return self._num_chunks - self.free - self._lingering

    @property
    def loadable(self) -> int:
        """Chunks that a lookup finds."""
        return self._policy.evictable + self._pinned

    @property
    def pending(self) -> int:
        """Chunks with a store in flight that will make them loadable."""
        return self.used_chunks - self.loadable

    @property
    def pinned(self) -> int:
        """Chunks that loads in flight keep from eviction: part of `loadable`."""
        return self._pinned

    @property
    def lingering(self) -> int:
        """Chunks that were dropped while a transfer was in flight: neither used nor free."""
        return self._lingering

    @property
    def free(self) -> int:
        """Chunks without a key."""
        return self._lists.sizes[FREE_LIST]

    @property
    def evictions(self) -> int:
        """Chunks evicted since the index was made; `reset` and `forget` evict nothing."""
        return self._evictions

    @property
    def lookups(self) -> tuple[int, int, int]:
        """How often `lookup` has answered MISS, PENDING and HIT."""
        counts = [self._unknown, 0, 0]
        for answer, count in zip(ANSWERS, self._lookups, strict=True):
            counts[answer] += count
        misses, pendings, hits = counts
        return misses, pendings, hits

    # --- questions --------------------------------------------------------------------------------

    def lookup(self, key: Key) -> Lookup:
        """Say what is known of a key, and count the question; recency stays as it is."""
        return ANSWERS[self.lookup_state(key)]

    def lookup_state(self, key: Key) -> int:
        """The same by state, for a caller with a table of its own in place of `ANSWERS`.

        A scheduler asks once for each chunk of each waiting request, so this is short at any price.
        """
        slot = self._shards[key[0]].get(key)
        if slot is None:
            self._unknown += 1
            return FREE
        state = self._states.of[slot]
        self._lookups[state] += 1
        return state

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the keys that `lookup` misses; counts nothing."""
        state_of, find = self._states.of, self._table.find
        return [key for key in keys if ANSWERS[state_of[find(key)]] is Lookup.MISS]

    def lookup_prefix(self, keys: Sequence[Key]) -> int:
        """Count the hits before the first key that is none; changes nothing."""
        return self._table.count_leading(keys, self._states.of, IDLE)

    def chunk_ids(self, keys: Iterable[Key]) -> list[int]:
        """Tell the chunk that each key has, or -1, in the order of the keys; changes nothing.

        For reading marks that are kept by chunk, such as those of failed stores. To load, use
        `prepare_load`: a key that lookup misses can still have a chunk (see `states`).
        """
        num_chunks = self._num_chunks
        return [slot if slot < num_chunks else ABSENT for slot in self._table.find_all(keys)]

    # --- loads ------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[Key]) -> ChunkIds:
        """Pin the chunks of loadable keys, count a use of each, and return their ids.

        A pin keeps a chunk from eviction until `complete_load`. Keys come head of the prefix first;
        a key given twice in one call is pinned once.

        Returns (len(keys),) int32 in the order of the keys.

        Raises:
            IndexMisuse: a key is not a hit; nothing is pinned then.
        """
        chunks = self._table.find_marked(keys, self._states.of, IDLE)
        idle = _distinct(chunks)
        if len(chunks) < len(keys):
            chunks = self._table.find_all(keys)
            require_loadable(keys, chunks, self._states.of)
            for chunk in self._states.having(_distinct(chunks), PINNED):
                self._more_pins[chunk] = self._more_pins.get(chunk, 0) + 1
        self._states.change(idle, PINNED)
        self._pinned += len(idle)
        self._policy.hold(idle)
        return np.array(chunks, dtype=_INT32)

    def complete_load(self, keys: Collection[Key]) -> None:
        """Take one pin from each key of a load that is over, whatever came of it.

        Keys may come in any order, as a set for one. Chunks without pins become evictable: the most
        recently used of all, and among themselves in the order in which they were prepared. Those
        that were dropped meanwhile become free.

        Raises:
            IndexMisuse: no load of a key is in flight.
        """
        unpinned = _distinct(self._table.find_marked(keys, self._states.of, PINNED))
        if self._more_pins or len(unpinned) < len(keys):
            chunks = self._table.find_all(keys)
            require_pinned(keys, chunks, self._states.of)
            unpinned = self._take_pins(_distinct(chunks))
        self._states.change(unpinned, IDLE)
        self._pinned -= len(unpinned)
        self._policy.release(unpinned)

    def refresh(self, keys: Iterable[Key]) -> None:
        """Make keys recent, head of the prefix first, without counting a use.

        For the end of a request: it stored its prefix piece by piece, so that the head has become the
        oldest. Once its stores are complete, this puts the head where it is evicted last. Keys that are no
        hit are ignored, and so are pinned ones: they will be the most recent of all when their load is over.
        """
        self._policy.refresh(self._table.find_marked(keys, self._states.of, IDLE))

    # --- stores -----------------------------------------------------------------------------------

    def prepare_store(self, keys: Iterable[Key]) -> StorePlan | None:
        """Give chunks to the keys that have none, evicting idle chunks if too few are free.

        Counts a use of the keys that are loadable already. Never evicts a key of this batch, a pinned
        or a pending chunk. Keys come head of the prefix first. Each key of the plan has to come back
        in a `complete_store`.

        Returns the plan, which is empty if there is nothing to store; None if it does not fit, and
        then nothing has changed.
        """
        new = list(dict.fromkeys(keys))
        slots = self._table.find_all(new)
        idle: list[int] = []
        if slots.count(ABSENT) < len(slots):
            state_of = self._states.of
            idle = self._states.having(slots, IDLE)
            pairs = zip(new, slots, strict=True)
            new = [key for key, slot in pairs if state_of[slot] == FREE]
            slots = [slot for slot in slots if state_of[slot] == FREE]
        num_free = min(len(new), self._lists.sizes[FREE_LIST])
        if len(new) - num_free > self._policy.evictable - len(idle):
            return None
        # Held, the batch's own chunks cannot become victims of its new keys.
        if idle:
            self._policy.hold(idle)
        free = self._lists.take(FREE_LIST, num_free) if num_free else []
        placed, evicted = self._policy.admit(new, slots, free)
        self._table.assign(placed, new)
        self._states.change(placed, WRITING)
        self._evictions += len(evicted)
        if idle:
            self._policy.release(idle)
        return StorePlan(new, np.array(placed, dtype=_INT32), evicted)

    def complete_store(self, keys: Collection[Key], failed: Collection[Key] = ()) -> list[Key]:
        """End stores: stored keys become loadable, failed ones are forgotten and their chunks freed.

        Keys may come in any order, as a set for one, and in other portions than they were planned in.
        Keys whose store began before a `reset` only free their chunks, failed or not.

        Args:
            keys: all keys whose store is over.
            failed: those of them whose bytes did not arrive.

        Returns the keys that have become loadable.

        Raises:
            IndexMisuse: no store of a key is in flight, or `failed` has a key that is not in `keys`.
        """
        distinct = list(dict.fromkeys(keys))
        stored, arrived = distinct, self._table.find_marked(distinct, self._states.of, WRITING)
        if failed or len(arrived) < len(distinct):
            chunks = self._table.find_all(distinct)
            lost = set(failed)
            require_storing(distinct, chunks, self._states.of)
            require_named(lost, distinct)
            stored, arrived = self._sort_out(distinct, chunks, lost)
        self._states.change(arrived, IDLE)
        self._policy.release(arrived)
        return stored

    # --- dropping ---------------------------------------------------------------------------------

    def forget(self, keys: Iterable[Key]) -> list[Key]:
        """Drop loadable keys, after a load that failed for one; others are ignored.

        A pinned chunk is no longer found and becomes free with its last pin; until then its key
        cannot be stored again.

        Returns the keys dropped.
        """
        chunks = _distinct(self._table.find_all(keys))
        idle, pinned = self._states.having(chunks, IDLE), self._states.having(chunks, PINNED)
        dropped = self._table.keys_of(idle + pinned)
        self._policy.drop_listed(idle)
        self._policy.drop_held(pinned)
        self._states.change(pinned, FORGOTTEN)
        self._pinned -= len(pinned)
        self._lingering += len(pinned)
        self._free(idle)
        return dropped

    def reset(self) -> None:
        """Drop everything: nothing is found afterwards, and the policy remembers nothing.

        Chunks with a transfer in flight become free when it completes, or by `abandon_stale`.

        Takes time in proportion to the chunks used, for it gives back the memory of their keys
        (figures in docs/explanation/chunk-index.md). That is not the hot path: it runs when an engine
        throws its cache away, to sleep or to change weights, which takes seconds.
        """
        self._lingering += self._pinned + self.pending
        self._pinned = 0
        becomes = {WRITING: STALE_STORE, PINNED: STALE_LOAD, FORGOTTEN: STALE_LOAD, IDLE: FREE}
        for source, target in becomes.items():
            self._states.change_all(source, target)
        self._policy.clear()
        self._table.retain(
            self._states.all_having(STALE_LOAD) + self._states.all_having(STALE_STORE)
        )

    def abandon_stale(self) -> int:
        """Free what waits for transfers from before the last `reset`; returns the number of chunks.

        For callers that do not report those transfers, as vLLM's scheduler does not. Legal once no copy
        of them can run beside a later store: a chunk freed here may be the next one stored to. A
        completion that arrives after all is an `IndexMisuse`. Takes one pass over a byte a chunk.
        """
        loads, stores = self._states.all_having(STALE_LOAD), self._states.all_having(STALE_STORE)
        for chunk in loads:
            self._more_pins.pop(chunk, None)
        self._free_lingering(loads)
        self._free_lingering(stores)
        return len(loads) + len(stores)

    # --- parts of the moves -------------------------------------------------------------------------

    def _take_pins(self, chunks: Iterable[int]) -> list[int]:
        """Take one pin from each chunk; frees the dropped ones without further pins, returns the others."""
        unpinned = [chunk for chunk in chunks if chunk not in self._more_pins]
        for chunk in chunks:
            more = self._more_pins.pop(chunk, 0)
            if more > 1:
                self._more_pins[chunk] = more - 1
        self._free_lingering(self._states.having(unpinned, FORGOTTEN))
        self._free_lingering(self._states.having(unpinned, STALE_LOAD))
        return self._states.having(unpinned, PINNED)

    def _free_lingering(self, chunks: Sequence[int]) -> None:
        """Free chunks whose last transfer is over."""
        self._lingering -= len(chunks)
        self._free(chunks)

    def _free(self, chunks: Sequence[int]) -> None:
        """Take the keys of chunks that the policy does not have, and put them at the end of the free list."""
        self._table.remove(self._table.keys_of(chunks))
        self._table.clear(chunks)
        self._states.change(chunks, FREE)
        self._lists.append(FREE_LIST, chunks)

    def _sort_out(
        self, keys: list[Key], chunks: list[int], failed: set[Key]
    ) -> tuple[list[Key], list[int]]:
        """Free the chunks of failed and of stale stores; returns the keys and chunks of the others."""
        state_of = self._states.of
        stored, arrived, lost = [], [], []
        for key, chunk in zip(keys, chunks, strict=True):
            if state_of[chunk] == STALE_STORE:
                continue
            if key in failed:
                lost.append(chunk)
            else:
                stored.append(key)
                arrived.append(chunk)
        self._free_lingering(self._states.having(chunks, STALE_STORE))
        self._policy.drop_held(lost)
        self._free(lost)
        return stored, arrived


def _distinct(chunks: list[int]) -> list[int]:
    """Each chunk once, in the order given."""
    if len(chunks) < 2 or len(set(chunks)) == len(chunks):
        return chunks
    return list(dict.fromkeys(chunks))

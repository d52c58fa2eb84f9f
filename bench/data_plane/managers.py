"""Index operations: vLLM's `CPUOffloadingManager` against `RegionManager`, which vLLM calls the same way.

Keys are 36 bytes, as vLLM makes them. Both managers are full, half of their chunks were loaded before, and each
round takes its keys at random from all that are stored. *Load* and *store* are whole lives: prepare, complete,
end of the request. The lookup of a prefix goes to the chunk index itself, which has one call for what vLLM asks
key by key. Chunks are in private memory; with a region kvcellar also reads some bytes of a file (a
microsecond or so) at the end of each store.
"""

import random
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial

from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench.data_plane.measuring import Bench, Comparison, Unit, nothing, thread_s
from kvcellar.index.chunks import ChunkIndex
from kvcellar.index.policies import PolicyName
from kvcellar.plugin.ledger import Ledger, PrivateChunks
from kvcellar.vllm.manager import RegionManager

Batches = list[list[OffloadKey]]
MakeManager = Callable[[], OffloadingManager]

_BATCHES = (1, 16, 256)
"""Keys in a call: the chunk of a decode step, a short prefix, a long one."""
_LONG = 256
_SHORT = 16
_PINNED_SHARE = 2
"""Of the chunks, one in so many is pinned where an eviction beside pinned chunks is measured."""


def compare(bench: Bench) -> None:
    """All operations, with both policies."""
    for policy in ("lru", "arc"):
        _Policy(bench, policy).compare()


class Keys:
    """The keys that are stored, and others."""

    def __init__(self, count: int) -> None:
        self._random = random.Random(1)  # noqa: S311 - picks keys, no secrets
        self.stored = self.new(count)

    def new(self, count: int) -> list[OffloadKey]:
        """Keys that nobody has seen; hashed, as a scheduler has them once it has looked them up."""
        keys = [make_offload_key(self._random.randbytes(32), 0) for _ in range(count)]
        for key in keys:
            hash(key)
        return keys

    def pick(self, count: int) -> list[OffloadKey]:
        """Some of the stored keys, as other objects: vLLM makes them anew for each request."""
        picked = [make_offload_key(key[:-4], 0) for key in self._random.sample(self.stored, count)]
        for key in picked:
            hash(key)
        return picked


def in_batches(keys: list[OffloadKey], size: int) -> Batches:
    """The keys in calls."""
    return [keys[first : first + size] for first in range(0, len(keys), size)]


def store(manager: OffloadingManager, batches: Iterable[list[OffloadKey]]) -> None:
    """The whole life of stores, each by a request of its own."""
    for keys in batches:
        context = ReqContext("store")
        manager.prepare_store(keys, context)
        manager.complete_store(keys, context)
        manager.on_request_finished(context)


def load(manager: OffloadingManager, batches: Iterable[list[OffloadKey]]) -> None:
    """The whole life of loads, each by a request of its own."""
    for keys in batches:
        context = ReqContext("load")
        manager.prepare_load(keys, context)
        manager.complete_load(keys, context)
        manager.on_request_finished(context)


def look_up(manager: OffloadingManager, batches: Batches) -> None:
    """One call a key, as vLLM's scheduler does."""
    context, lookup = ReqContext("lookup"), manager.lookup
    for keys in batches:
        for key in keys:
            lookup(key, context)


class _Policy:
    """The comparisons with one replacement policy."""

    def __init__(self, bench: Bench, policy: PolicyName) -> None:
        self._bench = bench
        self._policy: PolicyName = policy
        self._chunks = bench.scale.chunks
        self._count = min(bench.scale.keys, self._chunks // 2)
        self._keys = Keys(self._chunks)

    def compare(self) -> None:
        """All operations."""
        self._bench.head(f"{self._policy}, {self._chunks:,} chunks: time a key")
        theirs, ours = self._full(self._theirs), self._full(self._ours)
        index = self._index()
        for size in _BATCHES:
            self._per_key("lookup, hit", size, self._picked, look_up, theirs, ours)
            self._per_key("lookup, miss", size, self._new, look_up, theirs, ours)
            self._prefix_lookup(size, theirs, index)
            self._per_key("load", size, self._picked, load, theirs, ours)
        # Last, since they evict what the others pick.
        for size in _BATCHES:
            self._per_key("store with eviction", size, self._new, store, theirs, ours)
        self._bench.head(f"{self._policy}, {self._chunks:,} chunks")
        self._longest_call()
        self._eviction_beside_pinned()
        self._memory()

    # --- what is made

    def _theirs(self) -> OffloadingManager:
        return CPUOffloadingManager(self._chunks, self._policy)

    def _ours(self) -> OffloadingManager:
        ledger = Ledger(self._chunks, self._policy, PrivateChunks(), keeps_events=False)
        return RegionManager(ledger)

    def _full(self, make: MakeManager) -> OffloadingManager:
        manager = make()
        store(manager, in_batches(self._keys.stored, _LONG))
        load(manager, in_batches(self._keys.stored[::2], _LONG))
        return manager

    def _index(self) -> ChunkIndex:
        index = ChunkIndex(self._chunks, self._policy)
        for keys in in_batches(self._keys.stored, _LONG):
            index.prepare_store(keys)
            index.complete_store(keys)
        return index

    def _picked(self, size: int) -> Batches:
        return in_batches(self._keys.pick(self._count), size)

    def _new(self, size: int) -> Batches:
        return in_batches(self._keys.new(self._count), size)

    # --- what is compared

    def _per_key(
        self,
        name: str,
        size: int,
        draw: Callable[[int], Batches],
        do: Callable[[OffloadingManager, Batches], None],
        theirs: OffloadingManager,
        ours: OffloadingManager,
    ) -> None:
        def side(manager: OffloadingManager, batches: Batches) -> float:
            return thread_s(partial(do, manager, batches)) / self._count

        self._bench.compare(
            Comparison(
                f"{name}, {size} a call",
                Unit.NS,
                partial(draw, size),
                partial(side, theirs),
                partial(side, ours),
            )
        )

    def _prefix_lookup(self, size: int, theirs: OffloadingManager, index: ChunkIndex) -> None:
        def ask(batches: Batches) -> None:
            for keys in batches:
                index.lookup_prefix(keys)

        self._bench.compare(
            Comparison(
                f"lookup of a prefix, {size} a call",
                Unit.NS,
                partial(self._picked, size),
                lambda batches: thread_s(lambda: look_up(theirs, batches)) / self._count,
                lambda batches: thread_s(lambda: ask(batches)) / self._count,
            )
        )

    def _longest_call(self) -> None:
        """The longest of many loads and stores: a scheduler step waits for it."""
        # Loaded this often, they are never those that a store evicts.
        often = self._keys.stored[: self._chunks // 64 * 16]

        def longest_s(manager: OffloadingManager, given: tuple[Batches, Batches]) -> float:
            loads, stores = given
            calls = [
                thread_s(partial(do, manager, [keys]))
                for pair in zip(loads, stores, strict=True)
                for do, keys in zip((load, store), pair, strict=True)
            ]
            return max(calls)

        def draw() -> tuple[Batches, Batches]:
            loads = in_batches(often * 4, _SHORT)
            return loads, in_batches(self._keys.new(len(often) * 4), _SHORT)

        theirs, ours = self._full(self._theirs), self._full(self._ours)
        for manager in (theirs, ours):
            load(manager, in_batches(often, _SHORT))
        self._bench.compare(
            Comparison(
                "longest call",
                Unit.MS,
                draw,
                partial(longest_s, theirs),
                partial(longest_s, ours),
                most_rounds=3,
            )
        )

    def _eviction_beside_pinned(self) -> None:
        theirs, ours = self._full(self._theirs), self._full(self._ours)
        pinned = self._keys.stored[: self._chunks // _PINNED_SHARE]
        for manager in (theirs, ours):
            for keys in in_batches(pinned, _LONG):
                manager.prepare_load(keys, ReqContext("pins"))

        def evict_s(manager: OffloadingManager, batches: Batches) -> float:
            return thread_s(partial(store, manager, batches)) / len(batches)

        self._bench.compare(
            Comparison(
                f"store of one key, beside {len(pinned):,} pinned chunks",
                Unit.US,
                lambda: in_batches(self._keys.new(20), 1),
                partial(evict_s, theirs),
                partial(evict_s, ours),
            )
        )

    def _memory(self) -> None:
        """What a full manager keeps, the keys aside."""

        def bytes_a_chunk(make: MakeManager, _: None) -> float:
            tracemalloc.start()
            manager = self._full(make)
            kept, _peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            del manager
            return kept / self._chunks

        self._bench.compare(
            Comparison(
                "memory of a chunk",
                Unit.BYTES,
                nothing,
                partial(bytes_a_chunk, self._theirs),
                partial(bytes_a_chunk, self._ours),
                most_rounds=1,
            )
        )

"""The scheduler's book over the chunks of its region: what vLLM's offloading manager has to decide.

Owns the chunk index and what surrounds it: counters, events, the trail that each request leaves, the
marks of failed stores, and loads that failed. `kvcellar.vllm` puts vLLM's types around it.

Rules beyond those of the index:

- A batch that does not fit is cut to its head, never answered with "cannot store", which vLLM repeats
  at each step with a warning. What lies behind the cut is of no use without it, so nothing more of
  that request is stored.
- A key whose store a rank marked as failed is forgotten when the store completes, so it is never
  loaded. A key whose load failed is forgotten as well: otherwise the request would load it again, for
  ever.
- After `reset` nothing completes what was in flight: vLLM makes its workers wait for those copies
  before the next store begins, and drops their completions.

Recency comes from loads, stores and ends of requests; vLLM calls its `touch` hook nowhere.

One thread, that of the scheduler. This module must not know vLLM, torch or files.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

from kvcellar.index.chunks import ChunkIds, ChunkIndex, StorePlan
from kvcellar.index.keytable import Key
from kvcellar.index.policies import PolicyName
from kvcellar.region.metadata import Counters


class ChunkHolder(Protocol):
    """Where the chunks are; `kvcellar.worker.attached.SchedulerHandle` in an engine with a region."""

    def take_failed(self, chunks: list[int]) -> set[int]:
        """Those of `chunks` whose last store failed on some rank; their marks are cleared."""

    def report(self, counters: Counters) -> None:
        """Publish the scheduler's counters."""

    def close(self) -> None:
        """Let go of the region."""


class PrivateChunks:
    """Chunks in private memory of each rank: there is no page to report to, and nothing to read."""

    def take_failed(self, chunks: list[int]) -> set[int]:
        """None: without a region a failed store stops the engine."""
        del chunks
        return set()

    def report(self, counters: Counters) -> None:
        """Nobody reads them."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class Trail:
    """What one request did with chunks, in one generation of the ledger.

    Attributes:
        generation: as `Ledger.generation` was when the trail began; an older one is worth nothing.
        keys: those it loaded, stored or found stored; an ordered set.
        stores_in_flight: keys whose store has begun and is not complete.
        is_cut: a batch did not fit, so what follows is not stored.
        is_finished: vLLM will ask for nothing more.
    """

    generation: int = 0
    keys: dict[Key, None] = field(default_factory=dict)
    stores_in_flight: int = 0
    is_cut: bool = False
    is_finished: bool = False

    def note(self, keys: Iterable[Key]) -> None:
        """Add keys; those that are there keep their places."""
        noted = self.keys
        for key in keys:
            noted[key] = None


@dataclass(frozen=True, slots=True)
class ChunkEvent:
    """Keys that were stored, or are no longer there."""

    keys: list[Key]
    is_removed: bool


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Figures since the ledger was made; `used_chunks` is the present one."""

    lookup_hit: int = 0
    lookup_miss: int = 0
    lookup_pending: int = 0
    used_chunks: int = 0
    evicted_chunks: int = 0
    skipped_chunks: int = 0
    failed_store_chunks: int = 0
    failed_load_chunks: int = 0


PositionOf = Callable[[Key], int | None]
"""Where in its request a key's chunk ends, in tokens, if that is known."""


class Ledger:
    """The book of one engine start.

    Args:
        num_chunks: chunks that may be handed out.
        policy: how chunks are replaced.
        holder: where they are; it becomes the ledger's own, which closes it.
        keeps_events: whether somebody takes the events; otherwise none are kept.

    Attributes:
        index: for lookups without a detour: vLLM makes one for each chunk of each waiting request, again for
            each try to schedule it, and each counts.
        generation: how often the ledger was reset.
    """

    def __init__(
        self, num_chunks: int, policy: PolicyName, holder: ChunkHolder, *, keeps_events: bool
    ) -> None:
        self.index = ChunkIndex(num_chunks, policy)
        self._holder = holder
        self._keeps_events = keeps_events
        self._events: list[ChunkEvent] = []
        self._counts = LedgerCounts()
        self._published = Counters()
        self.generation = 0

    @property
    def num_chunks(self) -> int:
        """Chunks of the region."""
        return self.index.num_chunks

    @property
    def counts(self) -> LedgerCounts:
        """The figures now."""
        misses, pendings, hits = self.index.lookups
        return replace(
            self._counts,
            lookup_hit=hits,
            lookup_miss=misses,
            lookup_pending=pendings,
            used_chunks=self.index.used_chunks,
            evicted_chunks=self.index.evictions,
        )

    # --- loads ------------------------------------------------------------------------------------

    def prepare_load(self, keys: Collection[Key], trail: Trail) -> ChunkIds:
        """Pin chunks for a load and tell their ids, in the order of the keys.

        Raises:
            IndexMisuse: a key is not a hit.
        """
        chunks = self.index.prepare_load(keys)
        trail.note(keys)
        return chunks

    def complete_load(self, keys: Collection[Key], *, is_failed: bool) -> None:
        """End a load; the keys of a failed one are forgotten.

        Raises:
            IndexMisuse: no load of a key is in flight.
        """
        self.index.complete_load(keys)
        if is_failed:
            dropped = self.index.forget(keys)
            self._counts = replace(
                self._counts, failed_load_chunks=self._counts.failed_load_chunks + len(keys)
            )
            if self._keeps_events:
                self._note(dropped, is_removed=True)
            self.publish()

    # --- stores -----------------------------------------------------------------------------------

    def prepare_store(self, keys: Collection[Key], trail: Trail) -> StorePlan:
        """Give chunks to those of `keys` that have none, or to as many heads of groups as fit.

        Keys come one KV cache group after the other, head of the prefix first in each.
        """
        trail.note(keys)
        offered = [] if trail.is_cut else list(keys)
        while (plan := self.index.prepare_store(offered)) is None:
            offered = _heads(offered)
        if len(offered) < len(keys):
            self._cut(trail, keys, set(offered))
        trail.stores_in_flight += len(plan.keys)
        if self._keeps_events:
            self._note(plan.evicted, is_removed=True)
        return plan

    def complete_store(self, keys: Collection[Key], trail: Trail, position_of: PositionOf) -> None:
        """End stores; keys that a rank marked as failed are forgotten.

        Raises:
            IndexMisuse: no store of a key is in flight.
        """
        ordered = list(keys)
        chunks = self.index.chunk_ids(ordered)
        failed: list[Key] = []
        if failed_chunks := self._holder.take_failed(chunks):
            pairs = zip(ordered, chunks, strict=True)
            failed = [key for key, chunk in pairs if chunk in failed_chunks]
        stored = self.index.complete_store(ordered, failed)
        if self._keeps_events:
            self._note(stored, is_removed=False)
        trail.stores_in_flight -= len(ordered)
        if trail.is_finished:
            self._refresh_if_over(trail, position_of)
        if failed:
            self._counts = replace(
                self._counts, failed_store_chunks=self._counts.failed_store_chunks + len(failed)
            )
            self.publish()

    def finish(self, trail: Trail, position_of: PositionOf) -> None:
        """A request is over, but for stores that are still in flight."""
        trail.is_finished = True
        self._refresh_if_over(trail, position_of)

    # --- the rest ---------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop everything. Copies in flight are waited for by vLLM and never completed here."""
        self.generation += 1
        self.index.reset()
        self.index.abandon_stale()
        # Their keys are gone; what vLLM publishes at a reset says so for all of them.
        self._events.clear()
        self.publish()

    def take_events(self) -> list[ChunkEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def publish(self) -> None:
        """Show the counters in the region, if they changed."""
        counts = self.counts
        counters = Counters(
            lookup_hit=counts.lookup_hit,
            lookup_miss=counts.lookup_miss,
            lookup_pending=counts.lookup_pending,
            used_chunks=counts.used_chunks,
        )
        if counters != self._published:
            self._holder.report(counters)
            self._published = counters

    def close(self) -> None:
        """Let go of the region."""
        self._holder.close()

    def _cut(self, trail: Trail, keys: Iterable[Key], offered: set[Key]) -> None:
        left_out = [key for key in keys if key not in offered]
        new = self.index.missing(left_out)
        if new:
            trail.is_cut = True
            self._counts = replace(
                self._counts, skipped_chunks=self._counts.skipped_chunks + len(new)
            )
        self.index.refresh(left_out)

    def _refresh_if_over(self, trail: Trail, position_of: PositionOf) -> None:
        """Put the head of a finished request where it is evicted last."""
        if not trail.stores_in_flight:
            keys: Collection[Key] = trail.keys
            if len(keys) > 1:
                keys = sorted(keys, key=lambda key: position_of(key) or 0)
            self.index.refresh(keys)
            trail.keys.clear()

    def _note(self, keys: list[Key], *, is_removed: bool) -> None:
        if keys:
            self._events.append(ChunkEvent(keys, is_removed))


_GROUP_BYTES = 4
"""vLLM ends a key with the index of its KV cache group. Source: vllm/v1/kv_offload/base.py of 0.32,
`make_offload_key`."""


def _heads(keys: Sequence[Key]) -> list[Key]:
    """The first half of the keys of each KV cache group, rounded down; keys come group by group."""
    heads: list[Key] = []
    for _, members in groupby(keys, key=lambda key: key[-_GROUP_BYTES:]):
        group = list(members)
        heads += group[: len(group) // 2]
    return heads

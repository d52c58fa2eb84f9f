"""The scheduler's side: vLLM's offloading manager over the ledger, and the one for "off".

Called by the scheduler's one thread. What is decided stands in `kvcellar.plugin.ledger`; here vLLM's
types are put around it.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvcellar.index.chunks import ChunkIds
from kvcellar.index.states import ANSWERS, Lookup
from kvcellar.plugin.ledger import Ledger, LedgerCounts, Trail

_INT32 = np.dtype(np.int32)
_WORDS = {
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.HIT: LookupResult.HIT,
}
_ANSWERS = tuple(_WORDS[answer] for answer in ANSWERS)
"""What vLLM is told, by a chunk's state."""

_ENABLED = "vllm:kvcellar_enabled"
_CHUNKS = "vllm:kvcellar_chunks"
_USED = "vllm:kvcellar_used_chunks"
_LOOKUPS = "vllm:kvcellar_lookup_chunks"
_EVICTED = "vllm:kvcellar_evicted_chunks"
_SKIPPED = "vllm:kvcellar_skipped_store_chunks"
_FAILED = "vllm:kvcellar_failed_chunks"

METRICS: dict[str, OffloadingMetricMetadata] = {
    _ENABLED: OffloadingGaugeMetadata("1 if this engine offloads, 0 if it serves without."),
    _CHUNKS: OffloadingGaugeMetadata("Chunks of each rank's share of the region."),
    _USED: OffloadingGaugeMetadata("Chunks that hold KV data, or will once their store is done."),
    _LOOKUPS: OffloadingCounterMetadata(
        "Chunks looked up, once for each try to schedule a request.", labelnames=("outcome",)
    ),
    _EVICTED: OffloadingCounterMetadata("Chunks that made room for others."),
    _SKIPPED: OffloadingCounterMetadata("Chunks not stored, since their batch did not fit."),
    _FAILED: OffloadingCounterMetadata(
        "Chunks dropped because a copy from or to them failed.", labelnames=("direction",)
    ),
}
"""All that `get_stats` of the managers emits. Names begin with `vllm:`, since vLLM takes only such out
of the registry before it registers them again."""


class ChunkSpec(BlockIDsLoadStoreSpec):
    """The chunks of a transfer, in `block_ids`; it travels from the scheduler to the workers."""

    def __init__(self, block_ids: ChunkIds | Sequence[int]) -> None:
        """Keep an array as it is, where vLLM's own class makes another one."""
        self.block_ids = np.asarray(block_ids, dtype=_INT32)


class RegionManager(OffloadingManager):
    """vLLM's view of the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._index = ledger.index
        self._seen = LedgerCounts()
        self._is_first = True
        self._failed_loads: Collection[str] = ()

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Offload chunk by chunk, as they are computed."""
        del req_context
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk can be loaded; one whose store is in flight is worth waiting for."""
        del req_context
        return _ANSWERS[self._index.lookup_state(key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> str:
        """Where a hit came from, asked by vLLM 0.32; the text is the value of its enum's HOST."""
        del key, req_context
        return "host"

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSpec:
        """Pin chunks for a load."""
        return ChunkSpec(self._ledger.prepare_load(keys, self._trail(req_context)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """End a load, after all ranks have answered."""
        is_failed = req_context.req_id in self._failed_loads
        self._ledger.complete_load(keys, is_failed=is_failed)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Give chunks to keys; what does not fit is left out, never refused."""
        plan = self._ledger.prepare_store(keys, self._trail(req_context))
        return PrepareStoreOutput(plan.keys, ChunkSpec(plan.chunk_ids), plan.evicted)

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """End a store, after all ranks have answered; the region tells which chunks failed.

        vLLM never passes `success=False`: it stops a worker whose store fails.
        """
        del success
        self._ledger.complete_store(
            keys, self._trail(req_context), req_context.get_offload_key_position
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Make the chunks of a finished request recent, its head last to go."""
        self._ledger.finish(self._trail(req_context), req_context.get_offload_key_position)

    def drop_failed_loads(self, request_ids: Collection[str]) -> None:
        """Name the requests whose load failed: `complete_load` forgets their keys, until the next call."""
        self._failed_loads = request_ids

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events for vLLM's publisher."""
        for event in self._ledger.take_events():
            yield OffloadingEvent(keys=event.keys, medium=Medium.CPU, removed=event.is_removed)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Publish the counters once a step."""
        del context
        self._ledger.publish()

    def reset_cache(self) -> None:
        """Drop everything, for sleep and for new weights."""
        self._ledger.reset()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What changed since the last call; None if nothing did."""
        counts, seen = self._ledger.counts, self._seen
        if counts == seen and not self._is_first:
            return None
        stats = OffloadingConnectorStats()
        if self._is_first:
            stats.set_gauge(_ENABLED, 1)
            stats.set_gauge(_CHUNKS, self._ledger.num_chunks)
        stats.set_gauge(_USED, counts.used_chunks)
        for name, labels, now, before in (
            (_LOOKUPS, ("hit",), counts.lookup_hit, seen.lookup_hit),
            (_LOOKUPS, ("miss",), counts.lookup_miss, seen.lookup_miss),
            (_LOOKUPS, ("pending",), counts.lookup_pending, seen.lookup_pending),
            (_EVICTED, (), counts.evicted_chunks, seen.evicted_chunks),
            (_SKIPPED, (), counts.skipped_chunks, seen.skipped_chunks),
            (_FAILED, ("store",), counts.failed_store_chunks, seen.failed_store_chunks),
            (_FAILED, ("load",), counts.failed_load_chunks, seen.failed_load_chunks),
        ):
            stats.increase_counter(name, now - before, labels)
        self._seen, self._is_first = counts, False
        return stats

    def shutdown(self) -> None:
        """Leave the region."""
        self._ledger.close()

    def _trail(self, req_context: ReqContext) -> Trail:
        trail: Trail | None = req_context.get_state(Trail)
        if trail is None or trail.generation != self._ledger.generation:
            trail = Trail(self._ledger.generation)
            req_context.set_state(trail)
        return trail


class OffManager(OffloadingManager):
    """Offload is off: nothing is found, nothing is stored, and vLLM sends its workers nothing."""

    def __init__(self) -> None:
        self._is_told = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """As usual."""
        del req_context
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Nothing is there."""
        del key, req_context
        return LookupResult.MISS

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkSpec:
        """Nothing to load: vLLM asks only for what was a hit."""
        del keys, req_context
        return ChunkSpec([])

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Nothing to store. An answer of None would make vLLM warn and ask again at each step."""
        del keys, req_context
        return PrepareStoreOutput([], ChunkSpec([]), [])

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Tell once that offload is off."""
        if self._is_told:
            return None
        self._is_told = True
        stats = OffloadingConnectorStats()
        stats.set_gauge(_ENABLED, 0)
        return stats

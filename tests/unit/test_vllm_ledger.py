"""The scheduler's book, driven as vLLM drives it, and by random moves."""

import random
from collections.abc import Sequence

import pytest

from kvcellar.errors import IndexMisuse
from kvcellar.index.policies import PolicyName
from kvcellar.index.states import Lookup
from kvcellar.plugin.ledger import ChunkEvent, Ledger, PrivateChunks, Trail
from kvcellar.region.metadata import Counters


class FakeRegion:
    """A region whose marks the test sets; it keeps what is reported."""

    def __init__(self) -> None:
        self.failed: set[int] = set()
        self.reports: list[Counters] = []
        self.is_closed = False

    def take_failed(self, chunks: list[int]) -> set[int]:
        taken = self.failed & set(chunks)
        self.failed -= taken
        return taken

    def report(self, counters: Counters) -> None:
        self.reports.append(counters)

    def close(self) -> None:
        self.is_closed = True


def key(number: int, group: int = 0) -> bytes:
    return b"%031d" % number + group.to_bytes(4, "big")


def keys(numbers: Sequence[int], group: int = 0) -> list[bytes]:
    return [key(number, group) for number in numbers]


def position_of(a_key: bytes) -> int:
    return int(a_key[:-4])


def make(num_chunks: int, policy: PolicyName = "lru") -> tuple[Ledger, FakeRegion]:
    region = FakeRegion()
    return Ledger(num_chunks, policy, region, keeps_events=True), region


def store(ledger: Ledger, wanted: Sequence[bytes], trail: Trail | None = None) -> list[bytes]:
    trail = trail or Trail(ledger.generation)
    plan = ledger.prepare_store(wanted, trail)
    ledger.complete_store(set(plan.keys), trail, position_of)
    return plan.keys


def hits(ledger: Ledger, wanted: Sequence[bytes]) -> list[Lookup]:
    return [ledger.index.lookup(one) for one in wanted]


def test_a_store_in_flight_is_pending_and_loadable_once_complete() -> None:
    ledger, _ = make(4)
    trail = Trail()
    plan = ledger.prepare_store(keys(range(2)), trail)
    assert hits(ledger, keys(range(3))) == [Lookup.PENDING, Lookup.PENDING, Lookup.MISS]
    ledger.complete_store(set(plan.keys), trail, position_of)
    assert hits(ledger, keys(range(2))) == [Lookup.HIT, Lookup.HIT]
    assert ledger.prepare_load(keys([1, 0]), trail).tolist() == plan.chunk_ids[::-1].tolist()
    ledger.complete_load(set(keys([0, 1])), is_failed=False)


def test_keys_that_are_stored_or_being_stored_are_not_stored_again() -> None:
    ledger, _ = make(8)
    trail = Trail()
    plan = ledger.prepare_store(keys(range(2)), trail)
    again = ledger.prepare_store(keys(range(4)), Trail())
    assert again.keys == keys([2, 3])
    ledger.complete_store(set(plan.keys), trail, position_of)
    assert ledger.prepare_store(keys(range(4)), Trail()).keys == []


def test_a_store_that_a_rank_marked_is_forgotten_and_its_chunk_used_again() -> None:
    ledger, region = make(2)
    trail = Trail()
    plan = ledger.prepare_store(keys(range(2)), trail)
    region.failed = {int(plan.chunk_ids[1]), 77}
    ledger.complete_store(set(plan.keys), trail, position_of)
    assert hits(ledger, keys(range(2))) == [Lookup.HIT, Lookup.MISS]
    assert region.failed == {77}
    assert ledger.counts.failed_store_chunks == 1
    assert ledger.counts.used_chunks == 1
    assert store(ledger, keys([1])) == keys([1])
    assert ledger.take_events() == [
        ChunkEvent(keys([0]), is_removed=False),
        ChunkEvent(keys([1]), is_removed=False),
    ]


def test_a_failed_load_forgets_its_keys_so_that_the_request_does_not_load_them_again() -> None:
    ledger, region = make(4)
    store(ledger, keys(range(3)))
    ledger.take_events()
    ledger.prepare_load(keys([0, 1]), Trail())
    ledger.complete_load(set(keys([0, 1])), is_failed=True)
    assert hits(ledger, keys(range(3))) == [Lookup.MISS, Lookup.MISS, Lookup.HIT]
    (event,) = ledger.take_events()
    assert event.is_removed
    assert set(event.keys) == set(keys([0, 1]))
    assert ledger.counts.failed_load_chunks == 2
    assert region.reports[-1].used_chunks == 1


def test_a_batch_evicts_others_and_never_its_own() -> None:
    ledger, _ = make(4)
    store(ledger, keys(range(4)))
    ledger.take_events()
    plan = ledger.prepare_store(keys([3, 10, 11, 12]), Trail())
    assert plan.keys == keys([10, 11, 12])
    assert set(plan.evicted) == set(keys([0, 1, 2]))
    assert ledger.take_events() == [ChunkEvent(plan.evicted, is_removed=True)]


def test_a_batch_that_does_not_fit_is_cut_to_the_head_of_each_group() -> None:
    ledger, _ = make(8)
    batch = keys(range(12)) + keys(range(8, 12), group=1)
    trail = Trail()
    plan = ledger.prepare_store(batch, trail)
    assert plan.keys == keys(range(6)) + keys([8, 9], group=1)
    assert ledger.counts.skipped_chunks == 8
    assert trail.is_cut


def test_nothing_more_of_a_request_is_stored_behind_a_cut() -> None:
    ledger, _ = make(4)
    trail = Trail()
    ledger.prepare_store(keys(range(4)), trail)
    assert ledger.prepare_store(keys([4, 5]), trail).keys == []
    ledger.complete_store(set(keys(range(4))), trail, position_of)
    assert ledger.prepare_store(keys([6]), trail).keys == []
    assert ledger.counts.skipped_chunks == 3
    assert store(ledger, keys([6])) == keys([6])


def test_a_cut_batch_of_stored_keys_is_no_cut() -> None:
    ledger, _ = make(4)
    trail = Trail(is_cut=True)
    store(ledger, keys(range(4)))
    assert ledger.prepare_store(keys(range(4)), trail).keys == []
    assert ledger.counts.skipped_chunks == 0


def test_without_chunks_nothing_is_stored_and_nothing_raises() -> None:
    ledger, _ = make(0)
    assert ledger.num_chunks == 0
    assert ledger.prepare_store(keys([0, 1]), Trail()).keys == []
    assert ledger.index.lookup(key(0)) is Lookup.MISS


def test_the_head_of_a_finished_request_is_evicted_last() -> None:
    ledger, _ = make(4)
    trail = Trail()
    for number in range(4):  # piece by piece, so that the head has become the oldest
        store(ledger, keys([number]), trail)
    ledger.finish(trail, position_of)
    store(ledger, keys([10, 11]))
    assert hits(ledger, keys(range(4))) == [Lookup.HIT, Lookup.HIT, Lookup.MISS, Lookup.MISS]


def test_the_end_of_a_request_waits_for_its_last_store() -> None:
    ledger, _ = make(4)
    trail = Trail()
    store(ledger, keys([0]), trail)
    store(ledger, keys([1]), trail)
    last = ledger.prepare_store(keys([2, 3]), trail)
    ledger.finish(trail, position_of)
    ledger.complete_store(set(last.keys), trail, position_of)
    store(ledger, keys([10, 11]))
    assert hits(ledger, keys(range(4))) == [Lookup.HIT, Lookup.HIT, Lookup.MISS, Lookup.MISS]


def test_a_reset_forgets_everything_and_frees_what_is_in_flight() -> None:
    ledger, region = make(4)
    store(ledger, keys(range(2)))
    ledger.prepare_load(keys([0]), Trail())
    ledger.prepare_store(keys([2]), Trail())
    ledger.publish()
    generation = ledger.generation
    ledger.reset()
    assert ledger.generation == generation + 1
    assert hits(ledger, keys(range(3))) == [Lookup.MISS] * 3
    assert ledger.counts.used_chunks == 0
    assert region.reports[-1].used_chunks == 0
    assert ledger.take_events() == []
    assert len(store(ledger, keys(range(4)))) == 4


def test_counters_are_published_when_they_change_and_only_then() -> None:
    ledger, region = make(4)
    ledger.publish()
    assert region.reports == []
    store(ledger, keys(range(2)))
    hits(ledger, keys(range(3)))
    ledger.publish()
    ledger.publish()
    assert region.reports == [Counters(lookup_hit=2, lookup_miss=1, used_chunks=2)]


def test_events_are_not_kept_for_nobody() -> None:
    ledger = Ledger(4, "lru", PrivateChunks(), keeps_events=False)
    store(ledger, keys(range(6)))
    assert ledger.take_events() == []


def test_closing_the_ledger_lets_go_of_the_region() -> None:
    ledger, region = make(1)
    ledger.close()
    assert region.is_closed
    Ledger(1, "lru", PrivateChunks(), keeps_events=False).close()


def test_a_load_of_what_is_no_hit_is_refused() -> None:
    ledger, _ = make(1)
    with pytest.raises(IndexMisuse):
        ledger.prepare_load(keys([0]), Trail())


class Player:
    """Makes random legal moves, as vLLM might, and checks what it is given."""

    def __init__(self, policy: PolicyName, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ledger, self.region = make(16, policy)
        self.key_in: dict[int, bytes] = {}  # by chunk: the key it was last written for
        self.stores: list[tuple[dict[bytes, int], Trail]] = []
        self.loads: list[dict[bytes, int]] = []

    def chunks_in_flight(self) -> set[int]:
        batches = [batch for batch, _ in self.stores] + self.loads
        return {chunk for batch in batches for chunk in batch.values()}

    def begin_store(self) -> None:
        first, trail = self.rng.randrange(40), Trail(self.ledger.generation)
        wanted = keys(range(first, first + self.rng.randrange(1, 9)))
        plan = self.ledger.prepare_store(wanted, trail)
        batch = dict(zip(plan.keys, plan.chunk_ids.tolist(), strict=True))
        assert not self.chunks_in_flight() & set(batch.values())
        self.key_in |= {chunk: one for one, chunk in batch.items()}
        if batch:
            self.stores.append((batch, trail))

    def end_store(self) -> None:
        if self.stores:
            batch, trail = self.stores.pop(self.rng.randrange(len(self.stores)))
            if self.rng.random() < 0.2:
                self.region.failed = {next(iter(batch.values()))}
            self.ledger.complete_store(set(batch), trail, position_of)
            self.ledger.finish(trail, position_of)

    def begin_load(self) -> None:
        found = [one for one in keys(range(48)) if self.ledger.index.lookup(one) is Lookup.HIT]
        if found:
            wanted = self.rng.sample(found, self.rng.randrange(1, min(4, len(found)) + 1))
            chunks = self.ledger.prepare_load(wanted, Trail()).tolist()
            assert [self.key_in[chunk] for chunk in chunks] == wanted
            self.loads.append(dict(zip(wanted, chunks, strict=True)))

    def end_load(self) -> None:
        if self.loads:
            batch = self.loads.pop(self.rng.randrange(len(self.loads)))
            self.ledger.complete_load(set(batch), is_failed=self.rng.random() < 0.2)

    def reset(self) -> None:
        if self.rng.random() < 0.05:
            self.ledger.reset()
            self.stores.clear()
            self.loads.clear()

    def end_everything(self) -> None:
        while self.stores:
            self.end_store()
        while self.loads:
            self.end_load()


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("seed", range(10))
def test_random_moves_keep_the_book_exact(policy: PolicyName, seed: int) -> None:
    """A load gets the chunks its keys were written to, no chunk in flight is given away, none leaks."""
    player = Player(policy, seed)
    moves = [player.begin_store, player.end_store, player.begin_load, player.end_load, player.reset]
    for _ in range(400):
        player.rng.choice(moves)()
        assert 0 <= player.ledger.counts.used_chunks <= 16
    player.end_everything()
    player.ledger.reset()
    assert player.ledger.counts.used_chunks == 0
    assert len(store(player.ledger, keys(range(100, 116)))) == 16

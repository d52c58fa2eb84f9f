"""The contract of the chunk index, call by call, for both policies."""

import numpy as np
import pytest

from kvcellar.errors import ConfigurationError, IndexMisuse
from kvcellar.index.chunks import ChunkIndex
from kvcellar.index.policies import PolicyName
from kvcellar.index.states import Lookup


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") + bytes(32)


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def counts(index: ChunkIndex) -> dict[str, int]:
    names = ("loadable", "pending", "pinned", "lingering", "free", "evictions")
    return {name: getattr(index, name) for name in names if getattr(index, name)}


@pytest.fixture(params=["lru", "arc"])
def policy(request: pytest.FixtureRequest) -> PolicyName:
    name: PolicyName = request.param
    return name


@pytest.fixture
def index(policy: PolicyName) -> ChunkIndex:
    return ChunkIndex(4, policy)


def store(index: ChunkIndex, *numbers: int) -> list[bytes]:
    plan = index.prepare_store(keys(*numbers))
    assert plan is not None
    assert sorted(index.complete_store(set(plan.keys))) == sorted(plan.keys)
    return plan.evicted


def test_a_key_is_a_miss_then_pending_then_a_hit(index: ChunkIndex) -> None:
    assert index.lookup(key(1)) is Lookup.MISS
    index.prepare_store(keys(1))
    assert index.lookup(key(1)) is Lookup.PENDING
    assert index.complete_store(keys(1)) == keys(1)
    assert index.lookup(key(1)) is Lookup.HIT
    assert counts(index) == {"loadable": 1, "free": 3}
    assert (index.num_chunks, index.used_chunks) == (4, 1)


def test_chunk_ids_follow_the_order_of_the_keys(index: ChunkIndex) -> None:
    plan = index.prepare_store(keys(1, 2, 3))
    assert plan is not None
    assert plan.keys == keys(1, 2, 3)
    assert plan.chunk_ids.dtype == np.int32
    assert sorted(plan.chunk_ids.tolist()) == [0, 1, 2]
    index.complete_store(keys(3, 1, 2))
    chunk_of = dict(zip(plan.keys, plan.chunk_ids.tolist(), strict=True))
    loaded = index.prepare_load(keys(3, 1))
    assert loaded.dtype == np.int32
    assert loaded.tolist() == [chunk_of[key(3)], chunk_of[key(1)]]
    assert index.chunk_ids(keys(9, 2)) == [-1, chunk_of[key(2)]]


def test_the_chunk_ids_handed_out_belong_to_the_receiver(index: ChunkIndex) -> None:
    store(index, 1)
    index.prepare_load(keys(1))[:] = 99
    assert index.prepare_load(keys(1)).tolist() == [0]


def test_a_prefix_ends_at_the_first_key_that_is_no_hit(index: ChunkIndex) -> None:
    store(index, 1, 2)
    index.prepare_store(keys(3))
    assert index.lookup_prefix(keys(1, 2, 3, 1)) == 2
    assert index.lookup_prefix(keys(1, 8, 2)) == 1
    assert index.lookup_prefix(keys(2, 1)) == 2
    assert index.lookup_prefix([]) == 0


def test_a_store_leaves_out_what_is_present_pending_or_given_twice(index: ChunkIndex) -> None:
    store(index, 1)
    index.prepare_store(keys(2))
    plan = index.prepare_store(keys(3, 1, 3, 2, 4))
    assert plan is not None
    assert plan.keys == keys(3, 4)
    assert counts(index) == {"loadable": 1, "pending": 3}


def test_a_store_of_nothing_new_is_an_empty_plan(index: ChunkIndex) -> None:
    store(index, 1)
    plan = index.prepare_store(keys(1))
    assert plan is not None
    assert (plan.keys, plan.chunk_ids.tolist(), plan.evicted) == ([], [], [])
    assert index.complete_store([]) == []


def test_a_full_index_evicts_the_least_recently_used(index: ChunkIndex) -> None:
    for number in (1, 2, 3, 4):
        store(index, number)
    assert store(index, 5) == keys(1)
    assert index.lookup(key(1)) is Lookup.MISS
    assert counts(index) == {"loadable": 4, "evictions": 1}


def test_the_head_of_a_batch_is_evicted_last_in_whatever_order_it_completes(
    index: ChunkIndex,
) -> None:
    index.prepare_store(keys(1, 2, 3, 4))
    index.complete_store(keys(2, 4, 1, 3))
    assert store(index, 5, 6, 7) == keys(4, 3, 2)


def test_a_load_makes_recent_in_the_order_in_which_it_was_prepared(index: ChunkIndex) -> None:
    store(index, 1, 2, 3, 4)
    index.prepare_load(keys(4, 2, 3, 1))
    index.complete_load(set(keys(1, 2, 3, 4)))
    assert store(index, 5, 6) == keys(1, 3)


def test_a_pinned_chunk_is_not_evicted_until_its_last_load_is_over(index: ChunkIndex) -> None:
    store(index, 1, 2, 3, 4)
    index.prepare_load(keys(4))
    index.prepare_load(keys(4))
    assert index.pinned == 1
    assert store(index, 5, 6, 7) == keys(3, 2, 1)
    index.complete_load(keys(4))
    assert index.prepare_store(keys(11, 12, 13, 14)) is None
    index.complete_load(keys(4))
    assert index.pinned == 0
    plan = index.prepare_store(keys(11, 12, 13, 14))
    assert plan is not None
    assert key(4) in plan.evicted


def test_a_chunk_is_pinned_until_the_last_of_five_loads_is_over(index: ChunkIndex) -> None:
    store(index, 1, 2)
    for _ in range(5):
        index.prepare_load(keys(1))
    for _ in range(4):
        index.complete_load(keys(1))
        assert index.pinned == 1
    index.complete_load(keys(1))
    assert counts(index) == {"loadable": 2, "free": 2}
    with pytest.raises(IndexMisuse):
        index.complete_load(keys(1))


def test_the_pins_of_one_chunk_are_not_those_of_another(index: ChunkIndex) -> None:
    store(index, 1, 2)
    for numbers in ((1,), (1, 2)):
        index.prepare_load(keys(*numbers))
    index.complete_load(keys(1, 2))
    assert index.pinned == 1
    index.prepare_load(keys(2))
    for numbers in ((2,), (1,)):
        index.complete_load(keys(*numbers))
    assert index.pinned == 0


def test_a_key_given_twice_in_one_load_is_pinned_once(index: ChunkIndex) -> None:
    store(index, 1)
    assert index.prepare_load(keys(1, 1)).tolist() == [0, 0]
    index.complete_load(keys(1, 1))
    assert counts(index) == {"loadable": 1, "free": 3}


@pytest.mark.parametrize(("bad", "word"), [(9, "MISS"), (3, "PENDING")])
def test_a_load_of_a_key_that_is_no_hit_is_refused_and_pins_nothing(
    index: ChunkIndex, bad: int, word: str
) -> None:
    store(index, 1, 2)
    index.prepare_store(keys(3))
    before = counts(index)
    with pytest.raises(IndexMisuse, match=f"{key(bad).hex()}.*{word}"):
        index.prepare_load(keys(1, bad, 2))
    assert counts(index) == before


def test_a_completion_of_what_is_not_in_flight_is_refused_and_changes_nothing(
    index: ChunkIndex,
) -> None:
    store(index, 1)
    index.prepare_store(keys(2))
    before = counts(index)
    for bad in (1, 9):
        with pytest.raises(IndexMisuse, match=key(bad).hex()):
            index.complete_store(keys(2, bad))
    for bad in (1, 2, 9):
        with pytest.raises(IndexMisuse, match=key(bad).hex()):
            index.complete_load(keys(bad))
    with pytest.raises(IndexMisuse, match=key(9).hex()):
        index.complete_store(keys(2), failed=keys(9))
    assert counts(index) == before


def test_a_store_that_does_not_fit_changes_nothing(index: ChunkIndex) -> None:
    store(index, 1, 2, 3)
    index.prepare_load(keys(1))
    before = counts(index)
    assert index.prepare_store(keys(5, 6, 7, 8)) is None
    # Two could go, but one of them belongs to the batch itself.
    assert index.prepare_store(keys(2, 5, 6, 7)) is None
    assert counts(index) == before
    assert store(index, 5, 6) == keys(3)


def test_a_store_never_evicts_a_key_of_its_own_batch(index: ChunkIndex) -> None:
    store(index, 4, 3, 2, 1)
    assert store(index, 1, 2, 3, 9) == keys(4)


def test_a_failed_store_is_forgotten_and_its_chunk_waits_longest(index: ChunkIndex) -> None:
    plan = index.prepare_store(keys(1, 2))
    assert plan is not None
    assert index.complete_store(set(keys(1, 2)), failed=set(keys(1))) == keys(2)
    assert index.lookup(key(1)) is Lookup.MISS
    assert counts(index) == {"loadable": 1, "free": 3}
    again = index.prepare_store(keys(1, 7, 8))
    assert again is not None
    assert again.chunk_ids.tolist()[-1] == plan.chunk_ids.tolist()[0]


def test_a_store_completes_in_portions(index: ChunkIndex) -> None:
    index.prepare_store(keys(1, 2))
    index.complete_store(keys(2))
    assert [index.lookup(k) for k in keys(1, 2)] == [Lookup.PENDING, Lookup.HIT]


def test_forget_drops_idle_keys_at_once_and_ignores_others(index: ChunkIndex) -> None:
    store(index, 1, 2)
    index.prepare_store(keys(3))
    assert sorted(index.forget(keys(1, 3, 9, 1))) == keys(1)
    assert [index.lookup(k) for k in keys(1, 2, 3)] == [Lookup.MISS, Lookup.HIT, Lookup.PENDING]
    assert counts(index) == {"loadable": 1, "pending": 1, "free": 2}


def test_a_forgotten_key_that_is_pinned_is_not_found_and_not_stored_until_its_loads_are_over(
    index: ChunkIndex,
) -> None:
    store(index, 1, 2)
    index.prepare_load(keys(1))
    index.prepare_load(keys(1, 2))
    assert index.forget(keys(1)) == keys(1)
    assert index.lookup(key(1)) is Lookup.MISS
    index.complete_load(keys(1))
    plan = index.prepare_store(keys(1))
    assert plan is not None
    assert plan.keys == []
    assert counts(index) == {"loadable": 1, "pinned": 1, "lingering": 1, "free": 2}
    index.complete_load(keys(1, 2))
    assert counts(index) == {"loadable": 1, "free": 3}
    assert store(index, 1) == []


def test_reset_drops_everything(index: ChunkIndex) -> None:
    store(index, 1, 2, 3, 4)
    index.reset()
    assert [index.lookup(k) for k in keys(1, 2, 3, 4)] == [Lookup.MISS] * 4
    assert counts(index) == {"free": 4}
    assert store(index, 5, 2, 3, 4) == []


def test_a_store_from_before_a_reset_completes_harmlessly(index: ChunkIndex) -> None:
    index.prepare_store(keys(1, 2))
    index.reset()
    assert index.lookup(key(1)) is Lookup.MISS
    # Its chunk is still written to, so the key cannot get another one yet.
    plan = index.prepare_store(keys(1, 3))
    assert plan is not None
    assert plan.keys == keys(3)
    assert index.complete_store(keys(1, 2, 3), failed=keys(2)) == keys(3)
    assert counts(index) == {"loadable": 1, "free": 3}
    assert index.lookup(key(1)) is Lookup.MISS


def test_a_load_from_before_a_reset_completes_harmlessly(index: ChunkIndex) -> None:
    store(index, 1, 2)
    index.prepare_load(keys(1, 2))
    index.prepare_load(keys(1))
    index.forget(keys(2))
    index.reset()
    index.reset()
    assert counts(index) == {"lingering": 2, "free": 2}
    index.complete_load(keys(1, 2))
    assert counts(index) == {"lingering": 1, "free": 3}
    index.complete_load(keys(1))
    assert counts(index) == {"free": 4}


def test_abandon_stale_frees_what_a_reset_left_and_nothing_else(index: ChunkIndex) -> None:
    store(index, 1, 2)
    index.prepare_load(keys(1))
    index.prepare_load(keys(1))
    index.prepare_store(keys(3))
    index.reset()
    store(index, 4)
    index.prepare_load(keys(4))
    index.forget(keys(4))
    assert index.abandon_stale() == 2
    assert counts(index) == {"lingering": 1, "free": 3}
    with pytest.raises(IndexMisuse):
        index.complete_store(keys(3))
    index.complete_load(keys(4))
    assert store(index, 1, 2, 3, 4) == []
    index.prepare_load(keys(1))
    index.complete_load(keys(1))
    assert index.pinned == 0


def test_the_pins_of_an_abandoned_load_are_not_those_of_the_next_key(policy: PolicyName) -> None:
    index = ChunkIndex(1, policy)
    store(index, 1)
    for _ in range(2):
        index.prepare_load(keys(1))
    index.reset()
    assert index.abandon_stale() == 1
    store(index, 2)
    index.prepare_load(keys(2))
    index.complete_load(keys(2))
    assert counts(index) == {"loadable": 1}


def test_each_lookup_counts_and_other_questions_do_not(index: ChunkIndex) -> None:
    store(index, 1)
    index.prepare_store(keys(2))
    for number in (1, 1, 2, 3, 3, 3):
        index.lookup(key(number))
    index.lookup_prefix(keys(1, 2))
    assert index.missing(keys(3, 1, 2, 4)) == keys(3, 4)
    assert index.lookups == (3, 1, 2)


def test_refresh_ignores_unknown_and_pending_keys(index: ChunkIndex) -> None:
    index.prepare_store(keys(1))
    index.refresh(keys(1, 9))
    assert counts(index) == {"pending": 1, "free": 3}


def test_refresh_makes_recent_the_head_most(index: ChunkIndex) -> None:
    for number in (1, 2, 3, 4):
        store(index, number)
    index.refresh(keys(1, 2, 3, 4, 1))
    assert store(index, 5, 6) == keys(4, 3)


def test_without_chunks_everything_misses_and_no_store_fits(policy: PolicyName) -> None:
    index = ChunkIndex(0, policy)
    assert index.lookup(key(1)) is Lookup.MISS
    assert index.lookup_prefix(keys(1)) == 0
    assert index.prepare_store(keys(1)) is None
    plan = index.prepare_store([])
    assert plan is not None
    assert plan.keys == []
    assert index.prepare_load([]).tolist() == []
    index.refresh(keys(1))
    assert index.forget(keys(1)) == []
    index.reset()
    assert index.abandon_stale() == 0
    with pytest.raises(IndexMisuse):
        index.prepare_load(keys(1))
    assert counts(index) == {}


def test_an_index_of_impossible_size_or_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="-1"):
        ChunkIndex(-1)
    with pytest.raises(ConfigurationError, match=r"fifo.*'lru' and 'arc'"):
        ChunkIndex(1, "fifo")  # type: ignore[arg-type]

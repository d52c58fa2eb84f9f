"""No call of the index costs more because the index is large or much of it is pinned.

Cost is counted, not timed: the bytecodes that Python executes during a call. Calls into C are one
step each, so these tests also look at the two structures whose C code could take long.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from kvcellar.index.chunks import ChunkIndex
from kvcellar.index.keytable import Key, KeyTable
from kvcellar.index.policies import PolicyName
from kvcellar.index.policy import LruPolicy

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def steps(call: Callable[[], object]) -> int:
    """Bytecodes executed by a call, without those of callbacks of the garbage collector."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> "TraceFunction":
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") * 9


def fill(index: ChunkIndex, numbers: Sequence[int]) -> list[bytes]:
    keys = [key(number) for number in numbers]
    plan = index.prepare_store(keys)
    assert plan is not None
    index.complete_store(keys)
    return keys


def full_index(policy: PolicyName, num_chunks: int, num_pinned: int) -> ChunkIndex:
    """A full index whose least recently used chunks are pinned, and which has evicted before."""
    index = ChunkIndex(num_chunks, policy)
    fill(index, range(num_chunks, 2 * num_chunks))
    pinned = fill(index, range(num_pinned))
    fill(index, range(num_pinned, num_chunks))
    index.prepare_load(pinned)
    return index


def one_key_store(index: ChunkIndex) -> int:
    """Steps of a store that evicts one key."""
    fill(index, [10**6])  # so that tiers and ghosts are in their steady state
    before = index.evictions
    count = steps(lambda: index.prepare_store([key(10**6 + 1)]))
    assert index.evictions == before + 1
    return count


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_an_eviction_takes_the_same_steps_beside_50000_pinned_chunks_as_beside_100(
    policy: PolicyName,
) -> None:
    few, many = full_index(policy, 60_000, 100), full_index(policy, 60_000, 50_000)
    assert (few.pinned, many.pinned) == (100, 50_000)
    assert one_key_store(many) == one_key_store(few)


def test_a_policy_that_scans_pinned_chunks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LruPolicy.admit

    def admit(
        self: LruPolicy, keys: Sequence[Key], slots: Sequence[int], free: Sequence[int]
    ) -> tuple[list[int], list[Key]]:
        for _ in range(self.evictable):
            pass
        return real(self, keys, slots, free)

    few, many = full_index("lru", 200, 0), full_index("lru", 2000, 0)
    monkeypatch.setattr(LruPolicy, "admit", admit)
    assert one_key_store(many) > 5 * one_key_store(few)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_no_call_takes_more_steps_in_a_larger_index(policy: PolicyName) -> None:
    def count_all(num_chunks: int) -> dict[str, int]:
        index = full_index(policy, num_chunks, num_chunks // 2)
        batch = fill(index, range(10**6, 10**6 + 8))
        new = [key(number) for number in range(2 * 10**6, 2 * 10**6 + 8)]
        return {
            "lookup": steps(lambda: index.lookup(batch[0])),
            "lookup_prefix": steps(lambda: index.lookup_prefix(batch)),
            "chunk_ids": steps(lambda: index.chunk_ids(batch)),
            "refresh": steps(lambda: index.refresh(batch)),
            "prepare_load": steps(lambda: index.prepare_load(batch)),
            "complete_load": steps(lambda: index.complete_load(set(batch))),
            "prepare_store": steps(lambda: index.prepare_store(batch[:4] + new)),
            "complete_store": steps(lambda: index.complete_store(new, failed=new[:2])),
            "forget": steps(lambda: index.forget(new)),
            "counts": steps(lambda: (index.used_chunks, index.pinned, index.lingering, index.free)),
        }

    assert count_all(100) == count_all(20_000)


def test_keys_are_spread_so_that_no_dict_is_large() -> None:
    table = KeyTable(25_600)
    table.assign(range(25_600), [bytes([number % 256]) + key(number) for number in range(25_600)])
    lists = [part for part in gc.get_referents(table) if isinstance(part, list)]
    dicts = [part for part in gc.get_referents(*lists) if isinstance(part, dict)]
    assert [len(part) for part in dicts] == [100] * 256


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_chunks_leave_nothing_for_the_garbage_collector(policy: PolicyName) -> None:
    def tracked(num_chunks: int) -> int:
        gc.collect()
        before = len(gc.get_objects())
        index = full_index(policy, num_chunks, num_chunks // 2)
        gc.collect()
        after = len(gc.get_objects())
        assert index.loadable == num_chunks
        return after - before

    tracked(10)
    assert tracked(5000) - tracked(100) <= 20

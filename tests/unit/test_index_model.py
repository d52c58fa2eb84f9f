"""Random legal moves of the chunk index against a model that is slow and obvious."""

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcellar.index.chunks import ChunkIndex
from kvcellar.index.policies import PolicyName
from kvcellar.index.policy import LruPolicy
from kvcellar.index.states import Lookup

NUM_CHUNKS = 5
KEYS = [bytes([number % 3, number]) for number in range(11)]
"""Few enough to come back often; some share the first byte."""

batches = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)


class ModelLru:
    """The idle keys, least recently used first; the others by their last use."""

    def __init__(self, num_chunks: int) -> None:
        self.idle: list[bytes] = []
        self.held: list[bytes] = []

    def hold(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.idle:
                self.idle.remove(key)
                self.held.append(key)

    def release(self, keys: Sequence[bytes]) -> None:
        for key in [key for key in self.held if key in keys]:
            self.held.remove(key)
            self.idle.append(key)

    def refresh(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.idle:
                self.idle.remove(key)
                self.idle.append(key)

    def admit(self, keys: Sequence[bytes], num_free: int) -> list[bytes]:
        evicted = [self.idle.pop(0) for _ in keys[num_free:]]
        self.held.extend(reversed(keys))
        return evicted

    def drop(self, key: bytes) -> None:
        for keys in (self.idle, self.held):
            if key in keys:
                keys.remove(key)


class ModelArc:
    """ARC over lists: T1 and T2 hold every resident key, and a victim is the first that is idle."""

    def __init__(self, num_chunks: int) -> None:
        self.c = num_chunks
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0.0
        self.held: list[bytes] = []  # by last use

    def promote(self, key: bytes) -> None:
        tier = self.t1 if key in self.t1 else self.t2
        tier.remove(key)
        self.t2.append(key)

    def hold(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.t1 + self.t2 and key not in self.held:
                self.promote(key)
                self.held.append(key)

    def release(self, keys: Sequence[bytes]) -> None:
        for key in [key for key in self.held if key in keys]:
            self.held.remove(key)
            tier = self.t1 if key in self.t1 else self.t2
            tier.remove(key)
            tier.append(key)

    def refresh(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            for tier in (self.t1, self.t2):
                if key in tier and key not in self.held:
                    tier.remove(key)
                    tier.append(key)

    def admit(self, keys: Sequence[bytes], num_free: int) -> list[bytes]:
        evicted = []
        for position, key in enumerate(keys):
            victim = self.request(key, evicts=position >= num_free)
            if victim is not None:
                evicted.append(victim)
        for key in reversed(keys):
            self.held.remove(key)
            self.held.append(key)
        return evicted

    def request(self, key: bytes, *, evicts: bool) -> bytes | None:
        """One miss: cases II, III and IV of the paper's figure 4."""
        victim = None
        self.held.append(key)
        if key in self.b1:
            self.p = min(self.c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self.b1.remove(key)
            victim = self.replace(tie=False, ghost=True) if evicts else None
            self.t2.append(key)
        elif key in self.b2:
            self.p = max(0.0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self.b2.remove(key)
            victim = self.replace(tie=True, ghost=True) if evicts else None
            self.t2.append(key)
        else:
            ghost = True
            if len(self.t1) + len(self.b1) == self.c:
                if self.b1:
                    self.b1.pop(0)
                else:
                    ghost = False
            elif evicts and (
                len(self.t1 + self.t2 + self.b1 + self.b2) == 2 * self.c
                or len(self.b1 + self.b2) == self.c
            ):
                self.b2.pop(0)
            victim = self.replace(tie=False, ghost=ghost) if evicts else None
            self.t1.append(key)
        return victim

    def replace(self, *, tie: bool, ghost: bool) -> bytes:
        idle1 = [key for key in self.t1 if key not in self.held]
        idle2 = [key for key in self.t2 if key not in self.held]
        from_t1 = len(self.t1) > self.p or (tie and len(self.t1) == self.p)
        if not (idle1 if from_t1 else idle2):
            from_t1 = not from_t1
        victim = (idle1 if from_t1 else idle2)[0]
        (self.t1 if from_t1 else self.t2).remove(victim)
        if ghost:
            (self.b1 if from_t1 else self.b2).append(victim)
        return victim

    def drop(self, key: bytes) -> None:
        for keys in (self.t1, self.t2, self.held):
            if key in keys:
                keys.remove(key)


@dataclasses.dataclass
class Chunk:
    """What the model knows of a key that has a chunk."""

    chunk: int
    state: str  # writing, loadable, forgotten, stale load, stale store
    pins: int = 0


MODELS: dict[PolicyName, Callable[[int], ModelLru | ModelArc]] = {"lru": ModelLru, "arc": ModelArc}


class IndexMachine(RuleBasedStateMachine):
    """Moves that a scheduler may make, each made in the index and in the model."""

    policy: PolicyName

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(NUM_CHUNKS, self.policy)
        self.order = MODELS[self.policy](NUM_CHUNKS)
        self.chunks: dict[bytes, Chunk] = {}
        self.free = list(range(NUM_CHUNKS))
        self.loads: list[list[bytes]] = []
        self.evictions = 0
        self.random = random.Random(7)

    def idle(self) -> list[bytes]:
        return [
            key
            for key, chunk in self.chunks.items()
            if (chunk.state, chunk.pins) == ("loadable", 0)
        ]

    def in_flight(self) -> list[bytes]:
        return [
            key for key, chunk in self.chunks.items() if chunk.state in ("writing", "stale store")
        ]

    def let_go(self, key: bytes) -> None:
        self.free.append(self.chunks.pop(key).chunk)

    @rule(batch=batches)
    def prepare_store(self, batch: list[bytes]) -> None:
        new = [key for key in dict.fromkeys(batch) if key not in self.chunks]
        own = [key for key in dict.fromkeys(batch) if key in self.idle()]
        plan = self.index.prepare_store(batch)
        if len(new) > len(self.free) + len(self.idle()) - len(own):
            assert plan is None
            return
        assert plan is not None
        assert plan.keys == new
        self.order.hold(own)
        num_free = min(len(new), len(self.free))
        evicted = self.order.admit(new, num_free)
        self.order.release(own)
        assert plan.evicted == evicted
        assert not set(evicted) & set(batch)
        assert set(evicted) <= set(self.idle())
        expected = self.free[:num_free] + [self.chunks[key].chunk for key in evicted]
        assert sorted(plan.chunk_ids.tolist()) == sorted(expected)
        assert plan.chunk_ids.tolist()[:num_free] == self.free[:num_free]
        del self.free[:num_free]
        for key in evicted:
            del self.chunks[key]
        for key, chunk in zip(new, plan.chunk_ids.tolist(), strict=True):
            self.chunks[key] = Chunk(chunk, "writing")
        self.evictions += len(evicted)

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def complete_store(self, data: st.DataObject) -> None:
        over = data.draw(st.lists(st.sampled_from(self.in_flight()), min_size=1, unique=True))
        failed = data.draw(st.lists(st.sampled_from(over), unique=True))
        stored = [key for key in over if self.chunks[key].state == "writing" and key not in failed]
        # Free chunks come stale ones first, then the failed, each in the order of the call.
        for state in ("stale store", "writing"):
            for key in [key for key in over if key not in stored]:
                if key in self.chunks and self.chunks[key].state == state:
                    self.order.drop(key)
                    self.let_go(key)
        assert self.index.complete_store(over, failed=set(failed)) == stored
        for key in stored:
            self.chunks[key].state = "loadable"
        self.order.release(stored)

    @precondition(lambda self: any(chunk.state == "loadable" for chunk in self.chunks.values()))
    @rule(data=st.data())
    def prepare_load(self, data: st.DataObject) -> None:
        loadable = [key for key, chunk in self.chunks.items() if chunk.state == "loadable"]
        batch = data.draw(st.lists(st.sampled_from(loadable), min_size=1, max_size=4))
        ids = self.index.prepare_load(batch)
        assert ids.tolist() == [self.chunks[key].chunk for key in batch]
        self.order.hold([key for key in dict.fromkeys(batch) if self.chunks[key].pins == 0])
        for key in set(batch):
            self.chunks[key].pins += 1
        self.loads.append(batch)

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        batch = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        over = list(dict.fromkeys(batch))
        self.random.shuffle(over)
        self.index.complete_load(over)
        for key in over:
            self.chunks[key].pins -= 1
        unpinned = [key for key in over if self.chunks[key].pins == 0]
        self.order.release([key for key in unpinned if self.chunks[key].state == "loadable"])
        for state in ("forgotten", "stale load"):
            for key in unpinned:
                if key in self.chunks and self.chunks[key].state == state:
                    self.let_go(key)

    @rule(batch=batches)
    def refresh(self, batch: list[bytes]) -> None:
        self.index.refresh(batch)
        self.order.refresh([key for key in dict.fromkeys(batch) if key in self.idle()])

    @rule(batch=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2))
    def forget(self, batch: list[bytes]) -> None:
        gone = [
            key
            for key in dict.fromkeys(batch)
            if key in self.chunks and self.chunks[key].state == "loadable"
        ]
        assert sorted(self.index.forget(batch)) == sorted(gone)
        for key in gone:
            self.order.drop(key)
            self.chunks[key].state = "forgotten"
            if self.chunks[key].pins == 0:
                self.let_go(key)

    @precondition(lambda self: self.random.random() < 0.2)  # rare, or nothing ever fills
    @rule()
    def reset(self) -> None:
        self.index.reset()
        stale = {"writing": "stale store", "loadable": "stale load", "forgotten": "stale load"}
        for key in self.idle():
            del self.chunks[key]
        for chunk in self.chunks.values():
            chunk.state = stale.get(chunk.state, chunk.state)
        self.order = MODELS[self.policy](NUM_CHUNKS)
        # The order of the free chunks after a reset is the policy's secret: learn it.
        self.learn_free()

    def learn_free(self) -> None:
        held = {chunk.chunk for chunk in self.chunks.values()}
        self.free = [chunk for chunk in range(NUM_CHUNKS) if chunk not in held]
        keys = [b"\xff" + bytes([chunk]) for chunk in self.free]
        plan = self.index.prepare_store(keys)
        assert plan is not None
        assert sorted(plan.chunk_ids.tolist()) == self.free
        # Failed in this order, they are free in this order.
        self.index.complete_store(keys, failed=keys)
        self.free = plan.chunk_ids.tolist()

    @rule()
    def abandon_stale(self) -> None:
        gone = [key for key, chunk in self.chunks.items() if chunk.state.startswith("stale")]
        gone.sort(key=lambda key: (self.chunks[key].state, self.chunks[key].chunk))
        assert self.index.abandon_stale() == len(gone)
        self.loads = [[key for key in batch if key not in gone] for batch in self.loads]
        self.loads = [batch for batch in self.loads if batch]
        for key in gone:
            self.let_go(key)

    @invariant()
    def lookups_agree(self) -> None:
        answers = {"loadable": Lookup.HIT, "writing": Lookup.PENDING}
        for key in KEYS:
            state = self.chunks[key].state if key in self.chunks else ""
            assert self.index.lookup(key) is answers.get(state, Lookup.MISS), (key, state)
        expected = [self.chunks[key].chunk if key in self.chunks else -1 for key in KEYS]
        assert self.index.chunk_ids(KEYS) == expected

    @invariant()
    def counts_are_exact(self) -> None:
        states = [chunk.state for chunk in self.chunks.values()]
        pinned = [c for c in self.chunks.values() if c.state == "loadable" and c.pins]
        index = self.index
        assert index.num_chunks == NUM_CHUNKS == index.used_chunks + index.lingering + index.free
        assert index.loadable == states.count("loadable")
        assert index.pending == states.count("writing")
        assert index.used_chunks == index.loadable + index.pending
        assert index.pinned == len(pinned)
        assert index.lingering == len(states) - index.used_chunks
        assert index.free == len(self.free)
        assert index.evictions == self.evictions

    @invariant()
    def every_chunk_is_in_one_place(self) -> None:
        places = [chunk.chunk for chunk in self.chunks.values()] + self.free
        assert sorted(places) == list(range(NUM_CHUNKS))

    @invariant()
    def ghosts_are_bounded(self) -> None:
        order = self.order
        if isinstance(order, ModelArc):
            assert len(order.b1) + len(order.b2) <= NUM_CHUNKS
            assert len(order.t1) + len(order.b1) <= NUM_CHUNKS
            assert not set(order.b1 + order.b2) & set(order.t1 + order.t2)


class LruMachine(IndexMachine):
    policy: PolicyName = "lru"


class ArcMachine(IndexMachine):
    policy: PolicyName = "arc"


WALKS = settings(
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.properties
@pytest.mark.parametrize("machine", [LruMachine, ArcMachine])
def test_random_legal_moves_agree_with_the_model(machine: type[IndexMachine]) -> None:
    run_state_machine_as_test(machine, settings=WALKS)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("num_chunks", [3, 8])
def test_long_walks_agree_on_every_victim(policy: PolicyName, num_chunks: int) -> None:
    """What short histories do not reach: full ghost lists, keys that come back, ghosts that age out."""
    choose = random.Random(num_chunks)
    pool = [bytes([1 + number % 5, number]) for number in range(3 * num_chunks)]
    index, order = ChunkIndex(num_chunks, policy), MODELS[policy](num_chunks)
    for step in range(3000):
        # Times of much reuse and times of scans, so that the target moves both ways.
        reach = len(pool) if step // 150 % 2 else num_chunks + 2
        batch = list(dict.fromkeys(choose.choices(pool[:reach], k=choose.randint(1, num_chunks))))
        hits = [key for key in batch if index.lookup(key) is Lookup.HIT]
        if choose.random() < 0.2:
            index.prepare_load(hits)
            index.complete_load(set(hits))
            order.hold(hits)
            order.release(hits)
        elif choose.random() < 0.05:
            index.forget(hits)
            for key in hits:
                order.drop(key)
        else:
            new = [key for key in batch if key not in hits]
            order.hold(hits)
            evicted = order.admit(new, min(len(new), index.free))
            order.release(hits)
            plan = index.prepare_store(batch)
            assert plan is not None
            assert plan.evicted == evicted
            index.complete_store(set(plan.keys))
            order.release(new)
    assert index.evictions > 1000


def test_the_model_notices_an_index_that_evicts_what_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hold(self: LruPolicy, chunks: Sequence[int]) -> None:
        self.refresh(chunks)  # the chunks stay listed

    monkeypatch.setattr(LruPolicy, "hold", hold)
    thorough = settings(
        WALKS,
        max_examples=500,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        print_blob=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(LruMachine, settings=thorough)

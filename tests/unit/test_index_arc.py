"""ARC against the paper's own algorithm: one request at a time, nothing pinned."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcellar.index.chunks import ChunkIndex
from kvcellar.index.states import Lookup


class PaperArc:
    """ARC(c) of figure 4, Megiddo and Modha 2003, line by line. Lists are LRU first."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []

    def request(self, x: bytes) -> None:
        if x in self.t1 + self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
        elif x in self.b1:
            delta = 1.0 if len(self.b1) >= len(self.b2) else len(self.b2) / len(self.b1)
            self.p = min(self.p + delta, self.c)
            self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
        elif x in self.b2:
            delta = 1.0 if len(self.b2) >= len(self.b1) else len(self.b1) / len(self.b2)
            self.p = max(self.p - delta, 0)
            self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
        else:
            self.miss(x)

    def miss(self, x: bytes) -> None:
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace(x)
            else:
                self.t1.pop(0)
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if total >= self.c:
                if total == 2 * self.c:
                    self.b2.pop(0)
                self.replace(x)
        self.t1.append(x)

    def replace(self, x: bytes) -> None:
        size = len(self.t1)
        if size >= 1 and (size > self.p or (x in self.b2 and size == self.p)):
            self.b1.append(self.t1.pop(0))
        else:
            self.b2.append(self.t2.pop(0))


def serve(index: ChunkIndex, key: bytes) -> None:
    """One request: a load of what is there, a store of what is not."""
    if index.lookup(key) is Lookup.HIT:
        index.prepare_load([key])
        index.complete_load([key])
    else:
        plan = index.prepare_store([key])
        assert plan is not None
        index.complete_store(plan.keys)


def agree(trace: list[int], num_chunks: int) -> PaperArc:
    paper, index = PaperArc(num_chunks), ChunkIndex(num_chunks, "arc")
    for number in trace:
        key = number.to_bytes(2, "little")
        paper.request(key)
        serve(index, key)
        resident = {key for key in paper.t1 + paper.t2 if index.lookup(key) is Lookup.HIT}
        assert resident == set(paper.t1 + paper.t2)
        assert index.loadable == len(resident)
    return paper


@given(st.lists(st.integers(0, 12), max_size=120), st.integers(1, 6))
@example([0, 1, 0, 2, 1, 2, 0], 1)
def test_arc_keeps_what_the_paper_keeps(trace: list[int], num_chunks: int) -> None:
    agree(trace, num_chunks)


@pytest.mark.parametrize("seed", range(3))
def test_arc_keeps_what_the_paper_keeps_over_a_long_trace(seed: int) -> None:
    choose = random.Random(seed)
    trace = [round(choose.paretovariate(0.7)) % 150 for _ in range(1000)]
    # A scan in the middle, which is what ARC resists.
    trace[400:400] = range(200, 300)
    paper = agree(trace, 20)
    assert paper.b1
    assert paper.b2
    assert paper.p > 0


def test_keys_used_again_survive_a_scan_that_would_flush_lru() -> None:
    survivors = {}
    for policy in ("lru", "arc"):
        index = ChunkIndex(20, policy)
        hot = [bytes([1, number]) for number in range(10)]
        for key in hot * 3:
            serve(index, key)
        for number in range(200):
            serve(index, bytes([2, number]))
        survivors[policy] = sum(index.lookup(key) is Lookup.HIT for key in hot)
    assert survivors == {"lru": 0, "arc": 10}

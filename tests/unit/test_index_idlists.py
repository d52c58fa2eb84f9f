"""The two structures below the chunk index."""

import random

import pytest

from kvcellar.index import idlists
from kvcellar.index.idlists import IdLists
from kvcellar.index.keytable import ABSENT, KeyTable


def test_ids_leave_a_list_in_the_order_in_which_they_came() -> None:
    lists = IdLists(6, 2)
    lists.append(0, [3, 1, 4])
    lists.append(1, [5, 0])
    lists.move_to_end(0, [3])
    lists.remove(0, [4])
    assert lists.sizes == [2, 2]
    assert lists.take(0, 2) == [1, 3]
    assert lists.take(1, 1) == [5]
    assert lists.sizes == [0, 1]


def test_ids_move_to_the_end_one_by_one_or_in_runs() -> None:
    rng = random.Random(5)
    for _ in range(300):
        lists, order = IdLists(8, 2), rng.sample(range(8), 8)
        lists.append(1, order)
        for _ in range(4):
            first = rng.randrange(8)
            run = order[first : first + rng.randrange(5)]
            moved = run + rng.choices(range(8), k=rng.randrange(4))
            lists.move_to_end(1, moved)
            for node in moved:
                order.remove(node)
                order.append(node)
        assert lists.sizes == [0, 8]
        assert lists.take(1, 8) == order


def test_a_whole_list_moves_in_front_of_another() -> None:
    lists = IdLists(6, 3)
    lists.append(0, [1, 2])
    lists.append(1, [3, 4])
    lists.move_all(1, 0)
    lists.move_all(1, 0)
    lists.move_all(0, 2)
    lists.append(0, [5])
    assert lists.sizes == [1, 0, 4]
    assert lists.take(2, 4) == [3, 4, 1, 2]
    assert lists.take(0, 1) == [5]


def test_stamps_order_ids_the_first_of_a_batch_last() -> None:
    lists = IdLists(6, 1)
    lists.stamp([4, 2])
    lists.stamp([0, 5])
    assert lists.by_stamp([0, 2, 4, 5]) == [2, 4, 5, 0]


def test_stamps_start_again_before_they_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idlists, "_MAX_STAMP", 5)
    lists = IdLists(6, 1)
    for _ in range(3):
        lists.stamp([0, 1, 2])
        assert lists.by_stamp([0, 1, 2]) == [2, 1, 0]


def test_a_table_answers_for_keys_it_does_not_have() -> None:
    table = KeyTable(3)
    table.assign([2, 0], [b"a", b"b"])
    assert table.find_all([b"b", b"x", b"a"]) == [0, ABSENT, 2]
    marks = bytearray([7, 0, 7, 0])
    assert table.find_marked([b"x", b"a", b"b"], marks, 7) == [2, 0]
    assert table.count_leading([b"a", b"b", b"x"], marks, 7) == 2
    assert table.keys_of([0, 2]) == [b"b", b"a"]


def test_a_table_moves_a_key_to_another_slot() -> None:
    table = KeyTable(3)
    table.assign([0], [b"a"])
    table.assign([1], [b"a"])
    table.assign([0], [b"b"])
    assert table.find_all([b"a", b"b"]) == [1, 0]
    table.retain([1])
    assert table.find_all([b"a", b"b"]) == [1, ABSENT]

"""Ordered lists over a fixed set of ids: every move takes the same time however many ids there are.

The lists are doubly linked and *intrusive*: the links of an id are entries of two Python lists made once,
so that no move resizes anything or leaves an object for the garbage collector. The list a caller
names is itself a node, behind the ids::

    node   0 .. num_ids-1                        | num_ids + list
    next   the id after this one, or the list    | first id
           (of an id in no list: its stamp)      |
    prev   the id before this one, or the list   | last id

Invariants: an id is in one list or in none; a stamp is higher than those given before it. (Stamps
start again after 2^31; one batch that is held meanwhile then loses its order, nothing else.)

All methods take batches, because in Python the call costs more than the move. The caller knows which
list an id is in; nothing is checked on this level. One thread at a time.

This module must not know what the ids stand for.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

_NO_ID = (-1,)
_MAX_STAMP = 2**31 - 1
"""So that stamps stay small integers, however long an engine runs."""


class IdLists:
    """`num_lists` lists over the ids `[0, num_ids)`; each id starts in no list.

    Attributes:
        sizes: how many ids each list has; for reading only.
    """

    def __init__(self, num_ids: int, num_lists: int) -> None:
        """Allocate everything that the lists will ever need."""
        self._num_ids = num_ids
        self._next = list(range(num_ids + num_lists))
        self._prev = self._next.copy()
        self.sizes = [0] * num_lists
        self._stamp = 0

    def append(self, which: int, nodes: Sequence[int]) -> None:
        """Put ids that are in no list at the end of a list, in the order given."""
        next_, prev = self._next, self._prev
        head = self._num_ids + which
        last = prev[head]
        for node in nodes:
            next_[last] = node
            prev[node] = last
            last = node
        next_[last] = head
        prev[head] = last
        self.sizes[which] += len(nodes)

    def remove(self, which: int, nodes: Sequence[int]) -> None:
        """Take ids out of the list that they are in."""
        next_, prev = self._next, self._prev
        for node in nodes:
            before = prev[node]
            after = next_[node]
            next_[before] = after
            prev[after] = before
        self.sizes[which] -= len(nodes)

    def move_to_end(self, which: int, nodes: Iterable[int]) -> None:
        """Put ids that are in a list at its end, in the order given; one given twice is moved twice.

        Ids that follow each other in the list already, as those of a prefix do, are moved as one run.
        """
        next_, prev = self._next, self._prev
        head = self._num_ids + which
        last = end = prev[head]
        start = head
        for node in chain(nodes, _NO_ID):
            if next_[end] == node:
                end = node
                continue
            if end != last:
                before = prev[start]
                after = next_[end]
                next_[before] = after
                prev[after] = before
                next_[last] = start
                prev[start] = last
                next_[end] = head
                last = end
            start = end = node
        prev[head] = last

    def recount(self, source: int, target: int, count: int) -> None:
        """Count some ids of a list to another one that the caller moves or takes them from at once.

        The links of an id do not tell its list, only the sizes do. This saves the caller one move.
        """
        self.sizes[source] -= count
        self.sizes[target] += count

    def take(self, which: int, count: int) -> list[int]:
        """Remove the first `count` ids of a list, which has to have them; returns them in order."""
        next_ = self._next
        head = self._num_ids + which
        node = next_[head]
        taken = []
        for _ in range(count):
            taken.append(node)
            node = next_[node]
        next_[head] = node
        self._prev[node] = head
        self.sizes[which] -= count
        return taken

    def transfer(self, source: int, target: int, count: int) -> list[int]:
        """Move the first `count` ids of a list, which has to have them, to the end of a list.

        Returns them in order.
        """
        if count == 0:
            return []
        next_, prev = self._next, self._prev
        source_head, target_head = self._num_ids + source, self._num_ids + target
        node = next_[source_head]
        moved = []
        for _ in range(count):
            moved.append(node)
            node = next_[node]
        next_[source_head], prev[node] = node, source_head
        last = prev[target_head]
        next_[last], prev[moved[0]] = moved[0], last
        next_[moved[-1]], prev[target_head] = target_head, moved[-1]
        self.sizes[source] -= count
        self.sizes[target] += count
        return moved

    def stamp(self, nodes: Sequence[int]) -> None:
        """Stamp ids that are in no list, the first of them with the highest stamp."""
        next_ = self._next
        stamp = self._stamp + len(nodes)
        if stamp > _MAX_STAMP:
            stamp = len(nodes)
        self._stamp = stamp
        for node in nodes:
            next_[node] = stamp
            stamp -= 1

    def by_stamp(self, nodes: Iterable[int]) -> list[int]:
        """Put ids that are in no list in the order of their stamps, lowest first."""
        return sorted(nodes, key=self._next.__getitem__)

    def move_all(self, source: int, target: int) -> None:
        """Put a whole list in front of another, in constant time."""
        if self.sizes[source]:
            next_, prev = self._next, self._prev
            source_head, target_head = self._num_ids + source, self._num_ids + target
            first, last, follower = next_[source_head], prev[source_head], next_[target_head]
            next_[target_head], prev[first] = first, target_head
            next_[last], prev[follower] = follower, last
            next_[source_head] = prev[source_head] = source_head
            self.sizes[target] += self.sizes[source]
            self.sizes[source] = 0

"""A two-way table between keys and slots that is never rebuilt as a whole.

A Python dict that is inserted into and deleted from is rebuilt every so often: with 100,000 keys
that took 9 ms, with a million 100 ms, inside a scheduler step (2-core KVM guest, Zen 4, CPython
3.11, December 2026). The table spreads its keys over 256 dicts by their first byte, so that a rebuild concerns a
256th of it. Keys are hashes, so the first byte spreads them well; other keys are served as
correctly, only with longer rebuilds. The garbage collector does not look into dicts from bytes to
int.

Invariants: a key has one slot and a slot at most one key.

This module must not know what the slots stand for.
"""

from collections.abc import Collection, Iterable, Sequence

Key = bytes
"""What names a KV chunk: at least one byte, opaque, compared whole."""

ABSENT = -1
"""The slot of a key that the table does not have. As an index it reads the *last* entry of an array,
so an array over slots with one spare entry at its end answers for absent keys too."""

_NUM_SHARDS = 256


class KeyTable:
    """Keys of the slots `[0, num_slots)`.

    Batches must not hold a key or a slot twice; nothing is checked on this level. One thread at a time.

    Attributes:
        shards: by a key's first byte, its slot by key; always these dicts, for reading only.
    """

    def __init__(self, num_slots: int) -> None:
        """Allocate one entry a slot; the dicts grow to their size as keys come."""
        self.shards: list[dict[Key, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._keys: list[Key] = [b""] * num_slots

    def find(self, key: Key) -> int:
        """The slot of a key, or `ABSENT`."""
        return self.shards[key[0]].get(key, ABSENT)

    def find_all(self, keys: Iterable[Key]) -> list[int]:
        """The slot of each key or `ABSENT`, in the order of the keys."""
        shards = self.shards
        return [shards[key[0]].get(key, ABSENT) for key in keys]

    def find_marked(self, keys: Iterable[Key], marks: bytearray, mark: int) -> list[int]:
        """The slots of those of the keys whose slot bears `mark`, in the order of the keys.

        `marks` has one entry per slot and a spare one at its end for absent keys.
        """
        shards = self.shards
        return [slot for key in keys if marks[slot := shards[key[0]].get(key, ABSENT)] == mark]

    def count_leading(self, keys: Sequence[Key], marks: bytearray, least: int) -> int:
        """How many keys come before the first whose slot has a mark below `least`.

        `marks` has one entry per slot and a spare one at its end for absent keys.
        """
        shards = self.shards
        for position, key in enumerate(keys):
            if marks[shards[key[0]].get(key, ABSENT)] < least:
                return position
        return len(keys)

    def keys_of(self, slots: Iterable[int]) -> list[Key]:
        """The keys of slots that have one, in the order of the slots."""
        keys = self._keys
        return [keys[slot] for slot in slots]

    def assign(self, slots: Iterable[int], keys: Iterable[Key]) -> None:
        """Make keys, whether known or not, those of slots, pairwise.

        A slot that loses its key by this must be given another one or `clear`ed, before or after.
        """
        shards, key_of = self.shards, self._keys
        for slot, key in zip(slots, keys, strict=True):
            shards[key[0]][key] = slot
            key_of[slot] = key

    def remove(self, keys: Iterable[Key]) -> None:
        """Make known keys unknown; their slots must be given others or `clear`ed, before or after."""
        shards = self.shards
        for key in keys:
            del shards[key[0]][key]

    def clear(self, slots: Iterable[int]) -> None:
        """Leave slots without a key."""
        key_of = self._keys
        for slot in slots:
            key_of[slot] = b""

    def retain(self, slots: Collection[int]) -> None:
        """Drop the keys of all slots but these. Time grows with the number of keys dropped."""
        kept = self.keys_of(slots)
        for shard in self.shards:
            shard.clear()
        self._keys = [b""] * len(self._keys)
        self.assign(slots, kept)

"""The calls that break the contract of the chunk index, and what is said about each.

Each function looks at a whole batch before anything has changed. `chunks` are those of the keys, in
the same order; the arrays have the spare entry that `keytable.ABSENT` reads.
"""

from collections.abc import Iterable, Sequence

from kvcellar.errors import IndexMisuse
from kvcellar.index.keytable import Key
from kvcellar.index.states import (
    ANSWERS,
    FORGOTTEN,
    IDLE,
    PINNED,
    STALE_LOAD,
    STALE_STORE,
    WRITING,
)

_LOADING = (PINNED, FORGOTTEN, STALE_LOAD)
_STORING = (WRITING, STALE_STORE)


def require_loadable(keys: Iterable[Key], chunks: Sequence[int], state_of: bytearray) -> None:
    """Refuse to load a key that is not a hit."""
    for key, chunk in zip(keys, chunks, strict=True):
        if state_of[chunk] < IDLE:
            raise IndexMisuse(
                f"a load of key {key.hex()} was prepared, but its lookup is a "
                f"{ANSWERS[state_of[chunk]].name}; only a HIT can be loaded"
            )


def require_pinned(keys: Iterable[Key], chunks: Sequence[int], state_of: bytearray) -> None:
    """Refuse to complete a load that is not in flight."""
    for key, chunk in zip(keys, chunks, strict=True):
        if state_of[chunk] not in _LOADING:
            raise IndexMisuse(
                f"a load of key {key.hex()} was completed, but none is in flight; "
                "complete each prepared load once"
            )


def require_storing(keys: Iterable[Key], chunks: Sequence[int], state_of: bytearray) -> None:
    """Refuse to complete a store that is not in flight."""
    for key, chunk in zip(keys, chunks, strict=True):
        if state_of[chunk] not in _STORING:
            raise IndexMisuse(
                f"a store of key {key.hex()} was completed, but none is in flight; "
                "complete each key of a store plan once"
            )


def require_named(failed: set[Key], keys: Iterable[Key]) -> None:
    """Refuse a failed key that is not among the keys whose store is over."""
    for key in failed.difference(keys):
        raise IndexMisuse(
            f"key {key.hex()} was named as failed, but not among the keys whose store is over; "
            "name it in both"
        )

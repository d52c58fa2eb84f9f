"""The replacement policies by their names: what each needs of the shared table and lists, and its making.

The one place that a new policy has to be told to, besides its own module.
"""

from typing import Literal

from kvcellar.errors import ConfigurationError
from kvcellar.index.arc import ArcPolicy
from kvcellar.index.idlists import IdLists
from kvcellar.index.keytable import KeyTable
from kvcellar.index.policy import LruPolicy, Policy

PolicyName = Literal["lru", "arc"]

_GHOSTS_PER_CHUNK = {"lru": 0, "arc": 1}
"""How many keys a policy remembers beyond those that have a chunk, by its name."""


def num_slots(policy: PolicyName, num_chunks: int) -> int:
    """Slots of key table and lists: one for each chunk, and behind them one for each ghost.

    Raises:
        ConfigurationError: no policy has that name.
    """
    if policy not in _GHOSTS_PER_CHUNK:
        raise ConfigurationError(
            f"replacement policy {policy!r} was asked for; the policies are 'lru' and 'arc'"
        )
    return num_chunks * (1 + _GHOSTS_PER_CHUNK[policy])


def make_policy(policy: PolicyName, lists: IdLists, table: KeyTable, num_chunks: int) -> Policy:
    """A policy over lists and a table with `num_slots` slots, which it shares with the chunk index."""
    match policy:
        case "lru":
            return LruPolicy(lists, table)
        case "arc":
            return ArcPolicy(lists, table, num_chunks)

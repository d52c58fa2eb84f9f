"""Descriptors that a forked child must not keep.

A lock goes with the last descriptor of its description, so a child that was forked for something else
would keep a slot, the owner byte or even the big lock beyond its parent's death. Everything of this
package that holds a description closes it in children: closes, never unlocks, since an unlock in the
child would free the parent's lock. (A child that execs loses them anyway: O_CLOEXEC.)
"""

import os
import weakref
from typing import Protocol


class HasDescriptors(Protocol):
    """Something that closes its descriptors on `close_in_child`, whatever state it is in."""

    def close_in_child(self) -> None:
        """Close every descriptor; nothing else."""


_holders: "weakref.WeakSet[HasDescriptors]" = weakref.WeakSet()
_registered: list[bool] = []


def close_in_children(holder: HasDescriptors) -> None:
    """Close the descriptors of `holder` in every child that is forked while `holder` exists."""
    if not _registered:
        _registered.append(True)
        os.register_at_fork(after_in_child=_close_all)
    _holders.add(holder)


def _close_all() -> None:
    for holder in list(_holders):
        holder.close_in_child()

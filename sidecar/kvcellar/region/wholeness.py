"""Whether a data file still is what its page says, as far as the file system tells.

Every container of the pod may write the data file, so any of them can cut it, or punch pages out of it.
Both leave fewer blocks than the state promises. What it does not show: pages that were punched and then
written again, by whoever touched them, and a punch inside a huge page that the kernel could only zero.
That is no worse than what a write of such a process could do, and as little to be seen.
"""

import os

from kvcellar.contract import EngineId
from kvcellar.region import file
from kvcellar.region.metadata import OwnerSection
from kvcellar.region.states import ATTACHABLE


def loss(data_fd: int, engine_id: EngineId, owner: OwnerSection, *, is_reserved: bool) -> str:
    """What the data file lacks, in a sentence; empty if nothing.

    With `is_reserved` every page has to be there, without it the size alone has to be right.
    """
    size, reserved = os.fstat(data_fd).st_size, file.reserved_bytes(data_fd)
    lacks_pages = is_reserved and reserved < owner.capacity_bytes
    if size == owner.capacity_bytes and not lacks_pages:
        return ""
    return (
        f"the data file of region {engine_id} has {size} bytes ({reserved} of them reserved), it was made with "
        f"{owner.capacity_bytes}: another process of this pod cut, punched or grew it"
    )


def loss_by_state(data_fd: int, engine_id: EngineId, owner: OwnerSection) -> str:
    """`loss`, of what the owner's state promises: every page once it is Reserved, the size before."""
    return loss(data_fd, engine_id, owner, is_reserved=owner.state in ATTACHABLE)

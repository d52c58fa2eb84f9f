"""Whether the files of a region still are what its page says, as far as the file system tells.

Every container of the pod may write the data file, so any of them can cut it, or punch pages out of it.
Both leave fewer blocks than the state promises. What it does not show: pages that were punched and then
written again, by whoever touched them, and a punch inside a huge page that the kernel could only zero.
That is no worse than what a write of such a process could do, and as little to be seen.
"""

import os
import stat

from kvcellar.contract import EngineId, Mode
from kvcellar.region import file, stock
from kvcellar.region.directory import FILE_MODE, RegionDirectory, oddity, status_at
from kvcellar.region.metadata import OwnerSection
from kvcellar.region.names import index_name, meta_name
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


def names_damage(
    directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection, page: tuple[int, int]
) -> str:
    """Why the next engine start would not find or open the files, in a sentence; empty if it would.

    `page` is (device, inode) of the metadata page.
    """
    # The names are still in the directory then, so that nothing else would show it.
    if not directory.is_there():
        return f"the directory {directory.path} was removed or replaced by another process"
    if not directory.has_mode():
        return f"the mode of the directory {directory.path} was changed by another process"
    if directory.identity(meta_name(engine_id)) != page:
        return f"the metadata page of region {engine_id} was removed or replaced by another process"
    data = stock.find_data(directory, engine_id, owner)
    if directory.identity(data) != (owner.data_device, owner.data_inode):
        return f"the data file {os.path.basename(data)} was removed or replaced by another process"
    if not has_index(directory, engine_id, owner):
        index = index_name(engine_id, owner.nonce)
        return f"the index file {index} was removed or replaced by another process"
    for name in _file_names(directory, engine_id, owner):
        if done := _done_to(directory, name):
            return f"another process has {done} the file {os.path.basename(name)}"
    return ""


def _done_to(directory: RegionDirectory, name: str) -> str:
    status = status_at(directory.fd, name)
    if status is None:
        return "removed"
    if oddity(status):
        return "given a second name to"
    return "" if _has_mode(status) else "changed the mode of"


def mend_modes(
    directory: RegionDirectory,
    engine_id: EngineId,
    owner: OwnerSection,
    page_and_data: tuple[int, int],
) -> None:
    """Set the modes of the directory and of the region's files again, if somebody has changed them.

    Page and data are the owner's open files, whatever their names lead to by now.

    Raises:
        OSError: a file is another user's, or the index is gone.
    """
    directory.mend_mode()
    for fd in page_and_data:
        if not _has_mode(os.fstat(fd)):
            os.fchmod(fd, FILE_MODE)
    if owner.mode is not Mode.STOCK:
        _mend_index(directory, index_name(engine_id, owner.nonce))


def _mend_index(directory: RegionDirectory, name: str) -> None:
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd)
    try:
        status = os.fstat(fd)
        if not (oddity(status) or _has_mode(status)):
            # A mode may keep its own owner from opening the file, and fchmod wants it open.
            os.chmod(f"/proc/self/fd/{fd}", FILE_MODE)
    finally:
        os.close(fd)


def _file_names(
    directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection
) -> tuple[str, ...]:
    index = () if owner.mode is Mode.STOCK else (index_name(engine_id, owner.nonce),)
    return (meta_name(engine_id), stock.find_data(directory, engine_id, owner), *index)


def _has_mode(status: os.stat_result) -> bool:
    return stat.S_IMODE(status.st_mode) == FILE_MODE


def has_index(directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection) -> bool:
    """Whether ranks can open the index file, where the region has one."""
    return owner.mode is Mode.STOCK or directory.is_plain(index_name(engine_id, owner.nonce))

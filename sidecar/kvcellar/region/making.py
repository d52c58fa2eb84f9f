"""Make the files of a region, or adopt those that are there (protocol steps 1 to 3).

The order that keeps it safe: data and index exist before the page that names them is renamed into
place, under the big lock; a live page is never renamed over or replaced, because its locks would stay
on the old inode; names go in the order page, data, index. What a kill leaves in between is garbage that
no page names (`region.survey`).

All functions here are called under the big lock and do only non-blocking work.
"""

import contextlib
import errno
import os
import secrets
from dataclasses import dataclass, replace

from kvcellar.contract import EngineId, Mode, RegionState
from kvcellar.errors import (
    ConfigurationError,
    DoesNotFit,
    KVCellarError,
    MetadataDamaged,
    RegionHeld,
    RegionMismatch,
)
from kvcellar.region import file, locks, metafile, stock, syscalls
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.frame import META_BYTES
from kvcellar.region.memory import TMPFS
from kvcellar.region.metadata import OwnerSection
from kvcellar.region.names import data_name, index_name, meta_name, temporary_name
from kvcellar.region.promises import LimitReader, needed_bytes, plan_beside_others
from kvcellar.region.states import ATTACHABLE, RegionRequest
from kvcellar.region.wholeness import has_index, loss_by_state


@dataclass(frozen=True, slots=True)
class RegionFiles:
    """The open files of a region whose owner byte this process holds."""

    owner: OwnerSection
    meta_fd: int
    data_fd: int
    is_adopted: bool


def adopt(directory: RegionDirectory, request: RegionRequest) -> RegionFiles | None:
    """Take over the engine's region if there is one; None if one has to be made.

    A held region is adopted as it is. One that nobody holds is removed if its data file is gone, cut or of
    another capacity, or if its page has damage that no owner can repair.

    Raises:
        RegionHeld: another process owns it.
        MetadataDamaged: its page cannot be read; nothing was touched.
        RegionMismatch: a name of it leads to something that is not ours.
    """
    name = meta_name(request.engine_id)
    try:
        meta_fd = directory.open_file(name)
    except FileNotFoundError:
        return None
    data_fd: int | None = None
    try:
        if not locks.try_lock(meta_fd, locks.OWNER_BYTE):
            raise RegionHeld(
                f"region {request.engine_id} in {directory.path} is owned by another living process: "
                "give this engine another id, or stop the other owner"
            )
        owner = metafile.read_owner(meta_fd)
        data_fd = _open_data(directory, request.engine_id, owner)
        if data_fd is not None and _still_wanted(directory, meta_fd, data_fd, owner, request):
            there_is = min(file.reserved_bytes(data_fd), owner.capacity_bytes)
            taken = replace(
                owner,
                settled_bytes=min(owner.settled_bytes, there_is),
                huge_page_bytes=min(owner.huge_page_bytes, there_is),
                kind=request.kind,
            )
            if taken != owner:
                metafile.write_owner(meta_fd, taken)
            files = RegionFiles(taken, meta_fd, data_fd, is_adopted=True)
            meta_fd, data_fd = -1, None
            return files
        remove(directory, request.engine_id, owner, identity(meta_fd))
    finally:
        for fd in (meta_fd, data_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
    return None


def create(
    directory: RegionDirectory, request: RegionRequest, read_limits: LimitReader
) -> RegionFiles:
    """Plan a region and publish its files in state Reserving.

    Raises:
        DoesNotFit: a limit leaves too little; nothing was made.
        ConfigurationError: the volume does not let files be made.
    """
    if request.mode is Mode.STOCK:
        stock.check_root(directory)
        stock.check_name_is_free(directory, request.engine_id)
    asked = needed_bytes(request.capacity_bytes, request.mode)
    decided = plan_beside_others(directory, asked, read_limits)
    if not decided.fits:
        raise decided.refusal(request.engine_id, request.capacity_setting)
    engine_id, nonce = request.engine_id, secrets.token_hex(8)
    temporary = temporary_name(engine_id, nonce)
    made: dict[str, int] = {}
    try:
        data, index = data_name(engine_id, nonce), index_name(engine_id, nonce)
        # What a stock vLLM stores where is in its own memory: it has no use for an index file.
        for name in (data, temporary) if request.mode is Mode.STOCK else (data, index, temporary):
            made[name] = directory.create_file(name)
        data_fd, meta_fd = made[data], made[temporary]
        os.ftruncate(data_fd, request.capacity_bytes)
        owner = _new_owner(request, nonce, data_fd)
        os.posix_fallocate(meta_fd, 0, META_BYTES)  # on a full volume a write is only cut short
        os.pwrite(meta_fd, metafile.new_page(owner), 0)
        if not locks.try_lock(meta_fd, locks.OWNER_BYTE):
            raise RegionHeld(
                f"the new metadata page of region {engine_id} was locked by somebody else"
            )
        syscalls.rename_no_replace(directory.fd, temporary, meta_name(engine_id))
    except (OSError, KVCellarError) as error:
        for name, fd in made.items():
            # Where it cannot, the next sweep does.
            with contextlib.suppress(OSError):
                directory.unlink_if(name, identity(fd))
            os.close(fd)
        raise as_refusal(error, request) from error
    if index in made:
        os.close(made[index])
    return RegionFiles(owner, meta_fd, data_fd, is_adopted=False)


def remove(
    directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection, meta: tuple[int, int]
) -> None:
    """Remove a region's names: page and data if they still lead to the very files, and the index by its nonce.

    The caller has shown that nobody holds it. What another process has put at the page's name stays, be
    it a later generation; data and index go all the same, since inode and nonce are of this generation
    alone: their memory is what the next region needs.
    """
    directory.unlink_if(meta_name(engine_id), meta)
    data = (owner.data_device, owner.data_inode)
    for name in stock.data_names(engine_id, owner):
        directory.unlink_if(name, data)
    directory.unlink_regular(index_name(engine_id, owner.nonce))


def free_unheld(data_fd: int, owner: OwnerSection) -> None:
    """Give back the pages of a data file that has lost its names, unless somebody holds it.

    Its last close would free them, but another process may keep it by a name or a descriptor of its own. The
    size stays, since the janitor leaves an empty file alone. Not for under the lock: a large file takes seconds.
    """
    with contextlib.suppress(OSError):
        if not stock.held_slots(data_fd, owner.mode):
            file.free_all(data_fd, owner.capacity_bytes)


def identity(fd: int) -> tuple[int, int]:
    """(device, inode) of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _new_owner(request: RegionRequest, nonce: str, data_fd: int) -> OwnerSection:
    device, inode = identity(data_fd)
    return OwnerSection(
        state=RegionState.RESERVING,
        reason="",
        mode=request.mode,
        capacity_bytes=request.capacity_bytes,
        page_bytes=request.page_bytes,
        nonce=nonce,
        data_device=device,
        data_inode=inode,
        kind=request.kind,
    )


def _open_data(directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection) -> int | None:
    """The data file that the page names, or None if the name is gone or leads to another inode."""
    if owner.mode is Mode.STOCK and owner.state in ATTACHABLE:
        # A release that was killed has left it hidden. Where the name is taken, the file is gone.
        with contextlib.suppress(RegionMismatch):
            stock.publish(directory, engine_id, owner)
    name = stock.find_data(directory, engine_id, owner)
    if directory.identity(name) != (owner.data_device, owner.data_inode):
        return None
    return directory.open_file(name)


def _still_wanted(
    directory: RegionDirectory,
    meta_fd: int,
    data_fd: int,
    owner: OwnerSection,
    request: RegionRequest,
) -> bool:
    """Adopt what is held, and what is whole and as asked."""
    if stock.held_slots(data_fd, owner.mode):
        return True
    same = (owner.capacity_bytes, owner.mode) == (request.capacity_bytes, request.mode)
    is_whole = not loss_by_state(data_fd, request.engine_id, owner)
    has_all = is_whole and has_index(directory, request.engine_id, owner)
    return same and has_all and _is_readable(meta_fd)


def _is_readable(meta_fd: int) -> bool:
    """Whether rank 0 of the next engine start can read the page; its session section is not the owner's."""
    try:
        metafile.read_contents(meta_fd)
    except MetadataDamaged:
        return False
    return True


def as_refusal(
    error: OSError | KVCellarError, request: RegionRequest, had_bytes: int = 0
) -> KVCellarError:
    """What the kernel's answer means to the person who asked for the capacity.

    `had_bytes`: what the region had taken when the limit was reached.
    """
    if isinstance(error, KVCellarError):
        return error
    limits = {errno.ENOSPC: TMPFS, errno.EBUSY: "memory cgroup", errno.ENOMEM: "node"}
    name = limits.get(error.errno or 0)
    if name is None:
        return ConfigurationError(
            f"region {request.engine_id} of {request.capacity_bytes} bytes cannot be made: {error.strerror}; check the "
            "volume at KVCELLAR_DIR"
        )
    return DoesNotFit(
        f"region {request.engine_id} needs {request.capacity_bytes} bytes, but the {name} limit was reached when "
        f"it had {had_bytes} bytes: memory that was free at the plan is in use now; lower {request.capacity_setting} "
        "or raise the limit",
        asked_bytes=request.capacity_bytes,
        free_bytes=had_bytes,
        binding_limit=name,
    )

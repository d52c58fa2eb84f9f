"""Regions for an unmodified vLLM: where their file lies, and who holds them.

vLLM opens `/dev/shm/vllm_offload_<engine_id>.mmap`: with O_CREAT | O_EXCL first, and if the file is there,
read-write, waiting until it is as large as needed (0.31 and 0.32: `SharedOffloadRegion`). Who finds the
file neither checks memory, nor cuts it to size, nor ever removes it. So a file of ours under that name is
joined by all ranks, start after start.

The file is made and reserved under a hidden name in our directory, and gets vLLM's name only once every
page is promised: an engine that came earlier would join a file without pages, and could die of that.
The metadata page says `stock`; device and inode in it name the file, wherever it lies.

Held is a file that refuses a lease (`leases`), since vLLM holds no slot. So a stock region knows *whether*
an engine has it, not which processes; the row of slot 0 stands for all of them.
"""

import os
import time
from collections.abc import Iterator

from kvcellar.contract import EngineId, Mode, Role
from kvcellar.errors import ConfigurationError, KVCellarError, RegionMismatch
from kvcellar.region import leases, locks, metafile, syscalls
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.frame import MAX_SLOTS
from kvcellar.region.metadata import OwnerSection, SlotRow
from kvcellar.region.names import data_name, engine_of_meta, meta_name, stock_name
from kvcellar.region.quarantine import WAIT_S
from kvcellar.region.states import ATTACHABLE

ENGINE_SLOT = 0
"""The slot whose row says since when an engine has the region; no process locks it."""


def published_name(engine_id: EngineId) -> str:
    """Name that vLLM opens, relative to our directory, which lies directly in the volume's root."""
    return f"../{stock_name(engine_id)}"


def data_names(engine_id: EngineId, owner: OwnerSection) -> tuple[str, ...]:
    """Every name that the data file may have: our own, and in stock mode vLLM's."""
    hidden = data_name(engine_id, owner.nonce)
    return (hidden,) if owner.mode is Mode.PLUGIN else (hidden, published_name(engine_id))


def find_data(directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection) -> str:
    """The name that leads to the data file; where none does, the one that should.

    Once it is reserved, a stock file under its hidden name is as good as gone: no engine finds it.
    """
    if owner.mode is Mode.STOCK and owner.state in ATTACHABLE:
        return published_name(engine_id)
    names = data_names(engine_id, owner)
    meant = (owner.data_device, owner.data_inode)
    return next((name for name in names if directory.identity(name) == meant), names[0])


def held_slots(fd: int, mode: Mode) -> tuple[int, ...]:
    """The slots of a data file that somebody holds, by `fd` as the asking description."""
    if mode is Mode.PLUGIN:
        return tuple(locks.held_slots(fd, MAX_SLOTS))
    return (ENGINE_SLOT,) if leases.is_held(fd) else ()


def note_engine(meta_fd: int) -> None:
    """Write down that an engine has the region from now on."""
    row = SlotRow("0" * 32, Role.WORKER, rank=0, since_unix_s=time.time())
    metafile.write_slot(meta_fd, ENGINE_SLOT, row)


def check_root(directory: RegionDirectory) -> None:
    """Make sure that a file can go from our directory to the volume's root.

    Raises:
        ConfigurationError: they are on different file systems.
    """
    if os.stat("..", dir_fd=directory.fd).st_dev != os.fstat(directory.fd).st_dev:
        raise ConfigurationError(
            f"{directory.path} is on another file system than {directory.path.parent}, where a stock vLLM looks for "
            "its file: set KVCELLAR_DIR to a directory of that volume"
        )


def check_name_is_free(directory: RegionDirectory, engine_id: EngineId) -> None:
    """Refuse to make a region whose place somebody has taken.

    Raises:
        RegionMismatch: a file of vLLM's name is there, and it is not this region's.
    """
    if directory.identity(published_name(engine_id)) is not None:
        raise _taken(directory, engine_id)


def publish(directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection) -> None:
    """Give the data file vLLM's name; nothing if it has that. Call it under the lock.

    Raises:
        RegionMismatch: another file has the name, or the file is gone.
    """
    published = published_name(engine_id)
    if directory.identity(published) == (owner.data_device, owner.data_inode):
        return
    try:
        syscalls.rename_no_replace(directory.fd, data_name(engine_id, owner.nonce), published)
    except FileExistsError as error:
        raise _taken(directory, engine_id) from error
    except OSError as error:
        raise RegionMismatch(
            f"the data file of region {engine_id} cannot get the name {directory.path.parent / stock_name(engine_id)} "
            f"({error.strerror}): let uid {os.geteuid()} write to {directory.path.parent}"
        ) from error


def hide(directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection) -> bool:
    """Take vLLM's name from the data file; whether it had it. Call it under the lock.

    In a directory that was removed nothing can be hidden: the file keeps the name then.

    Raises:
        RegionMismatch: another file has the hidden name.
    """
    published, hidden = published_name(engine_id), data_name(engine_id, owner.nonce)
    if directory.identity(published) != (owner.data_device, owner.data_inode):
        return False
    try:
        syscalls.rename_no_replace(directory.fd, published, hidden)
    except FileNotFoundError:
        return False
    except FileExistsError as error:
        raise RegionMismatch(
            f"{directory.path / hidden} is there already, and it is not what this sidecar made for engine {engine_id}: "
            "remove it, so that the region can be made anew"
        ) from error
    return True


def withdraw(
    directory: RegionDirectory, engine_id: EngineId, owner: OwnerSection, data_fd: int
) -> bool:
    """Hide a file that is to be removed; False if somebody has it, or came for it, and it is back.

    It blocks for as long as a process may take between the file's name and the file (`quarantine`).
    """
    if leases.take(data_fd) is not leases.Lease.TAKEN:
        return False
    try:
        with directory.lock():
            had_name = hide(directory, engine_id, owner)
        if had_name:
            time.sleep(WAIT_S)
        if leases.is_intact(data_fd):
            return True
        with directory.lock():
            publish(directory, engine_id, owner)
    finally:
        leases.give_back(data_fd)
    return False


def spoken_for(directory: RegionDirectory) -> tuple[frozenset[tuple[int, int]], frozenset[str]]:
    """Stock files that a metadata page names, by identity; and names of those whose page cannot be read.

    Call it under the lock.
    """
    files: set[tuple[int, int]] = set()
    unknown: set[str] = set()
    for engine_id in _engines(directory):
        try:
            fd = directory.open_file(meta_name(engine_id), os.O_RDONLY)
            try:
                owner = metafile.read_owner(fd)
            finally:
                os.close(fd)
        except FileNotFoundError:
            continue
        except KVCellarError:
            unknown.add(stock_name(engine_id))
        else:
            if owner.mode is Mode.STOCK:
                files.add((owner.data_device, owner.data_inode))
    return frozenset(files), frozenset(unknown)


def _engines(directory: RegionDirectory) -> Iterator[EngineId]:
    return (engine_id for name in directory.names() if (engine_id := engine_of_meta(name)))


def _taken(directory: RegionDirectory, engine_id: EngineId) -> RegionMismatch:
    path = directory.path.parent / stock_name(engine_id)
    return RegionMismatch(
        f"{path} is there already, and it is not what this sidecar made for engine {engine_id}: an engine that uses "
        "it has to end, then the janitor removes it (KVCELLAR_JANITOR); else remove it by hand"
    )

"""What lies in a directory of regions: ours and another owner's, held or not, and loose files.

Also the two removals that need no owner: a region that nobody owns or holds, and a loose file that no
metadata page names and nobody holds. Both prove under the big lock what they claim before they remove.
"""

import contextlib
import os
import stat
from dataclasses import dataclass
from enum import StrEnum

from kvcellar.contract import EngineId, Owner
from kvcellar.errors import KVCellarError, RegionHeld
from kvcellar.region import file, locks, making, metafile
from kvcellar.region.directory import (
    RegionDirectory,
    data_name,
    data_of_part,
    engine_of_meta,
    engine_of_part,
    index_name,
    meta_name,
)
from kvcellar.region.frame import MAX_SLOTS
from kvcellar.region.metadata import OwnerSection
from kvcellar.region.metafile import MetaContents


class LooseKind(StrEnum):
    """What a name looks like that no metadata page vouches for."""

    PART = "part"
    """Our pattern: left by a process that was killed while it made or removed a region."""
    FOREIGN = "foreign"
    """Not our pattern, or no regular file of one name: never touched."""


@dataclass(frozen=True, slots=True)
class FoundRegion:
    """A region in the directory.

    Attributes:
        contents: the metadata page; None if it cannot be read, then `error` says why.
        is_owned: a living process holds the owner byte.
        held: slots that are held now.
        reserved_bytes: bytes of the data file, 0 if it is gone.
    """

    engine_id: EngineId
    contents: MetaContents | None
    error: str
    is_owned: bool
    held: tuple[int, ...]
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class LooseFile:
    """A file that no metadata page names."""

    name: str
    kind: LooseKind
    size_bytes: int
    is_held: bool


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything in a directory at one moment."""

    regions: tuple[FoundRegion, ...]
    loose: tuple[LooseFile, ...]


def survey(directory: RegionDirectory) -> Survey:
    """Look at every name in the directory, under the lock so that nothing is half made."""
    with directory.lock():
        return _survey(directory)


def _survey(directory: RegionDirectory) -> Survey:
    names = directory.names()
    regions = []
    named: set[str] = set()
    unreadable: set[EngineId] = set()
    for name in names:
        engine_id = engine_of_meta(name)
        if engine_id is None:
            continue
        found = _look(directory, engine_id)
        regions.append(found)
        named.add(name)
        if found.contents is None:
            unreadable.add(engine_id)
        else:
            named |= set(_parts(engine_id, found.contents.owner))
    loose = [
        _loose(directory, name)
        for name in names
        if name not in named and engine_of_part(name) not in unreadable
    ]
    return Survey(tuple(regions), tuple(loose))


def reclaim_unheld(directory: RegionDirectory, engine_id: EngineId) -> None:
    """Remove a region that nobody owns and nobody holds.

    Raises:
        RegionHeld: somebody owns or holds it.
        FileNotFoundError: there is no such region.
        MetadataDamaged: its page cannot be read, so nothing proves which files are its own.
        RegionMismatch: its name leads to something that kvcellar did not make.
    """
    with directory.lock():
        name = meta_name(engine_id)
        meta_fd = directory.open_file(name)
        try:
            if not locks.try_lock(meta_fd, locks.OWNER_BYTE):
                raise RegionHeld(
                    f"region {engine_id} is owned by a living process: it was left alone"
                )
            owner = metafile.read_owner(meta_fd)
            if _held(directory, data_name(engine_id, owner.nonce)):
                raise RegionHeld(f"region {engine_id} is held by an engine: it was left alone")
            making.remove(directory, engine_id, owner, making.identity(meta_fd))
        finally:
            os.close(meta_fd)


def reclaim_loose(directory: RegionDirectory) -> list[LooseFile]:
    """Remove every loose file of our pattern that nobody holds; returns what was removed.

    Under the lock no region is half made, so a file that no page names has no future, unless a rank
    of a killed engine still holds it.
    """
    with directory.lock():
        garbage = [
            found
            for found in _survey(directory).loose
            if found.kind is LooseKind.PART and not found.is_held
        ]
        return [found for found in garbage if directory.unlink_regular(found.name)]


def reclaim_dead_engines(directory: RegionDirectory) -> list[EngineId]:
    """Remove regions that an engine owned which is dead and gone; returns their ids.

    A region of a sidecar is not touched: its sidecar may only be restarting.
    """
    removed = []
    for found in survey(directory).regions:
        is_engines = found.contents is not None and found.contents.owner.kind is Owner.ENGINE
        if not is_engines or found.is_owned or found.held:
            continue
        with contextlib.suppress(KVCellarError, FileNotFoundError):
            reclaim_unheld(directory, found.engine_id)
            removed.append(found.engine_id)
    return removed


def _look(directory: RegionDirectory, engine_id: EngineId) -> FoundRegion:
    try:
        meta_fd = directory.open_file(meta_name(engine_id), os.O_RDONLY)
    except (KVCellarError, FileNotFoundError) as error:
        return FoundRegion(engine_id, None, str(error), is_owned=False, held=(), reserved_bytes=0)
    try:
        is_owned = locks.is_locked(meta_fd, locks.OWNER_BYTE)
        try:
            contents = metafile.read_contents(meta_fd)
        except KVCellarError as error:
            return FoundRegion(engine_id, None, str(error), is_owned, held=(), reserved_bytes=0)
    finally:
        os.close(meta_fd)
    held, reserved = _look_at_data(directory, data_name(engine_id, contents.owner.nonce))
    return FoundRegion(engine_id, contents, "", is_owned, held, reserved)


def _look_at_data(directory: RegionDirectory, name: str) -> tuple[tuple[int, ...], int]:
    try:
        fd = directory.open_file(name, os.O_RDONLY)
    except (KVCellarError, FileNotFoundError):
        return (), 0
    try:
        return tuple(locks.held_slots(fd, MAX_SLOTS)), file.reserved_bytes(fd)
    finally:
        os.close(fd)


def _held(directory: RegionDirectory, name: str) -> bool:
    return bool(_look_at_data(directory, name)[0])


def _parts(engine_id: EngineId, owner: OwnerSection) -> tuple[str, str]:
    return data_name(engine_id, owner.nonce), index_name(engine_id, owner.nonce)


def _loose(directory: RegionDirectory, name: str) -> LooseFile:
    kind = LooseKind.PART if engine_of_part(name) else LooseKind.FOREIGN
    try:
        status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except FileNotFoundError:
        return LooseFile(name, kind, 0, is_held=False)
    size = status.st_blocks * 512
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return LooseFile(name, LooseKind.FOREIGN, size, is_held=False)
    holds = kind is LooseKind.PART and _held(directory, data_of_part(name))
    return LooseFile(name, kind, size, is_held=holds)

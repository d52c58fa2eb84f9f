"""What lies in a directory of regions: ours and another owner's, held or not, and loose files.

Also the two removals that need no owner: a region that nobody owns or holds, and a loose file that no
metadata page names and nobody holds. Both prove under the big lock what they claim before they remove.
"""

import contextlib
import os
from dataclasses import dataclass, replace
from enum import StrEnum

from kvcellar.contract import EngineId, Mode, Owner, RegionState
from kvcellar.errors import ConfigurationError, KVCellarError, RegionHeld
from kvcellar.region import file, locks, making, metafile, stock
from kvcellar.region.answers import in_words
from kvcellar.region.directory import RegionDirectory, oddity
from kvcellar.region.metadata import OwnerSection
from kvcellar.region.metafile import MetaContents
from kvcellar.region.names import (
    data_name,
    data_of_part,
    engine_of_meta,
    engine_of_part,
    index_name,
    meta_name,
    quarantined,
)
from kvcellar.region.wholeness import loss_by_state


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
        contents: the metadata page; None if it cannot be read.
        error: why page or data file cannot be looked at, so that nobody knows whether the region is held
            and it is left alone; empty if they can.
        damage: what the data file lacks, as far as the page promises it; empty if nothing.
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
    damage: str = ""

    @property
    def is_notice(self) -> bool:
        """Whether all that it is there for is to tell engines why there is no region: nobody left it behind."""
        is_failed = self.contents is not None and self.contents.owner.state is RegionState.FAILED
        return is_failed and self.is_owned and not self.reserved_bytes


@dataclass(frozen=True, slots=True)
class LooseFile:
    """A file that no metadata page names.

    Attributes:
        is_held: a process holds it, or may: `error` says then why nobody can tell.
        error: why a file of our pattern is left alone whoever holds it; empty for all others.
    """

    name: str
    kind: LooseKind
    size_bytes: int
    is_held: bool
    error: str = ""


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything in a directory at one moment."""

    regions: tuple[FoundRegion, ...]
    loose: tuple[LooseFile, ...]


def _said(directory: RegionDirectory, _doing: str, error: OSError) -> KVCellarError:
    return ConfigurationError(
        f"the regions in {directory.path} cannot be looked at or removed ({error.strerror}): check the volume "
        "at KVCELLAR_DIR, and the node's memory"
    )


_in_words = in_words(_said, but=(FileNotFoundError, PermissionError))
"""Names that are gone or not to be removed are for the callers."""


@_in_words
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
        if name not in named and engine_of_part(name) not in unreadable and not _is_aside(name)
    ]
    return Survey(tuple(regions), tuple(loose))


@_in_words
def reclaim_unheld(directory: RegionDirectory, engine_id: EngineId) -> None:
    """Remove a region that nobody owns and nobody holds.

    Raises:
        RegionHeld: somebody owns or holds it.
        FileNotFoundError: there is no such region.
        MetadataDamaged: its page cannot be read, so nothing proves which files are its own.
        RegionMismatch: a name of it leads to something that kvcellar did not make, or its data file has a
            second name.
        ConfigurationError: this process may not look whether it is held.
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
            if _held(directory, stock.find_data(directory, engine_id, owner), owner.mode):
                raise RegionHeld(f"region {engine_id} is held by an engine: it was left alone")
            making.remove(directory, engine_id, owner, making.identity(meta_fd))
        finally:
            os.close(meta_fd)


@_in_words
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


@_in_words
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
        return _unreadable(engine_id, error)
    try:
        is_owned = locks.is_locked(meta_fd, locks.OWNER_BYTE)
        try:
            contents = metafile.read_contents(meta_fd)
        except KVCellarError as error:
            return _unreadable(engine_id, error, is_owned=is_owned)
    finally:
        os.close(meta_fd)
    return _look_at_data(directory, FoundRegion(engine_id, contents, "", is_owned, (), 0))


def _unreadable(
    engine_id: EngineId, error: KVCellarError | OSError, *, is_owned: bool = False
) -> FoundRegion:
    return FoundRegion(engine_id, None, str(error), is_owned, held=(), reserved_bytes=0)


def _look_at_data(directory: RegionDirectory, found: FoundRegion) -> FoundRegion:
    """What was found, with what its data file says; a file that is gone is held by nobody."""
    if found.contents is None:
        return found
    owner = found.contents.owner
    name = stock.find_data(directory, found.engine_id, owner)
    # An open description of a stock file passes for an engine's: its owner, who asks, must see none.
    is_stock = owner.mode is Mode.STOCK
    flags = os.O_PATH if is_stock and found.is_owned else os.O_RDONLY
    try:
        fd = directory.open_file(name, flags)
    except FileNotFoundError:
        file_name = os.path.basename(name)
        return replace(found, damage=f"the data file {file_name} was removed by another process")
    except KVCellarError as error:
        return replace(found, error=str(error))
    try:
        return replace(
            found,
            held=() if flags == os.O_PATH else stock.held_slots(fd, owner.mode),
            reserved_bytes=file.reserved_bytes(fd),
            damage=loss_by_state(fd, found.engine_id, owner),
        )
    finally:
        os.close(fd)


def _held(directory: RegionDirectory, name: str, mode: Mode = Mode.PLUGIN) -> bool:
    """Whether anybody holds a data file; not, if there is no such file.

    Raises:
        KVCellarError: it is there and cannot be opened, or has a second name: nobody can tell.
    """
    try:
        fd = directory.open_file(name, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return bool(stock.held_slots(fd, mode))
    finally:
        os.close(fd)


def _parts(engine_id: EngineId, owner: OwnerSection) -> tuple[str, str]:
    return data_name(engine_id, owner.nonce), index_name(engine_id, owner.nonce)


def _is_aside(name: str) -> bool:
    """Whether it is the janitor's, which removes it or puts it back."""
    return quarantined(name) is not None and engine_of_part(name) is None


def _loose(directory: RegionDirectory, name: str) -> LooseFile:
    kind = LooseKind.PART if engine_of_part(name) else LooseKind.FOREIGN
    try:
        status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except FileNotFoundError:
        return LooseFile(name, kind, 0, is_held=False)
    size = status.st_blocks * 512
    if odd := oddity(status):
        error = f"{name} {odd}" if kind is LooseKind.PART else ""
        return LooseFile(name, LooseKind.FOREIGN, size, is_held=False, error=error)
    if kind is LooseKind.FOREIGN:
        return LooseFile(name, kind, size, is_held=False)
    try:
        return LooseFile(name, kind, size, _held(directory, data_of_part(name)))
    except KVCellarError as error:
        return LooseFile(name, kind, size, is_held=True, error=str(error))

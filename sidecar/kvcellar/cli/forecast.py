"""Whether regions would fit, told by the limits and the promises alone: nothing is made or taken."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcellar.contract import EngineId, Mode, RegionState
from kvcellar.daemon.config import Settings
from kvcellar.errors import ConfigurationError
from kvcellar.region import memory, syscalls
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import HUGE_PAGE_BYTES, round_down
from kvcellar.region.memory import Plan
from kvcellar.region.names import meta_name
from kvcellar.region.permissions import not_permitted
from kvcellar.region.promises import needed_bytes, outstanding_bytes, promised_bytes
from kvcellar.region.survey import survey

UNNAMED = EngineId("new")
"""Stands in sentences for an engine that nobody has named."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What would become of regions.

    Attributes:
        plan: of all of them together.
        engine_ids: whose regions they are.
        capacity_bytes: of each, a multiple of 2 MiB.
        n_adopted: how many of them are there, and would be adopted as they are.
    """

    plan: Plan
    engine_ids: tuple[EngineId, ...]
    capacity_bytes: int
    n_adopted: int


def forecast(settings: Settings) -> Forecast:
    """Plan the regions of these settings, beside what others were promised.

    A region of the same name and capacity would be adopted, so it asks for what it lacks; one of another
    capacity would be replaced, so what it has taken is there for the new one.

    Raises:
        ConfigurationError: settings without a capacity, or a volume that cannot hold regions.
    """
    capacity = round_down(settings.required_capacity_bytes, HUGE_PAGE_BYTES)
    ids = [UNNAMED] * settings.engines if settings.engine_id is None else settings.engine_ids
    with _volume(settings.region_directory) as (fd, directory):
        limits = memory.read_limits(fd, pod_limit_bytes=settings.pod_memory_limit_bytes)
        asked = needed_bytes(capacity, settings.mode) * len(ids)
        promised = n_adopted = 0
        if directory is not None:
            named = ids if settings.engine_id is not None else []
            asked, promised, n_adopted = _beside(directory, named, capacity, settings.mode, asked)
    return Forecast(memory.plan(asked, limits, promised), tuple(ids), capacity, n_adopted)


def _beside(
    directory: RegionDirectory, ids: Sequence[EngineId], capacity: int, mode: Mode, asked: int
) -> tuple[int, int, int]:
    """What is asked for when the regions that are there count, what others have yet to take, and how many stay."""
    n_adopted = 0
    with directory.lock():
        promised = promised_bytes(directory)
        own = {engine: outstanding_bytes(directory, meta_name(engine)) for engine in ids}
    for region in survey(directory).regions:
        if region.engine_id not in own or region.contents is None or region.is_notice:
            continue
        owner, whole = region.contents.owner, needed_bytes(capacity, mode)
        missing = max(owner.capacity_bytes - region.reserved_bytes, 0)
        is_same = (owner.capacity_bytes, owner.mode) == (capacity, mode)
        if is_same or region.held:
            n_adopted += 1
            is_reserving = owner.state is RegionState.RESERVING
            index = own[region.engine_id] - (missing if is_reserving else 0)
            asked += missing + max(index, 0) - whole
        else:
            asked -= min(region.reserved_bytes, whole)
    return asked, promised - sum(own.values()), n_adopted


@contextmanager
def _volume(path: Path) -> Iterator[tuple[int, RegionDirectory | None]]:
    """The directory of regions, or where it would be made, open for reading."""
    try:
        directory = RegionDirectory.open(path)
    except FileNotFoundError:
        fd = _open_parent(path)
        try:
            _check_filesystem(path.parent, fd)
            yield fd, None
        finally:
            os.close(fd)
        return
    try:
        _check_filesystem(path, directory.fd)
        yield directory.fd, directory
    except PermissionError as error:
        raise ConfigurationError(not_permitted(path, "looked at")) from error
    finally:
        directory.close()


def _open_parent(path: Path) -> int:
    try:
        return os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            f"{path.parent} cannot be opened ({error.strerror}): mount the pod's memory-backed volume there, or set "
            "KVCELLAR_ROOT to where it is"
        ) from error


def _check_filesystem(path: Path, fd: int) -> None:
    magic = syscalls.filesystem_magic(fd)
    if magic not in syscalls.MEMORY_FILESYSTEMS:
        raise ConfigurationError(
            f"{path} is not on tmpfs (file system type {magic:#x}): a sidecar would not start there; mount an "
            "emptyDir with medium: Memory, or set KVCELLAR_ROOT to a tmpfs"
        )

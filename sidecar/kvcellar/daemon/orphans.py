"""Files that nobody owns: what is removed, what is left alone and why.

A file of our pattern that no metadata page names and nobody holds was left by a process that was
killed while it made or removed a region: it is removed. A region of another engine id that nobody owns
may be another sidecar's that is about to start again, so it is only reported; `kvcellar clean` removes
it. Files that kvcellar did not make are counted and never touched.
"""

import logging
from collections import deque
from dataclasses import dataclass

from kvcellar.contract import OrphanBody
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.names import meta_name
from kvcellar.region.survey import FoundRegion, LooseFile, LooseKind, Survey, reclaim_loose, survey

logger = logging.getLogger(__name__)

RECLAIMED = "reclaimed"
KEPT = "kept"
REMEMBERED = 32
"""Reclaimed files that the status goes on showing, and files of stock vLLM that lie there; the metrics count all."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was found so far.

    Attributes:
        orphans: reclaimed ones, oldest first, then those that lie there now.
        reclaimed_files, reclaimed_bytes: since this process started.
        foreign_bytes: files in the directory, or files of stock vLLM beside it, that are not ours.
    """

    orphans: tuple[OrphanBody, ...] = ()
    reclaimed_files: int = 0
    reclaimed_bytes: int = 0
    foreign_bytes: int = 0

    def plus(self, other: "Sweep") -> "Sweep":
        """Both together."""
        return Sweep(
            self.orphans + other.orphans,
            self.reclaimed_files + other.reclaimed_files,
            self.reclaimed_bytes + other.reclaimed_bytes,
            self.foreign_bytes + other.foreign_bytes,
        )


class Sweeper:
    """Sweeps one directory, and remembers what it removed."""

    def __init__(self, own_ids: list[str]) -> None:
        self._own_ids = frozenset(own_ids)
        self._reclaimed: deque[OrphanBody] = deque(maxlen=REMEMBERED)
        self._files = 0
        self._bytes = 0

    def sweep(self, directory: RegionDirectory) -> Sweep:
        """Remove what nobody owns or holds, and look at the rest. Takes the directory's lock.

        Raises:
            NotReady: another process held the lock for too long.
        """
        for loose in reclaim_loose(directory):
            self._note(loose)
        found = survey(directory)
        foreign = [loose for loose in found.loose if loose.kind is LooseKind.FOREIGN]
        return Sweep(
            (*self._reclaimed, *lying(found, self._own_ids)),
            self._files,
            self._bytes,
            sum(loose.size_bytes for loose in foreign),
        )

    def _note(self, loose: LooseFile) -> None:
        self._files += 1
        self._bytes += loose.size_bytes
        reason = "no metadata page names it and nobody held it"
        self._reclaimed.append(OrphanBody(loose.name, loose.size_bytes, RECLAIMED, reason))
        logger.info("orphan reclaimed", extra={"file": loose.name, "size_bytes": loose.size_bytes})


def lying(found: Survey, own_ids: frozenset[str]) -> list[OrphanBody]:
    """Orphans that lie in a directory now: held parts, what only looks like one, and unowned regions of other ids."""
    parts = [_kept(loose) for loose in found.loose if loose.kind is LooseKind.PART or loose.error]
    unowned = [
        _unowned(region)
        for region in found.regions
        if not (region.engine_id in own_ids or region.is_owned or region.held)
    ]
    return parts + unowned


def _kept(loose: LooseFile) -> OrphanBody:
    reason = "nobody holds it; the next sweep removes it"
    if loose.error:
        reason = f"{loose.error}; it is left alone"
    elif loose.is_held:
        reason = "a process of an engine still holds it; it is removed once that process ends"
    return OrphanBody(loose.name, loose.size_bytes, KEPT, reason)


def _unowned(region: FoundRegion) -> OrphanBody:
    reason = region.error or "nobody owns or holds this region; `kvcellar clean` removes it"
    return OrphanBody(meta_name(region.engine_id), region.reserved_bytes, KEPT, reason)

"""`kvcellar clean`: remove regions and files that nobody owns or holds, and say what was left and why."""

import sys

from kvcellar.contract import printable
from kvcellar.daemon.config import Settings
from kvcellar.errors import ConfigurationError, NotReady, RegionHeld, RegionMismatch
from kvcellar.region.directory import RegionDirectory, meta_name
from kvcellar.region.permissions import not_permitted
from kvcellar.region.survey import (
    FoundRegion,
    LooseFile,
    LooseKind,
    Survey,
    reclaim_loose,
    reclaim_unheld,
    survey,
)


def run(*, is_dry: bool) -> int:
    """Clean the directory.

    Raises:
        NotReady: there is no directory.
        ConfigurationError: this process may not remove what lies in it.
        RegionHeld: there was something, and all of it is owned or held.
        RegionMismatch: a page cannot be read or a name is not ours; the rest was cleaned.
    """
    path = Settings.load().region_directory
    try:
        directory = RegionDirectory.open(path)
    except FileNotFoundError as error:
        raise NotReady(
            f"{path} does not exist: set KVCELLAR_DIR to where the regions are"
        ) from error
    try:
        return _Cleaner(directory, is_dry).clean()
    except PermissionError as error:
        raise ConfigurationError(
            not_permitted(path, "cleaned", "run the command as uid {uid}, as its sidecar does")
        ) from error
    finally:
        directory.close()


class _Cleaner:
    """One pass over a directory; counts what went and what stayed."""

    def __init__(self, directory: RegionDirectory, is_dry: bool) -> None:
        self._directory = directory
        self._is_dry = is_dry
        self._removed = 0
        self._kept = 0

    def clean(self) -> int:
        found = survey(self._directory)
        damage = [self._clean_region(region) for region in found.regions]
        self._clean_loose(found)
        if any(damage):
            raise RegionMismatch(next(text for text in damage if text))
        if self._kept and not self._removed:
            raise RegionHeld(
                f"nothing was removed: all {self._kept} found are owned or held, or not as kvcellar made them"
            )
        if not self._removed:
            sys.stdout.write("nothing to remove\n")
        return 0

    def _clean_region(self, region: FoundRegion) -> str:
        """Remove a region, or say why not; returns what is damaged."""
        name = meta_name(region.engine_id)
        if region.error:
            self._say("kept", name, region.reserved_bytes, region.error)
            return region.error
        if region.is_notice:
            return ""
        if region.is_owned or region.held:
            who = "a living process owns it" if region.is_owned else "an engine holds it"
            self._say("kept", name, region.reserved_bytes, who)
            return ""
        try:
            if not self._is_dry:
                reclaim_unheld(self._directory, region.engine_id)
        except (RegionHeld, FileNotFoundError) as error:
            self._say("kept", name, region.reserved_bytes, str(error))
            return ""
        except RegionMismatch as error:
            self._say("kept", name, region.reserved_bytes, str(error))
            return str(error)
        self._say("removed", name, region.reserved_bytes, "nobody owned or held it")
        return ""

    def _clean_loose(self, found: Survey) -> None:
        parts = [loose for loose in found.loose if loose.kind is LooseKind.PART]
        free = [loose for loose in parts if not loose.is_held]
        gone: list[LooseFile] = free if self._is_dry else reclaim_loose(self._directory)
        for loose in gone:
            self._say("removed", loose.name, loose.size_bytes, "no metadata page names it")
        names = {loose.name for loose in gone}
        for loose in found.loose:
            if loose.error or (loose.kind is LooseKind.PART and loose.name not in names):
                reason = loose.error or "a process of an engine holds it"
                self._say("kept", loose.name, loose.size_bytes, reason)

    def _say(self, action: str, name: str, size_bytes: int, reason: str) -> None:
        if action == "removed":
            self._removed += 1
        else:
            self._kept += 1
        would = "would be " if self._is_dry else ""
        line = f"{would}{action}  {name}  {size_bytes} bytes  {reason}"
        sys.stdout.write(printable(line) + "\n")

"""`kvcellar clean`: remove regions and files that nobody owns or holds, and say what was left and why."""

import sys
import time
from pathlib import Path

from kvcellar.contract import printable
from kvcellar.daemon.config import Settings
from kvcellar.errors import ConfigurationError, NotReady, RegionHeld, RegionMismatch
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.janitor import Janitor
from kvcellar.region.names import meta_name
from kvcellar.region.permissions import not_permitted
from kvcellar.region.quarantine import WAIT_S
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
    settings = Settings.load()
    path = settings.region_directory
    try:
        directory = RegionDirectory.open(path)
    except FileNotFoundError as error:
        raise NotReady(
            f"{path} does not exist: set KVCELLAR_DIR to where the regions are"
        ) from error
    try:
        return _Cleaner(directory, settings.root, is_dry).clean()
    except PermissionError as error:
        raise ConfigurationError(
            not_permitted(path, "cleaned", "run the command as uid {uid}, as its sidecar does")
        ) from error
    finally:
        directory.close()


class _Cleaner:
    """One pass over a directory; counts what went and what stayed."""

    def __init__(self, directory: RegionDirectory, root: Path, is_dry: bool) -> None:
        self._directory = directory
        self._root = root
        self._is_dry = is_dry
        self._removed = 0
        self._kept = 0

    def clean(self) -> int:
        found = survey(self._directory)
        damage = [self._clean_region(region) for region in found.regions]
        self._clean_loose(found)
        self._clean_root()
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

    def _clean_root(self) -> None:
        """Remove files of stock vLLM that no engine has; those that one has are none of ours."""
        janitor = Janitor(self._root)
        try:
            if self._is_dry:
                found = janitor.look(self._directory)
                gone = [file for file in found if not (file.is_held or file.reason)]
                left = [file for file in found if file.reason]
            else:
                left = janitor.set_aside(self._directory)
                if janitor.is_waiting:
                    time.sleep(WAIT_S)
                gone = janitor.finish(self._directory)
        finally:
            janitor.close()
        for file in gone:
            self._say("removed", file.name, file.size_bytes, "no engine had it")
        for file in left:
            if not file.is_held:
                self._say("kept", file.name, file.size_bytes, file.reason)

    def _say(self, action: str, name: str, size_bytes: int, reason: str) -> None:
        if action == "removed":
            self._removed += 1
        else:
            self._kept += 1
        would = "would be " if self._is_dry else ""
        line = f"{would}{action}  {name}  {size_bytes} bytes  {reason}"
        sys.stdout.write(printable(line) + "\n")

"""The directory of regions for a thread that outlives it: opened anew once somebody removed or replaced it."""

from collections.abc import Callable

from kvcellar.region.directory import RegionDirectory


class ReopenedDirectory:
    """One thread's own description of the directory; end it with `close`."""

    def __init__(self, open_directory: Callable[[], RegionDirectory]) -> None:
        self._open = open_directory
        self._directory: RegionDirectory | None = None

    def get(self) -> RegionDirectory:
        """The directory that the path leads to now.

        Raises:
            KVCellarError, OSError: as `open_directory`; the next call tries again.
        """
        if self._directory is not None and not self._directory.is_there():
            self.close()
        if self._directory is None:
            self._directory = self._open()
        return self._directory

    def close(self) -> None:
        """Close it, if it is open; `get` opens it again."""
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

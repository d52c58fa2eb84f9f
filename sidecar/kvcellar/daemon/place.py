"""Where one region is kept: the directory, for as long as its path leads to it, and the notice in it."""

import contextlib
import logging

from kvcellar.daemon.notice import Notice
from kvcellar.daemon.rules import KeeperRules
from kvcellar.errors import KVCellarError
from kvcellar.region.cgroups import Limit
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.memory import read_limits
from kvcellar.region.names import meta_name
from kvcellar.region.states import RegionRequest

logger = logging.getLogger(__name__)


class RegionPlace:
    """A directory that is opened when it is needed. For one thread; end it with `close`.

    It is kept open although its path leads elsewhere, until `forget_if_lost`: a region in it is still there.
    """

    def __init__(self, request: RegionRequest, rules: KeeperRules) -> None:
        self._engine_id = request.engine_id
        self._rules = rules
        self._notice = Notice(request)
        self._directory: RegionDirectory | None = None

    def open(self) -> RegionDirectory:
        """The directory.

        Raises:
            KVCellarError, OSError: it cannot be opened; the next call tries again.
        """
        if self._directory is None:
            self._directory = self._rules.open_directory()
        return self._directory

    def forget_if_lost(self) -> None:
        """Let go of a directory that somebody has removed or replaced: the next one is made anew."""
        directory = self._directory
        if directory is not None and not directory.is_there():
            fields = {"engine_id": self._engine_id}
            logger.warning("directory removed by another process", extra=fields)
            self.close()

    def has_page(self) -> bool:
        """Whether something lies at the name of the region's metadata page; errors as of `open`."""
        return self.open().identity(meta_name(self._engine_id)) is not None

    def read_limits(self) -> list[Limit]:
        """Every memory limit that binds a region here; errors as of `open`."""
        return read_limits(self.open().fd, pod_limit_bytes=self._rules.pod_limit_bytes)

    def put_up_notice(self, reason: str) -> None:
        """Tell engines that start why there is no region."""
        with contextlib.suppress(KVCellarError, OSError):  # no directory, no engine that waits
            self._notice.put_up(self.open(), reason)

    def take_down_notice(self) -> None:
        """Make room for a region, if a notice is up."""
        self._notice.take_down()

    def close(self) -> None:
        """Take the notice down and close the directory; `open` opens it again."""
        self._notice.take_down()
        directory, self._directory = self._directory, None
        if directory is not None:
            directory.close()

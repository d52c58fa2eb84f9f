"""The janitor's thread: looks through the volume's root now and then, and says what it found and removed.

It has a thread of its own because a file lies aside for a second, and because the pages of a large one take
their time to be freed; neither may hold up the supervisor or a region.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvcellar.contract import Janitor as Policy
from kvcellar.contract import OrphanBody, printable
from kvcellar.daemon.orphans import KEPT, RECLAIMED, REMEMBERED, Sweep
from kvcellar.daemon.reopening import ReopenedDirectory
from kvcellar.errors import KVCellarError
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.janitor import Janitor, StockFile
from kvcellar.region.quarantine import WAIT_S

logger = logging.getLogger(__name__)

PASS_S = 5.0
"""Seconds between two looks."""
_WAIT_S = WAIT_S + 0.05


class Cleaner:
    """Cleans one volume's root of files of stock vLLM. `start` it once, `stop` it once.

    Attributes:
        sweep: what was found and removed so far; any thread may read it.
        has_looked: set after the first pass, whatever came of it.
    """

    def __init__(
        self, root: Path, policy: Policy, open_directory: Callable[[], RegionDirectory]
    ) -> None:
        self.sweep = Sweep()
        self.has_looked = threading.Event()
        self._policy = policy
        self._directory = ReopenedDirectory(open_directory)
        self._janitor = Janitor(root)
        self._reclaimed: deque[OrphanBody] = deque(maxlen=REMEMBERED)
        self._said: set[tuple[str, str]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="janitor", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, is yet to begin, or has ended as it should."""
        return self._stop.is_set() or self._thread.ident is None or self._thread.is_alive()

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; what lies aside then goes back. Returns at once."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread."""
        if self._thread.ident is not None:
            self._thread.join(max(timeout_s, 0.0))

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._pass()
                self.has_looked.set()
                self._stop.wait(PASS_S)
        finally:
            self._janitor.close()
            self._directory.close()

    def _pass(self) -> None:
        try:
            directory = self._directory.get()
            match self._policy:
                case Policy.RECLAIM:
                    self._reclaim(directory)
                case Policy.REPORT:
                    left = self._janitor.put_back(directory)
                    self._show(left + self._janitor.look(directory))
                case Policy.OFF:
                    self._show(self._janitor.put_back(directory))
        except (
            KVCellarError,
            OSError,
        ) as error:  # the keepers say what is wrong with the directory
            logger.debug("volume not cleaned", extra={"error": str(error)})

    def _reclaim(self, directory: RegionDirectory) -> None:
        left = self._janitor.set_aside(directory)
        if self._janitor.is_waiting:
            if self._stop.wait(_WAIT_S):
                self._janitor.put_back(directory)
                return
            for file in self._janitor.finish(directory):
                self._note(file)
        self._show(left)

    def _note(self, file: StockFile) -> None:
        reason = "no engine had it"
        name = printable(file.name)
        self._reclaimed.append(OrphanBody(name, file.size_bytes, RECLAIMED, reason))
        logger.info("orphan reclaimed", extra={"file": file.name, "size_bytes": file.size_bytes})
        self.sweep = Sweep(
            self.sweep.orphans,
            self.sweep.reclaimed_files + 1,
            self.sweep.reclaimed_bytes + file.size_bytes,
        )

    def _show(self, left: list[StockFile]) -> None:
        """Publish what stays; each reason for it is said once."""
        lying = lying_stock(left)
        for orphan in lying:
            if (orphan.name, orphan.reason) not in self._said:
                fields = {"file": orphan.name, "size_bytes": orphan.bytes, "reason": orphan.reason}
                logger.warning("orphan kept", extra=fields)
        self._said = {(orphan.name, orphan.reason) for orphan in lying}
        self.sweep = Sweep(
            (*self._reclaimed, *lying),
            self.sweep.reclaimed_files,
            self.sweep.reclaimed_bytes,
            sum(file.size_bytes for file in left),
        )


def lying_stock(left: list[StockFile]) -> list[OrphanBody]:
    """What lies in the root without an engine, and why; one that an engine has, or may have just made, is none.

    The first `REMEMBERED` of them: whoever may write to the volume may leave any number.
    """
    reason = "no engine has it; `kvcellar clean` removes it, or the janitor with KVCELLAR_JANITOR=reclaim"
    lying = [file for file in left if not (file.is_held or file.is_new)]
    return [
        # Any bytes may be a name, also those that are no text and that no answer could hold.
        OrphanBody(printable(file.name), file.size_bytes, KEPT, file.reason or reason)
        for file in lying[:REMEMBERED]
    ]

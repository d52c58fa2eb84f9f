"""The work of one sidecar: a keeper for each region, and a supervisor that watches what they share.

The supervisor sweeps orphans before any region is planned, then looks at the limits once a second and
at orphans every few seconds; when a limit changed or an orphan went, failed regions are tried again at
once. It also reads the desired state, which the keepers apply. `status` puts everything together and may
be called from any thread, without blocking.

Invariants: nothing here waits for a region's sake when it is told to stop; what is still inside a
system call then goes down with the process, and the next start goes on where it was.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvcellar.contract import Contents, EngineId, Mode
from kvcellar.daemon.cleaning import Cleaner
from kvcellar.daemon.config import Settings
from kvcellar.daemon.desired import Desired, DesiredFile
from kvcellar.daemon.in_force import CONTENTS_NOT_KEPT
from kvcellar.daemon.keeper import RegionKeeper
from kvcellar.daemon.oom import FirstToBeKilled
from kvcellar.daemon.orphans import Sweep, Sweeper
from kvcellar.daemon.reopening import ReopenedDirectory
from kvcellar.daemon.rules import KeeperRules
from kvcellar.daemon.status import Status
from kvcellar.errors import ConfigurationError, KVCellarError
from kvcellar.region.cgroups import Limit
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.memory import read_limits
from kvcellar.region.states import RegionRequest

logger = logging.getLogger(__name__)

_UNUSED = "desired state not used"
_TICK_S = 1.0
_SWEEP_S = 5.0
_STUCK_S = 30.0
"""Longer than the longest wait for the directory's lock (10 s, twice in a sweep)."""


def region_requests(settings: Settings) -> list[RegionRequest]:
    """What the settings ask for: one region for each engine.

    Raises:
        ConfigurationError: `KVCELLAR_ENGINE_ID` or `KVCELLAR_CAPACITY` is missing, or in stock mode the
            directory is not where its files can go to the root.
    """
    if settings.mode is Mode.STOCK and settings.region_directory.parent != settings.root:
        raise ConfigurationError(
            f"KVCELLAR_DIR={str(settings.region_directory)!r} cannot be used in stock mode: vLLM looks for its file in "
            f"KVCELLAR_ROOT, so the directory has to lie directly in {settings.root}"
        )
    return [
        RegionRequest(
            engine_id,
            settings.required_capacity_bytes,
            settings.mode,
            settings.huge_pages,
            settings.settle_threads,
        )
        for engine_id in settings.engine_ids
    ]


class Service:
    """Owns the regions of one sidecar. `start` it once and `stop` it once.

    Attributes:
        fatal: why the process has to end, under `fail`; None as long as it may go on.
    """

    def __init__(
        self, settings: Settings, requests: list[RegionRequest], *, any_filesystem: bool
    ) -> None:
        self.fatal: KVCellarError | None = None
        self._settings = settings
        self._any_filesystem = any_filesystem
        self._rules = KeeperRules(
            self._open_directory,
            settings.on_failure,
            settings.retention,
            settings.pod_memory_limit_bytes,
            FirstToBeKilled(),
        )
        self._keepers = [RegionKeeper(request, self._rules, self._on_fatal) for request in requests]
        self._sweeper = Sweeper([keeper.engine_id for keeper in self._keepers])
        self._sweep = Sweep()
        self._cleaner = Cleaner(settings.root, settings.janitor, self._open_directory)
        self._directory = ReopenedDirectory(self._open_directory)
        self._reclaimed_files = 0
        self._desired = DesiredFile(settings.desired_file, settings.pod_uid)
        self._limits: tuple[Limit, ...] = ()
        self._fatal_lock = threading.Lock()
        self._tell_fatal: Callable[[], None] | None = None
        self._stop = threading.Event()
        self._asked_s = 0.0
        self._beat_s = time.monotonic()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def start(self, tell_fatal: Callable[[], None]) -> None:
        """Begin; returns at once.

        Args:
            tell_fatal: called once, from a thread of the service, when `fatal` was set.
        """
        self._tell_fatal = tell_fatal
        self._beat_s = time.monotonic()
        if self._settings.contents is Contents.KEEP:
            logger.warning(CONTENTS_NOT_KEPT)
        self._supervisor.start()

    def request_stop(self) -> None:
        """Ask every thread to end after its step; safe in a signal handler's context."""
        self._asked_s = self._asked_s or time.monotonic()
        self._stop.set()
        self._cleaner.stop()
        for keeper in self._keepers:
            keeper.stop()

    def stop(self, timeout_s: float) -> None:
        """End, and wait for the threads up to a deadline after the first asking; regions keep their files."""
        self._asked_s = self._asked_s or time.monotonic()
        self._stop.set()
        self._cleaner.stop()
        for keeper in self._keepers:
            keeper.stop(leave_nothing=self.fatal is not None)
        deadline = self._asked_s + timeout_s
        for keeper in self._keepers:
            if not keeper.join(deadline - time.monotonic()):
                logger.warning(
                    "keeper still inside a system call", extra={"engine_id": keeper.engine_id}
                )
        self._cleaner.join(deadline - time.monotonic())
        self._supervisor.join(max(deadline - time.monotonic(), 0.0))

    def status(self) -> Status:
        """Everything that the sidecar shows, as of now."""
        ids = [keeper.engine_id for keeper in self._keepers]
        desired = self._desired.current
        sweep = self._sweep.plus(self._cleaner.sweep)
        return Status(
            regions=tuple(keeper.view for keeper in self._keepers),
            contents=self._settings.contents,
            retention=self._settings.retention.text,
            on_failure=self._settings.on_failure,
            limits=self._limits,
            orphans=sweep.orphans,
            reclaimed_files=sweep.reclaimed_files,
            reclaimed_bytes=sweep.reclaimed_bytes,
            foreign_bytes=sweep.foreign_bytes,
            stopped_by=str(self.fatal or ""),
            is_alive=self._is_alive(),
            desired_problems={
                engine_id: problem
                for engine_id in ids
                if (problem := desired.problem_of(engine_id))
            },
        )

    def _is_alive(self) -> bool:
        if self._stop.is_set() or self.fatal is not None:
            return True
        is_beating = self._supervisor.is_alive() and time.monotonic() - self._beat_s < _STUCK_S
        is_working = self._cleaner.is_alive and all(keeper.is_alive for keeper in self._keepers)
        return is_beating and is_working

    def _on_fatal(self, error: KVCellarError) -> None:
        with self._fatal_lock:
            if self.fatal is not None or self._tell_fatal is None:
                return
            self.fatal = error
        logger.error("sidecar stops", extra={"reason": str(error), "status": error.exit_status})
        for keeper in self._keepers:
            keeper.stop(leave_nothing=True)
        self._tell_fatal()

    def _open_directory(self) -> RegionDirectory:
        return RegionDirectory.create(
            self._settings.region_directory, any_filesystem=self._any_filesystem
        )

    # --- the supervisor's thread ---------------------------------------------------------------------

    def _supervise(self) -> None:
        self._look_at_desired()
        self._look(is_sweep=True)
        self._cleaner.start()
        while not (self._cleaner.has_looked.wait(0.1) or self._stop.is_set()):
            self._beat_s = time.monotonic()  # what it frees now is there for the plan
        for keeper in self._keepers:
            keeper.start()
        swept_s = time.monotonic()
        while not self._stop.wait(_TICK_S):
            self._beat_s = time.monotonic()
            self._look_at_desired()
            is_sweep = self._beat_s - swept_s >= _SWEEP_S
            self._look(is_sweep=is_sweep)
            if is_sweep:
                swept_s = self._beat_s

    def _look_at_desired(self) -> None:
        """Read what is desired, hand it on, and say once what cannot be used."""
        before = self._desired.current
        if not self._desired.look():
            return
        now = self._desired.current
        for keeper in self._keepers:
            keeper.desire(now.regions.get(keeper.engine_id))
        self._say_unused(before, now)

    def _say_unused(self, before: Desired, now: Desired) -> None:
        file = str(self._settings.desired_file)
        if now.problem != before.problem:
            if now.problem:
                logger.warning(_UNUSED, extra={"file": file, "reason": now.problem})
            else:
                logger.info("desired state used again", extra={"file": file})
        for keeper in self._keepers:
            stale = now.stale.get(keeper.engine_id, "")
            if stale and stale != before.stale.get(keeper.engine_id):
                logger.warning(
                    _UNUSED, extra={"file": file, "engine_id": keeper.engine_id, "reason": stale}
                )

    def _look(self, *, is_sweep: bool) -> None:
        """Look at limits and orphans; without a directory the keepers say what is wrong with it."""
        try:
            directory = self._directory.get()
            self._look_at_limits(directory)
            if is_sweep:
                self._sweep = self._sweeper.sweep(directory)
            self._look_at_reclaimed()
        except (KVCellarError, OSError) as error:
            logger.debug("directory not looked at", extra={"error": str(error)})

    def _look_at_limits(self, directory: RegionDirectory) -> None:
        before = {limit.name: limit.limit_bytes for limit in self._limits}
        self._limits = tuple(
            read_limits(directory.fd, pod_limit_bytes=self._settings.pod_memory_limit_bytes)
        )
        now = {limit.name: limit.limit_bytes for limit in self._limits}
        if before and now != before:
            logger.info("limits changed", extra={"limits": now})
            self._retry_failed()

    def _look_at_reclaimed(self) -> None:
        before = self._reclaimed_files
        self._reclaimed_files = self._sweep.reclaimed_files + self._cleaner.sweep.reclaimed_files
        if self._reclaimed_files != before:
            self._retry_failed()

    def _retry_failed(self) -> None:
        for keeper in self._keepers:
            keeper.retry_now()


def describe(settings: Settings, engine_ids: list[EngineId]) -> dict[str, object]:
    """The fields of the log line that opens the sidecar's log."""
    directory: Path = settings.region_directory
    return {
        "directory": str(directory),
        "engine_ids": list(engine_ids),
        "capacity_bytes": settings.capacity_bytes,
        "on_failure": settings.on_failure,
        "retention": settings.retention.text,
    }

"""The life of one region, from the plan to its end: one thread that owns it and repairs what it can.

The thread acquires the region (makes it, or adopts what an earlier sidecar left), reserves, settles,
and then looks at it once a second. What goes wrong ends in one of three ways:

=============================== =========================================== =====================
what                            `degrade`                                   `fail`
=============================== =========================================== =====================
another process owns the region observe it, and take over when it is freed  the process ends (4)
anything else                   state Failed, tried again with back-off     the process ends
the retention is over           Released, until another one is desired      the same
=============================== =========================================== =====================

What is desired at run time replaces the start settings. `retention: now` frees a region that nobody
holds in any state, also one that no engine has used yet and one that is still being reserved.

Invariants: only this thread touches the `OwnedRegion`; everybody else reads `view`, an immutable value
that is replaced at each change. Stopping at any moment leaves the files, and the next start goes on.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvcellar.contract import DesiredRegion, EngineId, OnFailure, PlanBody, RegionState
from kvcellar.daemon import plans
from kvcellar.daemon.backoff import BackOff
from kvcellar.daemon.counters import CounterTotals
from kvcellar.daemon.in_force import InForce
from kvcellar.daemon.observed import observed
from kvcellar.daemon.place import RegionPlace
from kvcellar.daemon.retention import RetentionClock
from kvcellar.daemon.rules import KeeperRules
from kvcellar.daemon.soundness import sound_snapshot
from kvcellar.daemon.status import RegionView, owned_view, released_view
from kvcellar.errors import DoesNotFit, KVCellarError, RegionHeld, RegionMismatch
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import HUGE_PAGE_BYTES, round_down
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.snapshot import RegionSnapshot
from kvcellar.region.states import RegionRequest

logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Seconds between two looks at a region that is ready or that another process owns."""
_HOLDER_S = 0.5
"""Seconds between two looks whether the last holder of a damaged region has gone."""


class RegionKeeper:
    """Keeps one region. `start` it once; `view` shows it; `stop` ends it."""

    def __init__(
        self,
        request: RegionRequest,
        rules: KeeperRules,
        report_fatal: Callable[[KVCellarError], None],
    ) -> None:
        capacity_bytes = round_down(request.capacity_bytes, HUGE_PAGE_BYTES)
        self.view = RegionView(
            request.engine_id, request.mode, RegionState.PLANNED, "", capacity_bytes
        )
        self._request = request
        self._rules = rules
        self._report_fatal = report_fatal
        self._place = RegionPlace(request, rules)
        self._region: OwnedRegion | None = None
        self._totals = CounterTotals()
        self._is_damaged = False
        self._backoff = BackOff()
        self._is_held = False
        self._clock = RetentionClock()
        self._in_force = InForce(rules.retention)
        self._stop = threading.Event()
        self._leave_nothing = False
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"keeper-{request.engine_id}", daemon=True
        )

    @property
    def engine_id(self) -> EngineId:
        """The engine whose region this is."""
        return self._request.engine_id

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, is yet to begin, or has ended as it should."""
        return self._stop.is_set() or self._thread.ident is None or self._thread.is_alive()

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def retry_now(self) -> None:
        """Cut a wait short: something changed that may let a failed region succeed."""
        self._wake.set()

    def desire(self, desired: DesiredRegion | None) -> None:
        """Apply what is desired now, or the start settings again; returns at once."""
        if self._in_force.offer(desired):
            self._wake.set()

    def stop(self, *, leave_nothing: bool = False) -> None:
        """Ask the thread to end after its step; returns at once.

        Args:
            leave_nothing: also remove the region, if this process made it and no engine has used it.
        """
        self._leave_nothing |= leave_nothing
        self._stop.set()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended, or never began."""
        if self._thread.ident is None:
            return True
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    # --- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._take_desired()
                try:
                    if self._is_at_rest():
                        self._rest()
                    else:
                        self._keep()
                except RegionHeld as error:
                    self._be_second(error)
                except (KVCellarError, OSError) as error:
                    self._fail(error)
        finally:
            self._end()

    def _keep(self) -> None:
        """Bring the region to Ready and watch it; returns at a stop, or when it is to be begun anew."""
        if self._frees_now() and self._was_freed():
            return
        region = self._take_up()
        with self._rules.oom.raised():
            region.reserve(self._has_to_stop)
        self._announce(region, RegionState.RESERVED, "region reserved")
        region.settle(self._has_to_stop)
        self._announce(region, RegionState.READY, "region ready")
        while True:
            self._wait(WATCH_S)
            if self._stop.is_set():
                return
            self._watch(region)
            if self.view.state is not RegionState.READY:
                # It was released, or left off when it was to go at once, and goes on.
                return

    # --- what is desired -----------------------------------------------------------------------------

    def _take_desired(self) -> None:
        self._in_force.take(self._fields())
        self.view = replace(self.view, desired=self._in_force.desired)

    def _frees_now(self) -> bool:
        """Whether the region has to go at once, used or not."""
        return self._in_force.frees_unused and not self._is_held

    def _is_at_rest(self) -> bool:
        """Whether the region was released, and nothing asks for it again."""
        return self.view.state is RegionState.RELEASED and not self._in_force.wants_it_again

    def _was_freed(self) -> bool:
        """Free the region before more is done for it; False if it has to be taken up before."""
        region = self._region
        if region is None:
            self._place.forget_if_lost()
            self._place.take_down_notice()
            if self._place.has_page():
                return False
        elif not self._was_released(region):
            return False
        self._be_released()
        return True

    def _rest(self) -> None:
        """Wait for another retention; engines that start meanwhile are told why there is no region."""
        self._place.forget_if_lost()
        self._place.put_up_notice(self._in_force.why_released)
        self._wait(WATCH_S)

    def _be_released(self) -> None:
        self._region, self._is_damaged = None, False
        self._backoff.reset()
        self._in_force.was_released()
        self._place.put_up_notice(self._in_force.why_released)
        self.view = released_view(self.view)
        logger.info("region released", extra=self._fields(retention=self._in_force.retention.text))

    # --- the region ----------------------------------------------------------------------------------

    def _take_up(self) -> OwnedRegion:
        """The region in a state that can be gone on from: acquired, or planned again after a failure."""
        if self._region is not None and self._is_damaged:
            self._clear_away(self._region)
        region = self._region
        if region is None:
            self._place.forget_if_lost()
        directory = self._place.open()
        if region is None:
            region = self._acquire(directory)
        else:
            self._show(region, plans.plan_again(region, directory, self._place.read_limits))
        if region.owner.state is RegionState.FAILED:
            # An engine holds it: it is cleared away once that one has gone.
            raise RegionMismatch(region.owner.reason)
        return region

    def _acquire(self, directory: RegionDirectory) -> OwnedRegion:
        self._place.take_down_notice()
        region = OwnedRegion.acquire(directory, self._request, self._place.read_limits)
        self._region = region
        self._show(region, plans.granted(region, directory, self._place.read_limits))
        logger.info(
            "region adopted" if region.is_adopted else "region made",
            extra=self._fields(state=region.owner.state, reserved_bytes=self.view.reserved_bytes),
        )
        if region.asked_bytes != region.capacity_bytes:
            logger.warning(
                "region keeps its old capacity: an engine holds it",
                extra=self._fields(asked_bytes=region.asked_bytes),
            )
        return region

    def _clear_away(self, region: OwnedRegion) -> None:
        """Remove a damaged region, so that a sound one can be made; its last holder goes first."""
        if not region.release():
            raise RegionMismatch(self.view.reason)
        self._region, self._is_damaged = None, False

    def _has_to_stop(self) -> bool:
        """Called between two steps: the moment to show the progress, to look for damage, and to take up wishes."""
        self._take_desired()
        if self._region is not None:
            self._show_seen(sound_snapshot(self._region))
        return self._stop.is_set() or self._frees_now()

    def _announce(self, region: OwnedRegion, state: RegionState, event: str) -> None:
        self._show(region)
        if region.owner.state is state:
            self._backoff.reset()
            owner = region.owner
            logger.info(
                event,
                extra=self._fields(
                    reserved_bytes=self.view.reserved_bytes,
                    huge_page_bytes=owner.huge_page_bytes,
                    reserve_seconds=round(owner.reserve_seconds, 3),
                    settle_seconds=round(owner.settle_seconds, 3),
                ),
            )

    def _watch(self, region: OwnedRegion) -> None:
        self._take_desired()
        seen = sound_snapshot(region)
        before = len(self.view.participants)
        self._show_seen(seen)
        if len(self.view.participants) != before:
            logger.info(
                "participants changed", extra=self._fields(participants=len(self.view.participants))
            )
        is_over = self._clock.is_over(
            self._in_force.retention, was_used=seen.was_used, is_held=self._is_held
        )
        if (is_over or self._frees_now()) and self._was_released(region):
            self._be_released()

    # --- when it goes wrong --------------------------------------------------------------------------

    def _be_second(self, error: RegionHeld) -> None:
        """Another process owns the region: show it as it is, and try again in a second."""
        if self._rules.on_failure is OnFailure.FAIL:
            self._end_process(error)
            return
        reason = f"observed only: {error}"
        if self.view.reason != reason:
            logger.warning("region owned by another process", extra=self._fields(reason=str(error)))
        seen = self._observed()
        self.view = replace(seen, reason=reason, plan_decided=True, desired=self._in_force.desired)
        self._wait(WATCH_S)

    def _fail(self, error: KVCellarError | OSError) -> None:
        """Say that there is no region, and why; then wait, or end the process."""
        reason = str(error)
        plan = self.view.plan
        if isinstance(error, DoesNotFit):
            plan = plans.refused(error, self._place.read_limits)
        self._is_damaged = isinstance(error, RegionMismatch)
        self._publish_failure(reason)
        self.view = replace(
            self.view, state=RegionState.FAILED, reason=reason, plan=plan, plan_decided=True
        )
        if self._rules.on_failure is OnFailure.FAIL:
            self._end_process(error)
            return
        if isinstance(error, DoesNotFit) and self._region is None:
            self._place.put_up_notice(reason)
        pause_s = self._backoff.next_s()
        logger.error("region failed", extra=self._fields(reason=reason, retry_s=round(pause_s, 1)))
        self._wait_out(pause_s)

    def _observed(self) -> RegionView:
        """The region that another process owns, or the last that was known of it."""
        try:
            seen = observed(self._place.open(), self.engine_id, self._totals)
        except (KVCellarError, OSError) as error:
            logger.debug("region not observed", extra=self._fields(error=str(error)))
            return self.view
        return seen or self.view

    def _publish_failure(self, reason: str) -> None:
        """Tell the engines through the metadata page, where there is one; the region stays ours."""
        region = self._region
        if region is None:
            return
        try:
            region.fail(reason)
            self._show(region)
        except (KVCellarError, OSError) as error:
            logger.warning("failure not published", extra=self._fields(error=str(error)))

    def _end_process(self, error: KVCellarError | OSError) -> None:
        fatal = error if isinstance(error, KVCellarError) else KVCellarError(str(error))
        self.view = replace(self.view, reason=str(error), plan_decided=True)
        self._leave_nothing = True
        self._stop.set()
        self._report_fatal(fatal)

    def _wait(self, seconds: float) -> bool:
        """Whether the wait was cut short."""
        is_woken = self._wake.wait(seconds)
        if not self._stop.is_set():
            self._wake.clear()
        return is_woken

    def _wait_out(self, seconds: float) -> None:
        """Wait; of a damaged region only until its last holder goes: the next engine start needs a sound one."""
        if not self._waits_for_holder():
            self._wait(seconds)
            return
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0 and self._waits_for_holder():
            if self._wait(min(left_s, _HOLDER_S)):
                return

    def _waits_for_holder(self) -> bool:
        if self._region is None or not self._is_damaged:
            return False
        try:
            return self._region.held()
        except (KVCellarError, OSError):
            return True

    def _end(self) -> None:
        region, self._region = self._region, None
        if region is not None:
            is_ours_alone = not region.is_adopted and self.view.session is None
            if not (self._leave_nothing and is_ours_alone and self._was_released(region)):
                region.close()
        self._place.close()

    def _was_released(self, region: OwnedRegion) -> bool:
        try:
            return region.release()
        except (KVCellarError, OSError) as error:
            logger.warning("region not released", extra=self._fields(error=str(error)))
            return False

    # --- what others see -----------------------------------------------------------------------------

    def _show(self, region: OwnedRegion, plan: PlanBody | None = None) -> None:
        self._show_seen(region.snapshot())
        if plan is not None:
            self.view = replace(self.view, plan=plan, plan_decided=True)

    def _show_seen(self, seen: RegionSnapshot) -> None:
        self._is_held = bool(seen.held)
        self.view = owned_view(self.view, seen, self._totals.add(seen.rows))

    def _fields(self, **more: object) -> dict[str, object]:
        return {"engine_id": self.engine_id, "capacity_bytes": self.view.capacity_bytes, **more}

"""What the sidecar shows: one immutable `Status`, and the HTTP bodies that are made from it. Pure.

The threads that own regions publish a new `RegionView` whenever something changed; HTTP handlers,
metrics and `kvcellar status` only read. So a request costs no I/O and sees one moment.

Invariants: what other processes wrote into the metadata page is shown, clamped to what is possible,
and never trusted. Model names never appear: `fingerprint` and `session` are hashes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvcellar import __version__
from kvcellar.contract import (
    CONTRACT_VERSION,
    Contents,
    DesiredRegion,
    EngineId,
    GeometryBody,
    LimitBody,
    Mode,
    OnFailure,
    OrphanBody,
    ParticipantBody,
    PlanBody,
    RegionBody,
    RegionsBody,
    RegionState,
    Role,
)
from kvcellar.region.cgroups import Limit
from kvcellar.region.geometry import Geometry
from kvcellar.region.metadata import Counters, OwnerSection, SessionSection, SlotRow
from kvcellar.region.names import engine_of_meta, engine_of_part
from kvcellar.region.snapshot import RegionSnapshot
from kvcellar.region.states import ATTACHABLE
from kvcellar.region.survey import FoundRegion

GIVEN_UP = frozenset({RegionState.FAILED, RegionState.RELEASED})
"""States from which an engine start gets no region."""


@dataclass(frozen=True, slots=True)
class RegionView:
    """One region as its keeper last saw it.

    Attributes:
        state, reason: as the owner has decided; for a region that another process owns, its own words.
        capacity_bytes: what was asked for, or what is there.
        owner: None as long as there is no metadata page.
        session: what the last engine start decided; None before the first.
        participants: rows whose slot is held now.
        totals: counters of all participants since this process started watching.
        reserved_bytes: bytes that the file system has promised to the data file.
        plan: what was granted or refused; None also where something else went wrong before.
        plan_decided: whether the start gate knows: there is a plan, or there will be none.
        desired: what its keeper applies instead of the start settings; None: nothing is desired.
    """

    engine_id: EngineId
    mode: Mode
    state: RegionState
    reason: str
    capacity_bytes: int
    owner: OwnerSection | None = None
    session: SessionSection | None = None
    participants: tuple[SlotRow, ...] = ()
    totals: Counters = field(default_factory=Counters)
    reserved_bytes: int = 0
    plan: PlanBody | None = None
    plan_decided: bool = False
    desired: DesiredRegion | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes of the chunks that hold KV blocks, by the scheduler's own count."""
        if self.session is None:
            return 0
        geometry = self.session.geometry
        used = [row.counters.used_chunks for row in self.participants if row.role is Role.SCHEDULER]
        chunks = min(max(used, default=0), geometry.num_chunks)
        return chunks * geometry.chunk_stride_bytes * geometry.copies

    @property
    def settled_bytes(self) -> int:
        """Bytes that are zeroed and resident."""
        return self.owner.settled_bytes if self.owner else 0

    @property
    def is_attachable(self) -> bool:
        """Whether an engine may attach now."""
        return self.state in ATTACHABLE


@dataclass(frozen=True, slots=True)
class Status:
    """Everything that the sidecar shows, at one moment.

    Attributes:
        contents, retention: as the process was started.
        orphans: files found without an owner, newest last.
        foreign_bytes: bytes of files in the directory that are not ours.
        stopped_by: why the process is about to end; empty while it goes on.
        is_alive: whether the threads that do the work still run.
        desired_problems: why what is desired of a region is not used, by engine id.
    """

    regions: tuple[RegionView, ...]
    contents: Contents
    retention: str
    on_failure: OnFailure
    limits: tuple[Limit, ...] = ()
    orphans: tuple[OrphanBody, ...] = ()
    reclaimed_files: int = 0
    reclaimed_bytes: int = 0
    foreign_bytes: int = 0
    stopped_by: str = ""
    is_alive: bool = True
    desired_problems: Mapping[EngineId, str] = field(default_factory=dict)

    def not_started(self) -> str:
        """Why the start gate is still shut; empty once it is open."""
        if self.stopped_by:
            return self.stopped_by
        undecided = [view.engine_id for view in self.regions if not view.plan_decided]
        if undecided:
            return f"the plan of region {undecided[0]} has not been decided yet"
        if self.on_failure is OnFailure.DEGRADE:
            return ""
        return next(
            (_unattachable(view) for view in self.regions if view.state in GIVEN_UP),
            "",
        )

    def not_ready(self) -> str:
        """Why an engine could not attach to every region now; empty if it could."""
        return next((_unattachable(view) for view in self.regions if not view.is_attachable), "")

    def plan(self) -> PlanBody | None:
        """The plan of all regions together; None as long as one is undecided, or could not be made.

        What was asked for is summed. What was free is what the first to plan has seen, since the others
        saw it less the promises before them.
        """
        plans = [view.plan for view in self.regions if view.plan is not None]
        if len(plans) < len(self.regions):
            return None
        widest = max(plans, key=lambda plan: plan.freeBytes)
        shown = next((plan for plan in plans if not plan.fits), widest)
        return PlanBody(
            fits=shown.fits,
            askedBytes=sum(plan.askedBytes for plan in plans),
            freeBytes=widest.freeBytes,
            bindingLimit=shown.bindingLimit,
            limits=shown.limits,
        )

    def region_body(self, engine_id: str) -> RegionBody | None:
        """The region of one engine; None if this sidecar has none of that id."""
        return next((b for b in self.regions_body().regions if b.engineId == engine_id), None)

    def regions_body(self) -> RegionsBody:
        """All regions, in the order of `KVCELLAR_ENGINE_ID`."""
        limits = self._limit_bodies()
        names = [view.engine_id for view in self.regions]
        return RegionsBody(
            [
                _region_body(view, self, limits, _orphans_of(view.engine_id, names, self.orphans))
                for view in self.regions
            ],
            contractVersion=CONTRACT_VERSION,
            version=__version__,
        )

    def _limit_bodies(self) -> list[LimitBody]:
        least = min((limit.free_bytes for limit in self.limits), default=0)
        binding = next((limit.name for limit in self.limits if limit.free_bytes == least), "")
        return [
            LimitBody(limit.name, limit.limit_bytes, limit.usage_bytes, limit.name == binding)
            for limit in self.limits
        ]


def found_view(found: FoundRegion, totals: Counters) -> RegionView:
    """A region that this process does not own, as it lies in the directory."""
    if found.contents is None:
        return RegionView(found.engine_id, Mode.PLUGIN, RegionState.FAILED, found.error, 0)
    owner, rows = found.contents.owner, found.contents.rows
    wrong = found.error or found.damage
    return RegionView(
        engine_id=found.engine_id,
        mode=owner.mode,
        state=RegionState.FAILED if wrong else owner.state,
        reason=wrong or owner.reason,
        capacity_bytes=owner.capacity_bytes,
        owner=owner,
        session=found.contents.session,
        participants=tuple(row for slot, row in sorted(rows.items()) if slot in found.held),
        totals=totals,
        reserved_bytes=found.reserved_bytes,
    )


def owned_view(before: RegionView, seen: RegionSnapshot, totals: Counters) -> RegionView:
    """The region that this process owns, as it is now; the plan and what is desired stay."""
    return replace(
        before,
        mode=seen.owner.mode,
        state=seen.owner.state,
        reason=seen.owner.reason,
        capacity_bytes=seen.owner.capacity_bytes,
        owner=seen.owner,
        session=seen.session,
        participants=tuple(row for _, row, is_held in seen.rows if is_held),
        totals=totals,
        reserved_bytes=seen.reserved_bytes,
    )


def released_view(before: RegionView) -> RegionView:
    """A region whose names are gone: nothing of it is there, and an engine start need not wait for it."""
    return replace(
        before,
        state=RegionState.RELEASED,
        reason="",
        owner=None,
        participants=(),
        reserved_bytes=0,
        plan_decided=True,
    )


def _unattachable(view: RegionView) -> str:
    return f"region {view.engine_id} is {view.state}" + (f": {view.reason}" if view.reason else "")


def _orphans_of(
    engine_id: str, names: list[EngineId], orphans: tuple[OrphanBody, ...]
) -> list[OrphanBody]:
    """Orphans of one region: those that carry its id; what carries no id of ours goes to the first."""

    def region_of(orphan: OrphanBody) -> str:
        carried = engine_of_part(orphan.name) or engine_of_meta(orphan.name)
        return carried if carried in names else names[0]

    return [orphan for orphan in orphans if region_of(orphan) == engine_id]


def _region_body(
    view: RegionView, status: Status, limits: list[LimitBody], orphans: list[OrphanBody]
) -> RegionBody:
    session, desired = view.session, view.desired
    return RegionBody(
        engineId=view.engine_id,
        mode=view.mode,
        state=view.state,
        reason=_reason(view, status),
        contents=(desired and desired.contents) or status.contents,
        retention=(desired and desired.retention) or status.retention,
        observedGeneration=desired.generation if desired else 0,
        generation=session.generation if session else 0,
        session=session.session if session else "",
        fingerprint=session.fingerprint if session else "",
        capacityBytes=view.capacity_bytes,
        reservedBytes=view.reserved_bytes,
        settledBytes=view.settled_bytes,
        hugePageBytes=view.owner.huge_page_bytes if view.owner else 0,
        usedBytes=view.used_bytes,
        unusedTailBytes=session.geometry.unused_tail_bytes if session else 0,
        geometry=_geometry_body(session.geometry) if session else None,
        participants=[
            ParticipantBody(row.role, row.rank, row.since_unix_s, row.pinned)
            for row in sorted(view.participants, key=lambda row: (row.role, row.rank))
        ],
        engineStarts=session.engine_starts if session else 0,
        limits=limits,
        orphans=orphans,
    )


def _reason(view: RegionView, status: Status) -> str:
    """Why the region is as it is, and why what is desired of it is not used."""
    problem = status.desired_problems.get(view.engine_id)
    return "; ".join(filter(None, [view.reason, problem and f"desired state not used: {problem}"]))


def _geometry_body(geometry: Geometry) -> GeometryBody:
    return GeometryBody(
        layout=geometry.layout,
        worldSize=geometry.world_size,
        copies=geometry.copies,
        rankBytes=geometry.rank_bytes,
        chunkStrideBytes=geometry.chunk_stride_bytes,
        numChunks=geometry.num_chunks,
    )

"""Attach an engine to its region: one call in every rank, one outcome for all of them.

Rank 0 goes first and decides (new session, new generation); the others follow. Two collective calls
keep the ranks together, and every rank makes both exactly once, failed or not:

1. rank 0's verdict, so that a rank above 0 never waits for a session that will not come;
2. every rank's outcome with what it sees (boot id, data file, geometry). Any failure detaches all.

The scheduler process attaches after the workers (`attach_scheduler`) and turns offload on only if every
rank's slot is held in its own session. With `Owner.ENGINE` rank 0 also makes the region, by the same code
as the sidecar, and the scheduler removes its names once everybody holds it, so nothing can leak.
"""

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvcellar.contract import (
    DEFAULT_ATTACH_TIMEOUT_S,
    DEFAULT_ROOT,
    DIRECTORY_NAME,
    Owner,
    Pin,
    Role,
    parse_engine_id,
)
from kvcellar.errors import (
    ConfigurationError,
    KVCellarError,
    NotReady,
    RanksDisagree,
    RegionHeld,
)
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.geometry import Geometry, Layout
from kvcellar.region.joining import JoinRequest
from kvcellar.region.mapping import Mapping
from kvcellar.region.memory import read_limits
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.participants import (
    GeometryOf,
    Participant,
    join_scheduler,
    join_session,
    open_session,
)
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import reclaim_dead_engines, reclaim_loose
from kvcellar.worker.arguments import check_chunk_bytes, check_kind, check_whole
from kvcellar.worker.attached import PinTerms, Region, SchedulerHandle, end_ownership
from kvcellar.worker.ranks import Exchange, exchange_alone

logger = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class AttachOptions:
    """How to attach; the defaults suit one process beside a sidecar.

    Attributes:
        directory: KVCELLAR_DIR.
        session: 32 hexadecimal digits, the same in all processes of one engine start; a fresh one is
            made for an engine of a single process.
        layout: sharded, or replicated if the KV cache is the same on all ranks.
        fingerprint: hexadecimal digits over everything that gives the bytes their meaning.
        owner: who makes the region; with `ENGINE` rank 0 does, of `capacity_bytes`.
        timeout_s: how long to wait without progress.
        exchange: see `Exchange`; the default is for a single rank.
        pin: whether `Region.pin` may register the region with the device driver.
    """

    directory: Path = Path(DEFAULT_ROOT) / DIRECTORY_NAME
    session: str = field(default_factory=lambda: secrets.token_hex(16))
    layout: Layout = Layout.SHARDED
    fingerprint: str = ""
    owner: Owner = Owner.SIDECAR
    capacity_bytes: int | None = None
    timeout_s: float = DEFAULT_ATTACH_TIMEOUT_S
    exchange: Exchange = exchange_alone
    pin: Pin = Pin.AUTO


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one rank tells the others: its failure, or what it sees."""

    rank: int
    error: str = ""
    seen: tuple[object, ...] = ()


def attach(
    engine_id: str,
    chunk_bytes: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    options: AttachOptions | None = None,
) -> Region:
    """Attach this rank to its engine's region and map its share of it.

    Blocks until the region is reserved (and made, with `Owner.ENGINE`), at most `options.timeout_s` without
    progress. Every rank has to call it; it makes exactly two collective calls.

    Args:
        engine_id: names the region.
        chunk_bytes: bytes of KV data in a chunk of one rank.
        rank: this rank, in `[0, world_size)`.
        world_size: ranks of the engine.
        options: see `AttachOptions`.

    Raises:
        NotReady: no region in time, the region Failed, or another rank could not attach.
        RanksDisagree: the ranks see different regions or geometries.
        KVCellarError: other causes, see `region.participants`; this rank's own error wins over the others'.
    """
    options = options or AttachOptions()

    def geometry_of(capacity_bytes: int) -> Geometry:
        return Geometry.compute(capacity_bytes, chunk_bytes, world_size, options.layout)

    attempt = _Attempt(rank, options)
    try:
        attempt.run(lambda: attempt.prepare(engine_id, chunk_bytes, world_size))
        attempt.run(lambda: attempt.open_session(geometry_of) if rank == 0 else None)
        verdict = attempt.agree(world_size)[0]
        attempt.run(lambda: attempt.enter(geometry_of, verdict))
        outcomes = attempt.agree(world_size)
        return attempt.finish(outcomes)
    except BaseException:
        attempt.undo()
        raise


class _Attempt:
    """One rank's way into the region: runs steps, keeps the first error, undoes everything on failure."""

    def __init__(self, rank: int, options: AttachOptions) -> None:
        self._rank = rank
        self._options = options
        self._prepared: JoinRequest | None = None
        self._error: KVCellarError | None = None
        self._directory: RegionDirectory | None = None
        self._participant: Participant | None = None
        self._mapping: Mapping | None = None
        self._owned: OwnedRegion | None = None
        self._seen: tuple[object, ...] = ()

    def run(self, step: Callable[[], None]) -> None:
        """Run a step unless an earlier one failed; keep its error for the exchange."""
        if self._error is not None:
            return
        try:
            step()
        except KVCellarError as error:
            self._error = error
        except OSError as error:
            self._error = NotReady(
                f"rank {self._rank} cannot attach: {_kernels_answer(error, self._options)}"
            )

    def prepare(self, engine_id: str, chunk_bytes: int, world_size: int) -> None:
        """Check the arguments. A step like others, so that a rank with bad ones is heard of by all."""
        check_chunk_bytes(chunk_bytes)
        check_whole("rank", self._rank)
        _check(engine_id, world_size, self._options)
        self._prepared = JoinRequest(
            parse_engine_id(engine_id),
            self._options.session,
            Role.WORKER,
            self._rank,
            world_size,
            self._options.fingerprint,
            self._options.timeout_s,
        )

    @property
    def _request(self) -> JoinRequest:
        if self._prepared is None:  # steps behind a failed `prepare` are not run
            raise NotReady(f"rank {self._rank} has not prepared to attach")
        return self._prepared

    def agree(self, world_size: int) -> list[_Outcome]:
        """One collective call: tell the others how it went so far, and hear it from them.

        Raises:
            RanksDisagree: the exchange did not bring the outcome of each rank; there is nobody to tell.
        """
        self.run(self._look)
        mine = _Outcome(self._rank, str(self._error) if self._error else "", self._seen)
        heard = self._options.exchange(mine)
        outcomes = [outcome for outcome in heard or [] if isinstance(outcome, _Outcome)]
        ranks = [outcome.rank for outcome in outcomes]
        is_in_order = any(o.error for o in outcomes) or ranks == list(range(len(ranks)))
        if len(ranks) != world_size or not is_in_order:
            raise self._error or RanksDisagree(
                f"rank {self._rank} of {world_size} heard of ranks {ranks}: the exchange has to bring what each rank "
                "gave, in rank order; give attach an all-gather over all ranks of the engine"
            )
        return outcomes

    def open_session(self, geometry_of: GeometryOf) -> None:
        """Rank 0: make the region if the engine owns it, then begin the session."""
        if self._options.owner is Owner.ENGINE:
            self._make_region()
        self._directory = self._directory or self._open_directory()
        self._participant = open_session(self._directory, self._request, geometry_of)

    def enter(self, geometry_of: GeometryOf, verdict: _Outcome) -> None:
        """Other ranks: join the session. All ranks: map their own range."""
        if verdict.error and self._request.rank != 0:
            raise NotReady(f"rank 0 could not attach: {verdict.error}")
        if self._participant is None:
            self._directory = self._open_directory()
            self._participant = join_session(self._directory, self._request, geometry_of)
        geometry = self._participant.geometry
        if geometry.num_chunks:
            offset = geometry.rank_offset_bytes(self._request.rank)
            self._mapping = Mapping.map_range(
                self._participant.data_fd, offset, geometry.rank_bytes
            )

    def finish(self, outcomes: list[_Outcome]) -> Region:
        """The region if all ranks are in and see the same; else detach and say why."""
        failed = [outcome for outcome in outcomes if outcome.error]
        if self._error is None and failed:
            self._error = NotReady(f"rank {failed[0].rank} could not attach: {failed[0].error}")
        if self._error is None and len({outcome.seen for outcome in outcomes}) > 1:
            self._error = RanksDisagree(
                "the ranks see different regions (boot id, device, inode, geometry): "
                + "; ".join(f"rank {o.rank} {o.seen}" for o in outcomes)
                + ": all ranks of an engine have to run in one pod with one volume"
            )
        if self._error is not None or self._participant is None:
            raise self._error or NotReady(f"rank {self._rank} did not attach")
        terms = PinTerms(self._options.pin, self._options.exchange)
        return Region(self._participant, self._mapping, self._rank, self._owned, terms)

    def _look(self) -> None:
        """See what all ranks have to see alike. A step like others, so that one that fails is heard of."""
        if self._participant is not None and not self._seen:
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            data = self._participant.data_identity
            self._seen = (boot_id, *data, self._participant.geometry)

    def _open_directory(self) -> RegionDirectory:
        deadline = time.monotonic() + self._options.timeout_s
        while True:
            try:
                return RegionDirectory.open(self._options.directory)
            except FileNotFoundError as error:
                if time.monotonic() >= deadline:
                    raise NotReady(
                        f"there is no directory {self._options.directory} after "
                        f"{self._options.timeout_s:g} s (KVCELLAR_ATTACH_TIMEOUT): no sidecar has made "
                        "it; mount the same volume in both containers, and look at the sidecar's log"
                    ) from error
                time.sleep(_POLL_S)

    def _make_region(self) -> None:
        if self._options.capacity_bytes is None:
            raise ConfigurationError(
                "the engine owns its region (KVCELLAR_OWNER=engine), but no capacity was given: set cpu_bytes_to_use"
            )
        directory = RegionDirectory.create(self._options.directory, owner=Owner.ENGINE)
        self._directory = directory
        for engine_id in reclaim_dead_engines(directory):
            logger.info("removed the region of engine %s, which is gone", engine_id)
        reclaim_loose(directory)
        request = RegionRequest(
            self._request.engine_id,
            self._options.capacity_bytes,
            kind=Owner.ENGINE,
            capacity_setting="cpu_bytes_to_use",
        )
        self._owned = self._acquire(directory, request)
        self._owned.reserve(_never)
        self._owned.settle(_never)

    def _acquire(self, directory: RegionDirectory, request: RegionRequest) -> OwnedRegion:
        """Own the region, once a rank 0 that lingers from an earlier start of this engine has gone."""
        deadline = time.monotonic() + self._options.timeout_s
        while True:
            try:
                return OwnedRegion.acquire(directory, request, lambda: read_limits(directory.fd))
            except RegionHeld:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_S)

    def undo(self) -> None:
        """Leave; an owned region goes with its names, for which the directory has still to be open."""
        if self._mapping is not None:
            self._mapping.close()
        if self._owned is not None:
            end_ownership(self._owned, self._options.session)
        if self._participant is not None:
            self._participant.close()
        if self._directory is not None:
            self._directory.close()


def _check(engine_id: str, world_size: int, options: AttachOptions) -> None:
    check_kind("engine_id", engine_id, str)
    check_whole("world_size", world_size)
    check_kind("directory", options.directory, Path)
    check_kind("layout", options.layout, Layout)
    check_kind("owner", options.owner, Owner)
    check_kind("pin", options.pin, Pin)
    if options.capacity_bytes is not None:
        check_whole("capacity_bytes", options.capacity_bytes)


def _kernels_answer(error: OSError, options: AttachOptions) -> str:
    return (
        f"the kernel answered {(error.strerror or str(error))!r} for the files in {options.directory}; check the "
        "limits of the engine's processes (ulimit -a) and the volume, and start the engine again"
    )


def _never() -> bool:
    return False


def attach_scheduler(engine_id: str, *, world_size: int, options: AttachOptions) -> SchedulerHandle:
    """Attach the scheduler to the region that its own workers hold; does not wait.

    With `Owner.ENGINE` the region's names are removed: every process that needs it has it open.

    Raises:
        NotReady: not every rank of this session holds a slot, so offload has to stay off.
        KVCellarError: other causes, see `region.participants`.
    """
    _check(engine_id, world_size, options)
    identifier = parse_engine_id(engine_id)
    request = JoinRequest(identifier, options.session, Role.SCHEDULER, 0, world_size, timeout_s=0.0)
    try:
        directory = RegionDirectory.open(options.directory)
    except FileNotFoundError as error:
        raise NotReady(
            f"there is no directory {options.directory}, so no region is attached"
        ) from error
    participant: Participant | None = None
    try:
        participant = join_scheduler(directory, request)
        if options.owner is Owner.ENGINE and not participant.remove_names():
            logger.warning("the names of region %s were removed by another process", identifier)
    except BaseException as error:
        (participant or directory).close()
        if isinstance(error, OSError):
            raise NotReady(
                f"the scheduler cannot attach to region {identifier}: {_kernels_answer(error, options)}"
            ) from error
        raise
    return SchedulerHandle(participant)

"""Random schedules of the real code: sidecars, engines, kills, restarts, children that linger.

A schedule is decided by its seed alone. `run_schedule` raises `Violation` with the seed if one of these
does not hold:

- attached ranks of one session have one and the same data file, and ranks of different sessions never
  share one;
- a region that somebody holds is never removed, but by its own engine;
- a region has one living owner;
- the scheduler turns on only while every rank of its session holds a slot;
- when everything has died, a new sidecar and a new engine succeed, and a final clean leaves no file.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvcellar.contract import EngineId, HugePages, Owner
from kvcellar.errors import KVCellarError, NotReady
from kvcellar.region import frame, metadata
from kvcellar.region.directory import RegionDirectory
from kvcellar.region.owner import OwnedRegion
from kvcellar.region.states import RegionRequest
from kvcellar.region.survey import reclaim_dead_engines, reclaim_loose, reclaim_unheld, survey
from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from kvcellar.worker.attached import Region
from tests.model.stepped import Process, Violation, World, identity, stepping

CAPACITY_BYTES = 2 * 2**20
CHUNK_BYTES = 100_000
SIDECAR_IDS = (EngineId("one"), EngineId("two"))
OWN_ID = EngineId("own")
_MIXES = (SIDECAR_IDS[:1], (OWN_ID,), (*SIDECAR_IDS, OWN_ID))
"""Engine ids of a schedule: the fewer, the more engine starts meet on one region."""
TIMEOUT_S = 3.0


@dataclass
class EngineStart:
    """What the processes of one engine start share, and what each of them reached."""

    engine_id: EngineId
    session: str
    owner: Owner
    world_size: int
    rounds: list[dict[int, object]] = field(default_factory=list)
    attached: dict[int, tuple[Process, Region]] = field(default_factory=dict)
    outcome: dict[int, str] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    is_on: bool = False
    processes: list[Process] = field(default_factory=list)


class Scene:
    """A world with kvcellar's actors in one directory, and the invariants."""

    def __init__(self, world: World, path: Path) -> None:
        self.world = world
        self.path = path
        self.starts: list[EngineStart] = []
        self.owners: dict[tuple[int, int], Process] = {}
        self.ids = world.dice.choice(_MIXES)
        self._starts_left, self._sidecars_left = 5, 3
        self.is_calm = False
        self.wants_end = False
        world.before_unlink = self._before_unlink
        world.after_slot = self._after_slot

    # --- actors ----------------------------------------------------------------------------------------

    def start_sidecar(self) -> Process:
        return self.world.start(f"sidecar-{len(self.world.processes)}", self._sidecar)

    def start_engine(self, engine_id: EngineId, world_size: int = 0) -> EngineStart:
        world_size = world_size or self.world.dice.choice((1, 2, 2))
        owner = Owner.ENGINE if engine_id == OWN_ID else Owner.SIDECAR
        session = f"{len(self.starts) + 1:032x}"
        start = EngineStart(engine_id, session, owner, world_size)
        self.starts.append(start)
        names = [*range(start.world_size), "scheduler"]
        programs = [self._worker(start, rank) for rank in range(start.world_size)]
        programs.append(self._scheduler(start))
        for name, program in zip(names, programs, strict=True):
            process = self.world.start(f"{engine_id}#{len(self.starts)}-{name}", program)
            start.processes.append(process)
        return start

    def _sidecar(self, process: Process) -> None:
        with suppress(NotReady):  # a child of a killed process may keep the big lock for a while
            self._keep_regions(process)

    def _keep_regions(self, process: Process) -> None:
        directory = RegionDirectory.create(self.path)
        regions: dict[EngineId, OwnedRegion] = {}
        while not (self.wants_end and not regions):
            reclaim_loose(directory)
            for engine_id in self.ids:
                if engine_id != OWN_ID and engine_id not in regions and not self.wants_end:
                    with suppress(KVCellarError):
                        regions[engine_id] = self._own(process, directory, engine_id)
                if engine_id in regions:
                    self._tend(regions, engine_id)
                self.world.sleep(0.05)

    def _own(
        self, process: Process, directory: RegionDirectory, engine_id: EngineId
    ) -> OwnedRegion:
        request = RegionRequest(engine_id, CAPACITY_BYTES, huge_pages=HugePages.NEVER)
        region = OwnedRegion.acquire(directory, request, list)
        data = (region.owner.data_device, region.owner.data_inode)
        if (other := self.owners.get(data)) in self.world.processes and other is not process:
            raise Violation(f"{process.name} and {other.name} both own {engine_id}")
        self.owners[data] = process
        region.reserve(lambda: False)
        region.settle(lambda: False)
        return region

    def _tend(self, regions: dict[EngineId, OwnedRegion], engine_id: EngineId) -> None:
        region = regions[engine_id]
        seen = region.snapshot()
        may_release = self.wants_end or (not self.is_calm and self.world.dice.random() < 0.2)
        if seen.damage or (may_release and region.release()):
            regions.pop(engine_id).close()

    def _options(self, start: EngineStart, rank: int) -> AttachOptions:
        return AttachOptions(
            directory=self.path,
            session=start.session,
            fingerprint="ab",
            owner=start.owner,
            capacity_bytes=CAPACITY_BYTES,
            timeout_s=TIMEOUT_S,
            exchange=lambda mine: self._exchange(start, rank, mine),
        )

    def _exchange(self, start: EngineStart, rank: int, mine: object) -> list[object]:
        """An all-gather among processes of which some may be dead: then it breaks, as a pipe does."""
        number = next(n for n in range(2) if n >= len(start.rounds) or rank not in start.rounds[n])
        if number == len(start.rounds):
            start.rounds.append({})
        heard = start.rounds[number]
        heard[rank] = mine
        while len(heard) < start.world_size:
            if start.lost:
                raise ConnectionError("a rank of this engine is dead")
            self.world.sleep(0.02)
        if rank > 0:
            self.world.sleep(self.world.dice.choice((0.0, 0.02, 0.2)))  # ranks are not equally fast
        return [heard[other] for other in range(start.world_size)]

    def _worker(self, start: EngineStart, rank: int) -> Callable[[Process], None]:
        def program(process: Process) -> None:
            try:
                region = attach(
                    start.engine_id,
                    CHUNK_BYTES,
                    rank=rank,
                    world_size=start.world_size,
                    options=self._options(start, rank),
                )
            except (KVCellarError, ConnectionError) as error:
                start.outcome[rank] = str(error)
                start.lost.add(rank)
                return
            start.attached[rank] = (process, region)
            start.outcome[rank] = ""
            self.check_attached()
            for _ in range(self.world.dice.randrange(10)):
                self.world.sleep(0.05)
            while self.is_calm and not self.wants_end:
                self.world.sleep(0.05)
            del start.attached[rank]
            region.close()

        return program

    def _scheduler(self, start: EngineStart) -> Callable[[Process], None]:
        def program(process: Process) -> None:
            while len(start.outcome) < start.world_size:
                if start.lost:
                    return
                self.world.sleep(0.02)
            self.world.sleep(self.world.dice.choice((0.0, 0.02, 0.2)))  # the engine captures graphs
            try:
                handle = attach_scheduler(
                    start.engine_id, world_size=start.world_size, options=self._options(start, 0)
                )
            except KVCellarError as error:
                start.outcome[-1] = str(error)
                return
            start.is_on = True
            for _ in range(self.world.dice.randrange(4)):
                self.world.sleep(0.05)
            while self.is_calm and not self.wants_end:
                self.world.sleep(0.05)
            handle.close()

        return program

    # --- invariants ------------------------------------------------------------------------------------

    def check_attached(self) -> None:
        """Ranks of a session share a file, ranks of different sessions do not."""
        by_file: dict[tuple[int, int], str] = {}
        by_session: dict[str, tuple[int, int]] = {}
        for start in self.starts:
            for rank, (process, region) in start.attached.items():
                if process not in self.world.processes:
                    continue
                data = region.data_identity
                if by_file.setdefault(data, start.session) != start.session:
                    raise Violation(f"two sessions hold one {start.engine_id} (rank {rank})")
                if by_session.setdefault(start.session, data) != data:
                    raise Violation(f"one session of {start.engine_id} holds two regions")

    def _holders(self, data: tuple[int, int]) -> list[Process]:
        """Processes, or the processes that their living children descend from, with a slot of a file."""
        slots = self.world.slots.items()
        return [process for fd, process in slots if identity(os.fstat(fd)) == data]

    def _after_slot(self, process: Process) -> None:
        """No session comes in beside another; the scheduler comes in beside all ranks of its own."""
        fd = next(fd for fd, holder in self.world.slots.items() if holder is process)
        mine = next(start for start in self.starts if process in start.processes)
        beside = [p for p in self._holders(identity(os.fstat(fd))) if p is not process]
        if strangers := [p for p in beside if p not in mine.processes]:
            raise Violation(f"{process.name} comes in beside {_names(strangers)}")
        # A rank that died since the scheduler took the lock was there when it looked.
        was_here = {p for p, tick in self.world.left.items() if tick >= process.locked_tick}
        if process is mine.processes[-1] and not {*beside, *was_here} >= {*mine.processes[:-1]}:
            raise Violation(f"{process.name} comes in beside {_names(beside)} only")

    def _before_unlink(self, name: str, dir_fd: int) -> None:
        """Nobody removes a name of a region that is held, but an engine the names of its own."""
        process = self.world.current
        data = self._data_behind(name, dir_fd)
        holders = self._holders(data) if data else []
        maker, fd = self.world.made.get(identity(os.stat(name, dir_fd=dir_fd)), (process, -1))
        is_index = name.endswith(".index")  # a killed clean-up may have left it alone, without data
        if maker is not None and fd in maker.fds and maker is not process and not is_index:
            holders.append(maker)
        own = [start for start in self.starts if process in start.processes]
        if own and own[0].owner is Owner.ENGINE:
            holders = [holder for holder in holders if holder not in own[0].processes]
        if holders:
            who = process.name if process else "somebody"
            raise Violation(f"{who} removes {name}, which {_names(holders)} hold")

    def _data_behind(self, name: str, dir_fd: int) -> tuple[int, int] | None:
        """The data file that a name is, or that the page of this name tells of."""
        if name.endswith((".data", ".index")):
            with suppress(FileNotFoundError):
                return identity(os.stat(f"{name.rpartition('.')[0]}.data", dir_fd=dir_fd))
            return None
        if not name.endswith(".meta"):
            return None
        fd = os.open(name, os.O_RDONLY, dir_fd=dir_fd)
        try:
            section = frame.read_section(os.read(fd, frame.META_BYTES), frame.OWNER_AT)
        finally:
            os.close(fd)
        if section is None:
            return None
        owner = metadata.unpack_owner(section.payload)
        return owner.data_device, owner.data_inode

    # --- the schedule ----------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """The random part: at each step something is started, killed or ended, or a process goes on."""
        self.start_sidecar()
        self.start_sidecar()
        for _ in range(steps):
            self.world.reap()
            if not self._disturb() and (awake := self.world.awake()):
                self.world.dice.choice(awake).advance()

    def _disturb(self) -> bool:
        """Perhaps change who is there; whether it did."""
        dice, world = self.world.dice, self.world
        roll = dice.random()
        if roll < 0.009:
            return self._start(is_engine=roll < 0.007)
        if roll < 0.06:
            if roll < 0.012:
                victims = world.processes
            elif roll < 0.022:
                victims = self._early_ranks_0()
            else:
                victims = self._at("unlink", "rename", "ftruncate")
            if victims:
                self._kill(dice.choice(victims))
            return bool(victims)
        if roll < 0.075 and world.children:
            world.end_child(dice.choice(world.children))
            return True
        return False

    def _start(self, *, is_engine: bool) -> bool:
        dice = self.world.dice
        if is_engine and self._starts_left:
            self._starts_left -= 1
            for _ in range(dice.choice((1, 2))):
                self.start_engine(dice.choice(self.ids))
            return True
        if not is_engine and self._sidecars_left:
            self._sidecars_left -= 1
            self.start_sidecar()
            return True
        return False

    def _at(self, *calls: str) -> list[Process]:
        """Processes that stopped before one of these calls, and would leave something half done."""
        return [process for process in self.world.processes if process.at in calls]

    def _early_ranks_0(self) -> list[Process]:
        """Ranks 0 that would leave a session without them, before the other ranks are in."""
        found = []
        for start in self.starts:
            rank_0 = start.processes[0] if start.processes else None
            is_early = bool(start.rounds and 0 in start.rounds[0]) and 0 not in start.outcome
            if is_early and rank_0 in self.world.processes:
                found.append(rank_0)
        return found

    def _kill(self, process: Process) -> None:
        for start in self.starts:
            if process in start.processes:
                start.lost.add(start.processes.index(process))
        self.world.kill(process, leaves_child=self.world.dice.random() < 0.4)

    def finish(self) -> None:
        """Everything dies; then a new sidecar and new engines succeed, and leave nothing."""
        self.world.end_all()
        self.is_calm = True
        self.start_sidecar()
        starts = [self.start_engine(engine_id) for engine_id in self.ids]
        if not self._go_on(8000, lambda: all(start.is_on for start in starts)):
            said = {start.engine_id: start.outcome for start in starts}
            raise Violation(f"a start after everything had died did not succeed: {said}")
        self.wants_end = True
        if not self._go_on(8000, lambda: not self.world.processes):
            raise Violation(f"{_names(self.world.processes)} did not end")
        directory = RegionDirectory.open(self.path)
        for found in survey(directory).regions:
            reclaim_unheld(directory, found.engine_id)
        reclaim_dead_engines(directory)
        reclaim_loose(directory)
        names = directory.names()
        directory.close()
        if names:
            raise Violation(f"files are left: {names}")

    def _go_on(self, steps: int, is_done: Callable[[], bool]) -> bool:
        for number in range(steps):
            self.world.reap()
            if is_done():
                return True
            awake = self.world.awake()
            awake[number % len(awake)].advance()
        return False


def _names(processes: list[Process]) -> str:
    return ", ".join(process.name for process in processes)


def run_schedule(seed: int, path: Path, steps: int = 1500) -> None:
    """Run one schedule in a directory of a tmpfs, which is not there yet.

    Raises:
        Violation: an invariant does not hold; the message names the seed.
    """
    world = World(seed)
    scene = Scene(world, path)
    try:
        with stepping(world):
            scene.run(steps)
            scene.finish()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from violation

"""An executable model of the protocol of docs/design.md ("The protocol"), without files or processes.

Processes are generators that give way before every change that others can see. The kernel is a few
dictionaries: names, files, and locks that belong to a description and live as long as a process or a
child has it; a child has everything of its parent, or only its mapping. A schedule is a seeded random
choice of whose turn it is, who is killed, which child lingers and which start comes next.
`tests/model/driven.py` does the same with the real code; this model is many times as fast, and says what
the rules are without the rest.

`Rule` names the parts of the protocol; a schedule may leave one out, and the tests see what breaks.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from tests.model.stepped import Violation

OWNER_BYTE = -1
"""Byte of a page; slots are the bytes 0, 1, ... of a data file."""
SLOTS = 6
Steps = Iterator[None]


class Rule(Enum):
    """A part of the protocol that can be left out."""

    BIG_LOCK = auto()
    OWNER_BYTE = auto()
    RENAME_WITHOUT_REPLACING = auto()
    IDENTITY_BEFORE_UNLINK = auto()
    PAGE_BY_NAME_BEFORE_RELEASE = auto()
    SLOTS_BEFORE_RELEASE = auto()
    SLOTS_BEFORE_LOOSE = auto()
    WAIT_FOR_LINGERING = auto()
    SLOTS_BEFORE_RANKS = auto()
    ALL_RANKS_BEFORE_SCHEDULER = auto()


@dataclass(eq=False)
class File:
    """An inode: a page (with `data` and what it says) or a data file; `locks` maps byte to description."""

    engine: str
    data: "File | None" = None
    is_reserved: bool = False
    session: int = 0
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    locks: dict[int, "Description"] = field(default_factory=dict)


@dataclass(eq=False)
class Description:
    """An open file description: alive while somebody has it."""

    file: File
    opener: "Process"


@dataclass(eq=False)
class Start:
    """One engine start: `ranks` attached in its session so far, what rank 0 said, what was lost."""

    engine: str
    session: int
    world: int
    is_owner: bool
    is_open: bool = False
    attached: set[int] = field(default_factory=set)
    lost: bool = False
    is_on: bool = False


@dataclass(eq=False)
class Process:
    """A process: its steps and its descriptions. `rank` is -1 for a scheduler, None for a sidecar."""

    name: str
    start: Start | None = None
    rank: int | None = None
    steps: Steps = field(default_factory=lambda: iter(()))
    has: set[Description] = field(default_factory=set)
    looked_tick: int = 0
    is_delicate: bool = False
    """In the middle of something: killed more often there, to be found out."""


class Model:
    """The directory, everybody in it, and the invariants."""

    def __init__(self, seed: int, *left_out: Rule) -> None:
        self.dice = random.Random(seed)
        self.left_out = left_out
        self.names: dict[str, File] = {}
        self.big: Process | None = None
        self.processes: list[Process] = []
        self.children: list[Process] = []
        self.starts: list[Start] = []
        self.left: dict[Process, int] = {}
        self.tick = 0
        self.nonces = 0
        self.is_calm = False
        self.wants_end = False
        self.ids = self.dice.choice((["a"], ["own"], ["a", "b", "own"]))

    def keeps(self, rule: Rule) -> bool:
        return rule not in self.left_out

    # --- the kernel ------------------------------------------------------------------------------------

    def open(self, process: Process, file: File) -> Description:
        description = Description(file, process)
        process.has.add(description)
        return description

    def close(self, process: Process, *descriptions: Description) -> None:
        process.has -= set(descriptions)
        for description in descriptions:
            self._let_go(description, process)

    def _let_go(self, description: Description, process: Process) -> None:
        locks = description.file.locks
        for byte in [byte for byte, holder in locks.items() if holder is description]:
            del locks[byte]
            self.left[process] = self.tick

    def try_lock(self, description: Description, byte: int) -> bool:
        holder = description.file.locks.setdefault(byte, description)
        return holder is description

    def held(self, data: File) -> list[int]:
        return sorted(data.locks)

    def end(self, process: Process) -> None:
        """Nobody has the process's descriptions any more."""
        self.close(process, *process.has)
        if self.big is process:
            self.big = None

    def lock(self, process: Process) -> Steps:
        yield
        if self.keeps(Rule.BIG_LOCK):
            while self.big is not None:
                yield
            self.big = process
        process.looked_tick = self.tick

    def unlock(self, process: Process) -> None:
        if self.big is process:
            self.big = None

    # --- names -----------------------------------------------------------------------------------------

    def unlink(self, process: Process, name: str, file: File) -> Steps:
        """Remove a name if it still leads to this file."""
        yield
        found = self.names.get(name)
        if found is None or (found is not file and self.keeps(Rule.IDENTITY_BEFORE_UNLINK)):
            return
        data = found.data if name.endswith(".meta") else found
        holders = [] if data is None else [d.opener for d in data.locks.values()]
        is_engines = process.start is not None and process.start.is_owner
        if any(not (is_engines and holder.start is process.start) for holder in holders):
            raise Violation(f"{process.name} removes {name}, which somebody holds")
        del self.names[name]

    def rename(self, new: str, page: File) -> bool:
        over = self.names.get(new)
        if over is not None and self.keeps(Rule.RENAME_WITHOUT_REPLACING):
            return False
        if over is not None and OWNER_BYTE in over.locks:
            raise Violation(f"{new} is renamed over while its owner lives")
        self.names[new] = page
        return True

    # --- steps 1 to 4: owning --------------------------------------------------------------------------

    def clean_loose(self, process: Process) -> Steps:
        yield from self.lock(process)
        named = {page.data for name, page in self.names.items() if name.endswith(".meta")}
        for name, file in list(self.names.items()):
            is_loose = name.endswith(".new") or (name.endswith(".data") and file not in named)
            is_free = not self.held(file) or not self.keeps(Rule.SLOTS_BEFORE_LOOSE)
            if is_loose and is_free:
                yield from self.unlink(process, name, file)
        self.unlock(process)

    def own(self, process: Process, engine: str) -> Steps:
        """Adopt or make; the page's description with the owner byte is in `process.has` afterwards."""
        yield from self.lock(process)
        page = self.names.get(f"{engine}.meta")
        if page is not None:
            description = self.open(process, page)
            yield
            if not self.try_lock(description, OWNER_BYTE) and self.keeps(Rule.OWNER_BYTE):
                self.close(process, description)
                self.unlock(process)
                return
            if page.data is None or page.data not in self.names.values():
                yield from self.unlink(process, f"{engine}.meta", page)
                self.close(process, description)
                page = None
        if page is None:
            yield from self._make(process, engine)
        self.unlock(process)
        mine = self.owned(process, engine)
        others = [p for p in self.processes if p is not process and self.owned(p, engine)]
        if mine and any(self.owned(other, engine) is mine for other in others):
            raise Violation(f"{process.name} and {others[0].name} both own {engine}")
        yield
        if mine:
            mine.is_reserved = True

    def _make(self, process: Process, engine: str) -> Steps:
        self.nonces += 1
        names = [f"{engine}.{self.nonces}.data", f"{engine}.{self.nonces}.new"]
        data = File(engine)
        yield
        self.names[names[0]] = data
        page = File(engine, data)
        yield
        self.names[names[1]] = page
        description = self.open(process, page)
        yield
        self.try_lock(description, OWNER_BYTE)
        yield
        if self.names.get(names[0]) is not data or self.names.get(names[1]) is not page:
            raise Violation(f"what {process.name} was making was removed")
        if not self.rename(f"{engine}.meta", page):
            self.close(process, description)
            return
        del self.names[names[1]]

    def owned(self, process: Process, engine: str) -> File | None:
        """The page of `engine` that the process believes to own."""
        for description in process.has:
            page = description.file
            has_byte = page.locks.get(OWNER_BYTE) is description
            is_mine = has_byte or not self.keeps(Rule.OWNER_BYTE)
            if page.engine == engine and page.data is not None and is_mine:
                return page
        return None

    def release(self, process: Process, page: File, *, is_engines: bool = False) -> Steps:
        """Step 7. An engine's own region goes although its own ranks hold it."""
        yield from self.lock(process)
        data = page.data
        is_there = self.names.get(f"{page.engine}.meta") is page
        if not self.keeps(Rule.PAGE_BY_NAME_BEFORE_RELEASE):
            page = self.names.get(f"{page.engine}.meta", page)
            is_there = True
        is_held = data is not None and bool(self.held(data))
        may = is_engines or not is_held or not self.keeps(Rule.SLOTS_BEFORE_RELEASE)
        if not self.keeps(Rule.IDENTITY_BEFORE_UNLINK):
            is_there = True
        if may and is_there and data is not None:
            yield from self.unlink(process, f"{page.engine}.meta", page)
            process.is_delicate = True
            name = next((name for name, file in self.names.items() if file is data), "")
            yield from self.unlink(process, name, data)
            process.is_delicate = False
        self.unlock(process)
        if may:
            mine = [d for d in process.has if d.file.data is data]
            self.close(process, *mine)

    # --- steps 5 and 6: attaching ----------------------------------------------------------------------

    def attach(self, process: Process, start: Start, rank: int) -> Steps:
        """Come in: `rank` -1 is the scheduler, which does not wait. Success shows in `process.has`."""
        for _ in range(1 if rank < 0 else 40):
            yield from self.lock(process)
            page = self.names.get(f"{start.engine}.meta")
            data = page.data if page else None
            if page and data and page.is_reserved and data in self.names.values():
                held = self.held(data)
                if self._admits(page, start, rank, held):
                    slot = next(slot for slot in range(SLOTS) if slot not in held)
                    yield from self._take(process, start, rank, page, slot)
                    self.unlock(process)
                    return
            self.unlock(process)
            for _ in range(self.dice.randrange(1, 6)):
                yield

    def _admits(self, page: File, start: Start, rank: int, held: list[int]) -> bool:
        rows = [page.rows.get(slot, (0, 0)) for slot in held]
        strangers = [session for session, _ in rows if session != start.session]
        if rank == 0:
            return not strangers or not self.keeps(Rule.WAIT_FOR_LINGERING)
        if page.session != start.session:
            return False
        if strangers and self.keeps(Rule.SLOTS_BEFORE_RANKS):
            return False
        ranks = {who for session, who in rows if session == start.session}
        is_full = ranks >= set(range(start.world))
        return rank > 0 or is_full or not self.keeps(Rule.ALL_RANKS_BEFORE_SCHEDULER)

    def _take(self, process: Process, start: Start, rank: int, page: File, slot: int) -> Steps:
        data = page.data
        if data is None:
            return
        description = self.open(process, data)
        process.is_delicate = True
        yield
        page.rows[slot] = start.session, rank
        yield
        if not self.try_lock(description, slot):
            self.close(process, description)
            return
        self._check_slot(process, start, rank, data)
        yield
        process.is_delicate = False

    def _check_slot(self, process: Process, start: Start, rank: int, data: File) -> None:
        beside = [d.opener for d in data.locks.values() if d.opener is not process]
        if any(other.start is not start for other in beside):
            raise Violation(f"{process.name} comes in beside another session")
        was_here = {p for p, tick in self.left.items() if tick >= process.looked_tick}
        ranks = {p.rank for p in {*beside, *was_here} if p.start is start}
        if rank < 0 and not ranks >= set(range(start.world)):
            raise Violation(f"{process.name} comes in beside ranks {ranks} only")
        for other in self.processes:
            has_other = any(
                d.file.data is None and d.file is not data and d in d.file.locks.values()
                for d in other.has
            )
            if other.start is start and has_other:
                raise Violation(f"one session of {start.engine} holds two regions")

    def has_slot(self, process: Process) -> bool:
        return any(d.file.data is None and d in d.file.locks.values() for d in process.has)

    # --- programs --------------------------------------------------------------------------------------

    def sidecar(self, process: Process) -> Steps:
        while True:
            yield from self.clean_loose(process)
            owned = [engine for engine in self.ids if self.owned(process, engine)]
            if self.wants_end and not owned:
                return
            for engine in self.ids:
                page = self.owned(process, engine)
                if engine == "own":
                    continue
                if page is None and not self.wants_end:
                    yield from self.own(process, engine)
                elif page and (self.wants_end or (not self.is_calm and self.dice.random() < 0.3)):
                    yield from self.release(process, page)
            for _ in range(self.dice.randrange(1, 10)):
                yield

    def worker(self, process: Process, start: Start, rank: int) -> Steps:
        if rank == 0 and start.is_owner:
            yield from self._own_first(process, start.engine)
        while rank > 0 and not (start.is_open or start.lost):
            yield
        if rank == 0 or start.is_open:
            yield from self.attach(process, start, rank)
        if self.has_slot(process):
            yield from self._be_attached(process, start, rank)
        start.lost = True
        if rank == 0 and (page := self.owned(process, start.engine)):
            yield from self.release(process, page, is_engines=True)

    def _own_first(self, process: Process, engine: str) -> Steps:
        yield from self.clean_loose(process)
        for _ in range(20):
            yield from self.own(process, engine)
            if self.owned(process, engine):
                return

    def _be_attached(self, process: Process, start: Start, rank: int) -> Steps:
        if rank == 0:
            process.is_delicate = True
            yield
            page = self._page_of(process, start)
            if page:
                page.session = start.session
            start.is_open = True
            yield
            process.is_delicate = False
        start.attached.add(rank)
        while len(start.attached) < start.world and not start.lost:
            yield
        yield from self._live(60)

    def _live(self, steps: int) -> Steps:
        for _ in range(self.dice.randrange(steps)):
            yield
        while self.is_calm and not self.wants_end:
            yield

    def _page_of(self, process: Process, start: Start) -> File | None:
        """The page, if it still is the one of the region that this process holds."""
        page = self.names.get(f"{start.engine}.meta")
        return page if page and any(d.file is page.data for d in process.has) else None

    def scheduler(self, process: Process, start: Start) -> Steps:
        while len(start.attached) < start.world and not start.lost:
            yield
        for _ in range(self.dice.choice((0, 0, 30))):
            yield
        if len(start.attached) == start.world:
            yield from self.attach(process, start, -1)
        if not self.has_slot(process):
            return
        start.is_on = True
        if start.is_owner and (page := self._page_of(process, start)):
            yield from self.release(process, page, is_engines=True)
        yield from self._live(20)

    # --- the schedule ----------------------------------------------------------------------------------

    def start_sidecar(self) -> None:
        process = Process(f"sidecar-{self.tick}")
        process.steps = self.sidecar(process)
        self.processes.append(process)

    def start_engine(self, engine: str) -> Start:
        session = len(self.starts) + 1
        start = Start(engine, session, self.dice.choice((1, 2, 2)), engine == "own")
        self.starts.append(start)
        for rank in range(-1, start.world):
            process = Process(f"{engine}#{session}-{rank}", start, rank)
            program = self.scheduler(process, start)
            process.steps = self.worker(process, start, rank) if rank >= 0 else program
            self.processes.append(process)
        return start

    def advance(self, process: Process) -> None:
        self.tick += 1
        try:
            next(process.steps)
        except StopIteration:
            self.processes.remove(process)
            self.end(process)

    def kill(self, process: Process, *, leaves_child: bool) -> None:
        self.processes.remove(process)
        if process.start:
            process.start.lost = True
        if leaves_child and process.has:
            self.children.append(process)
            if self.dice.random() < 0.5:  # all that it inherited is the mapping
                self.close(process, *(d for d in process.has if d.file.data is not None))
                if self.big is process:
                    self.big = None
        else:
            self.end(process)

    def disturb(self, roll: float) -> bool:
        if roll < 0.01 and len(self.starts) < 6:
            for _ in range(self.dice.choice((1, 2))):
                self.start_engine(self.dice.choice(self.ids))
        elif roll < 0.012 and sum(p.start is None for p in self.processes) < 2:
            self.start_sidecar()
        elif roll < 0.022 and self.processes:
            self.kill(self.dice.choice(self.processes), leaves_child=self.dice.random() < 0.4)
        elif roll < 0.05 and self.children:
            self.end(self.children.pop(self.dice.randrange(len(self.children))))
        elif roll < 0.056 and (delicate := [p for p in self.processes if p.is_delicate]):
            self.kill(self.dice.choice(delicate), leaves_child=self.dice.random() < 0.6)
        else:
            return False
        return True

    def run(self, steps: int = 600) -> None:
        """Run a schedule, let everything die, and see that a new start works and leaves nothing."""
        self.start_sidecar()
        self.start_sidecar()
        for _ in range(steps):
            if not self.disturb(self.dice.random()) and self.processes:
                self.advance(self.dice.choice(self.processes))
        self._end_all()
        self.is_calm = True
        self.start_sidecar()
        starts = [self.start_engine(engine) for engine in self.ids]
        self._go_on(lambda: all(start.is_on for start in starts), "a fresh start did not succeed")
        self.wants_end = True
        self._go_on(lambda: not self.processes, "a process did not end")
        self._clean()
        if self.names:
            raise Violation(f"files are left: {sorted(self.names)}")

    def _end_all(self) -> None:
        while self.processes:
            self.kill(self.processes[0], leaves_child=False)
        while self.children:
            self.end(self.children.pop())

    def _clean(self) -> None:
        janitor = Process("janitor")
        for page in [page for name, page in self.names.items() if name.endswith(".meta")]:
            for _ in self.release(janitor, page):
                pass
        for _ in self.clean_loose(janitor):
            pass

    def _go_on(self, is_done: Callable[[], bool], otherwise: str) -> None:
        for number in range(4000):
            if is_done():
                return
            self.advance(self.processes[number % len(self.processes)])
        raise Violation(otherwise)


def run_schedule(seed: int, *left_out: Rule) -> None:
    """Run one schedule of the model.

    Raises:
        Violation: an invariant does not hold; the message names the seed.
    """
    try:
        Model(seed, *left_out).run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from violation

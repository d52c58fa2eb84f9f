"""Scenes of the engine's side: ranks and a scheduler come to a sidecar's region, use it and leave."""

from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from typing_extensions import override

from kvcellar.contract import Direction
from kvcellar.errors import KVCellarError
from kvcellar.worker.attach import attach, attach_scheduler
from kvcellar.worker.attached import Region
from kvcellar.worker.ranks import Exchange
from tests.support.children import Child
from tests.support.scenes.scene import (
    CHUNK_BYTES,
    HEARS_S,
    ID,
    Scene,
    Sidecar,
    options,
    run_engine,
)
from tests.support.traced import Action, Ending


class Attach(Scene):
    """An engine of one rank attaches, beside a sidecar that lives."""

    @override
    def before(self) -> None:
        self.sidecar = Sidecar(self.path).ready()

    @override
    def prepare(self) -> Action:
        return lambda: self.attach()

    def attach(self) -> Region:
        return attach(ID, CHUNK_BYTES, options=options(self.path))


class NewGeneration(Attach):
    """An engine of another fingerprint and other chunks attaches to a region that has been used."""

    @override
    def before(self) -> None:
        super().before()
        run_engine(self.path, options(self.path, fingerprint="aa"))

    @override
    def attach(self) -> Region:
        return attach(ID, CHUNK_BYTES // 2, options=options(self.path, fingerprint="bb"))


class _OneOfTwo(Attach):
    """One rank of two attaches; the other lives on, attached or with its error."""

    rank = 0

    @override
    def before(self) -> None:
        super().before()
        self._mine, theirs = Pipe()
        self._options = options(self.path)

        def other(connection: Connection) -> None:
            try:
                region = self._attach(1 - self.rank, theirs)
            except (KVCellarError, OSError, EOFError) as error:
                connection.send(error)
                connection.recv()
                return
            connection.send("attached")
            connection.recv()
            region.close()

        self.children.append(Child(other, close=[self._mine]))
        theirs.close()

    @override
    def attach(self) -> Region:
        return self._attach(self.rank, self._mine)

    def _attach(self, rank: int, end: Connection) -> Region:
        sent = replace(self._options, exchange=exchange_of_two(rank, end))
        return attach(ID, CHUNK_BYTES, rank=rank, world_size=2, options=sent)

    @override
    def forked(self) -> None:
        self._mine.close()

    @override
    def others(self, ending: Ending | None) -> None:
        """It hears of the other's death or error at once, in time for the next start."""
        heard: object
        try:
            heard = self.children[0].hear(HEARS_S)
        except (KVCellarError, EOFError, OSError) as error:
            heard = error
        if heard == "attached":
            assert ending is not None, "one rank is in without the other"
            self.children[0].tell("close")
            assert self.children[0].wait() == 0


class AttachRankZeroOfTwo(_OneOfTwo):
    """Rank 0 of two attaches."""


class AttachRankOneOfTwo(_OneOfTwo):
    """Rank 1 of two attaches."""

    rank = 1


class AttachScheduler(Attach):
    """The scheduler attaches beside its rank, which lives."""

    @override
    def before(self) -> None:
        super().before()
        self._options = options(self.path)
        self.holder = attach(ID, CHUNK_BYTES, options=self._options)

    @override
    def prepare(self) -> Action:
        return lambda: attach_scheduler(ID, world_size=1, options=self._options)

    @override
    def others(self, ending: Ending | None) -> None:
        self.holder.close()

    @override
    def end(self) -> None:
        self.holder.close()
        super().end()


class Detach(Attach):
    """A rank and its scheduler count, and leave."""

    @override
    def prepare(self) -> Action:
        sent = options(self.path)
        region = attach(ID, CHUNK_BYTES, options=sent)
        scheduler = attach_scheduler(ID, world_size=1, options=sent)

        def act() -> None:
            region.add_counters(Direction.STORE, CHUNK_BYTES, ok=True)
            scheduler.close()
            region.close()

        return act


class Mark(Attach):
    """A rank marks a store that failed, counts one, and its scheduler reads the mark."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sent = options(self.path)
        region = attach(ID, CHUNK_BYTES, options=sent)
        scheduler = attach_scheduler(ID, world_size=1, options=sent)

        def act() -> None:
            region.mark_failed_store(1)
            region.add_counters(Direction.STORE, CHUNK_BYTES, ok=False)
            scheduler.take_failed([0, 1, 2])

        return act


def exchange_of_two(rank: int, end: Connection) -> Exchange:
    """A collective call of two ranks over a pipe."""

    def exchange(mine: object) -> list[object]:
        end.send(mine)
        theirs: object = end.recv()
        return [mine, theirs] if rank == 0 else [theirs, mine]

    return exchange

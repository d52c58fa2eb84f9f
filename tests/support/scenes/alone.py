"""Scenes of an engine that owns its region: nobody else is there, and its next start makes another one."""

import os
from multiprocessing.connection import Connection

from typing_extensions import override

from kvcellar.contract import Owner
from kvcellar.region.directory import RegionDirectory
from kvcellar.worker.attach import AttachOptions, attach, attach_scheduler
from tests.support.children import Child
from tests.support.scenes.scene import CAPACITY, CHUNK_BYTES, ID, Scene, options, run_engine
from tests.support.traced import Action


class _Alone(Scene):
    """An engine owns its region; nobody else is there."""

    def options(self) -> AttachOptions:
        """As this engine start, and no other, attaches."""
        return options(self.path, owner=Owner.ENGINE, capacity_bytes=CAPACITY)

    @override
    def next_start(self) -> None:
        run_engine(self.path, self.options())
        directory = RegionDirectory.open(self.path)
        assert directory.names() == []
        directory.close()
        self.path.rmdir()


class OwnRegion(_Alone):
    """An engine makes the region that it owns, beside what a killed one has left."""

    @override
    def before(self) -> None:
        child = Child(self._attach_and_say)
        assert child.hear() == "attached"
        child.kill()
        assert len(os.listdir(self.path)) == 3

    def _attach_and_say(self, connection: Connection) -> None:
        region = attach(ID, CHUNK_BYTES, options=self.options())
        connection.send("attached")
        connection.recv()
        region.close()

    @override
    def prepare(self) -> Action:
        sent = self.options()
        return lambda: attach(ID, CHUNK_BYTES, options=sent)


class OwnScheduler(_Alone):
    """The scheduler of such an engine attaches and removes the names, and all of them leave."""

    lives_on = False

    @override
    def prepare(self) -> Action:
        sent = self.options()
        region = attach(ID, CHUNK_BYTES, options=sent)

        def act() -> None:
            scheduler = attach_scheduler(ID, world_size=1, options=sent)
            scheduler.close()
            region.close()

        return act


class OwnDetach(_Alone):
    """Such an engine leaves before it has a scheduler."""

    @override
    def prepare(self) -> Action:
        return attach(ID, CHUNK_BYTES, options=self.options()).close

"""The controller is killed at random moments while pods come, go and crash; in the end all is true."""

import itertools
import random
import signal
import time
from collections.abc import Iterator

import pytest

from kvcellar_operator.words import Told
from tests.cluster.box.access import Access
from tests.cluster.box.cluster import Cluster
from tests.cluster.operators import install_crds, refused
from tests.cluster.scenes import Engine, Scene, scene_of
from tests.support.fake_sidecars import FakeSidecars, attached

pytestmark = pytest.mark.cluster


@pytest.fixture
def scene(cluster: Access, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    install_crds(cluster)
    with (
        FakeSidecars.running() as sidecars,
        scene_of(cluster, sidecars, tmp_path_factory.mktemp("controller")) as running,
    ):
        yield running


class Traffic:
    """Pods that come, go and crash at random, 10 to 30 of them."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.chance = random.Random(seed)
        self._scene = scene
        self._engines: dict[str, Engine] = {}
        self._numbers = itertools.count()

    def move(self, times: int) -> None:
        for _ in range(times):
            n_engines = len(self._engines)
            if n_engines < 10 or (n_engines < 30 and self.chance.random() < 0.6):
                self._come()
            elif self.chance.random() < 0.5:
                self._go()
            else:
                self._crash()

    def fill(self) -> None:
        while len(self._engines) < 30:
            self._come()

    def differences(self) -> list[str]:
        """What is not as it should be; nothing in the end."""
        found = {each["metadata"]["name"]: each for each in self._scene.regions()}
        wanted = {engine.region_name: engine for engine in self._engines.values()}
        wrong = [f"orphaned: {name}" for name in found.keys() - wanted.keys()]
        for name, engine in wanted.items():
            status = found.get(name, {}).get("status", {})
            said = {"phase": "Ready", "engineStarts": engine.sidecar.regions[0].engineStarts}
            if {key: status.get(key) for key in said} != said:
                wrong.append(f"not true: {name} says {status}")
        return wrong

    def crash_all(self) -> None:
        for engine in self._engines.values():
            self._restart(engine)

    def _come(self) -> None:
        engine = self._scene.run(f"traffic-{next(self._numbers)}")
        self._engines[engine.name] = engine

    def _go(self) -> None:
        engine = self._engines.pop(self.chance.choice(list(self._engines)))
        self._scene.delete(engine.name)

    def _crash(self) -> None:
        self._restart(self._engines[self.chance.choice(list(self._engines))])

    def _restart(self, engine: Engine) -> None:
        starts = engine.sidecar.regions[0].engineStarts + 1
        engine.sidecar.regions = [attached(engine.uid, starts=starts)]


@pytest.mark.parametrize(
    "kills", [5, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_killed_at_random_moments_everything_is_true_in_the_end(
    scene: Scene, box: Cluster, kills: int
) -> None:
    traffic = Traffic(scene, kills)
    for _ in range(kills):
        traffic.move(10)
        # From before it has started, which takes a second or two, to well into its work.
        time.sleep(traffic.chance.uniform(0.0, 5.0))
        scene.process.end(signal.SIGKILL)
        traffic.move(4)
        scene.process.start()
    traffic.fill()
    # All of them crash before and after one more kill, so their Events are counted on by a controller that
    # has not written them.
    traffic.crash_all()
    until_true(traffic)
    scene.process.end(signal.SIGKILL)
    scene.process.start()
    traffic.crash_all()
    until_true(traffic)
    assert len(scene.regions()) == 30
    # A restart of an engine may be told as often as there were some.
    told = scene.events().items()
    assert [key for key, count in told if count > 2 and key[0] != Told.ENGINE_RESTARTED] == []
    assert max(count for (reason, _), count in told if reason == Told.ENGINE_RESTARTED) > 1
    assert refused(box, scene.process.access) == []


def until_true(traffic: Traffic) -> None:
    """Wait until every object says what its sidecar does, and none is left over."""
    deadline = time.monotonic() + 30.0
    while traffic.differences() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert traffic.differences() == []

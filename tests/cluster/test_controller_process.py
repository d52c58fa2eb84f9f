"""The controller as a process beside a real API server, with pods that tests make and sidecars on loopback."""

import itertools
import json
import random
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcellar.contract import ANNOTATION_DESIRED, LABEL_INJECT, PlanBody, RegionState
from kvcellar_operator.config import ControllerSettings, parse
from kvcellar_operator.controller import needs
from kvcellar_operator.crd_region import spec_schema
from kvcellar_operator.engines import region_object_name
from kvcellar_operator.inject import InjectSettings, inject
from kvcellar_operator.profiles import Capacity, Profile
from kvcellar_operator.words import Told
from tests.cluster.box import simulated
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.errors import ApiError
from tests.cluster.operators import (
    OperatorProcess,
    granted,
    install_crds,
    own_namespace,
    user_of,
)
from tests.support.fake_sidecars import (
    GIB,
    FakeSidecar,
    FakeSidecars,
    Manner,
    attached,
    region,
)

pytestmark = pytest.mark.cluster

SETTINGS = InjectSettings(image="kvcellar:test", version="0")
PROFILE = Profile(capacity=Capacity("1Gi", size_bytes=GIB))
QUICK = ("--poll-interval", "0.5", "--poll-timeout", "0.5", "--poll-max-backoff", "1")


@pytest.fixture(scope="module", autouse=True)
def _crds(cluster: Access) -> None:
    install_crds(cluster)


@pytest.fixture(scope="module")
def sidecars() -> Iterator[FakeSidecars]:
    with FakeSidecars.running() as running:
        yield running


@dataclass
class Engine:
    """A pod of a test and what its sidecar says."""

    name: str
    uid: str
    sidecar: FakeSidecar

    @property
    def region_name(self) -> str:
        return region_object_name(self.name, self.uid)


@dataclass
class Scene:
    """One namespace, its pods and the controller that looks after them."""

    cluster: Access
    namespace: str
    node: str
    sidecars: FakeSidecars
    process: OperatorProcess

    @property
    def regions_path(self) -> str:
        return f"/apis/kvcellar.dev/v1alpha1/namespaces/{self.namespace}/offloadregions"

    def create(self, name: str, *, injected: bool = True) -> JsonObject:
        """Create a pod as the webhook lets it pass, bound to the node."""
        engine = {
            "name": "engine",
            "image": "engine:1",
            "command": ["vllm", "serve", "m"],
            "resources": {"limits": {"cpu": "1", "memory": "2Gi"}},
        }
        body: JsonObject = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {LABEL_INJECT: "true"}},
            "spec": {"containers": [engine], "nodeName": self.node},
        }
        if injected:
            body = inject(body, self.namespace, PROFILE, SETTINGS).pod
        return self.cluster.api.create(f"/api/v1/namespaces/{self.namespace}/pods", body)

    def run(self, name: str) -> Engine:
        """A pod that runs, with a sidecar that is well and an engine that is attached."""
        uid = self.create(name)["metadata"]["uid"]
        sidecar = self.sidecars.add()
        sidecar.regions = [attached(uid)]
        simulated.mark_running(self.cluster, self.namespace, name, sidecar.ip)
        return Engine(name, uid, sidecar)

    def delete(self, name: str) -> None:
        simulated.finish_deletion(self.cluster, self.namespace, name)

    def regions(self) -> list[JsonObject]:
        return list(self.cluster.api.get(self.regions_path)["items"])

    def region(self, name: str) -> JsonObject:
        """An object; empty until it is there."""
        try:
            return self.cluster.api.get(f"{self.regions_path}/{name}")
        except ApiError:
            return {}

    def holds(self, name: str, kind: str) -> tuple[str, str]:
        """Status and reason of a condition."""
        for each in self.region(name).get("status", {}).get("conditions", []):
            if each["type"] == kind:
                return each["status"], each["reason"]
        return "", ""

    def events(self) -> Counter[tuple[str, str]]:
        """Counts of our Events, by reason and object."""
        listed = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/events")["items"]
        return Counter(
            {
                (each["reason"], each["involvedObject"]["name"]): each["count"]
                for each in listed
                if each.get("source", {}).get("component") == "kvcellar-operator"
            }
        )

    def until_holds(self, name: str, kind: str, status: str, reason: str) -> None:
        until(
            lambda: self.holds(name, kind) == (status, reason),
            f"{kind} of {name} is {status} ({reason}), not {self.holds(name, kind)}",
        )


def settings_of(namespace: str) -> ControllerSettings:
    settings = parse(["controller", *arguments(namespace)])
    assert isinstance(settings, ControllerSettings)
    return settings


def arguments(namespace: str) -> list[str]:
    return ["--namespace", namespace, "--watch-namespace", namespace, *QUICK]


@pytest.fixture(scope="module")
def scene(
    cluster: Access, sidecars: FakeSidecars, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """One controller for all tests of the module, which look at different pods."""
    log = tmp_path_factory.mktemp("controller") / "log"
    node = f"kvc-node-{secrets.token_hex(4)}"
    simulated.create_node(cluster, node)
    with (
        own_namespace(cluster) as namespace,
        granted(cluster, namespace, needs(settings_of(namespace))) as account,
    ):
        process = OperatorProcess(account, log, "controller", *arguments(namespace))
        with process.running():
            yield Scene(cluster, namespace, node, sidecars, process)
    simulated.delete_node(cluster, node)


@pytest.fixture(autouse=True)
def _no_pods_left(scene: Scene) -> Iterator[None]:
    yield
    simulated.delete_pods(scene.cluster, scene.namespace)
    until(lambda: not scene.regions(), "no object is left")


def test_a_life_from_creation_to_the_end(scene: Scene, box: Cluster) -> None:
    uid = scene.create("life")["metadata"]["uid"]
    name = region_object_name("life", uid)
    until(lambda: scene.region(name), "the object is made")

    sidecar = scene.sidecars.add()
    sidecar.regions = [region(uid, RegionState.RESERVING, reservedBytes=GIB // 2)]
    simulated.mark_running(scene.cluster, scene.namespace, "life", sidecar.ip)
    scene.until_holds(name, "Reserved", "False", "Reserving")
    sidecar.regions = [attached(uid, usedBytes=GIB // 4)]
    scene.cluster.kubectl(
        "wait", "-n", scene.namespace, "--for=condition=Settled", f"kvreg/{name}", "--timeout=20s"
    )
    status = scene.region(name)["status"]
    assert status["phase"] == "Ready"
    assert status["usedBytes"] == GIB // 4
    assert status["node"] == scene.node
    assert scene.holds(name, "Attached") == ("True", "EngineAttached")
    assert scene.cluster.kubectl("get", "kvreg", "-n", scene.namespace).stdout.count("Ready") == 1

    # A crash, a start that adopts, an outage of the sidecar, and its return.
    sidecar.regions = [region(uid, engineStarts=1, generation=1)]
    scene.until_holds(name, "Attached", "False", "NoEngine")
    sidecar.regions = [attached(uid, starts=2)]
    scene.until_holds(name, "Attached", "True", "EngineAttached")
    sidecar.manner = Manner.HANGUP
    scene.until_holds(name, "Reachable", "False", "ConnectionFailed")
    sidecar.manner = Manner.WELL
    scene.until_holds(name, "Reachable", "True", "Answered")

    told = {reason for reason, about in scene.events() if about == name}
    assert told == {
        Told.REGION_RESERVED,
        Told.ENGINE_ATTACHED,
        Told.ENGINE_DETACHED,
        Told.ENGINE_RESTARTED,
        Told.SIDECAR_UNREACHABLE,
        Told.SIDECAR_REACHABLE,
    }
    assert {count for (_, about), count in scene.events().items() if about == name} == {1}

    scene.delete("life")
    until(lambda: not scene.regions(), "the object goes with its pod")

    writes = [
        (event["verb"], event["objectRef"]["resource"])
        for event in box.audit(user_of(scene.process.access))
        if event["verb"] in ("create", "update", "patch", "delete")
        and event["objectRef"].get("apiGroup") != "authorization.k8s.io"
        and event["objectRef"].get("apiGroup") != "authentication.k8s.io"
    ]
    # Nothing was written on the pod.
    assert {resource for _, resource in writes} == {"offloadregions", "events"}


def test_wishes_reach_the_pod_by_one_annotation(scene: Scene) -> None:
    engine = scene.run("wishes")
    scene.until_holds(engine.region_name, "Settled", "True", "Settled")
    pod = simulated.pod_path(scene.namespace, "wishes")

    def annotation() -> JsonObject:
        text = scene.cluster.api.get(pod)["metadata"]["annotations"].get(ANNOTATION_DESIRED, "{}")
        found: JsonObject = json.loads(text)
        return found

    assert annotation() == {}
    patch = json.dumps({"spec": {"retention": "now", "contents": "keep"}})
    scene.cluster.kubectl(
        "patch", "kvreg", "-n", scene.namespace, engine.region_name, "--type=merge", "-p", patch
    )
    until(annotation, "the annotation is there")
    wish = annotation()["regions"][engine.uid]
    assert (wish["retention"], wish["contents"]) == ("now", "keep")
    assert annotation()["podUID"] == engine.uid

    generation = scene.region(engine.region_name)["metadata"]["generation"]
    assert wish["generation"] == generation
    answered = attached(engine.uid, observedGeneration=generation, retention="now", contents="keep")
    engine.sidecar.regions = [answered]
    until(
        lambda: scene.region(engine.region_name)["status"].get("observedGeneration") == generation,
        "the sidecar's generation is shown",
    )
    nothing = json.dumps({"spec": {"retention": None, "contents": None}})
    scene.cluster.kubectl(
        "patch", "kvreg", "-n", scene.namespace, engine.region_name, "--type=merge", "-p", nothing
    )
    until(lambda: annotation() == {}, "the annotation is gone")


def test_whatever_a_sidecar_answers_the_object_says_so_and_the_others_stay_true(
    scene: Scene,
) -> None:
    manners = {
        Manner.SLOW: "Timeout",
        Manner.GARBAGE: "BadAnswer",
        Manner.ERROR: "BadStatus",
        Manner.HUGE: "BadAnswer",
        Manner.HANGUP: "ConnectionFailed",
    }
    engines = {manner: scene.run(f"engine-{manner.name.lower()}") for manner in manners}
    for manner, engine in engines.items():
        engine.sidecar.manner = manner
    good = scene.run("engine-good")
    wrong = scene.run("engine-wrong")
    wrong.sidecar.regions = [attached("somebody-else")]
    failed = scene.run("engine-failed")
    failed.sidecar.regions = [region(failed.uid, RegionState.FAILED, reason="no room")]
    failed.sidecar.plan = PlanBody(False, 2 * GIB, GIB, "pod memory limit", [])

    for manner, reason in manners.items():
        scene.until_holds(engines[manner].region_name, "Reachable", "False", reason)
    scene.until_holds(wrong.region_name, "Reachable", "False", "WrongSidecar")
    scene.until_holds(good.region_name, "Settled", "True", "Settled")
    scene.until_holds(failed.region_name, "Degraded", "True", "DoesNotFit")
    good.sidecar.regions = [attached(good.uid, starts=2)]
    until(
        lambda: scene.region(good.region_name)["status"]["engineStarts"] == 2,
        "the good one is true",
    )
    for engine in engines.values():
        engine.sidecar.manner = Manner.WELL
    for engine in engines.values():
        scene.until_holds(engine.region_name, "Reachable", "True", "Answered")


def test_a_pod_without_its_sidecar_is_told(scene: Scene) -> None:
    uid = scene.create("bare", injected=False)["metadata"]["uid"]
    until(lambda: scene.events()[(Told.NOT_INJECTED, "bare")] == 1, "the Event")
    if "capacity" not in spec_schema()["required"]:
        scene.until_holds(region_object_name("bare", uid), "Degraded", "True", "NotInjected")


def test_a_pod_that_a_quota_refuses_is_told(scene: Scene) -> None:
    base = f"namespaces/{scene.namespace}"
    scene.cluster.api.create(
        f"/api/v1/{base}/resourcequotas",
        {"metadata": {"name": "small"}, "spec": {"hard": {"limits.memory": "1Gi"}}},
    )
    engine = {"name": "e", "image": "e", "resources": {"limits": {"cpu": "1", "memory": "2Gi"}}}

    def owner(plural: str, name: str, labels: dict[str, str]) -> None:
        template = {
            "metadata": {"labels": {"app": name, **labels}},
            "spec": {"containers": [engine]},
        }
        spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
        if plural == "statefulsets":
            spec["serviceName"] = name
        body = {"metadata": {"name": name}, "spec": spec}
        scene.cluster.api.create(f"/apis/apps/v1/{base}/{plural}", body)

    owners = {"others": "replicasets", "engines": "replicasets", "ordered": "statefulsets"}
    for name, plural in owners.items():
        owner(plural, name, {} if name == "others" else {LABEL_INJECT: "true"})
    told = {(Told.POD_REFUSED, name): 1 for name in ("engines", "ordered")}
    until(lambda: told.items() <= scene.events().items(), "the Events")
    assert scene.events()[(Told.POD_REFUSED, "others")] == 0
    for name, plural in owners.items():
        scene.cluster.api.delete(f"/apis/apps/v1/{base}/{plural}/{name}")
    scene.cluster.api.delete(f"/api/v1/{base}/resourcequotas/small")


def test_two_controllers_at_once_do_not_flap(scene: Scene, tmp_path: Path) -> None:
    engines = [scene.run(f"two-{number}") for number in range(5)]
    until(lambda: len(scene.regions()) == 5, "all are made")
    second = OperatorProcess(
        scene.process.access, tmp_path / "second.log", "controller", *arguments(scene.namespace)
    )
    with second.running():
        for engine in engines:
            engine.sidecar.regions = [attached(engine.uid, starts=2, usedBytes=GIB // 2)]
        until(
            lambda: [each["status"]["engineStarts"] for each in scene.regions()] == [2] * 5,
            "all true",
        )
        time.sleep(1.5)
        before = {
            each["metadata"]["name"]: each["metadata"]["resourceVersion"]
            for each in scene.regions()
        }
        time.sleep(3.0)
        after = {
            each["metadata"]["name"]: each["metadata"]["resourceVersion"]
            for each in scene.regions()
        }
    assert before == after
    names = {engine.region_name for engine in engines}
    assert {count for (_, about), count in scene.events().items() if about in names} == {1}


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
def test_killed_at_random_moments_everything_is_true_in_the_end(scene: Scene, kills: int) -> None:
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


def until_true(traffic: Traffic) -> None:
    """Wait until every object says what its sidecar does, and none is left over."""
    deadline = time.monotonic() + 30.0
    while traffic.differences() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert traffic.differences() == []


def test_it_used_every_right_that_it_asks_for_and_no_other(scene: Scene, box: Cluster) -> None:
    """It looks at what the controllers of all tests above did.

    An API server that starts refuses everything until it has read the rules, so this comes before an outage.
    """
    used, refused = set(), []
    for event in box.audit(user_of(scene.process.access)):
        about = event.get("objectRef", {})
        if event["responseStatus"]["code"] == 403:
            refused.append((event["verb"], event["requestURI"]))
        resource = "/".join(filter(None, (about.get("resource"), about.get("subresource"))))
        used.add((event["verb"], resource))
    assert refused == []
    asked = {
        (verb, need.resource) for need in needs(settings_of(scene.namespace)) for verb in need.verbs
    }
    assert asked - used == set()


def test_it_goes_on_after_the_api_server_was_gone(scene: Scene, box: Cluster) -> None:
    engine = scene.run("outage-0")
    scene.until_holds(engine.region_name, "Attached", "True", "EngineAttached")
    box.end_program("kube-apiserver")
    engine.sidecar.regions = [attached(engine.uid, starts=2)]
    box.start_program("kube-apiserver")
    box.wait_until_ready()
    until(
        lambda: scene.region(engine.region_name)["status"]["engineStarts"] == 2, "it is true again"
    )
    late = scene.run("outage-1")
    scene.until_holds(late.region_name, "Attached", "True", "EngineAttached")
    assert scene.process.health("/livez")[0] == 200
    assert scene.process.metric("kvcellar_controller_answer_age_seconds") < 120


def test_a_missing_rule_is_said_by_name(cluster: Access, namespace: str, tmp_path: Path) -> None:
    wanted = [need for need in needs(settings_of(namespace)) if need.resource != "pods"]
    with granted(cluster, namespace, wanted) as account:
        process = OperatorProcess(account, tmp_path / "log", "controller", *arguments(namespace))
        with process.running(until_ready=False):
            until(
                lambda: f"may not watch pods in namespace {namespace}" in process.log(),
                "the rule is named",
            )
            until(
                lambda: process.metric("kvcellar_operator_missing_permissions") == 3,
                "they are counted",
            )


def test_it_ends_cleanly(scene: Scene) -> None:
    began_s = time.monotonic()
    assert scene.process.end() == 0
    assert time.monotonic() - began_s < 10.0

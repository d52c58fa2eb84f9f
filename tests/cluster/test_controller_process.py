"""The controller as a process beside a real API server, with pods that tests make and sidecars on loopback."""

import json
import signal
import time
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from kvcellar.contract import (
    ANNOTATION_DESIRED,
    ANNOTATION_SKIPPED,
    CONTRACT_VERSION,
    LABEL_INJECT,
    PlanBody,
    RegionState,
)
from kvcellar_operator.controller import needs
from kvcellar_operator.engines import region_object_name
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
    refused,
    used,
    user_of,
)
from tests.cluster.scenes import Scene, arguments, scene_of, settings_of
from tests.support.fake_sidecars import (
    GIB,
    FakeSidecars,
    Manner,
    attached,
    region,
)

pytestmark = pytest.mark.cluster

GONE_S = 60.0
"""The garbage collector looks for new kinds every 30 s."""


@pytest.fixture(scope="module", autouse=True)
def _crds(cluster: Access) -> None:
    install_crds(cluster)


@pytest.fixture(scope="module")
def sidecars() -> Iterator[FakeSidecars]:
    with FakeSidecars.running() as running:
        yield running


@pytest.fixture(scope="module")
def scene(
    cluster: Access, sidecars: FakeSidecars, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    """One controller for all tests of the module, which look at different pods."""
    with scene_of(cluster, sidecars, tmp_path_factory.mktemp("controller")) as running:
        yield running


@pytest.fixture(autouse=True)
def _no_pods_left(scene: Scene) -> Iterator[None]:
    yield
    simulated.delete_pods(scene.cluster, scene.namespace)
    until(lambda: not scene.regions(), "no object is left", GONE_S)


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
    until(lambda: not scene.regions(), "the object goes with its pod", GONE_S)

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


def test_a_sidecar_of_another_contract_degrades_its_region_and_is_sent_no_wish(
    scene: Scene,
) -> None:
    engine = scene.run("skewed")
    scene.until_holds(engine.region_name, "Settled", "True", "Settled")
    engine.sidecar.contract_version = CONTRACT_VERSION + 1

    scene.until_holds(engine.region_name, "Degraded", "True", "OtherContract")

    status = scene.region(engine.region_name)["status"]
    degraded = next(each for each in status["conditions"] if each["type"] == "Degraded")
    assert f"contract version {CONTRACT_VERSION + 1} " in degraded["message"]
    assert f"contract version {CONTRACT_VERSION} " in degraded["message"]
    assert status["phase"] == "Ready"
    wish = json.dumps({"spec": {"retention": "now"}})
    patch = ("patch", "kvreg", "-n", scene.namespace, engine.region_name, "--type=merge", "-p")
    scene.cluster.kubectl(*patch, wish)
    n_asked = engine.sidecar.n_asked
    until(lambda: engine.sidecar.n_asked >= n_asked + 2, "it was asked again")
    pod = simulated.pod_path(scene.namespace, "skewed")
    assert ANNOTATION_DESIRED not in scene.cluster.api.get(pod)["metadata"]["annotations"]

    engine.sidecar.contract_version = CONTRACT_VERSION
    scene.until_holds(engine.region_name, "Degraded", "False", "AsExpected")
    until(
        lambda: ANNOTATION_DESIRED in scene.cluster.api.get(pod)["metadata"]["annotations"],
        "the wish is relayed",
    )


def test_a_pod_without_its_sidecar_is_told(scene: Scene) -> None:
    uid = scene.create("bare", None)["metadata"]["uid"]
    name = region_object_name("bare", uid)
    until(lambda: scene.events()[(Told.NOT_INJECTED, "bare")] == 1, "the Event")
    scene.until_holds(name, "Degraded", "True", "NotInjected")
    assert "capacity" not in scene.region(name)["spec"]

    # Deleted by hand it is made again, and told no second time.
    scene.cluster.kubectl("delete", "-n", scene.namespace, "kvreg", name)
    scene.until_holds(name, "Degraded", "True", "NotInjected")
    assert scene.events()[(Told.NOT_INJECTED, "bare")] == 1


def test_a_pod_that_waits_or_has_lost_its_label_is_shown_as_such(scene: Scene) -> None:
    waits = region_object_name("waits", scene.create("waits")["metadata"]["uid"])
    engine = scene.run("unlabelled")
    scene.until_holds(engine.region_name, "Attached", "True", "EngineAttached")
    before = scene.region(engine.region_name)["status"]

    def label(value: str | None) -> None:
        labels = {"metadata": {"labels": {LABEL_INJECT: value}}}
        scene.cluster.api.patch(f"/api/v1/namespaces/{scene.namespace}/pods/unlabelled", labels)

    label(None)
    scene.until_holds(engine.region_name, "Reserved", "Unknown", "PodGone")
    scene.until_holds(waits, "Reachable", "Unknown", "PodPending")
    after = scene.region(engine.region_name)["status"]
    for same in ("phase", "residentBytes", "usedBytes"):
        assert after[same] == before[same], same

    label("true")
    scene.until_holds(engine.region_name, "Attached", "True", "EngineAttached")
    assert scene.events()[(Told.REGION_RESERVED, engine.region_name)] == 1
    assert scene.events()[(Told.REGION_RELEASED, engine.region_name)] == 0


def test_a_sidecar_that_has_just_started_and_does_not_listen_yet_is_no_warning(
    scene: Scene,
) -> None:
    uid = scene.create("slow-start")["metadata"]["uid"]
    sidecar = scene.sidecars.add()
    sidecar.regions, sidecar.manner = [attached(uid)], Manner.HANGUP
    simulated.mark_running(scene.cluster, scene.namespace, "slow-start", sidecar.ip)
    time.sleep(2.0)
    sidecar.manner = Manner.WELL
    name = region_object_name("slow-start", uid)
    scene.until_holds(name, "Attached", "True", "EngineAttached")
    told = {reason for reason, about in scene.events() if about == name}
    assert told == {Told.REGION_RESERVED, Told.ENGINE_ATTACHED}


def test_a_pod_of_which_no_capacity_is_known_has_an_object_that_says_so(scene: Scene) -> None:
    half = Profile(capacity=Capacity("50%", share=Fraction(1, 2)))
    pod = scene.create("endless", half, limit="")["metadata"]
    name = region_object_name("endless", pod["uid"])
    scene.until_holds(name, "Degraded", "True", "CapacityUnknown")
    status = scene.region(name)["status"]
    assert (status["phase"], status["reason"]) == ("Failed", pod["annotations"][ANNOTATION_SKIPPED])
    assert status["reason"].startswith("NoMemoryLimit: ")
    until(lambda: scene.events()[(Told.INJECTION_SKIPPED, "endless")] == 1, "the Event")

    # What somebody chose needs no object, and no Event.
    scene.create("off", Profile(is_enabled=False))
    simulated.mark_running(scene.cluster, scene.namespace, "endless")
    time.sleep(1.0)
    assert len(scene.regions()) == 1
    assert not [about for _, about in scene.events() if about == "off"]

    refused = scene.cluster.kubectl(
        *("patch", "-n", scene.namespace, "kvreg", name, "--type=merge"),
        *("-p", '{"spec": {"capacity": "1Gi"}}'),
        check=False,
    )
    assert "capacity cannot be added or removed" in refused.stderr


def test_engine_ids_that_are_no_object_names_have_objects_all_the_same(scene: Scene) -> None:
    ids = ["Chat_A.1", "chat-a.1", "x" * 128, "x" * 127 + "y", "_"]
    engine = scene.run("ids", {"engineIds": ids, "capacityBytes": GIB})
    engine.sidecar.regions = [attached(each) for each in ids]
    names = {each: region_object_name("ids", each) for each in ids}
    assert len(set(names.values())) == len(ids)
    for each, name in names.items():
        scene.until_holds(name, "Attached", "True", "EngineAttached")
        assert scene.region(name)["spec"]["engineID"] == each


def test_a_damaged_mark_without_a_capacity_leaves_an_object_that_the_sidecar_fills(
    scene: Scene,
) -> None:
    engine = scene.run("damaged", {"engineIds": ["$(KVCELLAR_POD_UID)"], "capacityBytes": -1})
    scene.until_holds(engine.region_name, "Settled", "True", "Settled")
    body = scene.region(engine.region_name)
    assert "capacity" not in body["spec"]
    assert body["status"]["capacityBytes"] == GIB


def test_a_controller_that_was_killed_counts_on_the_events_that_are_there(scene: Scene) -> None:
    engine = scene.run("again")
    scene.until_holds(engine.region_name, "Attached", "True", "EngineAttached")
    told = (Told.ENGINE_RESTARTED, engine.region_name)
    for starts in (2, 3):
        engine.sidecar.regions = [attached(engine.uid, starts=starts)]
        until(partial(has_count, scene, told, starts - 1), "the restart is told")
        scene.process.end(signal.SIGKILL)
        scene.process.start()
        scene.process.until_ready()


def has_count(scene: Scene, told: tuple[str, str], count: int) -> bool:
    return scene.events()[told] == count


def test_what_changed_while_it_was_down_is_true_within_half_a_minute(scene: Scene) -> None:
    stays, goes = scene.run("down-stays"), scene.run("down-goes")
    for engine in (stays, goes):
        scene.until_holds(engine.region_name, "Attached", "True", "EngineAttached")
    scene.process.end()
    stays.sidecar.regions = [attached(stays.uid, starts=2)]
    scene.delete(goes.name)
    new = scene.run("down-new")
    bare = region_object_name("down-bare", scene.create("down-bare", None)["metadata"]["uid"])
    scene.process.start()
    began_s = time.monotonic()
    scene.until_holds(new.region_name, "Attached", "True", "EngineAttached")
    scene.until_holds(bare, "Degraded", "True", "NotInjected")
    until(
        lambda: scene.region(stays.region_name)["status"]["engineStarts"] == 2,
        "the restart is said",
    )
    assert time.monotonic() - began_s < 30.0
    until(lambda: not scene.region(goes.region_name), "what has gone is gone", GONE_S)


@pytest.fixture
def small_quota(scene: Scene) -> Iterator[JsonObject]:
    """A container that asks for more than the namespace may use; gone afterwards, as the quota is."""
    base = f"/api/v1/namespaces/{scene.namespace}"
    quota = {"metadata": {"name": "small"}, "spec": {"hard": {"limits.memory": "1Gi"}}}
    engine = {"name": "e", "image": "e", "resources": {"limits": {"cpu": "1", "memory": "2Gi"}}}
    scene.cluster.api.create(f"{base}/resourcequotas", quota)

    def is_refused() -> bool:
        tried = {"metadata": {"name": "tried"}, "spec": {"containers": [engine]}}
        try:
            scene.cluster.api.create(f"{base}/pods", tried, dryRun="All")
        except ApiError as error:
            return "exceeded quota" in str(error)
        return False

    try:
        # The API server lets pods pass for some milliseconds until it has seen a new quota.
        until(is_refused, "the quota is in force")
        yield engine
    finally:
        scene.cluster.api.delete(f"{base}/resourcequotas/small")


def test_a_pod_that_a_quota_refuses_is_told(scene: Scene, small_quota: JsonObject) -> None:
    base = f"/apis/apps/v1/namespaces/{scene.namespace}"

    def owner(plural: str, name: str, labels: dict[str, str]) -> None:
        template = {
            "metadata": {"labels": {"app": name, **labels}},
            "spec": {"containers": [small_quota]},
        }
        spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
        if plural == "statefulsets":
            spec["serviceName"] = name
        body = {"metadata": {"name": name}, "spec": spec}
        scene.cluster.api.create(f"{base}/{plural}", body)

    owners = {"others": "replicasets", "engines": "replicasets", "ordered": "statefulsets"}
    for name, plural in owners.items():
        owner(plural, name, {} if name == "others" else {LABEL_INJECT: "true"})
    told = {(Told.POD_REFUSED, name): 1 for name in ("engines", "ordered")}
    until(lambda: told.items() <= scene.events().items(), "the Events")
    assert scene.events()[(Told.POD_REFUSED, "others")] == 0
    for name, plural in owners.items():
        scene.cluster.api.delete(f"{base}/{plural}/{name}")


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


def test_it_used_every_right_that_it_asks_for_and_no_other(scene: Scene, box: Cluster) -> None:
    """It looks at what the controllers of all tests above did.

    An API server that starts refuses everything until it has read the rules, so this comes before an outage.
    """
    assert refused(box, scene.process.access) == []
    asked = {
        (verb, need.resource) for need in needs(settings_of(scene.namespace)) for verb in need.verbs
    }
    assert asked - used(box, scene.process.access) == set()


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

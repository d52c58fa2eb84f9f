"""Releases change while engines run: the chart is upgraded and rolled back, and sidecars and operator differ."""

import itertools
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcellar import __version__
from kvcellar.contract import CONTRACT_VERSION, LABEL_PROFILE
from tests.cluster import charts
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.figures import RecordFigure
from tests.cluster.images import bumped
from tests.cluster.images.recipes import KVCELLAR_IMAGE
from tests.cluster.node_pods import (
    CAPACITY_BYTES,
    REGIONS,
    START_S,
    container_group,
    container_status,
    kill_container,
    make_profile,
    region_of,
    until_checked,
    until_restarted,
)
from tests.cluster.node_releases import (
    NOT_ASKED,
    PodsMeanwhile,
    Undisturbed,
    desired_of,
    image_of,
    reason_of,
    start_engine,
    until_reason,
    until_relayed,
    what_becomes_of_a_pod,
    wish,
)
from tests.cluster.node_shapes import Shapes, replicated
from tests.cluster.node_sidecars import NodeSidecar

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

OURS = f"contract version {CONTRACT_VERSION} (kvcellar {__version__})"
THEIRS = f"contract version {bumped.CONTRACT} (kvcellar {bumped.RELEASE})"
PROFILE = "/apis/kvcellar.dev/v1alpha1/namespaces/{}/offloadprofiles/default"

NEW_FIELD = """\
                ofTheNextRelease:
                  type: "string"
                  default: "usual"
"""
LARGE_BYTES = 96 << 20


@pytest.fixture(scope="module")
def other_release(node_box: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of another release, whose image the node has and whose profiles have one field more."""
    node_box.node.import_image(bumped.image().archive)
    chart = tmp_path_factory.mktemp("release") / "kvcellar"
    shutil.copytree(charts.CHART, chart)
    about = chart / "Chart.yaml"
    versions = re.compile("^(version|appVersion): .*", re.MULTILINE)
    about.write_text(versions.sub(rf"\g<1>: {bumped.RELEASE}", about.read_text()))
    profiles = chart / "templates" / "crds" / "offloadprofiles.yaml"
    first = "                enabled:\n"
    before, found, after = profiles.read_text().partition(first)
    assert found
    profiles.write_text(f"{before}{NEW_FIELD}{found}{after}")
    return chart


@pytest.fixture
def upgradable(installed: Cluster) -> Iterator[Cluster]:
    """The chart is deployed afterwards as it was, whatever the test did."""
    before = charts.Deployed.now(installed)
    assert before.revision
    yield installed
    before.restore(installed)


def crash_and_recover(cluster: Cluster, namespace: str, name: str, sidecar: NodeSidecar) -> None:
    """Kill the engine: it comes back in the same region, by the same sidecar."""
    starts = sidecar.until_ready()["engineStarts"]
    kill_container(cluster, namespace, name)
    until_restarted(cluster, namespace, name, 1)
    until_checked(cluster, namespace, name)
    until(lambda: sidecar.until_ready()["engineStarts"] == starts + 1, "the start is counted")
    assert sidecar.until_ready()["capacityBytes"] == CAPACITY_BYTES
    assert container_status(cluster, namespace, name, "kvcellar")["restartCount"] == 0


def change_the_sidecar(cluster: Cluster, namespace: str, name: str, image: str) -> None:
    """Give the sidecar of a pod that runs another image: it adopts the region, and the engine goes on."""
    sidecar = NodeSidecar.of(cluster, namespace, name)
    before, engine = sidecar.until_ready(), container_group(cluster, namespace, name).pids
    cluster.kubectl("set", "image", f"pod/{name}", f"kvcellar={image}", "--namespace", namespace)
    until_restarted(cluster, namespace, name, 1, "kvcellar")
    after = sidecar.until_ready()
    assert [after[key] for key in ("generation", "session")] == [
        before[key] for key in ("generation", "session")
    ]
    assert container_group(cluster, namespace, name).pids == engine
    sidecar.until_more_is_loaded()


# ---- the stories


def test_a_pod_that_no_webhook_is_asked_about_is_seen_as_such(installed: Cluster) -> None:
    became, _ = what_becomes_of_a_pod(installed, "kube-system")
    assert became == NOT_ASKED


def test_the_chart_is_upgraded_and_rolled_back_while_engines_of_both_releases_run_crash_and_recover(
    upgradable: Cluster, other_release: Path, pod_namespace: str, record_figure: RecordFigure
) -> None:
    cluster, namespace = upgradable, pod_namespace
    make_profile(cluster, namespace)
    first = charts.Deployed.now(cluster)
    old = start_engine(cluster, namespace, "old")
    before = region_of(cluster, namespace, "old")

    with Undisturbed(cluster, namespace, "old"):
        with PodsMeanwhile(cluster, namespace) as meanwhile:
            charts.upgrade(cluster, other_release, bumped.IMAGE)
            meanwhile.until_by(bumped.IMAGE)
        message = until_reason(cluster, namespace, "old", "Degraded", "OtherContract")
    meanwhile.assert_all_are_injected()
    record_figure("upgrade", meanwhile.in_words())
    assert message.index(OURS) < message.index(THEIRS)
    an_older_sidecar_goes_on_under_a_newer_operator(cluster, namespace, before, old)
    new = a_pod_of_the_newer_release_beside_it(cluster, namespace)

    with Undisturbed(cluster, namespace, "old"), Undisturbed(cluster, namespace, "new"):
        with PodsMeanwhile(cluster, namespace) as meanwhile:
            charts.roll_back(cluster, first.revision)
            meanwhile.until_by(KVCELLAR_IMAGE)
        message = until_reason(cluster, namespace, "new", "Degraded", "OtherContract")
        until_reason(cluster, namespace, "old", "Degraded", "AsExpected")
    meanwhile.assert_all_are_injected()
    record_figure("rollback", meanwhile.in_words())
    assert message.index(THEIRS) < message.index(OURS)
    # What was wished while its operator did not understand it.
    until_relayed(cluster, namespace, "old")
    crash_and_recover(cluster, namespace, "new", new)
    assert reason_of(cluster, namespace, "new", "Degraded") == "OtherContract"
    change_the_sidecar(cluster, namespace, "new", KVCELLAR_IMAGE)
    until_reason(cluster, namespace, "new", "Degraded", "AsExpected")


def an_older_sidecar_goes_on_under_a_newer_operator(
    cluster: Cluster, namespace: str, before: JsonObject, old: NodeSidecar
) -> None:
    """Its object is the one that it was, and says why nothing new is in it; its engine comes back from a crash."""
    after = region_of(cluster, namespace, "old")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
    assert reason_of(cluster, namespace, "old", "Reachable") == "OtherContract"
    wish(cluster, namespace, "old", contents="keep")
    crash_and_recover(cluster, namespace, "old", old)
    assert reason_of(cluster, namespace, "old", "Degraded") == "OtherContract"


def a_pod_of_the_newer_release_beside_it(cluster: Cluster, namespace: str) -> NodeSidecar:
    """A new pod has all of the newer release; wishes reach it, and not the older one."""
    new = start_engine(cluster, namespace, "new")
    assert image_of(cluster, namespace, "new") == bumped.IMAGE
    wish(cluster, namespace, "new", contents="keep")
    until_relayed(cluster, namespace, "new")
    # By now the older one would have had its wish, too.
    assert desired_of(cluster, namespace, "old") == ""
    return new


def until_told(cluster: Cluster, namespace: str, *, is_newer: bool) -> tuple[str, JsonObject]:
    """Wait until a webhook finds a field in the profile that it does not know, or finds none any more.

    Returns what it made of the pod: the other replica may see it later.
    The API server ends the watches of a kind some time after its CRD was changed, and shows objects by the CRD
    of before until then; so the profile is changed until the webhook has seen it by the new one.
    """
    tries = itertools.count()

    def look() -> list[tuple[str, JsonObject]]:
        marks = {"annotations": {"try": str(next(tries))}}
        cluster.api.patch(PROFILE.format(namespace), {"metadata": marks})
        became, stamp = what_becomes_of_a_pod(cluster, namespace)
        is_told = "ProfileNewer" in stamp["notices"]
        return [(became, stamp)] if is_told is is_newer else []

    return until(look, f"a new pod is told of a newer profile: {is_newer}", START_S)[0]


def test_objects_stay_true_when_only_the_crds_are_newer_and_when_they_are_taken_back(
    upgradable: Cluster, other_release: Path, pod_namespace: str
) -> None:
    cluster, namespace = upgradable, pod_namespace
    make_profile(cluster, namespace, contents="keep")
    sidecar = start_engine(cluster, namespace, "old")
    region, first = region_of(cluster, namespace, "old"), charts.Deployed.now(cluster)
    path = PROFILE.format(namespace)
    profile = cluster.api.get(path)["spec"]

    charts.upgrade(cluster, other_release, KVCELLAR_IMAGE)
    newer = profile | {"ofTheNextRelease": "usual"}
    until(lambda: cluster.api.get(path)["spec"] == newer, "the newer CRD is served", START_S)
    assert region_of(cluster, namespace, "old")["spec"] == region["spec"]
    cluster.api.patch(path, {"spec": {"ofTheNextRelease": "special"}})
    became, stamp = until_told(cluster, namespace, is_newer=True)
    assert became == KVCELLAR_IMAGE
    assert stamp["unknownFields"] == ["spec.ofTheNextRelease"]
    until_reason(cluster, namespace, "old", "Degraded", "AsExpected")

    charts.roll_back(cluster, first.revision)
    until(lambda: cluster.api.get(path)["spec"] == profile, "the CRD before is served", START_S)
    wish(cluster, namespace, "old", contents="discard")
    generation = region_of(cluster, namespace, "old")["metadata"]["generation"]
    until(
        lambda: sidecar.until_ready()["observedGeneration"] == generation,
        "the sidecar has what is wished",
        START_S,
    )
    until_told(cluster, namespace, is_newer=False)


def until_whole(cluster: Cluster, namespace: str, name: str, capacity_bytes: int) -> None:
    """Wait until an engine of a pod has loaded from a region of this capacity."""
    until_reason(cluster, namespace, name, "Attached", "EngineAttached")
    assert region_of(cluster, namespace, name)["status"]["capacityBytes"] == capacity_bytes
    NodeSidecar.of(cluster, namespace, name).until_more_is_loaded()


def test_a_deployment_is_rolled_to_a_new_profile_and_its_new_pods_have_that_capacity(
    installed: Cluster, pod_namespace: str, record_figure: RecordFigure
) -> None:
    cluster, namespace = installed, pod_namespace
    make_profile(cluster, namespace)
    make_profile(cluster, namespace, "large", capacity=str(LARGE_BYTES))
    workload = replicated("Deployment", "rolled", 2)
    cluster.apply(workload, options=("--namespace", namespace))
    shapes = Shapes(cluster, namespace)
    old = [each["metadata"]["name"] for each in shapes.pods_of("rolled", 2)]
    for name in old:
        until_whole(cluster, namespace, name, CAPACITY_BYTES)
        wish(cluster, namespace, name, contents="keep")
    # A profile is read when a pod is made: an edit changes no pod that runs.
    make_profile(cluster, namespace, capacity=str(CAPACITY_BYTES // 2))
    for name in old:
        until_relayed(cluster, namespace, name)
        until_whole(cluster, namespace, name, CAPACITY_BYTES)

    began = time.monotonic()
    labels = {"metadata": {"labels": {LABEL_PROFILE: "large"}}}
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/rolled"
    cluster.api.patch(path, {"spec": {"template": labels}})
    until(lambda: not set(names_of(shapes)) & set(old), "the old pods are gone", START_S)
    new = names_of(shapes)
    assert len(new) == 2
    for name in new:
        until_whole(cluster, namespace, name, LARGE_BYTES)
        # What was wished of a region goes with it.
        assert desired_of(cluster, namespace, name) == ""
    record_figure("two pods rolled to another profile", f"{time.monotonic() - began:.0f} s")
    until(lambda: regions_by_pod(cluster, namespace) == set(new), "the old objects are gone")


def names_of(shapes: Shapes) -> list[str]:
    return [each["metadata"]["name"] for each in shapes.pods_of("rolled", 2)]


def regions_by_pod(cluster: Cluster, namespace: str) -> set[str]:
    items = cluster.api.get(REGIONS.format(namespace))["items"]
    return {each["spec"]["podName"] for each in items}

"""Pods of every shape on a real kubelet: each engine has its region and loads what it stored, or the pod says why not.

They all start together when the first test asks for them.
"""

from collections.abc import Iterator

import pytest

from kvcellar.contract import CONTAINER_PATH
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.node_pods import (
    START_S,
    as_admitted,
    container_status,
    create_pod,
    memory,
    run_in,
    said,
    until_said,
)
from tests.cluster.node_shapes import (
    ALL_START_S,
    OTHER_USER,
    SHAPES,
    Shapes,
    conditions,
    job,
    no_shell,
    other_user,
    profiles,
    replicated,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

LOADS = 400
"""Of a Job: for about 9 s, so that the controller sees its engine at work."""
JOBS = ("OnFailure", "Never")


@pytest.fixture(scope="module")
def shapes(installed: Cluster, other_engines: None, shared_namespace: str) -> Iterator[Shapes]:
    """Everything that this module looks at, created."""
    cluster, namespace = installed, shared_namespace
    cluster.apply(*profiles(namespace))
    without = other_user("without-any-group", has_group=False)
    without = as_admitted(cluster, namespace, without)
    # As a policy of a cluster may do after the webhook.
    del without["spec"]["securityContext"]["supplementalGroups"]
    for made in (*(each for each, _ in SHAPES.values()), without, no_shell("stuck", "default")):
        create_pod(cluster, namespace, made)
    workloads = [replicated("Deployment", "two-pods", 2), replicated("StatefulSet", "named", 1)]
    jobs = [job(policy.lower(), policy, LOADS) for policy in JOBS]
    options = ("--namespace", namespace)
    cluster.apply(*workloads, *jobs, options=options)
    yield Shapes(cluster, namespace)
    cluster.kubectl("delete", "deployments,statefulsets,jobs", "--all", *options)


@pytest.mark.parametrize("name", SHAPES)
def test_an_engine_has_its_region_and_loads_what_it_stored_at_the_sidecars_expense(
    shapes: Shapes, name: str
) -> None:
    shapes.until_works(name, SHAPES[name][1])


# ---- what is particular about some of them


def test_two_engine_containers_have_a_region_each_by_the_containers_name(shapes: Shapes) -> None:
    made = shapes.until_works("two-engines", 2)
    uid = made["metadata"]["uid"]
    for container in ("one", "two"):
        attached = said(shapes.cluster, shapes.namespace, "two-engines", container)[0]
        assert attached["engine"] == f"{uid}-{container}"
    ids = {region["spec"]["engineID"] for region in shapes.regions(made)}
    assert ids == {f"{uid}-one", f"{uid}-two"}


def test_two_engines_of_one_container_have_a_region_each_by_their_number(shapes: Shapes) -> None:
    made = shapes.until_works("two-in-one", 2)
    uid = made["metadata"]["uid"]
    ids = {region["spec"]["engineID"] for region in shapes.regions(made)}
    assert ids == {f"{uid}_dp0", f"{uid}_dp1"}


def test_the_region_lies_in_the_part_of_the_users_volume_that_the_engine_sees(
    shapes: Shapes,
) -> None:
    made = shapes.until_works("own-volume")
    uid = made["metadata"]["uid"]
    volumes = shapes.cluster.node.folder / "kubelet" / "pods" / uid / "volumes"
    volume = volumes / "kubernetes.io~empty-dir" / "mine"
    names = shapes.cluster.node.run("find", str(volume), "-name", f"{uid}*").stdout.split()
    assert {name.rpartition("/")[0] for name in names} == {f"{volume}/part/kvcellar"}
    assert all(each["name"] != "kvcellar-shm" for each in made["spec"]["volumes"])


def test_the_sidecar_comes_behind_a_mesh_and_before_all_others(shapes: Shapes) -> None:
    made = shapes.until_works("sidecars-first")
    names = [each["name"] for each in made["spec"]["initContainers"]]
    assert names == ["istio-proxy", "kvcellar", "kvcellar-path", "kvcellar-wait", "shipper"]


def test_the_pods_own_limit_grows_by_the_sidecar_and_its_engine_stays_without_one(
    shapes: Shapes,
) -> None:
    made = shapes.until_works("pod-level")
    pays = memory(shapes.cluster, made)
    sidecar = container_status(shapes.cluster, shapes.namespace, "pod-level", "kvcellar")
    share = pays.container(sidecar["containerID"]).limit_bytes
    assert share is not None
    assert pays.limit_bytes == (160 << 20) + share


@pytest.mark.parametrize(
    ("name", "quality"),
    [("guaranteed", ""), ("burstable", "burstable"), ("best-effort", "besteffort")],
)
def test_the_kubelet_puts_the_pod_where_its_class_belongs(
    shapes: Shapes, name: str, quality: str
) -> None:
    made = shapes.until_works(name)
    assert made["status"]["qosClass"].lower() == (quality or "guaranteed")
    parent = memory(shapes.cluster, made).folder.parent.name
    assert parent == (quality or "kubepods")


@pytest.mark.parametrize("name", ["other-user", "other-user-without-group"])
def test_the_files_belong_to_the_sidecars_user_and_the_engine_may_write_them(
    shapes: Shapes, name: str
) -> None:
    shapes.until_works(name)
    look = (
        "import os\nfolder = '/dev/shm/kvcellar/'\nprint(os.getuid())\n"
        "[print(os.stat(folder + each).st_uid) for each in os.listdir(folder)]"
    )
    own, *owners = run_in(shapes.cluster, shapes.namespace, name, "engine", look).split()
    assert own == "1000"
    assert set(owners) == {str(OTHER_USER)}


def test_the_pythonpath_of_the_image_leads_on_to_its_modules(shapes: Shapes) -> None:
    made = shapes.until_works("own-path")
    # The engine itself has imported its module, from where the image has it.
    look = "import own_module, kvcellar\nprint(own_module.__file__, kvcellar.__file__)"
    own, ours = run_in(shapes.cluster, shapes.namespace, "own-path", "engine", look).split()
    assert own == "/opt/kvcellar/image/0/own_module.py"
    assert ours.startswith("/opt/kvcellar/current/")
    assert CONTAINER_PATH in {each["name"] for each in made["spec"]["initContainers"]}


# ---- controllers


def test_each_pod_of_a_deployment_has_a_region_of_its_own(shapes: Shapes) -> None:
    pods = [shapes.until_works(e["metadata"]["name"]) for e in shapes.pods_of("two-pods", 2)]
    ids = {region["spec"]["engineID"] for made in pods for region in shapes.regions(made)}
    assert ids == {made["metadata"]["uid"] for made in pods}


def test_a_pod_of_a_statefulset_that_comes_back_has_a_new_region_and_the_old_one_is_gone(
    shapes: Shapes,
) -> None:
    first = shapes.until_works("named-0")
    delete = ("delete", "pod", "named-0", "-n", shapes.namespace)
    shapes.cluster.kubectl(*delete, timeout_s=90)

    (second,) = shapes.pods_of("named", 1)
    assert second["metadata"]["name"] == "named-0"
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    shapes.until_works("named-0")
    until(lambda: not shapes.regions(first), "the region of the first pod is gone")


@pytest.mark.parametrize("policy", JOBS)
def test_a_job_completes_beside_its_sidecar_and_leaves_no_memory(
    shapes: Shapes, policy: str
) -> None:
    cluster, namespace, name = shapes.cluster, shapes.namespace, policy.lower()
    until(
        lambda: (
            cluster.kubectl(
                *(
                    "wait",
                    "--for=condition=complete",
                    f"job/{name}",
                    "--timeout=1s",
                    "-n",
                    namespace,
                ),
                check=False,
            ).returncode
            == 0
        ),
        f"job {name} is complete",
        ALL_START_S,
    )
    (made,) = shapes.pods_of(name, 1)
    pod_name = made["metadata"]["name"]
    assert made["status"]["phase"] == "Succeeded"
    assert said(cluster, namespace, pod_name)[-1] == {
        "event": "ended",
        "stores": LOADS,
        "loads": LOADS,
    }
    until(lambda: _phase(shapes, made) == "Released", "the object says that it is over", START_S)
    (region,) = shapes.regions(made)
    assert region["status"]["engineStarts"] == 1
    until(
        lambda: cluster.node.memory_of_pod(made["metadata"]["uid"]) is None,
        "the pod's cgroup is gone",
    )


def _phase(shapes: Shapes, made: JsonObject) -> str:
    phases = [str(each.get("status", {}).get("phase")) for each in shapes.regions(made)]
    return phases[0] if phases else ""


# ---- shapes that cannot work


def test_an_engine_that_may_not_open_the_region_says_why_and_serves_without(
    shapes: Shapes,
) -> None:
    cluster, namespace, name = shapes.cluster, shapes.namespace, "without-any-group"
    told = until_said(cluster, namespace, name, "without")
    for word in ("uid 1000", "/dev/shm/kvcellar", "fsGroup", "supplementalGroups"):
        assert word in told["reason"]
    made = shapes.pod(name)
    until(lambda: _phase(shapes, made) == "Ready", "the region itself is there", START_S)
    (region,) = shapes.regions(made)
    assert conditions(region)["Attached"] == "False"
    for container in ("engine", "kvcellar"):
        state = container_status(cluster, namespace, name, container)
        assert state["restartCount"] == 0
        assert "running" in state["state"]


def test_an_image_without_a_shell_whose_path_is_to_be_kept_is_told_of_by_pod_object_and_event(
    shapes: Shapes,
) -> None:
    made = shapes.pod("stuck")
    state = container_status(shapes.cluster, shapes.namespace, "stuck", CONTAINER_PATH)
    assert state

    def is_degraded() -> bool:
        return any(conditions(each).get("Degraded") == "True" for each in shapes.regions(made))

    until(is_degraded, "the object says that the pod cannot start", ALL_START_S)
    (region,) = shapes.regions(made)
    listed = {each["type"]: each for each in region["status"]["conditions"]}
    assert listed["Degraded"]["reason"] == "StartFailed"
    assert CONTAINER_PATH in listed["Degraded"]["message"]
    assert '"sh"' in listed["Degraded"]["message"]
    path = f"/api/v1/namespaces/{shapes.namespace}/events"
    until(
        lambda: [
            each
            for each in shapes.cluster.api.get(path)["items"]
            if each["reason"] == "StartFailed"
            and each["involvedObject"]["name"] == region["metadata"]["name"]
        ],
        "an Event says why",
        START_S,
    )

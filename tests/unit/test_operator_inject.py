"""Injection beside the golden shapes: the injector's own settings, size limits, marks, the script, words."""

import copy
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcellar import contract
from kvcellar_operator.engines import engine_ids_of, read_injected, region_object_name
from kvcellar_operator.explain import explain, explain_pod, parse_skipped
from kvcellar_operator.inject import (
    InjectSettings,
    Outcome,
    Profile,
    Reason,
    inject,
    skip,
    wanted_profile,
)
from kvcellar_operator.pods import Pod
from kvcellar_operator.profiles import Capacity
from kvcellar_operator.reasons import InjectionRefused

SETTINGS = InjectSettings(image="example/kvcellar:1", version="1.0.0")
UID = "0f6b2c84-7a53-4d0e-9f1b-2f5f0c1d8e6a"
GIB = 2**30
FIXED = Profile(capacity=Capacity("1Gi", GIB))


def pod(**spec: Any) -> Pod:  # noqa: ANN401 - fields of a pod
    engine = {
        "name": "engine",
        "image": "example/vllm:1",
        "command": ["vllm", "serve", "m"],
        "resources": {"limits": {"memory": "8Gi", "cpu": "4", "nvidia.com/gpu": 1}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "labels": {contract.LABEL_INJECT: "true"}},
        "spec": {"containers": [engine], **spec},
    }


def marked(given: Pod, **annotations: str) -> Pod:
    given["metadata"]["annotations"] = {k.replace("_", "/"): v for k, v in annotations.items()}
    return given


def sidecar_of(given: Pod) -> dict[str, Any]:
    found: dict[str, Any] = given["spec"]["initContainers"][0]
    assert found["name"] == "kvcellar"
    return found


@pytest.mark.parametrize("path", ["/dev/shm/", "/dev//shm", "//dev/./shm", "dev/shm"])
def test_a_memory_volume_at_dev_shm_is_reused_however_its_path_is_written(path: str) -> None:
    given = pod(volumes=[{"name": "mine", "emptyDir": {"medium": "Memory"}}])
    given["spec"]["containers"][0]["volumeMounts"] = [{"name": "mine", "mountPath": path}]

    injected = inject(given, "ns", FIXED, SETTINGS).pod

    assert "mine" in [mount["name"] for mount in sidecar_of(injected)["volumeMounts"]]
    assert "kvcellar-shm" not in [volume["name"] for volume in injected["spec"]["volumes"]]


# --- the injector's settings


def test_where_the_cluster_chooses_users_none_is_set() -> None:
    openshift = replace(SETTINGS, run_as_user=None)

    injected = inject(pod(securityContext={"fsGroup": 2000}), "ns", None, openshift).pod

    for container in injected["spec"]["initContainers"]:
        assert "runAsUser" not in container["securityContext"]
        assert container["securityContext"]["runAsNonRoot"] is True


def test_a_pod_that_is_root_by_its_own_words_still_gets_a_sidecar_that_is_not() -> None:
    openshift = replace(SETTINGS, run_as_user=None)

    injected = inject(pod(securityContext={"runAsUser": 0}), "ns", None, openshift).pod

    assert sidecar_of(injected)["securityContext"]["runAsUser"] == 65532


def test_without_native_sidecars_nothing_is_injected() -> None:
    injection = inject(pod(), "ns", None, replace(SETTINGS, has_native_sidecars=False))

    assert injection.reason is Reason.SIDECARS_UNSUPPORTED


def test_the_pull_policy_is_for_our_image_and_not_for_the_engines() -> None:
    injected = inject(pod(), "ns", None, replace(SETTINGS, image_pull_policy="Never")).pod

    policies = [c.get("imagePullPolicy") for c in injected["spec"]["initContainers"]]
    assert policies == ["Never", None, "Never"]


def test_a_default_profile_that_is_off_turns_injection_off() -> None:
    off = replace(SETTINGS, default_profile=Profile(is_enabled=False))

    assert inject(pod(), "ns", None, off).reason is Reason.PROFILE_DISABLED


def test_a_profile_of_the_namespace_comes_before_the_charts() -> None:
    injected = inject(pod(), "ns", replace(FIXED, name="default"), SETTINGS).pod

    stamp = read_injected(injected)
    assert (stamp["profile"], stamp["capacityBytes"]) == ("default", GIB)


def test_the_profile_that_a_pod_wants_is_the_one_of_its_label() -> None:
    wanting = pod()
    wanting["metadata"]["labels"][contract.LABEL_PROFILE] = "fast"

    assert wanted_profile(wanting) == "fast"
    assert wanted_profile(pod()) is None
    with pytest.raises(InjectionRefused, match="metadata"):
        wanted_profile({"metadata": []})


# --- marks


def test_an_old_injected_mark_goes_when_the_pod_is_skipped() -> None:
    given = marked(pod(hostIPC=True), **{contract.ANNOTATION_INJECTED: "{}", "a_b": "stays"})

    injection = inject(given, "ns", None, SETTINGS)

    assert injection.reason is Reason.HOST_IPC
    assert set(injection.pod["metadata"]["annotations"]) == {"a/b", contract.ANNOTATION_SKIPPED}
    assert injection.annotations == {
        contract.ANNOTATION_SKIPPED: f"HostIPC: {injection.message}",
    }


@pytest.mark.parametrize("reason", [Reason.MIRROR_POD, Reason.NOT_OPTED_IN, Reason.POD_TOO_LARGE])
def test_a_pod_that_must_not_be_marked_stays_as_it_is(reason: Reason) -> None:
    given = pod()

    injection = skip(given, reason, "because")

    assert injection.pod is given
    assert injection.annotations == {}


def test_a_long_message_is_cut() -> None:
    injection = skip(pod(), Reason.INTERNAL_ERROR, "x" * 5000)

    assert len(injection.annotations[contract.ANNOTATION_SKIPPED]) < 1100


def test_a_restart_policy_that_another_webhook_dropped_comes_back() -> None:
    once = inject(pod(), "ns", None, SETTINGS).pod
    damaged = copy.deepcopy(once)
    del sidecar_of(damaged)["restartPolicy"]

    injection = inject(damaged, "ns", None, SETTINGS)

    assert injection.outcome is Outcome.ALREADY
    assert injection.pod == once
    assert "restartPolicy" not in sidecar_of(damaged)


def test_a_sidecar_that_carries_no_mark_is_somebody_elses() -> None:
    once = inject(pod(), "ns", None, SETTINGS).pod
    del once["metadata"]["annotations"]

    assert inject(once, "ns", None, SETTINGS).reason is Reason.CONTAINER_NAME_TAKEN


def test_a_mirror_pod_is_not_even_marked_with_a_missing_profile() -> None:
    given = marked(pod(), **{"kubernetes.io_config.mirror": "x"})
    given["metadata"]["labels"][contract.LABEL_PROFILE] = "missing"

    injection = inject(given, "ns", None, SETTINGS)

    assert (injection.reason, injection.pod) == (Reason.MIRROR_POD, given)
    assert injection.pod is given


# --- limits of the API server


def test_a_pod_that_would_grow_too_large_stays_as_it_is() -> None:
    given = pod()
    given["spec"]["containers"][0]["env"] = [{"name": "BLOB", "value": "x" * 1_499_000}]

    injection = inject(given, "ns", None, SETTINGS)

    assert injection.reason is Reason.POD_TOO_LARGE
    assert injection.pod is given


def test_a_large_pod_that_still_fits_is_injected() -> None:
    given = pod()
    given["spec"]["containers"][0]["env"] = [{"name": "BLOB", "value": "x" * 1_400_000}]

    assert inject(given, "ns", None, SETTINGS).outcome is Outcome.INJECTED


def test_full_annotations_leave_no_room_for_ours() -> None:
    given = marked(pod(), big="x" * (256 * 1024 - 100))

    assert inject(given, "ns", None, SETTINGS).reason is Reason.POD_TOO_LARGE


# --- names


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, [UID]),
        ({"profile": replace(FIXED, engines=2)}, [f"{UID}_dp0", f"{UID}_dp1"]),
    ],
)
def test_the_controller_finds_the_engine_ids(spec: dict[str, Any], expected: list[str]) -> None:
    injected = inject(pod(), "ns", spec.get("profile"), SETTINGS).pod
    injected["metadata"]["uid"] = UID

    assert engine_ids_of(injected) == expected


@pytest.mark.parametrize("text", ["", "[]", '{"engineIds": 3}', '{"engineIds": ["../x", ".a", 7]}'])
def test_a_damaged_mark_names_no_bad_engine(text: str) -> None:
    given = marked(pod(), **{contract.ANNOTATION_INJECTED: text})
    given["metadata"]["uid"] = UID

    assert set(engine_ids_of(given)) <= {"7"}


def test_names_of_region_objects_are_legal_and_unique() -> None:
    long = "a" * 243 + "-" + "b" * 9
    names = [
        region_object_name(name, engine)
        for name in ("chat", "chat.x", long, long + "c")
        for engine in ("x", "X" * 128, "a_b", f"{UID}-engine_dp3")
    ]

    assert len(set(names)) == len(names)
    assert all(len(name) <= 253 for name in names)
    assert region_object_name("chat", "x") == "chat-2d711642"


# --- the script that links an image's PYTHONPATH


def link(tmp_path: Path, python_path: str | None) -> tuple[int, dict[str, str], str]:
    script = inject(pod(), "ns", None, SETTINGS).pod["spec"]["initContainers"][1]["command"]
    links, folder = tmp_path / "image", tmp_path / "cwd"
    folder.mkdir()
    env = {"PATH": "/usr/bin:/bin"} | ({} if python_path is None else {"PYTHONPATH": python_path})
    done = subprocess.run(
        [*script[:-1], str(links)], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    found = {path.name: str(path.readlink()) for path in links.iterdir()} if links.exists() else {}
    return done.returncode, found, done.stderr


def test_each_entry_is_linked_and_relative_ones_from_the_working_directory(tmp_path: Path) -> None:
    status, found, _ = link(tmp_path, "/app:src:/with space/*")

    assert (status, found) == (0, {"0": "/app", "1": f"{tmp_path}/cwd/src", "2": "/with space/*"})


@pytest.mark.parametrize("text", [None, "", ":"])
def test_an_image_without_a_path_has_no_links(tmp_path: Path, text: str | None) -> None:
    status, found, _ = link(tmp_path, text)

    assert (status, found) == (0, {})


def test_eight_entries_fit_and_nine_are_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "eight").mkdir()
    (tmp_path / "nine").mkdir()
    status, found, _ = link(tmp_path / "eight", ":".join("abcdefgh"))
    refused, _, words = link(tmp_path / "nine", ":".join("abcdefghi"))

    assert (status, len(found)) == (0, 8)
    assert refused == 1
    assert "imagePythonPath: ignore" in words


def test_the_script_holds_nothing_that_the_kubelet_expands() -> None:
    script = inject(pod(), "ns", None, SETTINGS).pod["spec"]["initContainers"][1]["command"][2]

    assert "$(" not in script
    assert "$$" not in script


# --- what holds of our containers


def test_every_container_of_ours_is_restricted_and_sees_no_token() -> None:
    injected = inject(pod(), "ns", None, SETTINGS).pod

    for container in injected["spec"]["initContainers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["runAsNonRoot"] is True
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert "/var/run/secrets/kubernetes.io/serviceaccount" in [
            mount["mountPath"] for mount in container["volumeMounts"]
        ]


def test_the_sidecar_has_a_liveness_probe_and_no_other() -> None:
    owner = sidecar_of(inject(pod(), "ns", None, SETTINGS).pod)

    assert owner["restartPolicy"] == "Always"
    assert "livenessProbe" in owner
    assert "startupProbe" not in owner
    assert "readinessProbe" not in owner


def test_every_variable_is_one_that_kvcellar_reads() -> None:
    injected = inject(pod(), "ns", None, SETTINGS).pod
    everyone = [*injected["spec"]["containers"], *injected["spec"]["initContainers"]]
    names = {entry["name"] for container in everyone for entry in container.get("env", [])}

    assert names - {"PYTHONPATH"} <= contract.ENV_NAMES


# --- words


def test_an_explanation_says_what_to_do() -> None:
    told = explain(inject(pod(hostIPC=True), "ns", None, SETTINGS))

    assert told.startswith("skipped: HostIPC\n")
    assert "remedy: Remove hostIPC" in told


def test_an_explanation_gives_the_argument_that_could_not_be_added() -> None:
    shell = pod()
    shell["spec"]["containers"][0]["command"] = ["sh", "-c", "vllm serve m"]

    told = explain(inject(shell, "ns", None, SETTINGS))

    given = told.split("--kv-transfer-config '")[1].split("'")[0]
    assert json.loads(given)["kv_connector"] == "KVCellarConnector"


def test_a_pod_of_the_cluster_is_explained_by_its_annotations() -> None:
    injected = inject(pod(), "ns", None, SETTINGS).pod
    skipped = inject(pod(hostIPC=True), "ns", None, SETTINGS).pod

    assert "engines: engine" in explain_pod(injected)
    assert "remedy" in explain_pod(skipped)
    assert "webhook was not called" in explain_pod(pod())
    assert "unknown reason" in explain_pod(
        marked(pod(), **{contract.ANNOTATION_SKIPPED: "NewReason: x"})
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"containers": 3, "capacityBytes": "x", "kvTransferConfig": [], "engineIds": {}, "notices": ["New"]}',
        '{"kvTransferConfig": {"a": 1}, "notices": null, "containers": [1]}',
    ],
)
def test_a_damaged_mark_is_explained_without_an_error(text: str) -> None:
    assert explain_pod(marked(pod(), **{contract.ANNOTATION_INJECTED: text}))


def test_a_skipped_mark_is_read_back() -> None:
    assert parse_skipped("HostIPC: a: b") == (Reason.HOST_IPC, "a: b")
    assert parse_skipped("no reason") == (None, "no reason")

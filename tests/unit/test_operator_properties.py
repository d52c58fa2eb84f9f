"""What holds of any pod: generated ones, and documents that are no pods at all."""

import copy
import re
from fractions import Fraction
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jsonpatch import apply_patch

from kvcellar.contract import LIBRARY_CURRENT, LIBRARY_DIR, Mode
from kvcellar_operator.demands import aggregate, memory_limit_bytes, pod_amount, qos_class
from kvcellar_operator.inject import (
    Injection,
    InjectSettings,
    Outcome,
    Profile,
    Reason,
    inject,
    json_patch,
)
from kvcellar_operator.pods import Pod, all_containers, items, spec_of
from kvcellar_operator.profiles import Capacity, ImagePythonPath, VllmArgument

SETTINGS = InjectSettings(image="example/kvcellar:1", version="1.0.0")
GIB = 2**30
_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")

AMOUNTS: dict[str, list[str | int]] = {
    "cpu": ["100m", "1", 2, "0"],
    "memory": ["64Mi", "1Gi", "3.5Gi", "64Gi", 1073741824],
}


def _level(draw: st.DrawFn) -> dict[str, Any]:
    return {name: draw(st.sampled_from(AMOUNTS[name])) for name in AMOUNTS if _maybe(draw)}


def _maybe(draw: st.DrawFn) -> bool:
    return draw(st.booleans())


def _resources(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["none", "same", "limits", "requests", "both"]))
    level = _level(draw)
    return {
        "none": {},
        "same": {"requests": dict(level), "limits": dict(level)},
        "limits": {"limits": level},
        "requests": {"requests": level},
        "both": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": level},
    }[kind]


ENTRIES: list[dict[str, Any]] = [
    {"name": "A", "value": "a"},
    {"name": "PYTHONPATH", "value": "/app"},
    {"name": "PYTHONPATH"},
    {"name": "PYTHONPATH", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}},
    {"name": "KVCELLAR_PIN", "value": "never"},
    {"name": "KVCELLAR_ENGINE_ID", "value": "chat"},
]
COMMANDS: list[dict[str, Any]] = [
    {},
    {"command": ["vllm", "serve", "m"]},
    {"args": ["--model", "m"]},
    {"command": ["sh", "-c", "vllm serve m"]},
    {"command": ["vllm", "serve", "m"], "args": ["--kv-transfer-config", '{"kv_connector":"X"}']},
    {"command": ["vllm", "serve", "m"], "args": ["--kv-transfer-config={"]},
]
MOUNTS: list[list[dict[str, Any]]] = [
    [],
    [{"name": "shm", "mountPath": "/dev/shm"}],
    [{"name": "shm", "mountPath": "/dev/shm/", "subPath": "a"}],
    [{"name": "disk", "mountPath": "/dev/shm"}],
    [{"name": "disk", "mountPath": "/data"}],
    [],
    [],
]
SECURITY: list[dict[str, Any]] = [
    {},
    {"runAsUser": 0},
    {"runAsUser": 1000, "runAsGroup": 1000},
    {"fsGroup": 2000},
    {"supplementalGroups": [3000]},
]


LARGE = {"cpu": "64", "memory": "2Ti"}
HALF = {"cpu": "32", "memory": "1Ti"}
POD_LEVELS: list[dict[str, Any]] = [
    {},
    {"limits": LARGE},
    {"requests": LARGE, "limits": LARGE},
    {"requests": HALF, "limits": LARGE},
    {"requests": HALF},
    {"limits": {"memory": "2Ti"}},
    {"requests": {"cpu": "32"}, "limits": {"cpu": 64}},
    {"requests": {"memory": "1Ti"}},
]
OTHERS: list[dict[str, Any]] = [{}, {}, {}, {"hostIPC": True}, {"newField": [None]}]


@st.composite
def containers(draw: st.DrawFn, name: str) -> dict[str, Any]:
    own: dict[str, Any] = {"name": name, "image": draw(st.sampled_from(["example/vllm:1", "app"]))}
    own |= copy.deepcopy(draw(st.sampled_from(COMMANDS)))
    resources = _resources(draw)
    if _maybe(draw):
        resources = {**resources, "limits": {**resources.get("limits", {}), "nvidia.com/gpu": 1}}
    if resources or _maybe(draw):
        own["resources"] = resources
    names = draw(st.lists(st.sampled_from(ENTRIES), max_size=3, unique_by=lambda e: e["name"]))
    if names or _maybe(draw):
        own["env"] = copy.deepcopy(names)
    mounts = copy.deepcopy(draw(st.sampled_from(MOUNTS)))
    if mounts or _maybe(draw):
        own["volumeMounts"] = mounts
    if _maybe(draw):
        own["unknownField"] = {"deep": [1, None, True]}
    return own


@st.composite
def pods(draw: st.DrawFn) -> Pod:
    spec: dict[str, Any] = {
        "containers": [
            draw(containers(f"c{n}")) for n in range(draw(st.integers(min_value=1, max_value=3)))
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "disk"}],
    }
    init: list[dict[str, Any]] = [
        {"name": "istio-proxy", "image": "proxy", "restartPolicy": "Always"},
        {
            "name": "logger",
            "image": "logger",
            "restartPolicy": "Always",
            "resources": _resources(draw),
        },
        {"name": "download", "image": "app", "resources": _resources(draw)},
    ]
    chosen = draw(st.lists(st.sampled_from(init), max_size=3, unique_by=lambda c: c["name"]))
    if chosen:
        spec["initContainers"] = copy.deepcopy(chosen)
    if _maybe(draw):
        spec["resources"] = copy.deepcopy(draw(st.sampled_from(POD_LEVELS)))
    if _maybe(draw):
        spec["securityContext"] = copy.deepcopy(draw(st.sampled_from(SECURITY)))
    spec |= draw(st.sampled_from(OTHERS))
    labels = {"kvcellar.dev/inject": "true"}
    return {"metadata": {"generateName": "p-", "labels": labels}, "spec": spec}


PROFILES = st.builds(
    Profile,
    capacity=st.sampled_from(
        [Capacity("1Gi", GIB), Capacity("64Mi", 64 << 20), Capacity("50%", share=Fraction(1, 2))]
    ),
    engines=st.sampled_from([1, 1, 3]),
    mode=st.sampled_from([Mode.PLUGIN, Mode.PLUGIN, Mode.STOCK]),
    shm_headroom_bytes=st.sampled_from([0, GIB]),
    image_python_path=st.sampled_from(list(ImagePythonPath)),
    vllm_argument=st.sampled_from(list(VllmArgument)),
)


def assert_kept(before: Any, after: Any, path: str = "") -> None:  # noqa: ANN401 - JSON
    """Everything of `before` is in `after`, lists in their order; what may rise is looked at elsewhere."""
    if path.startswith("/spec/resources/"):
        return
    if isinstance(before, dict):
        for key, value in before.items():
            assert key in after, f"{path}/{key} is lost"
            assert_kept(value, after[key], f"{path}/{key}")
    elif isinstance(before, list):
        rest = iter(after)
        for position, entry in enumerate(before):
            assert any(is_kept(entry, other) for other in rest), f"{path}/{position} is lost"
    else:
        assert is_same_text(before, after), f"{path} was {before!r} and is {after!r}"


def is_kept(before: Any, after: Any) -> bool:  # noqa: ANN401 - JSON
    try:
        assert_kept(before, after)
    except (AssertionError, TypeError, AttributeError):
        return False
    return True


def is_same_text(before: object, after: object) -> bool:
    """The same, but for the library in front of a PYTHONPATH."""
    return before == after or after == f"{LIBRARY_CURRENT}:{before}"


def assert_legal(pod: Pod) -> None:
    """What the API server would refuse at once is not there."""
    spec = spec_of(pod)
    names = [container["name"] for container in all_containers(pod)]
    assert len(set(names)) == len(names)
    volumes = [volume["name"] for volume in items(spec, "volumes")]
    assert len(set(volumes)) == len(volumes)
    assert all(_NAME.fullmatch(name) and len(name) <= 63 for name in [*names, *volumes])
    for container in all_containers(pod):
        paths = [mount["mountPath"].rstrip("/") for mount in items(container, "volumeMounts")]
        assert len(set(paths)) == len(paths)
        assert {mount["name"] for mount in items(container, "volumeMounts")} <= set(volumes)
    for resource in ("cpu", "memory"):
        requested = pod_amount(pod, "requests", resource)
        if requested is not None:
            assert requested >= aggregate(pod, "requests", resource)


@given(pods(), PROFILES)
def test_nothing_is_lost_and_twice_is_once(pod: Pod, profile: Profile) -> None:
    before = copy.deepcopy(pod)
    once: Injection = inject(pod, "ns", profile, SETTINGS)
    twice = inject(once.pod, "ns", profile, SETTINGS)

    assert pod == before
    assert twice.pod == once.pod
    assert_kept(before, once.pod)
    assert qos_class(once.pod) == qos_class(before)
    assert apply_patch(before, json_patch(before, once.pod)) == once.pod
    if once.outcome is Outcome.INJECTED:
        assert twice.outcome is Outcome.ALREADY
        assert_legal(once.pod)
        limit = memory_limit_bytes(before)
        assert not limit or memory_limit_bytes(once.pod) > limit
    assert any(
        mount["mountPath"] == LIBRARY_DIR
        for container in items(spec_of(once.pod), "containers")
        for mount in items(container, "volumeMounts")
    ) == (once.outcome is Outcome.INJECTED and profile.mode is Mode.PLUGIN)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "labels", "containers", "name", "env", "resources", "limits"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


@given(JSON)
def test_what_is_no_pod_passes_as_it_is(document: Any) -> None:  # noqa: ANN401 - JSON
    injection = inject(document, "ns", None, SETTINGS)

    assert injection.pod is document
    assert injection.reason in (Reason.INVALID_POD, Reason.NOT_OPTED_IN)


@given(pods(), st.data())
def test_a_pod_with_one_damaged_field_is_never_an_error(pod: Pod, data: st.DataObject) -> None:
    owner: Any = pod
    key: Any = data.draw(st.sampled_from(["metadata", "spec"]))
    for _ in range(data.draw(st.integers(min_value=0, max_value=4))):
        inner = owner[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        owner, key = inner, data.draw(st.sampled_from(keys))
    owner[key] = data.draw(JSON)

    injection = inject(pod, "ns", None, SETTINGS)

    assert injection.reason in tuple(Reason)

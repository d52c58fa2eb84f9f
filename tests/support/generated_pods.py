"""Pods and profiles as hypothesis draws them: combinations that people write, and some that nobody should."""

import copy
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from kvcellar.contract import Mode
from kvcellar_operator.pods import Pod
from kvcellar_operator.profiles import Capacity, ImagePythonPath, Profile, VllmArgument

GIB = 2**30

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

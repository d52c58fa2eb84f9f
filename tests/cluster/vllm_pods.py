"""A pod with a real vLLM: its packages and a tiny model are a folder of this machine, mounted read-only.

An image would be 6 GB that are copied for each cluster. ``make vllm-pod`` puts the packages into a folder, for
the Python of the engine image; the restricted Pod Security Standard lets a pod mount it by a claim.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from kvcellar.contract import LABEL_INJECT
from kvcellar.demo.models import VOCABULARY_SIZE, ModelKind, write_checkpoint
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import ROOT
from tests.cluster.images.recipes import ENGINE_IMAGE
from tests.cluster.node_pods import pod, restricted_container

FOLDER = ROOT / ".venv-vllm-pod"
MODEL = "model"
INSIDE = "/opt/vllm"


def write_model() -> Path:
    """Write the tiny model, and a tokenizer whose words are ``w3``, ``w4`` and so on."""
    folder = write_checkpoint(ModelKind.LLAMA, FOLDER / MODEL)
    words = {f"w{n}": n for n in range(VOCABULARY_SIZE)}
    tokenizer: JsonObject = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def volume(name: str, namespace: str) -> list[JsonObject]:
    """The folder as a volume of the cluster, and the claim `name` that pods mount it by."""
    meta = {"name": f"{namespace}-{name}"}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": meta,
            "spec": {
                **common,
                "capacity": {"storage": "10Gi"},
                "claimRef": {"name": name, "namespace": namespace},
                "hostPath": {"path": str(FOLDER), "type": "Directory"},
                "persistentVolumeReclaimPolicy": "Retain",
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                **common,
                "resources": {"requests": {"storage": "10Gi"}},
                "volumeName": meta["name"],
            },
        },
    ]


def program_pod(
    claim: str, program: str, labels: dict[str, str], arguments: Sequence[str] = ()
) -> JsonObject:
    """A pod whose container runs a program of Python that may import vLLM."""
    engine = restricted_container(
        name="engine",
        command=["python3", "-c", program],
        args=list(arguments),
        env=[{"name": name, "value": value} for name, value in environment().items()],
        resources={
            "limits": {"memory": "2Gi"},
            "requests": {"cpu": "50m", "memory": "512Mi"},
        },
        volumeMounts=[
            {"name": "vllm", "mountPath": INSIDE, "readOnly": True},
            {"name": "scratch", "mountPath": "/scratch"},
        ],
    )
    made = pod("engine", engine, labels)
    made["spec"]["volumes"] = [
        {"name": "vllm", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
        {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
    ]
    return made


def template(claim: str, labels: dict[str, str]) -> JsonObject:
    """The pod template of an engine that has opted in."""
    container = {
        "name": "vllm",
        "image": ENGINE_IMAGE,
        # Not `vllm serve`, which asks for metadata that the CPU build has under another name.
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": _arguments(),
        "env": [{"name": name, "value": value} for name, value in environment().items()],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 1},
        "resources": {
            "limits": {"memory": "4Gi"},
            "requests": {"cpu": "500m", "memory": "2Gi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "vllm", "mountPath": INSIDE, "readOnly": True},
            {"name": "scratch", "mountPath": "/scratch"},
        ],
    }
    spec = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "enableServiceLinks": False,
        "securityContext": {
            "fsGroup": 2000,
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 10,
        "volumes": [
            {"name": "vllm", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}},
            {"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}},
        ],
    }
    return {"metadata": {"labels": {LABEL_INJECT: "true", **labels}}, "spec": spec}


def _arguments() -> list[str]:
    """Of `vllm serve`; which, and why: kvcellar.demo.engine_config."""
    return [
        f"--model={INSIDE}/{MODEL}",
        "--served-model-name=tiny",
        "--dtype=float32",
        "--enforce-eager",
        "--block-size=32",
        "--num-gpu-blocks-override=64",
        f"--kv-cache-memory-bytes={64 << 20}",
        "--max-model-len=512",
        "--max-num-seqs=4",
        "--max-num-batched-tokens=512",
        "--seed=0",
    ]


def environment() -> dict[str, str]:
    """The variables of its container; its scratch folder is ``/scratch``."""
    return {
        "PYTHONPATH": INSIDE,
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/scratch",
        "TMPDIR": "/scratch",
        "VLLM_CACHE_ROOT": "/scratch/vllm",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        # The scheduler may not find the name of a pod that is not in any DNS.
        "VLLM_HOST_IP": "127.0.0.1",
    }

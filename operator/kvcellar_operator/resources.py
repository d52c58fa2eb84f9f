"""Builds what is put into a pod: containers, volumes, mounts. Pure; it changes no pod.

Every container that comes from here passes the restricted Pod Security Standard by construction
(`restricted_security`), asks for requests and limits that keep the pod's QoS class (`_resources`), and
sees no service-account token (`_TOKEN_MASK`).
Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from typing import Any

from kvcellar import contract
from kvcellar_operator import variables
from kvcellar_operator.demands import QosClass
from kvcellar_operator.identity import Identity
from kvcellar_operator.parts import Parts
from kvcellar_operator.pods import Container
from kvcellar_operator.quantities import MEBIBYTE, format_bytes, format_millicpus

PATH_ENTRIES = 8
"""Entries of an image's PYTHONPATH that can be linked."""
IMAGE_PATH_DIR = f"{contract.LIBRARY_DIR}/image"
_TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105 - a path
# The admission plugin mounts a token into every container that mounts nothing else at this path.
_TOKEN_MASK = {"name": contract.VOLUME_NO_TOKEN, "mountPath": _TOKEN_PATH, "readOnly": True}
_LIBRARY_MOUNT = {"name": contract.VOLUME_LIBRARY, "mountPath": contract.LIBRARY_DIR}
_INIT_MEMORY_BYTES = 128 * MEBIBYTE
_LIBRARY_LIMIT = "256Mi"

# The kubelet takes "$(" and "$$" in a command for its own, so the script uses neither.
_LINK_PYTHONPATH = """\
links=$1
set -f
IFS=:
set -- ${PYTHONPATH-}
mkdir -p "$links" || exit 1
for n in 0 1 2 3 4 5 6 7; do
  [ $# -gt 0 ] || break
  case "$1" in
    "") ;;
    /*) ln -sfn "$1" "$links/$n" || exit 1 ;;
    *) ln -sfn "$PWD/$1" "$links/$n" || exit 1 ;;
  esac
  shift
done
[ $# -eq 0 ] && exit 0
echo "kvcellar: this image's PYTHONPATH has more than 8 entries: name PYTHONPATH in the pod's env," \
  "or set imagePythonPath: ignore in the OffloadProfile" >&2
exit 1
"""


def sidecar(parts: Parts) -> Container:
    """The native sidecar: it owns the regions."""
    port: dict[str, Any] = {
        "name": contract.PORT_NAME,
        "containerPort": parts.profile.sidecar.port,
        "protocol": "TCP",
    }
    if parts.is_host_network:
        port["hostPort"] = parts.profile.sidecar.port
    info = {
        "name": contract.VOLUME_INFO,
        "mountPath": contract.DESIRED_FILE.rpartition("/")[0],
        "readOnly": True,
    }
    return {
        "name": contract.CONTAINER_SIDECAR,
        **_image(parts, parts.image),
        "command": ["kvcellar", "sidecar"],
        "restartPolicy": "Always",
        "env": variables.sidecar_env(parts),
        "ports": [port],
        # No startup and no readiness probe: with either a crashed engine would wait for the sidecar.
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": contract.PORT_NAME, "scheme": "HTTP"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        **_resources(parts, parts.sizing.sidecar_memory_bytes),
        **_common(parts),
        "volumeMounts": [dict(parts.shm.mount), info, dict(_TOKEN_MASK)],
    }


def wait(parts: Parts) -> Container:
    """The start gate: installs the library, then waits until the regions are far enough."""
    gate = f"kvcellar wait --for {parts.profile.gate}"
    mounts = [dict(_TOKEN_MASK)]
    command = gate.split()
    if parts.has_library:
        install = f"kvcellar install-library {contract.LIBRARY_DIR}"
        command = ["sh", "-c", f"{install} && exec {gate}"]
        mounts = [dict(_LIBRARY_MOUNT), *mounts]
    return {
        "name": contract.CONTAINER_WAIT,
        **_image(parts, parts.image),
        "command": command,
        "env": variables.wait_env(parts),
        **_resources(parts, _INIT_MEMORY_BYTES),
        **_common(parts),
        "volumeMounts": mounts,
    }


def link_python_path(parts: Parts, engine: Container, position: int) -> Container:
    """An init container with an engine's image, which links the entries of the image's PYTHONPATH.

    Args:
        parts: of the pod.
        engine: the engine container.
        position: of the engine among the engine containers, from 0.
    """
    directory = {"workingDir": engine["workingDir"]} if engine.get("workingDir") else {}
    pull = {"imagePullPolicy": engine["imagePullPolicy"]} if engine.get("imagePullPolicy") else {}
    return {
        "name": _numbered(contract.CONTAINER_PATH, position),
        "image": engine.get("image", ""),
        **pull,
        **directory,
        "command": ["sh", "-c", _LINK_PYTHONPATH, "sh", _numbered(IMAGE_PATH_DIR, position)],
        **_resources(parts, _INIT_MEMORY_BYTES),
        **_common(parts),
        "volumeMounts": [dict(_LIBRARY_MOUNT), dict(_TOKEN_MASK)],
    }


def linked_entries(position: int) -> list[str]:
    """Where `link_python_path` puts the entries; those that there are none for do not exist."""
    return [f"{_numbered(IMAGE_PATH_DIR, position)}/{n}" for n in range(PATH_ENTRIES)]


def library_mount() -> dict[str, Any]:
    """The mount of the library in an engine."""
    return {**_LIBRARY_MOUNT, "readOnly": True}


def volumes(parts: Parts) -> list[dict[str, Any]]:
    """The volumes to add."""
    library = {"name": contract.VOLUME_LIBRARY, "emptyDir": {"sizeLimit": _LIBRARY_LIMIT}}
    field = {"fieldPath": f"metadata.annotations['{contract.ANNOTATION_DESIRED}']"}
    item = {"path": contract.DESIRED_FILE.rpartition("/")[2], "fieldRef": field}
    info = {"name": contract.VOLUME_INFO, "downwardAPI": {"items": [item]}}
    mask = {"name": contract.VOLUME_NO_TOKEN, "emptyDir": {"sizeLimit": "1Mi"}}
    return [
        *([parts.shm.volume] if parts.shm.volume else []),
        *([library] if parts.has_library else []),
        info,
        mask,
    ]


def restricted_security(identity: Identity) -> dict[str, Any]:
    """A security context that passes the restricted Pod Security Standard."""
    user = {} if identity.user is None else {"runAsUser": identity.user}
    group = {} if identity.group is None else {"runAsGroup": identity.group}
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        **user,
        **group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def _image(parts: Parts, image: str) -> dict[str, Any]:
    policy = parts.settings.image_pull_policy
    return {"image": image, **({"imagePullPolicy": policy} if policy else {})}


def _resources(parts: Parts, memory_bytes: int) -> dict[str, Any]:
    """Requests and limits that keep the pod's QoS class: equal ones, some, or none."""
    if parts.qos is QosClass.BEST_EFFORT:
        return {}
    options = parts.profile.sidecar
    is_guaranteed = parts.qos is QosClass.GUARANTEED
    requested = options.cpu_limit_millis if is_guaranteed else options.cpu_request_millis
    # Memory is requested in full: the region is no cache that could be given back, and a scheduler that
    # does not count it overfills the node.
    memory = format_bytes(memory_bytes)
    return {
        "resources": {
            "requests": {"cpu": format_millicpus(requested), "memory": memory},
            "limits": {"cpu": format_millicpus(options.cpu_limit_millis), "memory": memory},
        }
    }


def _common(parts: Parts) -> dict[str, Any]:
    return {
        "securityContext": restricted_security(parts.identity),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _numbered(name: str, position: int) -> str:
    return name if position == 0 else f"{name}-{position + 1}"

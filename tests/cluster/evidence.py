"""What a failed test leaves to look at: the objects, Events and container logs of its namespace."""

import json
from pathlib import Path

from tests.cluster.box.cluster import Cluster

_LINES = 400


def save(cluster: Cluster, namespace: str, folder: Path) -> None:
    """Write what a namespace shows into a folder; an answer that does not come is no error."""
    folder.mkdir(parents=True, exist_ok=True)
    inside = ("--namespace", namespace)
    for name, arguments in {
        "events.txt": ("get", "events", "--sort-by=.lastTimestamp"),
        "objects.yaml": ("get", "pods,kvprof,kvreg,deployments", "--output=yaml"),
        "pods.txt": ("describe", "pods"),
    }.items():
        done = cluster.kubectl(*arguments, *inside, check=False)
        (folder / name).write_text(done.stdout + done.stderr)
    shown = cluster.kubectl("get", "pods", *inside, "--output=json", check=False)
    for pod in json.loads(shown.stdout or '{"items": []}')["items"]:
        status = pod.get("status", {})
        states = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
        for state in states:
            _save_logs(cluster, namespace, pod["metadata"]["name"], state, folder)
    for program in ("kubelet", "containerd", "kube-proxy"):
        log = cluster.settings.logs / f"{program}.log"
        lines = log.read_text(errors="replace").splitlines()[-_LINES:] if log.exists() else []
        (folder / log.name).write_text("\n".join(lines))


def _save_logs(
    cluster: Cluster, namespace: str, pod: str, state: dict[str, object], folder: Path
) -> None:
    """The container's log, and that of its run before."""
    name = str(state["name"])
    command = ("logs", pod, f"--container={name}", "--namespace", namespace, f"--tail={_LINES}")
    for suffix, option in (("", ()), (".previous", ("--previous",))):
        if suffix and not state.get("restartCount"):
            continue
        done = cluster.kubectl(*command, *option, check=False)
        (folder / f"{pod}.{name}{suffix}.log").write_text(done.stdout + done.stderr)

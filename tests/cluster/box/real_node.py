"""A real node: kubelet, containerd and kube-proxy in a network and a mount namespace of their own.

Whatever they mount, route and filter is in these namespaces, and goes with the last process in them: two
nodes on a machine share nothing, and the machine's own tables are never touched. A process that only
sleeps, the *holder*, keeps the namespaces while the programs are restarted. All of it is in one cgroup
(`cgroups`), by which it is found again when its makers are gone.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.box import cgroups
from tests.cluster.box.errors import BoxError
from tests.cluster.box.node_files import BRIDGE, NodeFiles
from tests.cluster.box.settings import Node, Settings

HOLDER = "holder"
PROGRAMS = ("containerd", "kubelet", "kube-proxy")
"""What runs on a node, in the order of its start."""

COVERED = ("/run", "/var/lib/cni", "/var/log/containers")
"""Folders of the machine that container runtimes write to wherever they are told to: empty inside."""

_UPLINK = "uplink"

_ENTER = 'echo $$ >"$1" && shift && exec "$@"'
"""Shell: into the group whose file is the first argument, then run the others."""

_HOLD = """\
set -e
ready=$1 kernel=$2
shift 2
# A cluster that ends may just have removed one.
for folder; do mkdir -p "$folder"; mount -t tmpfs -o mode=755 tmpfs "$folder"; done
mkdir /run/netns
cd "$kernel"
for file in *; do mount --bind "$file" "/proc/sys/$(echo "$file" | tr : /)"; done
touch "$ready"
exec sleep infinity
"""


def holder(node: Node, files: NodeFiles) -> Sequence[str]:
    """The command that makes the namespaces and keeps them."""
    unshare = ("unshare", "--mount", "--net", "sh", "-c", _HOLD, "sh")
    arguments = (str(files.ready), str(files.folder / "kernel"), *COVERED)
    return (*_into_group(node), *unshare, *arguments)


def command(
    program: str, node: Node, files: NodeFiles, kubeconfigs: dict[str, Path]
) -> Sequence[str]:
    """The arguments of a program of the node."""
    match program:
        case "containerd":
            return (f"--config={files.containerd}",)
        case "kubelet":
            return (
                f"--config={files.kubelet}",
                f"--kubeconfig={kubeconfigs['kubelet']}",
                f"--root-dir={files.folder / 'kubelet'}",
                f"--cert-dir={files.folder / 'kubelet' / 'pki'}",
                f"--hostname-override={node.name}",
                f"--node-ip={node.interface.ip}",
            )
        case "kube-proxy":
            return (f"--config={files.proxy}",)
        case _:
            raise ValueError(f"{program} is none of {PROGRAMS}")


def inside(node: Node, holder_pid: int) -> Sequence[str]:
    """What to put before a command to run it in the node's namespaces and group."""
    return (*_into_group(node), "nsenter", f"--target={holder_pid}", "--mount", "--net")


def _into_group(node: Node) -> Sequence[str]:
    return ("sh", "-c", _ENTER, "sh", str(cgroups.entrance(node.name)))


def connect(settings: Settings, node: Node, holder_pid: int) -> None:
    """Link the node's network namespace to the bridge, and let it route between its pods and Services."""
    bridge = settings.bridge
    if bridge is None:
        raise BoxError("a node needs a bridge")
    within = ("nsenter", f"--target={holder_pid}", "--net")
    peer = f"peer name {_UPLINK} netns {holder_pid}"
    _ip(f"link add {node.link} type veth {peer}")
    _ip(f"link set {node.link} master {bridge.name} up")
    for arguments in (
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"link set {_UPLINK} master {BRIDGE} up",
        f"address add {node.interface} dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ):
        _ip(arguments, within)
    script = "echo 1 >/proc/sys/net/ipv4/ip_forward"
    subprocess.run([*within, "sh", "-c", script], check=True, timeout=10)
    # From here too a Service is reached through the node.
    _ip(f"route replace {settings.service_subnet} via {node.interface.ip} dev {bridge.name}")


def _ip(arguments: str, within: Sequence[str] = ()) -> None:
    done = subprocess.run(
        [*within, "ip", *arguments.split()],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    if done.returncode != 0:
        raise BoxError(f"ip {arguments}: {done.stderr.strip()}")


class RunningNode:
    """What tests do to a node, and see of it."""

    def __init__(self, place: Node, files: NodeFiles, programs: Path, holder_pid: int) -> None:
        """Take over a node whose holder runs; `Cluster` makes it."""
        self.place = place
        self.folder = files.folder
        self.socket = files.socket
        self._ctr_program = str(programs / "ctr")
        self._holder_pid = holder_pid

    def run(self, *argv: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
        """Run a command where the node's programs see mounts and network; its status is not checked."""
        return subprocess.run(
            [*inside(self.place, self._holder_pid), *argv],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def import_image(self, archive: Path) -> None:
        """Give the node an image, from an archive as buildah, docker and podman write it.

        Raises:
            BoxError: the container runtime refused the archive.
        """
        done = self._ctr("images", "import", str(archive))
        if done.returncode != 0:
            raise BoxError(f"cannot import {archive}:\n{done.stdout}{done.stderr}")

    def memory_of_pod(self, pod_uid: str) -> cgroups.MemoryGroup | None:
        """The memory cgroup of a pod; None if there is none (any more)."""
        return cgroups.memory_of_pod(self.place.name, pod_uid)

    def containers_of_pod(self, pod_uid: str) -> list[str]:
        """The ids of a pod's containers that the runtime knows, its sandbox among them."""
        its_own = f'labels."io.kubernetes.pod.uid"=={pod_uid}'
        return self._ctr("containers", "list", "--quiet", its_own).stdout.split()

    def runtime_answers(self) -> bool:
        """Whether the container runtime can be asked."""
        return self.socket.exists() and self._ctr("version").returncode == 0

    def _ctr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        options = ("--address", str(self.socket), "--namespace", "k8s.io")
        return self.run(self._ctr_program, *options, *arguments, timeout_s=120.0)

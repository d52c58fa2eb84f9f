"""What the programs of a real node read: their configuration, in the cluster's folder."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.box.api import JsonObject
from tests.cluster.box.certificates import Authority, KeyPair
from tests.cluster.box.settings import Node, Settings

PAUSE_IMAGE = "kvcellar.test/pause:1"
"""What the sandbox of each pod runs."""

BRIDGE = "pods"
"""The bridge inside the node's network namespace."""

_CNI_PROGRAMS = "/usr/lib/cni"

_KERNEL = {
    "kernel:keys:root_maxbytes": "25000000",
    "kernel:keys:root_maxkeys": "1000000",
    "kernel:panic": "10",
    "kernel:panic_on_oops": "1",
    "vm:overcommit_memory": "1",
    "vm:panic_on_oom": "0",
}
"""Settings of the whole machine that a kubelet changes unless it finds them so: it is shown a copy.
Source: kubernetes v1.36, pkg/util/sysctl."""


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """What the programs of a node read; all of it in the cluster's folder."""

    folder: Path
    kubelet: Path
    proxy: Path
    containerd: Path

    @classmethod
    def write(
        cls, settings: Settings, node: Node, authority: Authority, kubeconfigs: dict[str, Path]
    ) -> "NodeFiles":
        """Make the configuration of each program."""
        folder = settings.folder / "node"
        for name in ("cni/conf", "kernel", "kubelet", "logs", "plugins"):
            (folder / name).mkdir(parents=True)
        for name, value in _KERNEL.items():
            (folder / "kernel" / name).write_text(f"{value}\n")
        (folder / "resolv.conf").write_text("# No name is known here.\n")
        _write_json(folder / "cni/conf/10-pods.conflist", _network(node, folder))
        serving = authority.server("kubelet", [f"IP:{node.interface.ip}", f"DNS:{node.name}"])
        files = cls(
            folder, folder / "kubelet.json", folder / "proxy.json", folder / "containerd.toml"
        )
        kubelet = _kubelet(node, folder, authority, serving)
        # Nobody answers there, at once; without an address there would be a warning for each pod.
        kubelet["clusterDNS"] = [str(settings.service_subnet[10])]
        _write_json(files.kubelet, kubelet)
        _write_json(files.proxy, _proxy(node, kubeconfigs["kube-proxy"]))
        files.containerd.write_text(_containerd(folder))
        return files

    @property
    def socket(self) -> Path:
        """Where containerd answers."""
        return self.folder / "containerd.sock"

    @property
    def ready(self) -> Path:
        """A file that is there once the holder has its namespaces in order."""
        return self.folder / "ready"


def _kubelet(node: Node, folder: Path, authority: Authority, serving: KeyPair) -> JsonObject:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": str(node.interface.ip),
        "authentication": {
            "anonymous": {"enabled": False},
            "x509": {"clientCAFile": str(authority.own.certificate)},
        },
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.name}",
        "containerRuntimeEndpoint": f"unix://{folder / 'containerd.sock'}",
        "crashLoopBackOff": {"maxContainerRestartPeriod": f"{node.restart_period_s}s"},
        "enforceNodeAllocatable": [],
        # Only a machine that is really full may lose pods.
        "evictionHard": {
            "imagefs.available": "1%",
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "failCgroupV1": False,
        "failSwapOn": False,
        "healthzPort": 0,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "podLogsDir": str(folder / "logs"),
        "readOnlyPort": 0,
        "resolvConf": str(folder / "resolv.conf"),
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "volumePluginDir": str(folder / "plugins"),
    }


def _proxy(node: Node, kubeconfig: Path) -> JsonObject:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": str(node.interface.network),
        # These would be settings of the whole machine.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpCloseWaitTimeout": "0s",
            "tcpEstablishedTimeout": "0s",
        },
        "hostnameOverride": node.name,
        # Answers of a pod on the same bridge would not come back through the node otherwise.
        "iptables": {"masqueradeAll": True},
        "mode": "iptables",
    }


def _network(node: Node, folder: Path) -> JsonObject:
    first, last = node.pod_addresses
    subnet = {
        "gateway": str(node.interface.ip),
        "rangeEnd": last,
        "rangeStart": first,
        "subnet": str(node.interface.network),
    }
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "hairpinMode": True,
        "isGateway": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(folder / "cni" / "addresses"),
            "ranges": [[subnet]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": node.name, "plugins": [bridge, portmap]}


def _containerd(folder: Path) -> str:
    """Its configuration; JSON strings are TOML's too."""
    unused = [
        "io.containerd.nri.v1.nri",
        *(f"io.containerd.snapshotter.v1.{name}" for name in ("blockfile", "btrfs", "devmapper")),
        *(f"io.containerd.snapshotter.v1.{name}" for name in ("erofs", "zfs")),
    ]
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    return f"""\
version = 3
root = {json.dumps(str(folder / "containerd"))}
state = "/run/containerd"
disabled_plugins = {json.dumps(unused)}

[grpc]
address = {json.dumps(str(folder / "containerd.sock"))}

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = {json.dumps(PAUSE_IMAGE)}

[{runtime}]
disable_apparmor = true
restrict_oom_score_adj = {json.dumps(not _may_lower_oom_scores())}

[{runtime}.cni]
bin_dirs = [{json.dumps(_CNI_PROGRAMS)}]
conf_dir = {json.dumps(str(folder / "cni" / "conf"))}

[{runtime}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[{runtime}.containerd.runtimes.runc.options]
BinaryName = "runc"
SystemdCgroup = false
"""


def _may_lower_oom_scores() -> bool:
    """Whether this process has CAP_SYS_RESOURCE; without it no sandbox would start. Source: capabilities(7)."""
    status = Path("/proc/self/status").read_text()
    mask = next(line for line in status.splitlines() if line.startswith("CapEff:")).split()[1]
    return bool(int(mask, 16) >> 24 & 1) and os.geteuid() == 0


def _write_json(path: Path, body: JsonObject) -> None:
    path.touch(mode=0o600)
    path.write_text(json.dumps(body, indent=2))

"""Where a cluster lives on its machine: everything that two clusters side by side may not share.

A cluster is on loopback, or has a bridge.

- *On loopback* needs no root. The API server listens on 127.0.0.1, and the addresses of Services are
  loopback addresses too: whoever listens on a Service's address and port serves it.
- *With a bridge* needs root. The API server listens on the bridge's address. It finds a Service through
  its endpoints, which may be any address of the bridge, as it refuses endpoints on loopback.
- *With a node* has a bridge too, and a network and mount namespace that is the node (`real_node`), one of its
  ends on the bridge. Pods have addresses of the bridge's subnet, so that tests and the API server reach
  them, and nothing beyond it.

In a run of tests the names of links, nodes and cgroups carry the run's tag (`RUN_VARIABLE`), so that what it leaves
behind is known for its own.
"""

import os
import random
import shutil
import socket
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from tests.cluster.box.errors import BoxError

_PORTS = range(20000, 30000)
"""Below the ports that Linux hands out to connections, so that none is taken between the choice of a
port and its use."""

_OFFSETS_PER_CLUSTER = 4

RUN_VARIABLE = "KVCELLAR_TEST_RUN"
"""Names the variable with the tag of the run of tests that a process belongs to: four hexadecimal digits."""


def name_prefix(tag: str = "") -> str:
    """How the names of what a cluster makes begin; without a tag, those of one that no test has made."""
    return f"kvc{tag}-"


@dataclass(frozen=True, slots=True)
class Bridge:
    """A network bridge that a cluster makes for itself."""

    name: str
    """At most 15 characters. Source: IFNAMSIZ of Linux."""
    interface: IPv4Interface
    """The control plane's address, and the subnet that it is in."""


@dataclass(frozen=True, slots=True)
class Node:
    """The place of a real node: kubelet, container runtime and pods."""

    name: str
    """As an object of the cluster, and of the cgroup, in every controller, that all of it is in."""
    interface: IPv4Interface
    """The node's address, and the subnet that its pods are in."""
    link: str
    """The end of its link that is on the bridge; at most 15 characters."""
    restart_period_s: int = 1
    """The longest pause before a crashed container is started again. Source: the kubelet's
    ``crashLoopBackOff.maxContainerRestartPeriod``, whose least value this is."""

    @property
    def pod_addresses(self) -> tuple[str, str]:
        """The first and the last address that a pod may get."""
        network = self.interface.network
        return str(network[10]), str(network[250])


@dataclass(frozen=True, slots=True)
class Settings:
    """One cluster's place; `choose` finds a free one."""

    folder: Path
    """State and credentials: made at the start, removed at the stop."""
    logs: Path
    """A log per program and the audit log: stays, unless it is inside `folder`."""
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    service_subnet: IPv4Network
    bridge: Bridge | None = None
    node: Node | None = None
    node_grace_s: int = 24 * 3600
    """How long a node without a heartbeat counts as ready: simulated nodes send none."""

    @property
    def address(self) -> str:
        """The address that the API server listens on."""
        return "127.0.0.1" if self.bridge is None else str(self.bridge.interface.ip)

    @classmethod
    def choose(
        cls, folder: Path, logs: Path | None = None, *, bridge: bool = False, node: bool = False
    ) -> "Settings":
        """A place that no other cluster has: free ports, and subnets that follow from them.

        Args:
            folder: where the cluster's files go; it may not exist yet.
            logs: where its logs go; by default into `folder`, and so away with it.
            bridge: whether it has one.
            node: whether it has a real node, and so a bridge as well.
        """
        api_port, offset = _free_ports()
        made = _bridge(offset) if bridge or node else None
        return cls(
            folder=folder,
            logs=logs or folder / "logs",
            api_port=api_port,
            etcd_port=api_port + 1,
            etcd_peer_port=api_port + 2,
            service_subnet=_subnet(
                IPv4Network("127.64.0.0/12" if made is None else "10.128.0.0/12"), offset
            ),
            bridge=made,
            node=_node(made) if node and made is not None else None,
        )


def _free_ports() -> tuple[int, int]:
    """The first of a group of free ports, and the group's number."""
    groups = list(range(len(_PORTS) // _OFFSETS_PER_CLUSTER))
    random.SystemRandom().shuffle(groups)
    for group in groups:
        first = _PORTS[group * _OFFSETS_PER_CLUSTER]
        if all(_is_free(first + i) for i in range(_OFFSETS_PER_CLUSTER)):
            return first, group
    raise BoxError(f"no free ports from {_PORTS.start} to {_PORTS.stop - 1}")


def _is_free(port: int) -> bool:
    """Whether nobody listens on a port, on any address."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _subnet(whole: IPv4Network, group: int) -> IPv4Network:
    """The group's part of a network, 256 addresses wide."""
    return IPv4Network((int(whole.network_address) + (group << 8), 24))


def _bridge(group: int) -> Bridge:
    """The group's bridge."""
    if shutil.which("ip") is None:
        raise BoxError("no command ip on this machine: install iproute2")
    subnet = _subnet(IPv4Network("10.80.0.0/12"), group)
    name = f"{name_prefix(os.environ.get(RUN_VARIABLE, ''))}{group}"
    return Bridge(name, IPv4Interface(f"{subnet.network_address + 1}/24"))


def _node(bridge: Bridge) -> Node:
    """The node on a bridge."""
    network = bridge.interface.network
    interface = IPv4Interface(f"{network[2]}/{network.prefixlen}")
    return Node(bridge.name, interface, f"{bridge.name}n")

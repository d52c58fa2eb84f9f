"""Where a cluster lives on its machine: everything that two clusters side by side may not share.

A cluster is on loopback, or has a bridge.

- *On loopback* needs no root. The API server listens on 127.0.0.1, and the addresses of Services are
  loopback addresses too: whoever listens on a Service's address and port serves it.
- *With a bridge* needs root. The bridge carries the node's address, on which the API server listens.
  The API server finds a Service through its endpoints, which may be any address of the bridge, as it
  refuses endpoints on loopback.
"""

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


@dataclass(frozen=True, slots=True)
class Bridge:
    """A network bridge that a cluster makes for itself."""

    name: str
    """At most 15 characters. Source: IFNAMSIZ of Linux."""
    interface: IPv4Interface
    """The node's address, and the subnet that it is in."""


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
    node_grace_s: int = 24 * 3600
    """How long a node without a heartbeat counts as ready: simulated nodes send none."""

    @property
    def address(self) -> str:
        """The address that the API server listens on."""
        return "127.0.0.1" if self.bridge is None else str(self.bridge.interface.ip)

    @classmethod
    def choose(cls, folder: Path, logs: Path | None = None, *, bridge: bool = False) -> "Settings":
        """A place that no other cluster has: free ports, and subnets that follow from them.

        Args:
            folder: where the cluster's files go; it may not exist yet.
            logs: where its logs go; by default into `folder`, and so away with it.
            bridge: whether it has one.
        """
        api_port, offset = _free_ports()
        return cls(
            folder=folder,
            logs=logs or folder / "logs",
            api_port=api_port,
            etcd_port=api_port + 1,
            etcd_peer_port=api_port + 2,
            service_subnet=_subnet(
                IPv4Network("10.128.0.0/12" if bridge else "127.64.0.0/12"), offset
            ),
            bridge=_bridge(offset) if bridge else None,
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
    return Bridge(f"kvc{group}", IPv4Interface(f"{subnet.network_address + 1}/24"))

"""The command line of each program of a cluster, and the files that those name."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.box.access import kubeconfig_text
from tests.cluster.box.api import JsonObject
from tests.cluster.box.certificates import Authority, KeyPair, private_key
from tests.cluster.box.node_files import NodeFiles
from tests.cluster.box.settings import Settings

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
"""In the order of their start."""

_ADMIN = "admin"
_USERS = {
    _ADMIN: ("kvcellar-admin", ("system:masters",)),
    "kube-controller-manager": ("system:kube-controller-manager", ()),
    "kube-scheduler": ("system:kube-scheduler", ()),
    "kube-proxy": ("system:kube-proxy", ()),
    "kubelet": ("system:node:{node}", ("system:nodes",)),
}
"""Each holder of a token, its name as a user and its groups."""

_SECRET_RESOURCES: list[JsonObject] = [
    {"group": "", "resources": ["secrets", "serviceaccounts/token"]},
    {"group": "authentication.k8s.io", "resources": ["tokenreviews"]},
]

AUDIT_POLICY: JsonObject = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # Who asked for what, and was it granted; never a token or a Secret's content.
        {"level": "Metadata", "resources": _SECRET_RESOURCES},
        {"level": "Metadata", "verbs": ["get", "list", "watch"]},
        {"level": "Metadata", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "users": [name for name, groups in _USERS.values() if not groups]},
        {"level": "RequestResponse"},
    ],
}
"""Bodies only of what tests and the programs under test write: the log stays small."""


@dataclass(frozen=True, slots=True)
class Files:
    """What the programs read; all of it in the cluster's folder."""

    authority: Authority
    serving: KeyPair
    token_key: Path
    tokens: Path
    audit_policy: Path
    kubeconfigs: dict[str, Path]
    """By the holder of the token; ``admin`` is the tests' own."""
    node: NodeFiles | None
    kubelet_client: KeyPair
    """What the API server shows to a kubelet."""

    @classmethod
    def write(cls, settings: Settings) -> "Files":
        """Make keys, certificates, tokens and kubeconfigs of a new cluster."""
        folder = settings.folder
        authority = Authority.create(folder / "certificates")
        names = [f"IP:{address}" for address in sorted({settings.address, "127.0.0.1"})]
        names += [f"IP:{settings.service_subnet[1]}", "DNS:localhost"]
        names += ["DNS:kubernetes.default.svc", "DNS:kubernetes.default"]
        tokens = {holder: secrets.token_hex(16) for holder in _USERS}
        ca_pem = authority.own.certificate.read_text()
        server = f"https://{settings.address}:{settings.api_port}"
        kubeconfigs = {
            holder: _written(
                folder / ("kubeconfig" if holder == _ADMIN else f"{holder}.kubeconfig"),
                kubeconfig_text(server, ca_pem, {"token": token}),
            )
            for holder, token in tokens.items()
        }
        node = settings.node
        return cls(
            authority=authority,
            serving=authority.server("kube-apiserver", names),
            token_key=private_key(folder / "certificates" / "tokens.key"),
            tokens=_written(folder / "tokens.csv", _token_lines(tokens, node.name if node else "")),
            audit_policy=_written(folder / "audit-policy.json", json.dumps(AUDIT_POLICY)),
            kubeconfigs=kubeconfigs,
            node=NodeFiles.write(settings, node, authority, kubeconfigs) if node else None,
            kubelet_client=authority.client("kubelet-client", "kube-apiserver", ["system:masters"]),
        )


def audit_log(settings: Settings) -> Path:
    """Where the API server writes what was asked of it."""
    return settings.logs / "audit.log"


def command(program: str, settings: Settings, files: Files) -> Sequence[str]:
    """The arguments of a program of the control plane."""
    match program:
        case "etcd":
            return _etcd(settings)
        case "kube-apiserver":
            return _api_server(settings, files)
        case "kube-controller-manager":
            return _controller_manager(settings, files)
        case "kube-scheduler":
            kubeconfig = files.kubeconfigs["kube-scheduler"]
            return (f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0")
        case _:
            raise ValueError(f"{program} is none of {CONTROL_PLANE}")


def _etcd(settings: Settings) -> Sequence[str]:
    client = f"http://127.0.0.1:{settings.etcd_port}"
    peer = f"http://127.0.0.1:{settings.etcd_peer_port}"
    return (
        "--name=box",
        f"--data-dir={settings.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=box={peer}",
        # Nothing in it outlives the cluster.
        "--unsafe-no-fsync",
        "--log-level=warn",
    )


def _api_server(settings: Settings, files: Files) -> Sequence[str]:
    # Endpoints may not be on loopback, so there the Service `kubernetes` has none. On a bridge, a
    # Service without this routing is reached by its own address, which takes a kube-proxy.
    on_loopback, on_bridge = "--endpoint-reconciler-type=none", "--enable-aggregator-routing=true"
    return (
        on_loopback if settings.bridge is None else on_bridge,
        f"--advertise-address={settings.address}",
        f"--bind-address={settings.address}",
        f"--secure-port={settings.api_port}",
        f"--etcd-servers=http://127.0.0.1:{settings.etcd_port}",
        f"--service-cluster-ip-range={settings.service_subnet}",
        f"--tls-cert-file={files.serving.certificate}",
        f"--tls-private-key-file={files.serving.key}",
        f"--client-ca-file={files.authority.own.certificate}",
        f"--token-auth-file={files.tokens}",
        "--authorization-mode=Node,RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={files.token_key}",
        f"--service-account-signing-key-file={files.token_key}",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-certificate-authority={files.authority.own.certificate}",
        f"--kubelet-client-certificate={files.kubelet_client.certificate}",
        f"--kubelet-client-key={files.kubelet_client.key}",
        f"--audit-policy-file={files.audit_policy}",
        f"--audit-log-path={audit_log(settings)}",
        # In MB; a rotated log would hide what happened before.
        "--audit-log-maxsize=100000",
    )


def _controller_manager(settings: Settings, files: Files) -> Sequence[str]:
    return (
        f"--kubeconfig={files.kubeconfigs['kube-controller-manager']}",
        "--leader-elect=false",
        "--secure-port=0",
        # Each controller by its own name, so that the audit log tells them apart.
        "--use-service-account-credentials",
        # At the usual 20 a second, asking for those credentials alone takes four seconds.
        "--kube-api-qps=1000",
        "--kube-api-burst=1000",
        f"--service-account-private-key-file={files.token_key}",
        f"--root-ca-file={files.authority.own.certificate}",
        f"--cluster-signing-cert-file={files.authority.own.certificate}",
        f"--cluster-signing-key-file={files.authority.own.key}",
        f"--node-monitor-grace-period={settings.node_grace_s}s",
    )


def _token_lines(tokens: dict[str, str], node: str) -> str:
    """The file of tokens. Source: kube-apiserver's ``--token-auth-file``."""
    lines = []
    for holder, token in tokens.items():
        user, groups = _USERS[holder]
        name = user.format(node=node)
        lines.append(f'{token},{name},{name},"{",".join(groups)}"\n')
    return "".join(lines)


def _written(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path

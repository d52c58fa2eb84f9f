"""How to log in to the API server: as the pod's ServiceAccount, or as a kubeconfig says.

Owns: which of the two, and how each is read. A kubeconfig may hold a token or a client certificate; a
program that makes credentials (`exec`) is not run.
"""

import base64
import contextlib
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvcellar.errors import ConfigurationError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Login:
    """Where the API server is, whom to trust, and who we are.

    Attributes:
        server: URL without a slash at its end.
        authorities: in PEM; None trusts those of this machine.
        is_verified: whether the server's certificate is looked at.
        token: bearer token; None without.
        client: certificate and key in PEM; None without.
    """

    server: str
    authorities: str | None = None
    is_verified: bool = True
    token: str | None = field(default=None, repr=False)
    client: tuple[bytes, bytes] | None = field(default=None, repr=False)

    def tls(self) -> ssl.SSLContext:
        """A context for connections to the server.

        Raises:
            ConfigurationError: a certificate or key cannot be used.
        """
        try:
            context = ssl.create_default_context(cadata=self.authorities)
            if self.client is not None:
                with memory_file(self.client[0]) as chain, memory_file(self.client[1]) as key:
                    context.load_cert_chain(chain, key)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"the login to {self.server} cannot be used: {error}"
            ) from error
        if not self.is_verified:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def find_login() -> Login:
    """Read the kubeconfig that KUBECONFIG names, else the ServiceAccount, else the user's kubeconfig.

    Raises:
        ConfigurationError: there is none, or it cannot be used.
    """
    named = os.environ.get("KUBECONFIG")
    if named:
        return read_kubeconfig(Path(named))
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}") for name in ("HOST", "PORT"))
    if host and port and (_ACCOUNT / "token").exists():
        return read_account(_ACCOUNT, host, port)
    return read_kubeconfig(Path.home() / ".kube" / "config")


def read_account(folder: Path, host: str, port: str) -> Login:
    """The login of a ServiceAccount, whose token the kubelet renews in place.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    host = f"[{host}]" if ":" in host else host
    try:
        token, authorities = (folder / "token").read_text(), (folder / "ca.crt").read_text()
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror}") from error
    return Login(f"https://{host}:{port}", authorities, token=token.strip())


def read_kubeconfig(path: Path) -> Login:
    """The login of a kubeconfig's current context.

    Raises:
        ConfigurationError: it cannot be read, or names no way to log in that we know.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"no API server to talk to: {path} cannot be read ({error.strerror}); run in a pod with a "
            "ServiceAccount, or set KUBECONFIG"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is no kubeconfig: {error}") from error
    try:
        context = _entry(document, "context", document["current-context"])
        cluster = _entry(document, "cluster", context["cluster"])
        user = _entry(document, "user", context["user"])
        return _login(cluster, user, path.parent)
    except (KeyError, TypeError, StopIteration, ValueError, OSError) as error:
        raise ConfigurationError(
            f"{path} is no kubeconfig that can be used: {type(error).__name__} {error}"
        ) from error


def _entry(document: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    found = next(each for each in document[f"{kind}s"] if each["name"] == name)
    return dict(found[kind] or {})


def _login(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> Login:
    authorities = _content(cluster, "certificate-authority", folder)
    certificate = _content(user, "client-certificate", folder)
    key = _content(user, "client-key", folder)
    token = user.get("token")
    if token is None and "tokenFile" in user:
        token = Path(folder, str(user["tokenFile"])).read_text().strip()
    if token is None and (certificate is None or key is None):
        raise ConfigurationError(
            "the kubeconfig's user has neither a token nor a client certificate with its key, which are the "
            f"ways to log in that are known here; it has {', '.join(sorted(user)) or 'nothing'}"
        )
    return Login(
        server=str(cluster["server"]).rstrip("/"),
        authorities=None if authorities is None else authorities.decode(),
        is_verified=not cluster.get("insecure-skip-tls-verify"),
        token=token,
        client=None if certificate is None or key is None else (certificate, key),
    )


def _content(owner: Mapping[str, Any], name: str, folder: Path) -> bytes | None:
    """What a kubeconfig holds itself, or in a file that it names."""
    if data := owner.get(f"{name}-data"):
        return base64.b64decode(str(data), validate=True)
    if file := owner.get(name):
        return Path(folder, str(file)).read_bytes()
    return None


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[str]:
    """The path of a file in memory that only this process can open: `ssl` reads keys from files alone."""
    descriptor = os.memfd_create("kvcellar-tls", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)

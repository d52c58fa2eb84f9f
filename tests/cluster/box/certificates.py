"""Keys and certificates of a cluster and of the servers that tests put in front of it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.box.errors import CommandFailed

_CONFIG = """\
[req]
distinguished_name = name
prompt = no
[name]
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
[client]
basicConstraints = critical,CA:FALSE
keyUsage = critical,digitalSignature
extendedKeyUsage = clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A private key and its certificate, as PEM files."""

    key: Path
    certificate: Path


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority of one's own, that signs what is asked of it."""

    folder: Path
    own: KeyPair

    @classmethod
    def create(cls, folder: Path, name: str = "kvcellar-test") -> "Authority":
        """Make an authority whose files, and those it signs, lie in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        own = KeyPair(folder / "ca.key", folder / "ca.crt")
        _request(own, f"/CN={name}", "authority", "", ())
        return cls(folder, own)

    def server(self, file_name: str, names: list[str], common_name: str = "server") -> KeyPair:
        """A server's certificate; each name is ``DNS:<name>`` or ``IP:<address>``."""
        return self._signed(file_name, f"/CN={common_name}", "server", ",".join(names))

    def client(self, file_name: str, user: str, groups: list[str]) -> KeyPair:
        """A certificate with which Kubernetes takes its holder for `user`, in `groups`."""
        subject = "".join(f"/O={group}" for group in groups) + f"/CN={user}"
        return self._signed(file_name, subject, "client", "IP:127.0.0.1")

    def _signed(self, file_name: str, subject: str, extensions: str, names: str) -> KeyPair:
        pair = KeyPair(self.folder / f"{file_name}.key", self.folder / f"{file_name}.crt")
        signer = ("-CA", str(self.own.certificate), "-CAkey", str(self.own.key))
        _request(pair, subject, extensions, names, signer)
        return pair


def private_key(path: Path) -> Path:
    """A key by itself, to sign tokens with: in the older of its two formats, as Kubernetes wants."""
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path))
    return path


def _request(
    pair: KeyPair, subject: str, extensions: str, names: str, signer: tuple[str, ...]
) -> None:
    """Make a key and its certificate, signed by itself if there is no signer."""
    config = pair.key.with_suffix(".cnf")
    config.write_text(_CONFIG.format(names=names or "DNS:none"))
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-config", str(config), "-extensions", extensions, "-subj", subject, "-days", "365"),
        *("-keyout", str(pair.key), "-out", str(pair.certificate), *signer),
    )


def _openssl(*arguments: str) -> None:
    argv = ["openssl", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise CommandFailed(argv, done.returncode, done.stdout, done.stderr)

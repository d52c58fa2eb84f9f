"""The webhook's certificate in use: kept in a Secret or read from files, loaded without a pause, trusted.

Owns: the one live TLS context, and who feeds it. Loading a certificate into a context that is in use
changes new connections only, so nothing is dropped when it is renewed.

Several replicas share the Secret. Each write names the version that it was made from, so of two that
renew at once one is refused, and takes what the other wrote.
"""

import asyncio
import base64
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from kvcellar_operator.cache import Cache
from kvcellar_operator.certificates import (
    Bundle,
    Serving,
    UnusableCertificate,
    expires_at,
    next_bundle,
    problem_of,
)
from kvcellar_operator.cluster import (
    Api,
    ApiFailure,
    Conflict,
    Forbidden,
    NotFound,
)
from kvcellar_operator.login import memory_file
from kvcellar_operator.objects import JsonObject, Key

logger = logging.getLogger(__name__)

_LOOK_S = 60.0
"""How often the age of certificates is looked at without any change."""
_FILES_LOOK_S = 1.0
"""The kubelet swaps a link to renew files, which leaves nothing to wait on but their content."""
_RETRY_S = 2.0
_SECRET_KEYS = ("ca.crt", "ca.key", "tls.crt", "tls.key")


class LiveCertificate:
    """The certificate that is served now, and what is wrong with it.

    Attributes:
        context: of the TLS server; stays the same object for ever.
        authorities: what the API server is to trust, in PEM; empty if somebody else sees to it.
        problem: a sentence, or "" if all is well.
        changed: set at each change of the above, for whoever patches the configuration.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.authorities = b""
        self.problem = "there is no certificate yet"
        self.expires: datetime | None = None
        self.changed = asyncio.Event()
        self._names = tuple(names)
        self._served: Serving | None = None

    @property
    def is_served(self) -> bool:
        """There is a certificate, be it a bad one."""
        return self._served is not None

    def take(self, serving: Serving, authorities: bytes) -> None:
        """Serve this pair from now on, and have these authorities trusted.

        A pair that cannot be loaded is refused, and the present one stays, with its authorities; one that
        the API server will not accept is loaded, since nobody else can tell, and named in `problem`.
        """
        try:
            problem = problem_of(serving, self._names, datetime.now(UTC))
            if serving != self._served:
                _load(self.context, serving)
                self._served = serving
                self.expires = expires_at(serving)
                logger.info("serving a certificate that ends at %s", self.expires.isoformat())
        except UnusableCertificate as error:
            self._say(str(error))
            return
        self._say(problem)
        if authorities != self.authorities:
            self.authorities = authorities
            self.changed.set()

    def miss(self, problem: str) -> None:
        """Nothing can be had from the source; the present pair stays."""
        self._say(problem)

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            logger.error("the webhook's certificate: %s", problem)
        self.problem = problem


def _load(context: ssl.SSLContext, serving: Serving) -> None:
    """Load a pair; `ssl` reads files only, and these exist in memory alone."""
    with memory_file(serving.certificate) as chain, memory_file(serving.key) as key:
        try:
            context.load_cert_chain(chain, key)
        except (ssl.SSLError, OSError) as error:
            raise UnusableCertificate(f"tls.crt and tls.key cannot be used: {error}") from error


# --- from files -----------------------------------------------------------------------------------------


async def follow_files(folder: Path, live: LiveCertificate) -> NoReturn:
    """Serve `tls.crt` and `tls.key` of a folder, and trust its `ca.crt` if there is one."""
    while True:
        try:
            serving = Serving(_read(folder / "tls.crt"), _read(folder / "tls.key"))
            authorities = _read(folder / "ca.crt") if (folder / "ca.crt").exists() else b""
        except OSError as error:
            live.miss(f"{error.filename} cannot be read: {error.strerror}")
        else:
            live.take(serving, authorities)
        await asyncio.sleep(_FILES_LOOK_S)


def _read(path: Path) -> bytes:
    return path.read_bytes()


# --- from a Secret that the replicas share ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SecretName:
    """Where the bundle is kept."""

    namespace: str
    name: str

    @property
    def collection(self) -> str:
        """Path of the Secrets of the namespace."""
        return f"/api/v1/namespaces/{self.namespace}/secrets"


class SharedSecret:
    """Makes, renews and serves the bundle of one Secret."""

    def __init__(self, secret: SecretName, names: Sequence[str], live: LiveCertificate) -> None:
        self._secret = secret
        self._names = tuple(names)
        self._live = live
        self._wake = asyncio.Event()
        self.cache: Cache[JsonObject] = Cache(
            secret.collection,
            lambda body: body,
            query={"fieldSelector": f"metadata.name={secret.name}"},
            on_change=self._wake.set,
        )

    async def run(self, api: Api) -> NoReturn:
        """Look at each change of the Secret, and every minute; `cache` has to run as well."""
        while True:
            await wait_for(self._wake, _LOOK_S)
            if self.cache.is_synced:
                await self._look(api)

    async def _look(self, api: Api) -> None:
        body = self.cache.objects.get(Key(self._secret.namespace, self._secret.name))
        bundle = _read_bundle(body)
        renewed = next_bundle(bundle, self._names, datetime.now(UTC))
        if renewed is None and bundle is not None:
            self._live.take(bundle.serving, bundle.authorities)
        elif renewed is not None:
            await self._write(api, body, renewed)

    async def _write(self, api: Api, body: JsonObject | None, bundle: Bundle) -> None:
        try:
            if body is None:
                await api.create(self._secret.collection, _new_secret(self._secret, bundle))
            else:
                version = body["metadata"]["resourceVersion"]
                patch = {"metadata": {"resourceVersion": version}, "data": _data(bundle)}
                await api.patch(f"{self._secret.collection}/{self._secret.name}", patch)
        except (Conflict, NotFound):
            # Another replica was first, and the watch brings what it wrote.
            logger.info("Secret %s changed meanwhile; looking again", self._secret.name)
        except ApiFailure as error:
            hint = (
                "; grant create, or let the chart make it" if isinstance(error, Forbidden) else ""
            )
            self._live.miss(f"the Secret {self._secret.name} cannot be written: {error}{hint}")
            await asyncio.sleep(_RETRY_S)
            self._wake.set()
        else:
            # The watch brings it back, and only then is it served: what counts is what is kept.
            logger.info("wrote a new certificate to Secret %s", self._secret.name)


def _read_bundle(body: JsonObject | None) -> Bundle | None:
    data = (body or {}).get("data") or {}
    if not all(data.get(key) for key in _SECRET_KEYS):
        return None
    ca, ca_key, certificate, key = (base64.b64decode(data[name]) for name in _SECRET_KEYS)
    return Bundle(ca, ca_key, Serving(certificate, key))


def _data(bundle: Bundle) -> dict[str, str]:
    serving = bundle.serving
    values = (bundle.authorities, bundle.authority_key, serving.certificate, serving.key)
    return {
        name: base64.b64encode(value).decode()
        for name, value in zip(_SECRET_KEYS, values, strict=True)
    }


def _new_secret(secret: SecretName, bundle: Bundle) -> JsonObject:
    metadata = {"name": secret.name, "namespace": secret.namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": _data(bundle)}


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until the event is set, which is taken back, or the time is over."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()

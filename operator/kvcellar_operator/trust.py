"""Has the API server trust what the webhook serves: `caBundle` of one MutatingWebhookConfiguration.

Helm makes and removes the configuration and never writes that field, so it is empty after an install and
after a reinstall, until the watch shows that here.
"""

import asyncio
import base64
import logging
from typing import NoReturn

from kvcellar_operator.cache import Cache
from kvcellar_operator.cluster import JSON_PATCH, Api, ApiFailure
from kvcellar_operator.objects import JsonObject, Key
from kvcellar_operator.serving import LiveCertificate, wait_for

logger = logging.getLogger(__name__)

CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
_LOOK_S = 60.0
_RETRY_S = 2.0
_PAUSE_S = 1.0
"""Between two writes. While kubelets renew a mounted Secret, replicas hold different files and each writes
its own; without a pause they would answer one another as fast as the API server can."""


class TrustKeeper:
    """Keeps `caBundle` of one MutatingWebhookConfiguration what the live certificate says.

    Helm makes and removes the configuration and never writes that field, so after a reinstall it is
    empty until the watch shows it here.
    """

    def __init__(self, name: str, live: LiveCertificate) -> None:
        self._name = name
        self._live = live
        self._wake = live.changed
        self.cache: Cache[JsonObject] = Cache(
            CONFIGURATIONS,
            lambda body: body,
            query={"fieldSelector": f"metadata.name={name}"},
            on_change=self._wake.set,
        )

    @property
    def is_trusted(self) -> bool:
        """The API server was told to trust what is served."""
        body = self.cache.objects.get(Key("", self._name))
        return body is not None and bool(self._live.authorities) and not self._changes(body)

    async def run(self, api: Api) -> NoReturn:
        """Patch at each change of either; `cache` has to run as well."""
        while True:
            await wait_for(self._wake, _LOOK_S)
            body = self.cache.objects.get(Key("", self._name))
            if body is not None and self._live.authorities and (changes := self._changes(body)):
                await self._patch(api, changes)

    def _changes(self, body: JsonObject) -> list[JsonObject]:
        wanted = base64.b64encode(self._live.authorities).decode()
        changes: list[JsonObject] = []
        for index, webhook in enumerate(body.get("webhooks") or ()):
            if webhook["clientConfig"].get("caBundle") != wanted:
                path = f"/webhooks/{index}"
                changes += [
                    {"op": "test", "path": f"{path}/name", "value": webhook["name"]},
                    {"op": "add", "path": f"{path}/clientConfig/caBundle", "value": wanted},
                ]
        return changes

    async def _patch(self, api: Api, changes: list[JsonObject]) -> None:
        try:
            await api.patch(f"{CONFIGURATIONS}/{self._name}", changes, JSON_PATCH)
        except ApiFailure as error:
            logger.warning("caBundle of %s cannot be patched: %s", self._name, error)
            await asyncio.sleep(_RETRY_S)
            self._wake.set()
        else:
            logger.info("the API server is told to trust our certificate (%s)", self._name)
            await asyncio.sleep(_PAUSE_S)

"""`kvcellar-operator webhook`: asks for nothing at a review, so it answers in milliseconds.

Profiles come from a copy in memory, so a review costs no request. Every replica does the same; none leads.
Order of an end: SIGTERM, not ready, serve until every node knows, finish what is being answered. Meanwhile
each answer closes its connection: the API server keeps them, and would lose what it asks at the very end.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from kvcellar.contract import API_GROUP, API_VERSION, PROFILE_PLURAL
from kvcellar.errors import KVCellarError
from kvcellar_operator.access import Need, missing
from kvcellar_operator.admission import Answer, NoReview, ProfileUnavailable, answer
from kvcellar_operator.cache import Cache
from kvcellar_operator.cluster import Api, ApiFailure
from kvcellar_operator.config import WebhookSettings
from kvcellar_operator.connection import Connection
from kvcellar_operator.http_server import health_app, listen, serving
from kvcellar_operator.inject import InvalidProfile, Profile, parse_served_profile
from kvcellar_operator.metrics import WebhookMetrics
from kvcellar_operator.objects import JsonObject, Key, key_of
from kvcellar_operator.serving import LiveCertificate, SecretName, SharedSecret, follow_files
from kvcellar_operator.trust import TrustKeeper
from kvcellar_operator.versions import has_native_sidecars

logger = logging.getLogger(__name__)

PATH = "/inject"
"""Path of the webhook; the chart's configuration names it."""

_RETRY_S = 5.0
_LOOK_S = 600.0

Decide = Callable[[object], Answer]
"""Answers one decoded AdmissionReview."""


class BodyTooLarge(KVCellarError):
    """A request is larger than any review."""


class Profiles:
    """The OffloadProfiles that are looked at, as a copy in memory."""

    def __init__(self, namespaces: Iterable[str]) -> None:
        group = f"/apis/{API_GROUP}/{API_VERSION}"
        paths = [f"{group}/namespaces/{name}/{PROFILE_PLURAL}" for name in namespaces]
        self.caches: list[Cache[Profile | InvalidProfile]] = [
            Cache(path, self._parsed) for path in paths or [f"{group}/{PROFILE_PLURAL}"]
        ]

    @property
    def is_synced(self) -> bool:
        """All are known."""
        return all(cache.is_synced for cache in self.caches)

    def find(self, namespace: str, name: str) -> Profile | None:
        """The profile of that name; None if the namespace has none.

        Raises:
            InvalidProfile: it cannot be used.
            ProfileUnavailable: none is known yet.
        """
        if not self.is_synced:
            raise ProfileUnavailable("the profiles could not be read yet; create the pod anew")
        for cache in self.caches:
            found = cache.objects.get(Key(namespace, name))
            if isinstance(found, InvalidProfile):
                raise InvalidProfile(str(found))
            if found is not None:
                return found
        return None

    def _parsed(self, body: JsonObject) -> Profile | InvalidProfile:
        """A profile, or why it is none: a bad one must not hide the good ones."""
        key = key_of(body)
        parsed: Profile | InvalidProfile
        try:
            parsed = parse_served_profile(body)
        except InvalidProfile as error:
            parsed = error
        problem = _problem(parsed)
        # Every list brings all of them again, unchanged.
        if problem and problem not in [_problem(cache.objects.get(key)) for cache in self.caches]:
            logger.warning("OffloadProfile %s/%s %s", key.namespace, key.name, problem)
        return parsed


def _problem(found: Profile | InvalidProfile | None) -> str:
    """What the log has to say of a profile; "" if nothing."""
    if isinstance(found, InvalidProfile):
        return f"cannot be used: {found}"
    if found is None or not found.unknown_fields:
        return ""
    unknown = ", ".join(found.unknown_fields)
    return f"is of a newer CRD: its pods are injected without {unknown}; upgrade the operator"


def create_app(
    decide: Decide,
    max_body_bytes: int,
    metrics: WebhookMetrics,
    is_leaving: Callable[[], bool],
) -> FastAPI:
    """The webhook's application; no connection outlives an answer that is given while leaving."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    async def inject(request: Request) -> Response:
        response = await reviewed(request)
        if is_leaving():
            response.headers["Connection"] = "close"
        return response

    async def reviewed(request: Request) -> Response:
        try:
            review = json.loads(await _read(request, max_body_bytes))
            began_s = time.perf_counter()
            decided = decide(review)
        except BodyTooLarge as error:
            metrics.refused()
            return JSONResponse({"detail": str(error)}, 413)
        except (NoReview, ValueError, RecursionError) as error:
            metrics.refused()
            return JSONResponse({"detail": str(error)}, 400)
        metrics.reviewed(decided.outcome, decided.reason, time.perf_counter() - began_s)
        return JSONResponse(decided.body)

    app.add_api_route(PATH, inject, methods=["POST"])
    return app


async def _read(request: Request, max_body_bytes: int) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_body_bytes:
            raise BodyTooLarge(f"the request is larger than {max_body_bytes} bytes")
    return bytes(body)


def needs(settings: WebhookSettings) -> list[Need]:
    """What the webhook's ServiceAccount has to be allowed."""
    read = ("list", "watch")
    asked = [
        Need(read, PROFILE_PLURAL, "know the profiles", API_GROUP, namespace)
        for namespace in settings.common.watch_namespaces or ("",)
    ]
    tls, own = settings.tls, settings.common.namespace
    if tls.folder is None:
        why = "share its certificate between replicas"
        asked.append(Need((*read, "patch"), "secrets", why, "", own, tls.secret))
    if tls.configuration:
        group, why = "admissionregistration.k8s.io", "have the API server trust its certificate"
        resource = "mutatingwebhookconfigurations"
        asked.append(Need((*read, "patch"), resource, why, group, "", tls.configuration))
    return asked


class Webhook:
    """The program; `run` is all of it."""

    def __init__(self, settings: WebhookSettings) -> None:
        self._settings = settings
        self._inject = settings.inject
        self._metrics = WebhookMetrics()
        self._profiles = Profiles(settings.common.watch_namespaces)
        self._live = LiveCertificate(settings.tls.names)
        self._trust: TrustKeeper | None = None
        self._is_leaving = False
        if settings.tls.configuration:
            self._trust = TrustKeeper(settings.tls.configuration, self._live)
        self._metrics.read_from(self._gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            ConfigurationError: a port is in use, or there is no API server to talk to.
        """
        settings = self._settings
        app = create_app(
            self._decide, settings.max_body_bytes, self._metrics, lambda: self._is_leaving
        )
        health = health_app(lambda: "", self.not_ready, self._metrics.registry)
        with listen(settings.common.health_port) as plain, listen(settings.port) as secure:
            async with (
                Api(Connection()) as api,
                serving(health, plain),
                serving(app, secure, self._live.context),
                asyncio.TaskGroup() as group,
            ):
                tasks = [group.create_task(work) for work in self._works(api)]
                await stop.wait()
                self._is_leaving = True
                logger.info("leaving: serving for %g s more", settings.drain_s)
                await asyncio.sleep(settings.drain_s)
                for task in tasks:
                    task.cancel()

    def not_ready(self) -> str:
        """Why no review should be sent here; "" if one may."""
        if self._is_leaving:
            return "leaving"
        if not self._profiles.is_synced:
            return "the profiles are not known yet"
        if not self._live.is_served or self._live.problem:
            return self._live.problem
        if self._trust is not None and not self._trust.is_trusted:
            return "the API server was not told yet to trust our certificate"
        return ""

    def _decide(self, review: object) -> Answer:
        return answer(review, self._profiles.find, self._inject)

    def _works(self, api: Api) -> Iterable[Coroutine[Any, Any, None]]:
        yield self._look_around(api)
        for cache in self._profiles.caches:
            yield cache.run(api)
        tls = self._settings.tls
        if tls.folder is None:
            name = SecretName(self._settings.common.namespace, tls.secret)
            shared = SharedSecret(name, tls.names, self._live)
            yield shared.cache.run(api)
            yield shared.run(api)
        else:
            yield follow_files(tls.folder, self._live)
        if self._trust is not None:
            yield self._trust.cache.run(api)
            yield self._trust.run(api)

    async def _look_around(self, api: Api) -> NoReturn:
        """Say at the start what is not allowed; see now and then whether nodes are too old."""
        needed = needs(self._settings)
        while True:
            try:
                if needed:
                    self._metrics.missing_permissions.set(len(await missing(api, needed)))
                    needed = []
                can = await has_native_sidecars(api)
                self._inject = replace(self._inject, has_native_sidecars=can)
            except ApiFailure as error:
                logger.warning("the cluster cannot be looked at: %s", error)
                await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(_LOOK_S)

    def _gauges(self) -> Iterable[tuple[str, str, Mapping[str, str], float]]:
        yield (
            "kvcellar_webhook_certificate_expiry_timestamp_seconds",
            "End of the certificate that is served; 0 without one",
            {},
            self._live.expires.timestamp() if self._live.expires else 0.0,
        )
        yield (
            "kvcellar_webhook_certificate_usable",
            "1 if the certificate has no problem that is known",
            {},
            0.0 if self._live.problem else 1.0,
        )
        newest = max(time.monotonic() - cache.answered_s for cache in self._profiles.caches)
        yield (
            "kvcellar_webhook_profiles_age_seconds",
            "Time since the API server last answered about profiles",
            {},
            newest,
        )

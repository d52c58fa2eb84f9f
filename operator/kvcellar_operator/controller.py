"""`kvcellar-operator controller`: watches pods, regions and refusals, and visits pods in one loop.

kopf watches, by `on.event` alone: it writes nothing on what it watches, and puts no finalizer on anything,
so nothing hangs after an uninstall. Its handlers note what they see and wake the pod; all decisions and
writes are `reconcile`'s. kopf ends if one of its watches does, and the program with it, to be started again.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import kopf

from kvcellar.contract import API_GROUP, API_VERSION, LABEL_INJECT, REGION_PLURAL
from kvcellar_operator import access, refusals, regions
from kvcellar_operator.access import Need
from kvcellar_operator.cluster import Api, ApiFailure, NotFound
from kvcellar_operator.config import ControllerSettings
from kvcellar_operator.connection import Connection
from kvcellar_operator.http_server import health_app, listen, serving
from kvcellar_operator.listening import Listener
from kvcellar_operator.metrics import Age, ControllerMetrics
from kvcellar_operator.objects import FIELD_MANAGER, key_of
from kvcellar_operator.podview import view_pod
from kvcellar_operator.polling import PollLoop
from kvcellar_operator.posting import EventPoster
from kvcellar_operator.reconcile import Reconciler
from kvcellar_operator.refusals import Refusals
from kvcellar_operator.sidecars import AskLimits, Resolve, Sidecars, pod_address
from kvcellar_operator.world import World, pod_of

logger = logging.getLogger(__name__)

_WATCH_S = 120
"""A watch is opened anew after this, which is what shows that the API server answers."""
_PAGE = 100
"""Objects of one page of a list: each is a whole pod until it was looked at."""
_RETRY_S = 5.0
_EXIT_S = 30.0

_PODS = ("", "v1", "pods")
_EVENTS = ("", "v1", "events")
_REGIONS = (API_GROUP, API_VERSION, REGION_PLURAL)


class _Backoffs:
    """Pauses between tries of the API server, without an end: an outage of an hour must not end us."""

    def __iter__(self) -> Iterator[float]:
        yield from (0.5, 1.0, 2.0)
        while True:
            yield 3.0


def needs(settings: ControllerSettings) -> list[Need]:
    """What the controller's ServiceAccount has to be allowed."""
    asked: list[Need] = []
    read = ("list", "watch")
    write = ("create", "get", "patch")
    for space in settings.common.watch_namespaces or ("",):
        asked += [
            Need((*read, "patch"), "pods", "find engines and relay what is wished", "", space),
            Need((*read, "create"), REGION_PLURAL, "show regions", API_GROUP, space),
            Need(("patch",), f"{REGION_PLURAL}/status", "keep regions true", API_GROUP, space),
            Need((*read, *write), "events", "tell what happens", "", space),
        ]
        asked += [
            Need(("get",), plural, "explain refused pods", "apps", space)
            for plural in refusals.OWNERS.values()
        ]
    return asked


class Controller:
    """The program; `run` is all of it."""

    def __init__(self, settings: ControllerSettings, resolve: Resolve = pod_address) -> None:
        self._settings = settings
        self._resolve = resolve
        self._metrics = ControllerMetrics()
        self._age = Age()
        self._world = World()
        self._loop: PollLoop | None = None
        self._is_watching = False
        self._metrics.read_from(self._gauges)

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set.

        Raises:
            ConfigurationError: the port is in use, or there is no API server to talk to.
        """
        connection = Connection()
        health = health_app(self.not_alive, self.not_ready, self._metrics.registry)
        with listen(self._settings.common.health_port) as plain:
            async with Api(connection) as api, serving(health, plain):
                if await self._until_ready(api, stop):
                    await self._work(api, connection, stop)

    def not_alive(self) -> str:
        """Why the program should be started again; "" if it should not."""
        if self._age.seconds > self._settings.stale_s:
            return f"no list or watch was answered for {self._age.seconds:.0f} s"
        return ""

    def not_ready(self) -> str:
        """Why status may be old; "" if it is not."""
        return self.not_alive() if self._is_watching else "the watches are not open yet"

    # --- start --------------------------------------------------------------------------------------

    async def _until_ready(self, api: Api, stop: asyncio.Event) -> bool:
        """Wait for the API server and for the CRDs, and say what is missing; False if told to stop."""
        while not stop.is_set():
            try:
                missing = await access.missing(api, needs(self._settings))
                self._metrics.missing_permissions.set(len(missing))
                await self._check_crds(api)
            except ApiFailure as error:
                logger.warning("not started yet: %s", error)
            else:
                return True
            self._age.now()
            try:
                async with asyncio.timeout(_RETRY_S):
                    await stop.wait()
            except TimeoutError:
                continue
        return False

    async def _check_crds(self, api: Api) -> None:
        try:
            served = await api.get(regions.GROUP_PATH)
        except NotFound as error:
            raise NotFound(f"the CRDs of {API_GROUP} are not installed", error.status) from error
        if REGION_PLURAL not in [each["name"] for each in served["resources"]]:
            raise NotFound(f"the CRD {REGION_PLURAL}.{API_GROUP} is not installed", 404)

    # --- work ---------------------------------------------------------------------------------------

    async def _work(self, api: Api, connection: Connection, stop: asyncio.Event) -> None:
        settings = self._settings
        limits = AskLimits(settings.poll_timeout_s, settings.poll_body_bytes)
        sidecars = Sidecars(limits, self._resolve)
        poster = EventPoster(api, self._metrics)
        refused = Refusals(api, poster)
        reconciler = Reconciler(
            api,
            self._world,
            Listener(sidecars, self._metrics),
            poster,
            self._metrics,
            settings,
        )
        loop = self._loop = PollLoop(reconciler.visit, settings.poll_at_once)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(work) for work in (loop.run(), poster.run(), refused.run())
                ]
                self._is_watching = True
                await self._watch(connection, loop, reconciler, refused, stop)
                for task in tasks:
                    task.cancel()
        finally:
            await sidecars.close()

    async def _watch(
        self,
        connection: Connection,
        loop: PollLoop,
        reconciler: Reconciler,
        refused: Refusals,
        stop: asyncio.Event,
    ) -> None:
        registry = kopf.OperatorRegistry()
        self._register_login(registry, connection)
        self._register_handlers(registry, loop, reconciler, refused)
        namespaces = self._settings.common.watch_namespaces
        # kopf takes the signals, and then ends by itself; `stop` is for one that came before. As kopf's own
        # stop flag it would keep kopf waiting for it.
        told = asyncio.create_task(stop.wait())
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=_kopf_settings(),
                standalone=True,
                clusterwide=not namespaces,
                namespaces=namespaces,
                # kopf's default asks for the user's name, which there is none of in a container.
                identity=FIELD_MANAGER,  # type: ignore[arg-type]  # a NewType that kopf does not export
            )
        )
        await asyncio.wait({told, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in (told, watching):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    def _register_login(self, registry: kopf.OperatorRegistry, connection: Connection) -> None:
        @kopf.on.login(id="login", registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:  # noqa: ANN401 - kopf's own arguments
            # kopf closes a session that it could not log in with, so each has to be new.
            session = connection.new_session(self._age.now)
            return kopf.AiohttpSession(server=connection.server, aiohttp_session=session)

    def _register_handlers(
        self,
        registry: kopf.OperatorRegistry,
        loop: PollLoop,
        reconciler: Reconciler,
        refused: Refusals,
    ) -> None:
        world = self._world

        @kopf.on.event(*_PODS, id="pods", registry=registry)
        async def pods(event: Mapping[str, Any], **_: Any) -> None:  # noqa: ANN401 - kopf's own
            body = event["object"]
            key = key_of(body)
            if event["type"] == "DELETED":
                world.pods.pop(key, None)
            else:
                world.pods[key] = view_pod(body)
            loop.wake(key, self._spread_s(event))

        @kopf.on.event(*_REGIONS, id="regions", registry=registry)
        async def of_regions(event: Mapping[str, Any], **_: Any) -> None:  # noqa: ANN401 - kopf's own
            body = event["object"]
            if event["type"] == "DELETED":
                world.drop_region(body)
                reconciler.forget_region(key_of(body))
            else:
                known = world.regions.get(key_of(body))
                if world.take_region(body) is known or not _is_news(body, known):
                    return
            loop.wake(pod_of(body), self._spread_s(event))

        @kopf.on.event(*_EVENTS, id="refusals", registry=registry)
        async def of_refusals(event: Mapping[str, Any], **_: Any) -> None:  # noqa: ANN401 - kopf's own
            if event["type"] != "DELETED":
                refused.note(event["object"])

    def _spread_s(self, event: Mapping[str, Any]) -> float:
        """What a list shows at once, at the start or after an outage, is visited over one interval."""
        if event["type"] is not None:
            return 0.0
        return random.uniform(0.0, self._settings.poll_s)  # noqa: S311 - spreads load, no secret

    def _gauges(self) -> Iterable[tuple[str, str, Mapping[str, str], float]]:
        name, text = "kvcellar_controller_answer_age_seconds", "Time since a list or watch answered"
        yield name, text, {}, self._age.seconds
        name, text = "kvcellar_controller_pods", "Pods that have opted in, by what was injected"
        injected = sum(pod.is_injected for pod in self._world.pods.values())
        skipped = sum(
            bool(pod.skipped) and not pod.is_injected for pod in self._world.pods.values()
        )
        missed = len(self._world.pods) - injected - skipped
        for state, count in (("injected", injected), ("skipped", skipped), ("missed", missed)):
            yield name, text, {"state": state}, count
        name, text = "kvcellar_controller_regions", "OffloadRegions by phase"
        phases = Counter(
            str(each["status"].get("phase", "Unknown")) for each in self._world.regions.values()
        )
        for phase, count in phases.items():
            yield name, text, {"phase": phase}, count
        if self._loop is not None:
            name, text = "kvcellar_controller_poll_lag_seconds", "How late the newest visit began"
            yield name, text, {}, self._loop.lag_s


def _is_news(body: Mapping[str, Any], known: Mapping[str, Any] | None) -> bool:
    """Whether a region changed by another hand: our own writes come back by the watch as well."""
    if known is None or known["metadata"]["uid"] != body["metadata"]["uid"]:
        return True
    is_ours = known["metadata"]["resourceVersion"] == body["metadata"]["resourceVersion"]
    return not is_ours


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    # The kinds are known and were waited for; watching CRDs and namespaces would ask for more rights.
    settings.scanning.disabled = True
    settings.watching.label_selectors[_PODS] = f"{LABEL_INJECT}=true"
    settings.watching.field_selectors[_EVENTS] = refusals.FIELD_SELECTOR
    settings.watching.chunk_size = _PAGE
    settings.watching.server_timeout = _WATCH_S
    settings.watching.client_timeout = _WATCH_S + 30
    settings.networking.error_backoffs = _Backoffs()
    settings.networking.connect_timeout = 10
    settings.process.ultimate_exiting_timeout = _EXIT_S
    # Handlers only take notes, so nothing is worth waiting for at the end.
    settings.queueing.idle_timeout = 1.0
    settings.queueing.exit_timeout = 0.5
    return settings

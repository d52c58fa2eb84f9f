"""The API server: a few verbs over JSON, and its refusals as errors of ours.

No request is repeated here. Whoever asks knows whether to look again, to go on, or to wait: the cache
lists anew, the controller comes back to the pod at its next turn.

Objects stay plain JSON: fields that this version does not know have to survive.
"""

import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Self

import aiohttp

from kvcellar.errors import KVCellarError
from kvcellar_operator.connection import Connection
from kvcellar_operator.objects import FIELD_MANAGER, JsonObject

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"

_PAGE = 500
"""Objects of one page of a list: what kubectl takes."""
_WATCH_S = 240
"""A watch ends by then and is opened anew, so a dead connection is noticed."""
_SILENCE_S = 90.0
"""The API server sends a bookmark at least every minute."""
_WATCH_LINE_BYTES = 8 * 2**20
"""An object is at most 1.5 MiB in etcd; its JSON is larger."""


class ApiFailure(KVCellarError):
    """The API server refused a request, or did not answer.

    Attributes:
        status: of HTTP; 0 if there was no answer.
        reason: the server's word for it, such as AlreadyExists.
    """

    def __init__(self, message: str, status: int = 0, reason: str = "") -> None:
        """Keep status and reason beside the sentence."""
        super().__init__(message)
        self.status = status
        self.reason = reason


class NotFound(ApiFailure):
    """404: there is no such object, or no such kind."""


class Conflict(ApiFailure):
    """409: it exists already, or somebody else changed it first."""


class Forbidden(ApiFailure):
    """403: RBAC, a quota or an admission plugin refuses it."""


class Expired(ApiFailure):
    """410: the resource version is too old to go on from; list anew."""


class Unreachable(ApiFailure):
    """No answer, or one that says to come back later."""


_ERRORS: dict[int, type[ApiFailure]] = {
    HTTPStatus.NOT_FOUND: NotFound,
    HTTPStatus.CONFLICT: Conflict,
    HTTPStatus.FORBIDDEN: Forbidden,
    HTTPStatus.GONE: Expired,
    HTTPStatus.TOO_MANY_REQUESTS: Unreachable,
}


class Api:
    """Requests to one API server; use it as a context."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._session = connection.new_session()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._session.close()

    async def get(self, path: str) -> JsonObject:
        """Read an object."""
        return await self._request("GET", path)

    async def create(self, path: str, body: JsonObject) -> JsonObject:
        """Create an object in the collection `path`."""
        return await self._request("POST", path, body, {"fieldManager": FIELD_MANAGER})

    async def replace(self, path: str, body: JsonObject) -> JsonObject:
        """Replace an object; its resourceVersion, if given, has to be the present one."""
        return await self._request("PUT", path, body, {"fieldManager": FIELD_MANAGER})

    async def patch(
        self, path: str, body: JsonObject | list[JsonObject], content_type: str = MERGE_PATCH
    ) -> JsonObject:
        """Change an object; a resourceVersion in a merge patch has to be the present one."""
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request("PATCH", path, body, query, content_type)

    async def pages(self, path: str, query: Mapping[str, str]) -> AsyncIterator[JsonObject]:
        """The pages of a list; the last one's resourceVersion is where a watch may begin."""
        following: dict[str, str] = {}
        while True:
            page = await self._request(
                "GET", path, query={**query, "limit": str(_PAGE), **following}
            )
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            following = {"continue": token}

    async def watch(
        self, path: str, query: Mapping[str, str], since: str
    ) -> AsyncIterator[tuple[str, JsonObject]]:
        """The changes of a list since a resource version, as (type, object); ends after minutes.

        Raises:
            Expired: the version is too old.
            Unreachable: the connection broke or fell silent.
        """
        asked = {
            **query,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": since,
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=_SILENCE_S)
        try:
            async with self._session.get(
                self._connection.server + path,
                params=asked,
                timeout=timeout,
                read_bufsize=_WATCH_LINE_BYTES,
            ) as response:
                await _refuse(response, f"watch {path}")
                while line := await response.content.readline():
                    yield _change(json.loads(line), path)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unreachable(f"watch {path}: {_told(error)}") from error

    async def _request(
        self,
        method: str,
        path: str,
        body: JsonObject | list[JsonObject] | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> JsonObject:
        what = f"{method} {path}"
        try:
            async with self._session.request(
                method,
                self._connection.server + path,
                params=query,
                data=None if body is None else json.dumps(body).encode(),
                headers={"Content-Type": content_type},
            ) as response:
                await _refuse(response, what)
                answer: JsonObject = await response.json()
                return answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unreachable(f"{what}: {_told(error)}") from error


async def _refuse(response: aiohttp.ClientResponse, what: str) -> None:
    if response.ok:
        return
    text = await response.text(errors="replace")
    try:
        status = json.loads(text)
        message, reason = str(status["message"]), str(status.get("reason", ""))
    except (ValueError, TypeError, KeyError):
        message, reason = text[:200], ""
    raise _failure(f"{what}: {response.status} {message}", response.status, reason)


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _failure(message: str, status: int, reason: str) -> ApiFailure:
    is_temporary = status >= HTTPStatus.INTERNAL_SERVER_ERROR
    kind = Unreachable if is_temporary else _ERRORS.get(status, ApiFailure)
    return kind(message, status, reason)


def _change(event: JsonObject, path: str) -> tuple[str, JsonObject]:
    kind, body = event["type"], event["object"]
    if kind == "ERROR":
        status = int(body.get("code", 0))
        raise _failure(f"watch {path}: {body.get('message', '')}", status, body.get("reason", ""))
    return kind, body

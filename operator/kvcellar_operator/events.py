"""What the controller tells people by Events: which to post, which to count on, which to hold back. Pure.

One Event object stands for one reason on one object; what happens again raises its count. Its name comes
from both, so a controller that was killed, or a second one, finds the Event that is there already.

Each occurrence carries a mark that stays the same while the transition behind it is the same one. A mark
that the Event bears already was told before the kill, and is not told again.
"""

import hashlib
import re
from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kvcellar_operator.objects import FIELD_MANAGER, JsonObject

ANNOTATION_MARK = "kvcellar.dev/transition"
"""Mark of the newest occurrence that an Event stands for."""

HOLD_S = 60.0
"""An Event is written at most once in this time, whatever happens; what came meanwhile is counted."""
MEMORY = 8192
"""Events that are remembered; of an older one the API server is asked anew."""

_MAX_MESSAGE = 1024
"""The API server refuses a longer one."""
_MAX_NAME = 253
_HASH_DIGITS = 16


class EventType(StrEnum):
    """Whether somebody should look."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Subject:
    """The object that an Event is about."""

    api_version: str
    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Occurrence:
    """Something that happened to an object.

    Attributes:
        subject: the object.
        type: whether somebody should look.
        reason: CamelCase, for machines; docs/reference/events.md lists them all.
        message: for people.
        mark: the same for the same transition; see the module's docstring.
    """

    subject: Subject
    type: EventType
    reason: str
    message: str
    mark: str


@dataclass(frozen=True, slots=True)
class Tally:
    """What is known of one Event: how it was written last, and what is held back since."""

    mark: str
    count: int
    written_s: float
    held: Occurrence | None = None
    n_held: int = 0


def event_name(occurrence: Occurrence) -> str:
    """Name of the Event object: of the subject's name, and a hash of its UID and the reason."""
    subject = occurrence.subject
    digest = hashlib.sha256(f"{subject.uid}/{occurrence.reason}".encode()).hexdigest()
    room = _MAX_NAME - _HASH_DIGITS - 1
    stem = re.sub("[-.]+$", "", subject.name[:room])
    return f"{stem}.{digest[:_HASH_DIGITS]}"


def new_event(occurrence: Occurrence, now: str) -> JsonObject:
    """The Event object of a first occurrence; `now` is a timestamp of the API."""
    subject = occurrence.subject
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": event_name(occurrence),
            "namespace": subject.namespace,
            "annotations": {ANNOTATION_MARK: occurrence.mark},
        },
        "involvedObject": {
            "apiVersion": subject.api_version,
            "kind": subject.kind,
            "namespace": subject.namespace,
            "name": subject.name,
            "uid": subject.uid,
        },
        "type": str(occurrence.type),
        "reason": occurrence.reason,
        "message": occurrence.message[:_MAX_MESSAGE],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def raised_event(
    present: JsonObject, occurrence: Occurrence, now: str, n_times: int = 1
) -> JsonObject | None:
    """The merge patch that counts on an Event that is there; None if it bears this mark already."""
    metadata = present["metadata"]
    if (metadata.get("annotations") or {}).get(ANNOTATION_MARK) == occurrence.mark:
        return None
    return {
        "metadata": {
            "resourceVersion": metadata["resourceVersion"],
            "annotations": {ANNOTATION_MARK: occurrence.mark},
        },
        "type": str(occurrence.type),
        "message": occurrence.message[:_MAX_MESSAGE],
        "lastTimestamp": now,
        "count": count_of(present) + n_times,
    }


def count_of(present: JsonObject) -> int:
    """How often an Event says that it happened."""
    count: Any = present.get("count")
    return count if isinstance(count, int) and count > 0 else 1


class EventLedger:
    """Decides which occurrences are written now; remembers the newest `MEMORY` Events."""

    def __init__(self) -> None:
        self._tallies: OrderedDict[tuple[str, str], Tally] = OrderedDict()

    def admit(self, occurrence: Occurrence, now_s: float) -> int:
        """How many times to write the occurrence for now: 0 if it was written, or is held back."""
        key = (occurrence.subject.namespace, event_name(occurrence))
        tally = self._tallies.get(key)
        if tally is None:
            return 1
        self._tallies.move_to_end(key)
        if tally.mark == occurrence.mark or (
            tally.held is not None and tally.held.mark == occurrence.mark
        ):
            return 0
        if now_s - tally.written_s < HOLD_S:
            self._tallies[key] = replace(tally, held=occurrence, n_held=tally.n_held + 1)
            return 0
        return tally.n_held + 1

    def remembers(self, occurrence: Occurrence) -> bool:
        """Whether its Event was written, so that it is there unless the API server has dropped it."""
        return (occurrence.subject.namespace, event_name(occurrence)) in self._tallies

    def due(self, now_s: float) -> list[tuple[Occurrence, int]]:
        """What was held back long enough, each with how often it happened."""
        return [
            (tally.held, tally.n_held)
            for tally in self._tallies.values()
            if tally.held is not None and now_s - tally.written_s >= HOLD_S
        ]

    def written(self, occurrence: Occurrence, count: int, now_s: float) -> None:
        """The Event stands, with this count."""
        key = (occurrence.subject.namespace, event_name(occurrence))
        self._tallies[key] = Tally(occurrence.mark, count, now_s)
        self._tallies.move_to_end(key)
        while len(self._tallies) > MEMORY:
            self._tallies.popitem(last=False)

    def forget(self, occurrence: Occurrence) -> None:
        """Nothing is known of its Event any more, and nothing of it is held back."""
        self._tallies.pop((occurrence.subject.namespace, event_name(occurrence)), None)

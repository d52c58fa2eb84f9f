"""The desired state: what people want of the regions of one pod, on its way to the pod's sidecar.

Purpose: `contents` and `retention` can be changed while an engine runs, without a new pod and without a
verb in the sidecar's HTTP. The controller writes the specs of a pod's OffloadRegions into one annotation
of the pod, `ANNOTATION_DESIRED`; the kubelet hands it to the sidecar as the file `DESIRED_FILE`.

Example::

    {"podUID":"7b0c...","regions":{"7b0c...":{"generation":2,"contents":"keep","retention":"15m"}}}

Rules for a writer: `generation` is that of the OffloadRegion's spec and rises with each change; a value
that is left out means what the sidecar was started with; a region without wishes is left out.
Rules for a reader: a key that it does not know is let pass; everything else that breaks the shape makes
the whole text unusable, and so does another pod's UID. No text, or none but blanks: nothing is desired.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvcellar.contract.parsing import parse_duration_s, parse_engine_id
from kvcellar.contract.text import printable
from kvcellar.contract.values import Contents
from kvcellar.errors import InvalidDesiredState, InvalidEngineId

MAX_DESIRED_BYTES = 2**18
"""Most bytes of the text: what Kubernetes allows all annotations of an object together."""
_MAX_GENERATION = 2**63 - 1
_SHOWN_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class DesiredRegion:
    """What is desired of one region. Field names are the JSON keys.

    Attributes:
        generation: of the OffloadRegion's spec, above 0.
        contents, retention: as in `KVCELLAR_CONTENTS` and `KVCELLAR_RETENTION`; None: as the sidecar was
            started.
    """

    generation: int
    contents: str | None = None
    retention: str | None = None


@dataclass(frozen=True, slots=True)
class DesiredState:
    """What is desired of the regions of one pod, by engine id. Field names are the JSON keys."""

    podUID: str
    regions: Mapping[str, DesiredRegion]


def desired_text(state: DesiredState) -> str:
    """The JSON of a desired state; the same state gives the same text."""
    regions = {
        engine_id: {name: value for name, value in asdict(region).items() if value is not None}
        for engine_id, region in sorted(state.regions.items())
    }
    return json.dumps({"podUID": state.podUID, "regions": regions}, separators=(",", ":"))


def parse_desired(data: bytes) -> DesiredState | None:
    """Read a desired state; None if nothing is desired.

    Raises:
        InvalidDesiredState: it is too long, no JSON, or breaks the shape; the message says where.
    """
    if len(data) > MAX_DESIRED_BYTES:
        raise InvalidDesiredState(f"it has more than {MAX_DESIRED_BYTES} bytes, which no pod's has")
    if not data.strip():
        return None
    body = _mapping(_decoded(data), "it")
    uid, regions = body.get("podUID"), body.get("regions")
    if not isinstance(uid, str) or not uid:
        raise InvalidDesiredState("its podUID is no text")
    parsed = {}
    for engine_id, entry in _mapping(regions, "its regions").items():
        try:
            parse_engine_id(engine_id)
        except InvalidEngineId as error:
            raise InvalidDesiredState(f"it names {_shown(engine_id)}: no engine id") from error
        parsed[engine_id] = _region(_mapping(entry, f"its region {engine_id}"), engine_id)
    return DesiredState(uid, parsed)


def is_retention(text: str) -> bool:
    """Whether a text is `keep`, `now`, or a duration above zero."""
    return text in ("keep", "now") or bool(parse_duration_s(text))


def _region(entry: Mapping[str, object], engine_id: str) -> DesiredRegion:
    generation = entry.get("generation")
    if (
        isinstance(generation, bool)
        or not isinstance(generation, int)
        or not 0 < generation <= _MAX_GENERATION
    ):
        raise InvalidDesiredState(
            f"the generation of its region {engine_id} is {_shown(generation)}: it has to be a whole number above 0"
        )
    contents = _text(entry, "contents", engine_id)
    if contents is not None and contents not in tuple(Contents):
        raise _no_value("contents", engine_id, contents, " or ".join(Contents))
    retention = _text(entry, "retention", engine_id)
    if retention is not None and not is_retention(retention):
        raise _no_value("retention", engine_id, retention, "keep, now or a duration such as 1h30m")
    return DesiredRegion(generation, contents, retention)


def _text(entry: Mapping[str, object], name: str, engine_id: str) -> str | None:
    value = entry.get(name)
    if value is not None and not isinstance(value, str):
        raise _no_value(name, engine_id, value, "a text")
    return value


def _no_value(name: str, engine_id: str, value: object, allowed: str) -> InvalidDesiredState:
    return InvalidDesiredState(
        f"{name} of its region {engine_id} is {_shown(value)}: it has to be {allowed}"
    )


def _decoded(data: bytes) -> object:
    try:
        return json.loads(
            data.decode(), object_pairs_hook=_once_each, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:  # the latter: thousands of brackets
        raise InvalidDesiredState(f"it is not JSON in UTF-8: {_shown(str(error))}") from error


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a key that stands twice: which of the two is meant nobody can tell."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number")


def _mapping(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidDesiredState(f"{what} is {_shown(value)}: it has to be a JSON object")
    return value


def _shown(value: object) -> str:
    """A value that anybody may have written, short and harmless to a terminal."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = value if isinstance(value, str) else repr(value)
    cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return printable(cut)

"""Reading what people write: engine ids, capacities, durations.

Each text is read in one place with one message, and nothing is trimmed: a blank around an id or a
capacity is refused like any other character that does not belong there, since it would be somebody
else's id to a program that compares bytes.
"""

import re
from decimal import Decimal, InvalidOperation
from typing import NewType

from kvcellar.errors import InvalidCapacity, InvalidEngineId

EngineId = NewType("EngineId", str)
"""A validated engine id; make one with `parse_engine_id`."""

_ENGINE_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_QUANTITY = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<suffix>|[eE][+-]?[0-9]{1,3}|[kMGTPE]|[KMGTPE]i|m)"
)
_DURATION = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s)?")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
MAX_CAPACITY_BYTES = 2**63 - 1


def parse_engine_id(text: str) -> EngineId:
    """Validate an engine id: `[A-Za-z0-9._-]{1,128}` without a leading dot.

    It becomes part of a file name, so nothing that could leave the directory or hide may pass.

    Raises:
        InvalidEngineId: with the text and the rule.
    """
    if not _ENGINE_ID.fullmatch(text):
        raise InvalidEngineId(
            f"engine id {_shown(text)} ({len(text)} characters) cannot be used: an engine id is 1 to 128 characters of "
            "A-Z a-z 0-9 . _ - and does not begin with a dot; set KVCELLAR_ENGINE_ID to such a name"
        )
    return EngineId(text)


def expand_engine_ids(text: str, engines: int) -> list[EngineId]:
    """The engine ids of one sidecar: a comma list, each with `_dp0 ... _dp(n-1)` if `engines` > 1.

    Raises:
        InvalidEngineId: one of them is invalid, or appears twice.
    """
    ids: list[EngineId] = []
    for part in text.split(","):
        base = parse_engine_id(part)
        names = [base] if engines <= 1 else [f"{base}_dp{n}" for n in range(engines)]
        ids += [parse_engine_id(name) for name in names]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    if twice:
        raise InvalidEngineId(
            f"engine id {twice[0]!r} is named twice in {text!r}: each engine needs a region, so an id, of its own"
        )
    return ids


def parse_capacity(text: str) -> int:
    """Bytes of a capacity: whole bytes, or a Kubernetes quantity such as `200Gi`.

    Raises:
        InvalidCapacity: not a quantity, a fraction of a byte, zero or less, or 2^63 and above.
    """
    match = _QUANTITY.fullmatch(text)
    if not match:
        raise InvalidCapacity(_capacity_message(text, "it is not a quantity"))
    suffix = match["suffix"]
    try:
        if suffix[:1] in ("e", "E") and suffix not in ("E", "Ei"):
            value = Decimal(match["number"] + suffix)
        elif suffix == "m":
            value = Decimal(match["number"]) / 1000
        else:
            value = Decimal(match["number"]) * (_BINARY.get(suffix) or _DECIMAL[suffix])
    except InvalidOperation as error:
        raise InvalidCapacity(_capacity_message(text, "it is not a quantity")) from error
    if value > MAX_CAPACITY_BYTES:
        raise InvalidCapacity(_capacity_message(text, "it is 2^63 bytes or more"))
    if value != value.to_integral_value():
        raise InvalidCapacity(_capacity_message(text, "it has a fraction of a byte"))
    if value <= 0:
        raise InvalidCapacity(_capacity_message(text, "it is not above zero"))
    return int(value)


def parse_duration_s(text: str) -> float | None:
    """Seconds of a duration such as `90s`, `15m` or `1h30m`; None if it is not one."""
    match = _DURATION.fullmatch(text)
    if not text or not match:
        return None
    hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(hours * 3600 + minutes * 60 + seconds)


def parse_timeout_s(text: str) -> float | None:
    """Seconds of `KVCELLAR_ATTACH_TIMEOUT`: a duration, or a number of seconds; None if it is neither or 0."""
    seconds = parse_duration_s(text)
    if seconds is None and _SECONDS.fullmatch(text):
        seconds = float(text)
    return seconds or None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 140 else text[:140] + "...")


def _capacity_message(text: str, why: str) -> str:
    return (
        f"capacity {_shown(text)} cannot be used: {why}; give whole bytes below 2^63 or a Kubernetes quantity "
        "such as 200Gi, 1500M or 1Ti"
    )

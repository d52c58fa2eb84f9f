"""Pieces of OpenAPI schemas for CRDs. Pure.

Every piece takes a description first: `kubectl explain` shows it, and a test wants one on every field.
"""

from enum import StrEnum
from typing import Any

from kvcellar_operator import profiles
from kvcellar_operator.quantities import format_bytes

Schema = dict[str, Any]

_SHARE = profiles.SHARE_PATTERN
_DURATION = profiles.DURATION_PATTERN
_RETENTION = profiles.RETENTION_PATTERN
MAX_QUANTITY_CHARACTERS = 24
# Bounds make the cost of a rule known, which the API server asks for.

_WHOLE = "quantity({0}).asApproximateFloat() == double(int(quantity({0}).asApproximateFloat()))"
"""Source: the quantity library of Kubernetes' CEL. isInteger() would refuse `1.5Gi` as well."""
_BYTES = f"isQuantity(self) && quantity(self).isLessThan(quantity('8E')) && {_WHOLE.format('self')}"

CAPACITY_RULE = (
    "type(self) == int ? self >= 2097152 : self.endsWith('%') "
    f"? self.matches('{_SHARE}') && self.matches('[1-9]') "
    f": {_BYTES} && quantity(self).compareTo(quantity('2Mi')) >= 0"
)
SIZE_RULE = (
    f"type(self) == int ? self >= 0 : {_BYTES} && quantity(self).compareTo(quantity('0')) >= 0"
)
REGION_SIZE_RULE = (
    f"type(self) == int ? self > 0 : {_BYTES} && quantity(self).isGreaterThan(quantity('0'))"
)
CPU_RULE = (
    "type(self) == int ? self > 0 : isQuantity(self) && quantity(self).isGreaterThan(quantity('0'))"
)
DURATION_RULE = f"self.matches('{_DURATION}') && self.matches('[1-9]')"
RETENTION_RULE = (
    f"self.matches('{_RETENTION}') && (self in ['keep', 'now'] || self.matches('[1-9]'))"
)
DURATION_WORDS = "a duration above zero in hours, minutes and seconds, such as 1h30m, 5m or 90s"
RETENTION_WORDS = f"keep, now, or {DURATION_WORDS}"


def rule(expression: str, message: str, **more: Any) -> Schema:  # noqa: ANN401 - keys of a rule
    """One CEL rule with the sentence that a refused object gets."""
    return {"rule": expression, "message": message, **more}


def text(description: str, limit: int, **more: Any) -> Schema:  # noqa: ANN401 - keys of a schema
    """A string of up to `limit` characters."""
    return {"type": "string", "description": description, "maxLength": limit, **more}


def choice(description: str, kind: type[StrEnum], **more: Any) -> Schema:  # noqa: ANN401
    """One word of an enumeration."""
    return {"type": "string", "description": description, "enum": [str(m) for m in kind], **more}


def flag(description: str, **more: Any) -> Schema:  # noqa: ANN401 - keys of a schema
    """True or false."""
    return {"type": "boolean", "description": description, **more}


def whole(description: str, limits: tuple[int, int], **more: Any) -> Schema:  # noqa: ANN401
    """A whole number within limits."""
    low, high = limits
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", "format": "int32", "description": description, **bounds, **more}


def count(description: str) -> Schema:
    """A whole number of zero or more, of 64 bits: bytes, generations."""
    return {"type": "integer", "format": "int64", "description": description, "minimum": 0}


def quantity(description: str, rules: list[Schema], default: int | str | None = None) -> Schema:
    """A Kubernetes quantity, as text or as a whole number."""
    filled = format_bytes(default) if isinstance(default, int) else default
    return {
        "description": description,
        "x-kubernetes-int-or-string": True,
        "maxLength": MAX_QUANTITY_CHARACTERS,
        **({} if filled is None else {"default": filled}),
        "x-kubernetes-validations": rules,
    }


def mapping(description: str, properties: dict[str, Schema], **more: Any) -> Schema:  # noqa: ANN401
    """An object with named fields."""
    return {"type": "object", "description": description, "properties": properties, **more}


def listing(description: str, entry: Schema, limit: int, **more: Any) -> Schema:  # noqa: ANN401
    """A list of up to `limit` entries."""
    return {"type": "array", "description": description, "maxItems": limit, "items": entry, **more}


def column(name: str, path: str, kind: str, description: str, priority: int = 0) -> Schema:
    """A column of `kubectl get`; with priority 1 of `-o wide` only."""
    extra = {"priority": priority} if priority else {}
    return {"name": name, "type": kind, "description": description, "jsonPath": path, **extra}

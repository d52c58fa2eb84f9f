"""What is said of any object of the API: its key, who writes it, how times are written. Pure."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

JsonObject = dict[str, Any]
"""An object as the API server sends it: fields that this version does not know have to survive."""

FIELD_MANAGER = "kvcellar-operator"
"""Owner of the fields that the operator writes, and the component that its Events name."""


class Key(NamedTuple):
    """What names an object within its kind; cluster-wide ones have no namespace."""

    namespace: str
    name: str


def key_of(body: JsonObject) -> Key:
    """The key of an object."""
    metadata = body["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])


def timestamp(seconds: float) -> str:
    """A time since the epoch, as the API writes it: whole seconds, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

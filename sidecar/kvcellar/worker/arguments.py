"""What `attach` is given, checked before anything is opened. Pure.

Types are checked as well: a chunk of 4096.0 bytes would fail half-way, on one rank, with a slot taken,
and an owner given as a word would pass for the other one.
"""

from numbers import Integral

from kvcellar.errors import ConfigurationError

MAX_CHUNK_BYTES = 2**62
"""Above every capacity that a file can have, and below what the metadata page cannot hold."""


def check_whole(name: str, value: object) -> None:
    """Refuse what is no whole number.

    Raises:
        ConfigurationError: with the name, the value and its type.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigurationError(_sentence(name, value, "a whole number"))


def check_chunk_bytes(value: object) -> None:
    """Refuse a size of a chunk that no region can have; 0 is one of an engine without KV blocks.

    Raises:
        ConfigurationError: with the value and the rule.
    """
    check_whole("chunk_bytes", value)
    if not 0 <= int(value) <= MAX_CHUNK_BYTES:  # type: ignore[call-overload]  # a whole number, as was checked
        raise ConfigurationError(
            f"chunk_bytes={value} cannot be used: a chunk has 0 to {MAX_CHUNK_BYTES} bytes; give the bytes of KV data "
            "in a chunk of one rank"
        )


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse an argument of another type.

    Raises:
        ConfigurationError: with the name, the value and the type.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(_sentence(name, value, f"a {kind.__name__}"))


def _sentence(name: str, value: object, wanted: str) -> str:
    return (
        f"{name}={value!r} cannot be used to attach: it is a {type(value).__name__}, and has to be {wanted}; "
        "correct it where attach is called"
    )

"""Kubernetes quantities of memory and CPU, read and written exactly. Pure.

`kvcellar.contract.parse_capacity` reads what a region may be; here zero, fractions of a CPU and numbers
that YAML reads as such are legal as well.
"""

import re
from decimal import Decimal, InvalidOperation
from math import ceil

from kvcellar.errors import ConfigurationError

_QUANTITY = re.compile(
    r"(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?P<suffix>[numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,3})?"
)
_FACTORS = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{suffix: Decimal(10) ** (3 * n) for n, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": Decimal(2) ** (10 * n) for n, suffix in enumerate("KMGTPE", start=1)},
}
_BINARY_SUFFIXES = ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
MEBIBYTE = 2**20


class InvalidQuantity(ConfigurationError):
    """A value that is no quantity of zero or more."""


def parse_quantity(value: object) -> Decimal:
    """The value of a quantity such as `200Gi`, `500m` or 2.

    Raises:
        InvalidQuantity: it is none, or negative.
    """
    text = str(value).strip().removeprefix("+")
    match = None if isinstance(value, bool) else _QUANTITY.fullmatch(text)
    if match is None:
        raise InvalidQuantity(
            f"{str(value)[:80]!r} is no quantity: give a number of zero or more, such as 200Gi, 500m or 2"
        )
    number, suffix = match["number"], match["suffix"] or ""
    try:
        if suffix in _FACTORS:
            return Decimal(number) * _FACTORS[suffix]
        return Decimal(number + suffix)
    except InvalidOperation as error:
        raise InvalidQuantity(f"{str(value)[:80]!r} is no quantity: it is too large") from error


def parse_bytes(value: object) -> int:
    """Bytes of a memory quantity; a fraction of a byte counts as one.

    Raises:
        InvalidQuantity: it is none, or negative.
    """
    return ceil(parse_quantity(value))


def parse_millicpus(value: object) -> int:
    """Thousandths of a CPU; a fraction of one counts as one.

    Raises:
        InvalidQuantity: it is none, or negative.
    """
    return ceil(parse_quantity(value) * 1000)


def format_bytes(size_bytes: int) -> str:
    """The shortest exact quantity: `200Gi`, `1536Mi`, or whole bytes."""
    size, suffix = size_bytes, ""
    for next_suffix in _BINARY_SUFFIXES:
        if size == 0 or size % 1024:
            break
        size, suffix = size // 1024, next_suffix
    return f"{size}{suffix}"


def format_millicpus(millicpus: int) -> str:
    """The shortest exact quantity: `2`, or `500m`."""
    return f"{millicpus}m" if millicpus % 1000 else str(millicpus // 1000)


def shown_bytes(size_bytes: int) -> str:
    """Bytes for people: exact, and rounded to a readable unit."""
    size, unit = float(size_bytes), ""
    for suffix in _BINARY_SUFFIXES:
        if size < 1024:
            break
        size, unit = size / 1024, suffix
    return f"{size_bytes} bytes ({size:.1f}{unit})" if unit else f"{size_bytes} bytes"

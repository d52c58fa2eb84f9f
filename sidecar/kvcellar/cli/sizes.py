"""Bytes and tables, as commands show them to people."""

from collections.abc import Sequence


def mebibytes(size_bytes: int) -> str:
    """Bytes in MiB, with one digit behind the point."""
    return f"{size_bytes / 2**20:.1f}MiB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows under their headings, in columns as wide as they have to be; one line each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "".join(f"{line.rstrip()}\n" for line in lines)

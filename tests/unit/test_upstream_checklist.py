"""The tables of upstream's checks and of bad input name tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
UPSTREAM, BAD_INPUT = REFERENCE / "upstream-checklist.md", REFERENCE / "bad-input.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def rows_of(text: str) -> list[str]:
    """Of all tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = [place - 1 for place, line in enumerate(lines) if line.startswith("|---")]
    return [
        line
        for place, line in enumerate(lines)
        if place not in heads and not line.startswith("|---")
    ]


@pytest.mark.parametrize("table", [UPSTREAM, BAD_INPUT], ids=lambda path: path.stem)
def test_every_test_that_a_table_names_exists(table: Path) -> None:
    named = _TEST.findall(table.read_text())
    assert len(named) > 40
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


@pytest.mark.parametrize("table", [UPSTREAM, BAD_INPUT], ids=lambda path: path.stem)
def test_every_row_names_a_test_or_a_reason(table: Path) -> None:
    tested, _, left_out = table.read_text().partition("## Left out")
    rows = rows_of(tested)
    assert len(rows) > 15
    assert [row for row in rows if not _TEST.search(row)] == []
    assert all(len(row.strip("| ").split(" | ")) == 2 for row in rows_of(left_out))

"""The tables of upstream's checks and of bad input name tests that exist."""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@dataclass(frozen=True, slots=True)
class Table:
    """A page with tables of tests, and the least that they have: little less than now, so that none gets lost."""

    page: str
    least_tests: int
    least_rows: int
    least_left_out: int = 0

    @property
    def text(self) -> str:
        return (REFERENCE / self.page).read_text()


TABLES = [
    Table("upstream-checklist.md", least_tests=75, least_rows=38, least_left_out=10),
    Table("bad-input.md", least_tests=60, least_rows=23),
]


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


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.page)
def test_every_test_that_a_table_names_exists(table: Table) -> None:
    named = _TEST.findall(table.text)
    assert len(named) >= table.least_tests
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.page)
def test_every_row_names_a_test_or_a_reason(table: Table) -> None:
    tested, _, left_out = table.text.partition("## Left out")
    rows, reasons = rows_of(tested), rows_of(left_out)
    assert len(rows) >= table.least_rows
    assert [row for row in rows if not _TEST.search(row)] == []
    assert len(reasons) >= table.least_left_out
    assert all(len(row.strip("| ").split(" | ")) == 2 for row in reasons)

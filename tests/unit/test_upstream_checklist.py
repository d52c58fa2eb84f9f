"""The table of upstream's checks names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "reference" / "upstream-checklist.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_every_test_that_the_table_names_exists() -> None:
    named = _TEST.findall(TABLE.read_text())
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


def test_every_row_names_a_test_or_a_reason() -> None:
    tested, left_out = TABLE.read_text().split("## Left out")
    rows = [row for row in tested.splitlines() if row.startswith("| ") and "---" not in row]
    empty = [row for row in rows if not _TEST.search(row) and row != "| behaviour | tests |"]
    assert empty == []
    reasons = [row for row in left_out.splitlines() if row.startswith("| ")]
    assert all(len(row.strip("| ").split(" | ")) == 2 for row in reasons)

"""The table of stories: each test that it names is there, and what was measured is in its rows."""

import ast
import json
from pathlib import Path

import pytest

from tests.cluster import stories
from tests.cluster.stories import STORIES

CLUSTER = Path(__file__).parents[1] / "cluster"


def names_of_tests(file: str) -> list[str]:
    path = CLUSTER / file
    assert path.exists(), f"{path} is named in the table of stories"
    tree = ast.parse(path.read_text())
    found = [each.name for each in tree.body if isinstance(each, ast.FunctionDef)]
    return [name for name in found if name.startswith("test_")]


def rows_of_page() -> list[list[str]]:
    lines = stories.PAGE.read_text().partition("<!-- stories -->")[2].partition("<!-- end -->")[0]
    rows = [line for line in lines.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_all_ten_stories_are_there() -> None:
    assert {story.number for story in STORIES} == set(range(1, 11))


@pytest.mark.parametrize("test", [test for story in STORIES for test in story.tests])
def test_each_test_of_a_story_exists(test: str) -> None:
    file, _, beginning = test.partition("::")
    assert any(name.startswith(beginning) for name in names_of_tests(file))


def test_the_page_has_the_stories_and_names_tests_that_exist() -> None:
    shown = [row for row in rows_of_page() if row[0].isdigit()]
    assert [(int(row[0]), row[1]) for row in shown] == [
        (story.number, story.words) for story in STORIES
    ]
    for row in shown:
        files = [file.strip(" `") for file in row[2].split(",")]
        assert files == ["none"] or all(names_of_tests(file) for file in files)


def test_each_file_of_tests_on_the_node_belongs_to_a_story() -> None:
    named = {test.partition("::")[0] for story in STORIES for test in story.tests}
    assert {path.name for path in CLUSTER.glob("test_node*.py")} <= named


# ---- what is made of figures


def line(test: str, **more: object) -> str:
    own = {"test": f"tests/cluster/{test}", "date": "2026-01-02", "commit": "abc1234"}
    nothing: dict[str, object] = {"restarts": {}, "recovery_s": None, "pod_bytes": None, "more": {}}
    return json.dumps(own | nothing | more)


def row_of(words: str, lines: list[str]) -> list[str]:
    table = stories.table(stories.read(lines))
    (row,) = (each for each in table.splitlines() if words in each)
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_a_row_sums_restarts_and_has_the_longest_recovery_and_the_largest_pod() -> None:
    one = "test_node_crashes.py::test_an_engine_that_is_killed"
    row = row_of(
        "killed at random moments",
        [
            line(f"{one}[3]", restarts={"engine": 3}, recovery_s=1.5, pod_bytes=96 << 20),
            line(f"{one}[100]", restarts={"engine": 100}, recovery_s=2.4, pod_bytes=90 << 20),
            line("test_node_crashes.py::test_without_kvcellar", restarts={"engine": 7}),
        ],
    )
    assert row[3:] == ["2", "engine 103", "2.4 s", "96 MiB", "", "abc1234, 2026-01-02"]


def test_the_newest_line_of_a_test_counts() -> None:
    one = "test_node_memory.py::test_one"
    row = row_of(
        "OOM kill",
        [line(one, more={"grew": "9"}), line(one, more={"grew": "0"}, date="2026-01-03")],
    )
    assert row[3] == "1"
    assert row[7:] == ["grew: 0", "abc1234, 2026-01-03"]


def test_a_story_without_figures_says_so() -> None:
    assert row_of("OOM kill", [])[3:] == ["not recorded yet", *[""] * 5]

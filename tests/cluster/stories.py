"""The stories that hold on a real cluster, and the table of them in docs/reference/stories.md.

``make soak-table`` writes the table anew from what the last runs have measured (`tests.cluster.figures`): of each
test the newest line counts, whether `make test` wrote it or `make soak`.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.box.cluster import ROOT
from tests.cluster.figures import VARIABLE, Figures

PAGE = ROOT / "docs" / "reference" / "stories.md"
FOLDER = "tests/cluster"
_BEGIN, _END = "<!-- stories -->\n", "<!-- end -->\n"
_HEAD = """\
| | story | tests | passed | restarts | longest recovery | largest pod | besides | commit, date |
|---|---|---|---|---|---|---|---|---|
"""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Story:
    """One story.

    Attributes:
        number: its place in the table; those of one number are parts of one story.
        words: what holds.
        tests: files of tests/cluster, or tests in them as ``file::beginning of the name``; empty where no
            test of the story runs on a cluster.
    """

    number: int
    words: str
    tests: tuple[str, ...]


STORIES = (
    Story(
        1,
        "a labelled pod is injected, attaches, uses its region and leaves nothing",
        ("test_node.py",),
    ),
    Story(
        1,
        "the demo's vLLM offloads, and in a soak answers alike after a kill; the README's quick start",
        ("test_cluster_demo.py", "test_quick_start.py"),
    ),
    Story(
        1,
        "a real vLLM's region is there while it loads; metrics, `du` and cgroups agree on it",
        (
            "test_node_vllm.py::test_the_region",
            "test_node_vllm.py::test_vllm",
            "test_node_vllm.py::test_metrics",
        ),
    ),
    Story(
        2,
        "an engine killed at random moments comes back each time in the same memory",
        ("test_node_crashes.py::test_an_engine",),
    ),
    Story(
        2,
        "a real vLLM killed while it starts and while it serves comes back in the same memory",
        ("test_node_vllm.py::test_a_vllm",),
    ),
    Story(
        2,
        "without kvcellar, vLLM's own region class leaves its file, and the pod crash-loops",
        ("test_node_crashes.py::test_without_kvcellar",),
    ),
    Story(
        3,
        "an OOM kill, and a region that does not fit: `degrade` serves without, `fail` says why",
        ("test_node_memory.py",),
    ),
    Story(
        4,
        "sidecar, node, operator and API server fail or go, and engines go on",
        ("test_node_outages.py",),
    ),
    Story(5, "who pays for a region; the QoS class stays", ("test_node_charges.py",)),
    Story(6, "pods of every shape", ("test_node_shapes.py",)),
    Story(
        7,
        "upgrades, rollbacks, rolled Deployments, and mixtures of releases",
        (
            "test_node_upgrades.py",
            "test_chart.py::test_a_release_is_installed_upgraded",
            "test_controller_process.py::test_a_sidecar_of_another_contract",
        ),
    ),
    Story(8, "a hostile container in the same pod", ("test_node_hostile.py",)),
    Story(
        9,
        "stock mode, and the janitor: vLLM's own region class, killed again and again",
        ("test_node_stock.py",),
    ),
    Story(
        10,
        "the network policy as it is rendered: nothing in the box enforces one",
        (
            "test_node_policy.py",
            "test_chart_rendering.py::test_a_network_policy",
            "test_chart_kubectl.py::test_kubectl_takes_what_helm_template_writes",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Line:
    """What one test has measured, in one run."""

    test: str
    date: str
    commit: str
    figures: Figures

    def belongs_to(self, story: Story) -> bool:
        """Whether it is one of the story's tests."""
        file, _, name = self.test.removeprefix(f"{FOLDER}/").partition("::")
        wanted = (each.partition("::") for each in story.tests)
        return any(file == each[0] and name.startswith(each[2]) for each in wanted)


def read(lines: Iterable[str]) -> list[Line]:
    """The newest line of each test."""
    newest: dict[str, Line] = {}
    for text in lines:
        raw = json.loads(text)
        line = Line(raw.pop("test"), raw.pop("date"), raw.pop("commit"), Figures(**raw))
        newest[line.test] = line
    return list(newest.values())


def table(lines: Iterable[Line]) -> str:
    """The stories with what was measured; a row without figures says so."""
    measured = list(lines)
    return _HEAD + "".join(
        _row(story, [line for line in measured if line.belongs_to(story)]) for story in STORIES
    )


def _row(story: Story, lines: list[Line]) -> str:
    files = ", ".join(f"`{file}`" for file in dict.fromkeys(_files(story))) or "none"
    return f"| {' | '.join((str(story.number), story.words, files, *_figures(lines)))} |\n"


def _files(story: Story) -> list[str]:
    return [each.partition("::")[0] for each in story.tests]


def _figures(lines: list[Line]) -> tuple[str, ...]:
    if not lines:
        return ("not recorded yet", *[""] * 5)
    restarts: Counter[str] = Counter()
    more: dict[str, str] = {}
    for line in lines:
        restarts.update(line.figures.restarts)
        more.update(line.figures.more)
    recoveries = [each.figures.recovery_s for each in lines if each.figures.recovery_s is not None]
    pods = [each.figures.pod_bytes for each in lines if each.figures.pod_bytes is not None]
    last = max(lines, key=lambda line: line.date)
    return (
        str(len(lines)),
        ", ".join(f"{name} {count}" for name, count in sorted((+restarts).items())),
        f"{max(recoveries):.1f} s" if recoveries else "",
        f"{max(pods) / _MIB:.0f} MiB" if pods else "",
        "; ".join(f"{name}: {value}" for name, value in sorted(more.items())),
        f"{last.commit}, {last.date}",
    )


def write_page(lines: Iterable[Line]) -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    PAGE.write_text(f"{before}{_BEGIN}\n{table(lines)}\n{_END}{after}")


def main() -> int:
    """Write the page from the file that the environment names."""
    path = Path(os.environ.get(VARIABLE, ROOT / ".tools" / "figures.jsonl"))
    if not path.exists():
        sys.stderr.write(f"{path}: no test has written its figures yet: run make soak\n")
        return 1
    write_page(read(path.read_text().splitlines()))
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} is written anew\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

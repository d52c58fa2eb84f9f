"""The list of mutants that nobody can notice, and what it is compared with; `make mutation` makes the mutants."""

import pytest

from tests.mutants import MODULES, ROOT, Mutant, explained, problems

ONE = Mutant("plan", "_places", "a == 1", "a <= 1")
OTHER = Mutant("plan", "_places", "a == 1", "a >= 1")


def test_each_listed_mutant_is_of_a_line_that_is_there() -> None:
    source = {
        module: " ".join((ROOT / "sidecar" / path).read_text().split())
        for module, (path, *_) in MODULES.items()
    }
    listed = explained()
    assert len(listed) > 20
    assert [
        each for each in listed if " ".join(each.before.split()) not in source[each.module]
    ] == []
    assert [each for each in listed if each.before == each.after] == []


def test_a_list_is_right_when_it_has_the_survivors_and_no_other() -> None:
    assert problems({ONE}, {ONE: "why"}) == []
    (missing,) = problems({ONE, OTHER}, {ONE: "why"})
    assert missing == f"nobody noticed:\n{OTHER.entry()}"
    (stale,) = problems({ONE}, {ONE: "why", OTHER: "why"})
    assert "noticed all the same" in stale
    assert OTHER.entry() in stale


def test_an_entry_needs_one_reason() -> None:
    entry = ONE.entry()
    assert explained(entry.replace('reason = ""', 'reason = "why"')) == {ONE: "why"}
    with pytest.raises(ValueError, match="no reason"):
        explained(entry)
    twice = entry.replace('reason = ""', 'reason = "why"') + "\n"
    with pytest.raises(ValueError, match="listed twice"):
        explained(twice + twice)

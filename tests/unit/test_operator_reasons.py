"""Every reason is explained, and the document says the same as the code."""

import re
from pathlib import Path

from kvcellar_operator.reasons import REASONS, Notice, Reason

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "injection.md"


def test_every_reason_is_explained_in_sentences() -> None:
    assert list(REASONS) == [*Reason, *Notice]
    for explanation in REASONS.values():
        assert explanation.meaning.endswith(".")
        assert explanation.remedy.endswith(".")


def test_reasons_are_words_that_conditions_and_events_take() -> None:
    for reason in REASONS:
        assert re.fullmatch("[A-Z][A-Za-z]*", reason)


def test_the_page_has_every_reason_with_its_meaning_and_remedy() -> None:
    rows = re.findall(r"^\| `([A-Za-z]+)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    told = {name: (meaning, remedy) for name, meaning, remedy in rows if name in set(REASONS)}

    assert told == {
        str(reason): (explanation.meaning, explanation.remedy)
        for reason, explanation in REASONS.items()
    }

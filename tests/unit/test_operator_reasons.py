"""Every reason is explained, and the documents say the same as the code.

After a wanted change:

    UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/unit/test_operator_reasons.py

writes the table of docs/how-to/troubleshoot.md anew.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from kvcellar_operator.reasons import REASONS, Explanation, Notice, Reason
from kvcellar_operator.words import TOLD, WHYS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "reference" / "injection.md"
TROUBLE = DOCS / "how-to" / "troubleshoot.md"
TABLE = re.compile(r"(?<=<!-- reasons -->\n).*(?=<!-- end -->)", re.DOTALL)
COUNTED = (Reason.INJECTED, Reason.ALREADY_INJECTED)
UNMARKED = (Reason.NOT_OPTED_IN, Reason.MIRROR_POD, Reason.INVALID_POD, Reason.POD_TOO_LARGE)


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


def everything() -> Iterator[tuple[str, str, Explanation]]:
    """Every word with where it is said, in the order of the alphabet."""
    words = [(str(word), place(word), told) for word, told in REASONS.items()]
    words += [(str(why), "condition", told) for why, told in WHYS.items()]
    words += [(str(told), "Event", explanation) for told, explanation in TOLD.items()]
    yield from sorted(words, key=lambda row: (row[0].lower(), row[1]))


def place(word: Reason | Notice) -> str:
    if isinstance(word, Notice):
        return "notice"
    if word in COUNTED:
        return "metric"
    return "warning" if word in UNMARKED else "skipped"


def test_the_page_for_trouble_has_every_reason_of_the_code_and_no_other() -> None:
    rows = ["| reason | said in | meaning | remedy |", "|---|---|---|---|"]
    rows += [
        f"| `{word}` | {where} | {told.meaning} | {told.remedy} |"
        for word, where, told in everything()
    ]
    table = "\n".join(rows) + "\n"
    text = TROUBLE.read_text()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        TROUBLE.write_text(TABLE.sub(lambda _: table, text))
        text = TROUBLE.read_text()

    assert table in text

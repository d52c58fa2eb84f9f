"""Writes plain data as YAML, without a YAML library. Pure.

Block style for maps and lists, JSON for scalars: every JSON scalar is one of YAML, so no text can be taken
for a number or a boolean.
"""

import json
import re
from typing import Any

_PLAIN_KEY = re.compile(r"[A-Za-z$][A-Za-z0-9_./-]*")
_UNPRINTABLE = re.compile("[\x7f-\x84\x86-\x9f]")
"""Characters that JSON takes as they are, and YAML does not."""
_AMBIGUOUS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def to_yaml(value: Any) -> str:  # noqa: ANN401 - any plain data
    """One YAML document of maps, lists, texts, numbers, booleans and null."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:  # noqa: ANN401 - any plain data
    if isinstance(value, dict) and value:
        return [line for key, item in value.items() for line in _entry(f"{_key(key)}:", item)]
    if isinstance(value, list) and value:
        return [line for item in value for line in _list_item(item)]
    return [_scalar(value)]


def _entry(head: str, item: Any) -> list[str]:  # noqa: ANN401 - any plain data
    lines = _lines(item)
    if not item or not isinstance(item, dict | list):
        return [f"{head} {lines[0]}"]
    return [head, *(f"  {line}" for line in lines)]


def _list_item(item: Any) -> list[str]:  # noqa: ANN401 - any plain data
    first, *rest = _lines(item)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:  # noqa: ANN401 - any plain data
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _key(key: str) -> str:
    is_plain = _PLAIN_KEY.fullmatch(key) and key.lower() not in _AMBIGUOUS
    return key if is_plain else _scalar(key)

"""The difference of two JSON documents as an RFC 6902 patch. Pure.

Small on purpose: what is inserted into a list becomes one `add` at its place, and nothing else of the list
is named, so that a reader of an audit log sees what was injected.
"""

from typing import Any

Operation = dict[str, Any]


def json_patch(before: Any, after: Any) -> list[Operation]:  # noqa: ANN401 - any JSON document
    """The operations that make `after` of `before`; none if they are the same."""
    return _difference("", before, after)


def _difference(path: str, before: Any, after: Any) -> list[Operation]:  # noqa: ANN401 - JSON
    if _same(before, after):
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return _of_maps(path, before, after)
    if isinstance(before, list) and isinstance(after, list):
        return _of_lists(path, before, after)
    return [{"op": "replace", "path": path, "value": after}]


def _of_maps(path: str, before: dict[str, Any], after: dict[str, Any]) -> list[Operation]:
    operations: list[Operation] = []
    for key, value in before.items():
        here = f"{path}/{_escaped(key)}"
        if key not in after:
            operations.append({"op": "remove", "path": here})
        else:
            operations += _difference(here, value, after[key])
    for key, value in after.items():
        if key not in before:
            operations.append({"op": "add", "path": f"{path}/{_escaped(key)}", "value": value})
    return operations


def _of_lists(path: str, before: list[Any], after: list[Any]) -> list[Operation]:
    """Equal ends are left alone; of the middle, pairs are compared and the rest is inserted or removed."""
    start = 0
    while start < min(len(before), len(after)) and _same(before[start], after[start]):
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and _same(before[-1 - end], after[-1 - end]):
        end += 1
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    pairs = min(len(old), len(new))
    operations: list[Operation] = []
    for offset in range(pairs):
        operations += _difference(f"{path}/{start + offset}", old[offset], new[offset])
    for position in reversed(range(start + pairs, start + len(old))):
        operations.append({"op": "remove", "path": f"{path}/{position}"})
    for position in range(start + pairs, start + len(new)):
        value = after[position]
        operations.append({"op": "add", "path": f"{path}/{position}", "value": value})
    return operations


def _same(before: Any, after: Any) -> bool:  # noqa: ANN401 - JSON
    """Whether two documents are the same; to JSON, other than to Python, true is not 1."""
    if isinstance(before, bool) or isinstance(after, bool):
        return before is after
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(v, after[k]) for k, v in before.items())
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_same, before, after))
    return bool(before == after)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")

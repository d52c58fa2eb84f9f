"""JSON patches: they make what they say, and name no more than they must."""

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jsonpatch import apply_patch

from kvcellar_operator.patch import json_patch

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(min_value=0, max_value=2) | st.text("a/~", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["a", "b", "a/b", "~", ""]), inner, max_size=3)
    ),
    max_leaves=12,
)
OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON, max_size=3)


@given(OBJECTS, OBJECTS)
def test_a_patch_makes_the_second_of_the_first(before: Any, after: Any) -> None:  # noqa: ANN401
    kept = copy.deepcopy(before)

    made = apply_patch(before, json_patch(before, after))

    assert json.dumps(made, sort_keys=True) == json.dumps(after, sort_keys=True)
    assert before == kept


def test_an_insertion_into_a_list_is_one_operation() -> None:
    before = {"list": [{"name": "a"}, {"name": "b"}]}
    after = {"list": [{"name": "new"}, {"name": "a"}, {"name": "b"}]}

    assert json_patch(before, after) == [{"op": "add", "path": "/list/0", "value": {"name": "new"}}]


def test_nothing_is_done_for_nothing() -> None:
    assert json_patch({"a": [1]}, {"a": [1]}) == []


def test_true_is_not_one() -> None:
    assert json_patch({"a": 1}, {"a": True}) == [{"op": "replace", "path": "/a", "value": True}]


def test_keys_are_escaped() -> None:
    assert json_patch({}, {"a/b~c": 1}) == [{"op": "add", "path": "/a~1b~0c", "value": 1}]

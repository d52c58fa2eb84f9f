"""What holds of any pod: generated ones, and documents that are no pods at all."""

import copy
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jsonpatch import apply_patch

from kvcellar.contract import LIBRARY_CURRENT, LIBRARY_DIR, Mode
from kvcellar_operator.demands import aggregate, memory_limit_bytes, pod_amount, qos_class
from kvcellar_operator.inject import (
    Injection,
    InjectSettings,
    Outcome,
    Profile,
    Reason,
    inject,
    json_patch,
)
from kvcellar_operator.pods import Pod, all_containers, items, spec_of
from tests.support.generated_pods import PROFILES, pods

SETTINGS = InjectSettings(image="example/kvcellar:1", version="1.0.0")
_NAME = re.compile("[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def assert_kept(before: Any, after: Any, path: str = "") -> None:  # noqa: ANN401 - JSON
    """Everything of `before` is in `after`, lists in their order; what may rise is looked at elsewhere."""
    if path.startswith("/spec/resources/"):
        return
    if isinstance(before, dict):
        for key, value in before.items():
            assert key in after, f"{path}/{key} is lost"
            assert_kept(value, after[key], f"{path}/{key}")
    elif isinstance(before, list):
        rest = iter(after)
        for position, entry in enumerate(before):
            assert any(is_kept(entry, other) for other in rest), f"{path}/{position} is lost"
    else:
        assert is_same_text(before, after), f"{path} was {before!r} and is {after!r}"


def is_kept(before: Any, after: Any) -> bool:  # noqa: ANN401 - JSON
    try:
        assert_kept(before, after)
    except (AssertionError, TypeError, AttributeError):
        return False
    return True


def is_same_text(before: object, after: object) -> bool:
    """The same, but for the library in front of a PYTHONPATH."""
    return before == after or after == f"{LIBRARY_CURRENT}:{before}"


def assert_legal(pod: Pod) -> None:
    """What the API server would refuse at once is not there."""
    spec = spec_of(pod)
    names = [container["name"] for container in all_containers(pod)]
    assert len(set(names)) == len(names)
    volumes = [volume["name"] for volume in items(spec, "volumes")]
    assert len(set(volumes)) == len(volumes)
    assert all(_NAME.fullmatch(name) and len(name) <= 63 for name in [*names, *volumes])
    for container in all_containers(pod):
        paths = [mount["mountPath"].rstrip("/") for mount in items(container, "volumeMounts")]
        assert len(set(paths)) == len(paths)
        assert {mount["name"] for mount in items(container, "volumeMounts")} <= set(volumes)
    for resource in ("cpu", "memory"):
        requested = pod_amount(pod, "requests", resource)
        if requested is not None:
            assert requested >= aggregate(pod, "requests", resource)


@given(pods(), PROFILES)
def test_nothing_is_lost_and_twice_is_once(pod: Pod, profile: Profile) -> None:
    before = copy.deepcopy(pod)
    once: Injection = inject(pod, "ns", profile, SETTINGS)
    twice = inject(once.pod, "ns", profile, SETTINGS)

    assert pod == before
    assert twice.pod == once.pod
    assert_kept(before, once.pod)
    assert qos_class(once.pod) == qos_class(before)
    assert apply_patch(before, json_patch(before, once.pod)) == once.pod
    if once.outcome is Outcome.INJECTED:
        assert twice.outcome is Outcome.ALREADY
        assert_legal(once.pod)
        limit = memory_limit_bytes(before)
        assert not limit or memory_limit_bytes(once.pod) > limit
    assert any(
        mount["mountPath"] == LIBRARY_DIR
        for container in items(spec_of(once.pod), "containers")
        for mount in items(container, "volumeMounts")
    ) == (once.outcome is Outcome.INJECTED and profile.mode is Mode.PLUGIN)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["metadata", "spec", "labels", "containers", "name", "env", "resources", "limits"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


@given(JSON)
def test_what_is_no_pod_passes_as_it_is(document: Any) -> None:  # noqa: ANN401 - JSON
    injection = inject(document, "ns", None, SETTINGS)

    assert injection.pod is document
    assert injection.reason in (Reason.INVALID_POD, Reason.NOT_OPTED_IN)


@given(pods(), st.data())
def test_a_pod_with_one_damaged_field_is_never_an_error(pod: Pod, data: st.DataObject) -> None:
    owner: Any = pod
    key: Any = data.draw(st.sampled_from(["metadata", "spec"]))
    for _ in range(data.draw(st.integers(min_value=0, max_value=4))):
        inner = owner[key]
        if not isinstance(inner, dict | list) or not inner:
            break
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        owner, key = inner, data.draw(st.sampled_from(keys))
    owner[key] = data.draw(JSON)

    injection = inject(pod, "ns", None, SETTINGS)

    assert injection.reason in tuple(Reason)

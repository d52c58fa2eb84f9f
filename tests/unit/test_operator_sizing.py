"""The numbers of a pod: they add up, they are enough, and each that does not fit is named."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.region.index_file import index_bound_bytes as real_index_bound_bytes
from kvcellar_operator import sizing
from kvcellar_operator.profiles import Capacity, Profile
from kvcellar_operator.quantities import (
    InvalidQuantity,
    format_bytes,
    format_millicpus,
    parse_bytes,
    parse_millicpus,
    shown_bytes,
)
from kvcellar_operator.reasons import InjectionRefused, Reason
from kvcellar_operator.sizing import size, volume_size

MIB = 2**20
GIB = 2**30


def of_bytes(size_bytes: int, engines: int = 1) -> Profile:
    return Profile(capacity=Capacity(str(size_bytes), size_bytes=size_bytes), engines=engines)


def of_share(share: Fraction, engines: int = 1) -> Profile:
    return Profile(capacity=Capacity("share", share=share), engines=engines)


def test_the_numbers_of_the_documented_example() -> None:
    sized = size(of_bytes(200 * GIB), [64 * GIB], None)

    assert sized.capacity_bytes == 200 * GIB
    assert sized.size_limit_bytes == 200 * GIB + 51 * MIB + GIB
    assert sized.sidecar_memory_bytes == 205561 * MIB


def test_a_share_is_of_all_engines_together_and_divided_by_their_regions() -> None:
    sized = size(of_share(Fraction(1, 2), engines=2), [64 * GIB, 64 * GIB], None)

    assert (sized.regions, sized.capacity_bytes) == (4, 16 * GIB)


def test_a_share_falls_back_to_the_pods_limit() -> None:
    assert size(of_share(Fraction(1, 4)), [0], 40 * GIB).capacity_bytes == 10 * GIB


@pytest.mark.parametrize("pod_limit", [None, 0])
def test_a_share_of_nothing_is_refused(pod_limit: int | None) -> None:
    with pytest.raises(InjectionRefused, match="1 of 2 set none") as caught:
        size(of_share(Fraction(1, 2)), [GIB, 0], pod_limit)

    assert caught.value.reason is Reason.NO_MEMORY_LIMIT


def test_a_share_below_a_huge_page_is_refused() -> None:
    with pytest.raises(InjectionRefused) as caught:
        size(of_share(Fraction(1, 100)), [100 * MIB], None)

    assert caught.value.reason is Reason.CAPACITY_TOO_SMALL


def test_regions_that_no_number_holds_are_refused() -> None:
    with pytest.raises(InjectionRefused) as caught:
        size(of_bytes(2**62, engines=2), [GIB], None)

    assert caught.value.reason is Reason.CAPACITY_TOO_LARGE


@given(
    st.integers(min_value=2 * MIB, max_value=2**50),
    st.integers(min_value=1, max_value=64),
    st.integers(min_value=0, max_value=2**40),
)
def test_what_is_asked_for_holds_what_it_is_for(capacity: int, engines: int, headroom: int) -> None:
    profile = replace(of_bytes(capacity, engines), shm_headroom_bytes=headroom)
    sized = size(profile, [GIB], None)
    held = (sized.capacity_bytes + real_index_bound_bytes(sized.capacity_bytes)) * sized.regions

    assert 0 <= capacity - sized.capacity_bytes < 2 * MIB
    assert sized.capacity_bytes % (2 * MIB) == 0
    assert sized.regions_bytes >= held
    assert sized.size_limit_bytes >= held + headroom
    # The sidecar's own plan wants 0.3 % more than what it takes, and it has to live as well.
    assert sized.sidecar_memory_bytes >= held * 1003 // 1000 + 96 * MIB


@given(st.integers(min_value=2 * MIB, max_value=2**62))
def test_the_bound_of_the_index_file_is_one(capacity: int) -> None:
    assert sizing.index_bound_bytes(capacity) >= real_index_bound_bytes(capacity)


@pytest.mark.parametrize(
    ("size_limit", "pod_limit", "expected", "binding"),
    [
        (12 * GIB, 20 * GIB, 12 * GIB, "sizeLimit"),
        (12 * GIB, 11 * GIB, 11 * GIB, "pod"),
        (12 * GIB, 0, 12 * GIB, "sizeLimit"),
        (0, 20 * GIB, 20 * GIB, "pod"),
        (0, 0, 0, "node"),
    ],
)
def test_the_kubelet_makes_the_volume_as_large_as_the_smaller_limit(
    size_limit: int, pod_limit: int, expected: int, binding: str
) -> None:
    sized = size(of_bytes(10 * GIB), [GIB], None)

    volume = volume_size(sized, size_limit, pod_limit)

    assert (volume.size_bytes, volume.binding_limit) == (expected, binding)
    assert volume.headroom_bytes == (expected - sized.regions_bytes if expected else None)


# --- quantities


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        (1024, 1024),
        ("1Ki", 1024),
        ("1.5Gi", 3 * 2**29),
        ("1e3", 1000),
        ("1E", 10**18),
        ("100m", 1),
        ("+5", 5),
        (".5Ki", 512),
        (2.5, 3),
    ],
)
def test_a_quantity_of_bytes(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("500m", 500), (2, 2000), ("0.1", 100), ("1", 1000), ("1u", 1), ("2.5", 2500)],
)
def test_a_quantity_of_cpus(text: object, expected: int) -> None:
    assert parse_millicpus(text) == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "1GB", "1 Gi", None, True, [], "NaN", "1e9999", "Gi", "٣"]
)
def test_what_is_no_quantity_is_refused(text: object) -> None:
    with pytest.raises(InvalidQuantity):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=2**63))
def test_bytes_are_written_exactly(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=10**9))
def test_cpus_are_written_exactly(millicpus: int) -> None:
    assert parse_millicpus(format_millicpus(millicpus)) == millicpus


def test_bytes_are_shown_with_a_readable_unit() -> None:
    assert shown_bytes(5 * GIB) == "5368709120 bytes (5.0Gi)"
    assert shown_bytes(3) == "3 bytes"
    assert shown_bytes(2**62) == "4611686018427387904 bytes (4.0Ei)"

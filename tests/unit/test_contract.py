"""What is accepted as an engine id, a capacity and a variable, and what is refused with which words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar import contract
from kvcellar.contract import (
    expand_engine_ids,
    parse_capacity,
    parse_engine_id,
    printable,
    to_json,
    unknown_variables,
)
from kvcellar.errors import ConfigurationError, InvalidCapacity, InvalidEngineId

GIB = 2**30


# --- engine ids


@pytest.mark.parametrize(
    "text",
    ["a", "-", "_", "A.b", "a..b", "a.", "x" * 128, "0f6b2c84-7a53-4d0e-9f1b-2f5f0c1d8e6a-engine"],
)
def test_an_engine_id_of_the_allowed_characters_is_kept_as_it_is(text: str) -> None:
    assert parse_engine_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * 129,
        "x" * 5000,
        "a/b",
        "/a",
        "..",
        ".",
        ".hidden",
        "a\0b",
        "\0",
        "é",
        "a\u0660",
        "a b",
        " a",
        "a ",
        "a\n",
        "\n",
        "a\t",
        "a:b",
        "a,b",
        "a\udcff",
    ],
)
def test_any_other_engine_id_is_refused_with_the_rule(text: str) -> None:
    with pytest.raises(InvalidEngineId) as refusal:
        parse_engine_id(text)
    message = str(refusal.value)
    assert "1 to 128 characters" in message
    assert "KVCELLAR_ENGINE_ID" in message
    assert f"({len(text)} characters)" in message
    assert len(message) < 1000
    message.encode()  # it can be logged whatever the id was
    assert refusal.value.exit_status == 2


@given(st.text(max_size=140))
def test_whatever_passes_is_one_plain_file_name(text: str) -> None:
    try:
        parsed = parse_engine_id(text)
    except InvalidEngineId:
        return
    assert 1 <= len(parsed.encode()) <= 128
    assert parsed.isascii()
    assert "/" not in parsed
    assert "\0" not in parsed
    assert not parsed.startswith(".")
    assert parsed.strip() == parsed


def test_data_parallel_engines_get_an_id_each() -> None:
    assert expand_engine_ids("a,b", 1) == ["a", "b"]
    assert expand_engine_ids("a,b", 2) == ["a_dp0", "a_dp1", "b_dp0", "b_dp1"]


@pytest.mark.parametrize("text", ["", ",", "a,", "a,,b", "a,.b", "a, b", " a", "a ", "a\n,b"])
def test_an_empty_or_bad_part_of_the_list_of_ids_is_refused(text: str) -> None:
    with pytest.raises(InvalidEngineId):
        expand_engine_ids(text, 1)


def test_an_id_that_is_named_twice_is_refused_by_name() -> None:
    with pytest.raises(InvalidEngineId, match="'a' is named twice"):
        expand_engine_ids("a,b,a", 1)
    with pytest.raises(InvalidEngineId, match="'a_dp1' is named twice"):
        expand_engine_ids("a_dp1,a_dp1", 1)


def test_an_id_that_grows_too_long_by_its_suffix_is_refused() -> None:
    expand_engine_ids("x" * 128, 1)
    with pytest.raises(InvalidEngineId, match="132 characters"):
        expand_engine_ids("x" * 128, 2)


# --- capacities


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        ("83886080", 80 * 2**20),
        ("200Gi", 200 * GIB),
        ("1.5Gi", 3 * GIB // 2),
        ("1500M", 1_500_000_000),
        ("1k", 1000),
        ("2Ti", 2 * 2**40),
        ("1e9", 10**9),
        ("1E3", 1000),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("2000m", 2),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_a_capacity_in_bytes_or_as_a_quantity_is_read(text: str, expected: int) -> None:
    assert parse_capacity(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("-1", "not a quantity"),
        ("+1", "not a quantity"),
        ("1.5", "fraction of a byte"),
        ("1m", "fraction of a byte"),
        ("0.1Ki", "fraction of a byte"),
        ("200GB", "not a quantity"),
        ("200 Gi", "not a quantity"),
        (" 200Gi", "not a quantity"),
        ("200Gi\n", "not a quantity"),
        ("200gi", "not a quantity"),
        ("1K", "not a quantity"),
        ("1e3Gi", "not a quantity"),
        ("0x10", "not a quantity"),
        ("1_000", "not a quantity"),
        ("\u0661", "not a quantity"),
        ("nan", "not a quantity"),
        ("inf", "not a quantity"),
        ("9223372036854775808", "2^63"),
        ("8Ei", "2^63"),
        ("1e999", "2^63"),
        ("9" * 4000, "2^63"),
        ("0", "not above zero"),
        ("0Gi", "not above zero"),
        ("", "not a quantity"),
        ("  ", "not a quantity"),
        (".", "not a quantity"),
        ("Gi", "not a quantity"),
    ],
)
def test_any_other_capacity_is_refused_with_the_reason_and_a_remedy(text: str, why: str) -> None:
    with pytest.raises(InvalidCapacity) as refusal:
        parse_capacity(text)
    message = str(refusal.value)
    assert why in message
    assert repr(text)[:40] in message
    assert "200Gi" in message
    assert len(message) < 1000
    assert refusal.value.exit_status == 2
    assert isinstance(refusal.value, ConfigurationError)


@given(st.integers(1, 2**63 - 1))
def test_every_whole_number_of_bytes_is_exact(number: int) -> None:
    assert parse_capacity(str(number)) == number


@given(st.text("0123456789.eEkKMGTPim+- ", max_size=12))
def test_a_capacity_is_whole_and_positive_or_refused(text: str) -> None:
    try:
        value = parse_capacity(text)
    except InvalidCapacity:
        return
    assert isinstance(value, int)
    assert 0 < value < 2**63
    assert " " not in text


# --- variables


def test_a_variable_that_nothing_reads_is_named() -> None:
    names = {
        "KVCELLAR_CAPACTIY",
        "KVCELLAR_CAPACITY",
        "KVCELLAR_",
        "kvcellar_x",
        "PATH",
        "XKVCELLAR_A",
    }
    assert unknown_variables(names) == ["KVCELLAR_", "KVCELLAR_CAPACTIY"]


@pytest.mark.parametrize(
    "name",
    [
        "KVCELLAR_TEST_ANYTHING",
        "KVCELLAR_SERVICE_HOST",
        "KVCELLAR_SERVICE_PORT",
        "KVCELLAR_SERVICE_PORT_HTTP",
        "KVCELLAR_PORT",
        "KVCELLAR_PORT_9785_TCP",
        "KVCELLAR_PORT_9785_TCP_ADDR",
        "KVCELLAR_WEBHOOK_SERVICE_HOST",
        "KVCELLAR_WEBHOOK_SERVICE_PORT",
        "KVCELLAR_WEBHOOK_PORT_443_TCP_PROTO",
        "KVCELLAR_WEBHOOK_PORT",
    ],
)
def test_what_the_kubelet_sets_for_services_and_the_tests_own_variables_pass(name: str) -> None:
    assert unknown_variables({name}) == []


@pytest.mark.parametrize(
    "name", ["KVCELLAR_HTTPPORT", "KVCELLAR_TEST", "KVCELLAR_SERVICE", "KVCELLAR_PORTS"]
)
def test_what_only_resembles_a_service_is_named(name: str) -> None:
    assert unknown_variables({name}) == [name]


def test_every_variable_of_the_contract_is_known() -> None:
    declared = {
        value
        for name, value in vars(contract).items()
        if name.startswith("ENV_") and isinstance(value, str) and name != "ENV_PREFIX"
    }
    assert declared == set(contract.ENV_NAMES)
    assert unknown_variables(declared) == []


def test_a_body_is_plain_json() -> None:
    limit = contract.LimitBody("tmpfs", 2, 1, binding=True)
    body = contract.PlanBody(
        fits=False, askedBytes=2, freeBytes=1, bindingLimit="tmpfs", limits=[limit]
    )
    assert json.loads(json.dumps(to_json(body))) == {
        "fits": False,
        "askedBytes": 2,
        "freeBytes": 1,
        "bindingLimit": "tmpfs",
        "limits": [{"name": "tmpfs", "limitBytes": 2, "usageBytes": 1, "binding": True}],
    }


# --- text from elsewhere


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 字", "plain é 字"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("two\nlines\r\t", "two\\nlines\\r\\t"),
        ("\x9b2J", "\\x9b2J"),
        ("turned \u202e about", "turned \\u202e about"),
        ("half \udc80", "half \\udc80"),
    ],
)
def test_what_would_move_a_terminal_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_shown_text_is_printed_and_stays_as_it_is_when_shown_again(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown

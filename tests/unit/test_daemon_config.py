"""Every setting of the sidecar: what is accepted, and the sentence that refuses the rest."""

import os
from pathlib import Path

import pytest

from kvcellar import contract
from kvcellar.contract import Contents, HugePages, Janitor, Mode, OnFailure, Owner, Pin
from kvcellar.daemon.config import Settings
from kvcellar.daemon.retention import Retention
from kvcellar.errors import ConfigurationError, InvalidCapacity, InvalidEngineId


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith(contract.ENV_PREFIX):
            monkeypatch.delenv(name)


def load(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Settings:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Settings.load()


def test_defaults_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(monkeypatch)
    assert dict(settings) == {
        "root": Path("/dev/shm"),
        "directory": None,
        "owner": Owner.SIDECAR,
        "engine_id": None,
        "engines": 1,
        "capacity_bytes": None,
        "contents": Contents.DISCARD,
        "retention": Retention("keep", None),
        "mode": Mode.PLUGIN,
        "on_failure": OnFailure.DEGRADE,
        "attach_timeout_s": 300.0,
        "pin": Pin.AUTO,
        "settle_threads": 1,
        "huge_pages": HugePages.AUTO,
        "janitor": Janitor.RECLAIM,
        "pod_memory_limit_bytes": 0,
        "pod_uid": None,
        "desired_file": None,
        "http_host": "127.0.0.1",
        "http_port": 9785,
        "log_level": "INFO",
    }
    assert settings.region_directory == Path("/dev/shm/kvcellar")


GOOD = [
    ("KVCELLAR_ROOT", "/mnt/shm", "root", Path("/mnt/shm")),
    ("KVCELLAR_DIR", "/mnt/shm/mine", "directory", Path("/mnt/shm/mine")),
    ("KVCELLAR_DIR", "/mnt/shm/mine", "region_directory", Path("/mnt/shm/mine")),
    ("KVCELLAR_ROOT", "/mnt", "region_directory", Path("/mnt/kvcellar")),
    ("KVCELLAR_OWNER", "engine", "owner", Owner.ENGINE),
    ("KVCELLAR_ENGINE_ID", "a", "engine_ids", ["a"]),
    ("KVCELLAR_ENGINE_ID", "a,b", "engine_ids", ["a", "b"]),
    ("KVCELLAR_ENGINE_ID", "x" * 128, "engine_ids", ["x" * 128]),
    ("KVCELLAR_ENGINES", "64", "engines", 64),
    ("KVCELLAR_CAPACITY", "2097152", "capacity_bytes", 2097152),
    ("KVCELLAR_CAPACITY", "200Gi", "required_capacity_bytes", 200 * 2**30),
    ("KVCELLAR_CAPACITY", "1e9", "capacity_bytes", 10**9),
    ("KVCELLAR_CONTENTS", "keep", "contents", Contents.KEEP),
    ("KVCELLAR_RETENTION", "now", "retention", Retention("now", 0.0)),
    ("KVCELLAR_RETENTION", "90s", "retention", Retention("90s", 90.0)),
    ("KVCELLAR_RETENTION", "15m", "retention", Retention("15m", 900.0)),
    ("KVCELLAR_RETENTION", "1h30m", "retention", Retention("1h30m", 5400.0)),
    ("KVCELLAR_MODE", "stock", "mode", Mode.STOCK),
    ("KVCELLAR_ON_FAILURE", "fail", "on_failure", OnFailure.FAIL),
    ("KVCELLAR_ATTACH_TIMEOUT", "12.5", "attach_timeout_s", 12.5),
    ("KVCELLAR_ATTACH_TIMEOUT", "5m", "attach_timeout_s", 300.0),
    ("KVCELLAR_PIN", "never", "pin", Pin.NEVER),
    ("KVCELLAR_SETTLE_THREADS", "4", "settle_threads", 4),
    ("KVCELLAR_HUGE_PAGES", "never", "huge_pages", HugePages.NEVER),
    ("KVCELLAR_JANITOR", "off", "janitor", Janitor.OFF),
    ("KVCELLAR_POD_MEMORY_LIMIT", "0", "pod_memory_limit_bytes", 0),
    ("KVCELLAR_POD_MEMORY_LIMIT", "1Ti", "pod_memory_limit_bytes", 2**40),
    ("KVCELLAR_HTTP_HOST", "0.0.0.0", "client_host", "127.0.0.1"),  # noqa: S104 - a value in a test
    ("KVCELLAR_HTTP_HOST", "::", "client_host", "127.0.0.1"),
    ("KVCELLAR_HTTP_HOST", "::1", "client_host", "::1"),
    ("KVCELLAR_HTTP_HOST", "10.1.2.3", "client_host", "10.1.2.3"),
    ("KVCELLAR_HTTP_PORT", "65535", "http_port", 65535),
    ("KVCELLAR_LOG_LEVEL", "debug", "log_level", "DEBUG"),
    ("KVCELLAR_POD_UID", "c0ffee", "pod_uid", "c0ffee"),
    ("KVCELLAR_DESIRED_FILE", "/etc/x", "desired_file", Path("/etc/x")),
    # read by other processes, or set by the kubelet for a Service
    ("KVCELLAR_VLLM_UNTESTED", "1", "engines", 1),
    ("KVCELLAR_TEST_ANYTHING", "x", "engines", 1),
    ("KVCELLAR_SERVICE_HOST", "10.0.0.1", "engines", 1),
    ("KVCELLAR_PORT_9785_TCP_ADDR", "10.0.0.1", "engines", 1),
]


@pytest.mark.parametrize(("name", "text", "field", "value"), GOOD)
def test_a_good_value_is_parsed(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, field: str, value: object
) -> None:
    assert getattr(load(monkeypatch, **{name: text}), field) == value


BAD = [
    ("KVCELLAR_ROOT", ""),
    ("KVCELLAR_ROOT", "dev/shm"),
    ("KVCELLAR_DIR", "."),
    ("KVCELLAR_OWNER", "me"),
    ("KVCELLAR_POD_UID", ""),
    ("KVCELLAR_POD_UID", "a b"),
    ("KVCELLAR_DESIRED_FILE", "desired.json"),
    ("KVCELLAR_ENGINES", "0"),
    ("KVCELLAR_ENGINES", "1.0"),
    ("KVCELLAR_ENGINES", "65"),
    ("KVCELLAR_CONTENTS", "Keep"),
    ("KVCELLAR_RETENTION", "0s"),
    ("KVCELLAR_RETENTION", "15"),
    ("KVCELLAR_RETENTION", "-5m"),
    ("KVCELLAR_RETENTION", "forever"),
    ("KVCELLAR_RETENTION", ""),
    ("KVCELLAR_MODE", "both"),
    ("KVCELLAR_ON_FAILURE", "ignore"),
    ("KVCELLAR_ATTACH_TIMEOUT", "0"),
    ("KVCELLAR_ATTACH_TIMEOUT", "soon"),
    ("KVCELLAR_ATTACH_TIMEOUT", "1m30"),
    ("KVCELLAR_PIN", "always"),
    ("KVCELLAR_SETTLE_THREADS", "0"),
    ("KVCELLAR_SETTLE_THREADS", "65"),
    ("KVCELLAR_HUGE_PAGES", "yes"),
    ("KVCELLAR_JANITOR", "kill"),
    ("KVCELLAR_HTTP_HOST", ""),
    ("KVCELLAR_HTTP_HOST", "a b"),
    ("KVCELLAR_HTTP_PORT", "0"),
    ("KVCELLAR_HTTP_PORT", "65536"),
    ("KVCELLAR_HTTP_PORT", "1_000"),
    ("KVCELLAR_HTTP_PORT", "tcp://10.0.0.1:80"),
    ("KVCELLAR_LOG_LEVEL", "loud"),
]


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_refused_with_its_name_the_value_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(monkeypatch, **{name: text})
    message = str(caught.value)
    assert message.startswith(f"{name}={text!r} cannot be used: give ")
    assert "\n" not in message
    assert caught.value.exit_status == 2


@pytest.mark.parametrize("text", ["-1", "1.5", "200GB", "1e3Gi", str(2**63), "", " ", "0", "4096"])
def test_a_bad_capacity_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(InvalidCapacity, match=r"KVCELLAR_CAPACITY.*cannot be used") as caught:
        load(monkeypatch, KVCELLAR_CAPACITY=text)
    assert repr(text) in str(caught.value)


def test_a_bad_pod_limit_is_refused_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidCapacity, match="KVCELLAR_POD_MEMORY_LIMIT"):
        load(monkeypatch, KVCELLAR_POD_MEMORY_LIMIT="-1")


@pytest.mark.parametrize(
    "text", ["", "x" * 129, "a/b", "..", ".a", "\u00fcber", "a b", "a,,b", "a,a", "\udcff"]
)
def test_a_bad_engine_id_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(InvalidEngineId) as caught:
        load(monkeypatch, KVCELLAR_ENGINE_ID=text)
    assert caught.value.exit_status == 2


def test_an_id_that_is_too_long_only_with_its_suffix_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidEngineId):
        load(monkeypatch, KVCELLAR_ENGINE_ID="x" * 126, KVCELLAR_ENGINES="2")


def test_data_parallel_engines_get_an_id_each(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(monkeypatch, KVCELLAR_ENGINE_ID="a", KVCELLAR_ENGINES="2")
    assert settings.engine_ids == ["a_dp0", "a_dp1"]


def test_an_unknown_variable_stops_the_start_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"^KVCELLAR_CAPACTIY is not a setting"):
        load(monkeypatch, KVCELLAR_CAPACTIY="1Gi")


def test_names_are_matched_with_their_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(monkeypatch, kvcellar_http_port="1").http_port == 9785


def test_a_sidecar_needs_an_engine_id_and_a_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(monkeypatch)
    with pytest.raises(ConfigurationError, match="KVCELLAR_ENGINE_ID is not set"):
        _ = settings.engine_ids
    with pytest.raises(ConfigurationError, match="KVCELLAR_CAPACITY is not set"):
        _ = settings.required_capacity_bytes


def test_every_known_variable_is_a_field_or_read_elsewhere() -> None:
    fields = {str(field.validation_alias) for field in Settings.model_fields.values()}
    elsewhere = {"KVCELLAR_VLLM_UNTESTED"}
    assert fields | elsewhere == contract.ENV_NAMES


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", None), ("h", None), ("1h1s", 3601.0), ("1m1h", None), ("1.5h", None), ("0s", 0.0)],
)
def test_a_duration_is_hours_minutes_seconds_in_this_order(
    text: str, seconds: float | None
) -> None:
    assert contract.parse_duration_s(text) == seconds

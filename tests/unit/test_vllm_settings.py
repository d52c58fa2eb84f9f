"""The plug-in's settings: what is read, what is refused, and with which words."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvcellar.contract import OnFailure, Owner, Pin
from kvcellar.errors import ConfigurationError, InvalidCapacity, InvalidEngineId, Unsupported
from kvcellar.plugin.settings import EngineNames, Settings, check_version, region_name

UUID = "2b0e7a52-6f6e-4b7e-9a55-0c6f3f5d1c11"
ALONE = EngineNames(UUID, dp_index=0, dp_local=0)
EXTRA: dict[str, object] = {
    "spec_name": "KVCellarOffloadingSpec",
    "spec_module_path": "kvcellar.vllm",
}
SIZED: dict[str, object] = {**EXTRA, "cpu_bytes_to_use": 1 << 20}


def read(environ: Mapping[str, str], extra: Mapping[str, object] | None = None) -> Settings:
    return Settings.read(environ, SIZED if extra is None else extra, ALONE)


def test_alone_the_engine_owns_a_region_below_the_default_root() -> None:
    assert read({"PATH": "/bin"}) == Settings(
        directory=Path("/dev/shm/kvcellar"),
        owner=Owner.ENGINE,
        engine_id=UUID,  # type: ignore[arg-type]
        on_failure=OnFailure.DEGRADE,
        attach_timeout_s=300.0,
        pin=Pin.AUTO,
        cpu_bytes_to_use=1 << 20,
        policy="lru",
    )


@pytest.mark.parametrize(
    ("environ", "directory"),
    [
        ({"KVCELLAR_ROOT": "/shm"}, "/shm/kvcellar"),
        ({"KVCELLAR_DIR": "/somewhere"}, "/somewhere"),
        ({"KVCELLAR_ROOT": "/shm", "KVCELLAR_DIR": "/somewhere"}, "/somewhere"),
    ],
)
def test_with_a_root_or_a_directory_the_sidecar_owns_the_region(
    environ: dict[str, str], directory: str
) -> None:
    settings = read(environ, EXTRA)
    assert settings.owner is Owner.SIDECAR
    assert settings.directory == Path(directory)
    assert settings.cpu_bytes_to_use is None


def test_the_owner_can_be_set_against_the_default() -> None:
    assert read({"KVCELLAR_ROOT": "/shm", "KVCELLAR_OWNER": "engine"}).owner is Owner.ENGINE
    assert read({"KVCELLAR_OWNER": "sidecar"}, EXTRA).owner is Owner.SIDECAR


def test_an_engine_that_owns_its_region_needs_a_size() -> None:
    with pytest.raises(ConfigurationError, match="cpu_bytes_to_use"):
        read({}, EXTRA)


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [
        (None, None),
        (0, None),
        (4096, 4096),
        (1.5 * 2**30, 3 * 2**29),
        ("200Gi", 200 * 2**30),
        ("4096", 4096),
    ],
)
def test_sizes_are_read_as_vllm_gives_them(value: object, size_bytes: int | None) -> None:
    settings = read({"KVCELLAR_ROOT": "/shm"}, EXTRA | {"cpu_bytes_to_use": value})
    assert settings.cpu_bytes_to_use == size_bytes


@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), True, [1], "200GB", " 200Gi", "1.5", 2**63]
)
def test_other_sizes_are_refused(value: object) -> None:
    with pytest.raises(InvalidCapacity, match="cpu_bytes_to_use"):
        read({"KVCELLAR_ROOT": "/shm"}, EXTRA | {"cpu_bytes_to_use": value})


@pytest.mark.parametrize("text", ["90", "90s", "1m30s", "0h1m30s", "90.0"])
def test_the_attach_timeout_is_seconds_or_a_duration(text: str) -> None:
    assert read({"KVCELLAR_ATTACH_TIMEOUT": text}).attach_timeout_s == 90.0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVCELLAR_ATTACH_TIMEOUT", "0"),
        ("KVCELLAR_ATTACH_TIMEOUT", "-1"),
        ("KVCELLAR_ATTACH_TIMEOUT", "soon"),
        ("KVCELLAR_ATTACH_TIMEOUT", "1m30"),
        ("KVCELLAR_ATTACH_TIMEOUT", ""),
        ("KVCELLAR_ON_FAILURE", "degrad"),
        ("KVCELLAR_OWNER", "Engine"),
        ("KVCELLAR_PIN", "always"),
        ("KVCELLAR_ROOT", "shm"),
        ("KVCELLAR_DIR", ""),
    ],
)
def test_bad_values_are_refused_by_the_name_of_the_variable(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}='{text}'"):
        read({name: text})


def test_unknown_variables_are_refused_by_name_and_foreign_ones_let_pass() -> None:
    with pytest.raises(ConfigurationError, match="KVCELLAR_ONFAILURE, KVCELLAR_TIMEOUT in"):
        read({"KVCELLAR_TIMEOUT": "1", "KVCELLAR_ONFAILURE": "fail", "HOME": "/"})
    read({"KVCELLAR_TEST_CONTROL": "x", "KVCELLAR_WEBHOOK_SERVICE_HOST": "10.0.0.1"})


def test_what_only_the_sidecar_reads_does_not_stop_the_engine() -> None:
    read({"KVCELLAR_CAPACITY": "1Gi", "KVCELLAR_RETENTION": "keep", "KVCELLAR_HTTP_PORT": "1"})


def test_keys_that_nobody_reads_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="evction_policy in kv_connector_extra_config"):
        read({}, SIZED | {"evction_policy": "arc"})


@pytest.mark.parametrize(
    "key", ["canonical_layout", "store_threshold", "cache_policy_module_path", "max_tracker_size"]
)
def test_what_kvcellar_does_not_do_is_refused_by_name_unless_it_is_off(key: str) -> None:
    with pytest.raises(Unsupported, match=key):
        read({}, SIZED | {key: 2})
    read({}, SIZED | {key: False})


def test_the_policy_is_lru_or_arc() -> None:
    assert read({}, SIZED | {"eviction_policy": "arc"}).policy == "arc"
    with pytest.raises(ConfigurationError, match="eviction_policy='fifo'"):
        read({}, SIZED | {"eviction_policy": "fifo"})


@pytest.mark.parametrize(
    ("environ", "names", "expected"),
    [
        ({}, ALONE, UUID),
        ({"KVCELLAR_ENGINE_ID": "pod-1"}, ALONE, "pod-1"),
        # vLLM says local rank 0 without data parallelism too, and size 1 with it (dense models).
        ({"KVCELLAR_ENGINE_ID": "pod-1"}, EngineNames(f"{UUID}_dp0", 0, 0), "pod-1_dp0"),
        ({"KVCELLAR_ENGINE_ID": "pod-1"}, EngineNames(f"{UUID}_dp9", 9, 1), "pod-1_dp1"),
        (
            {"KVCELLAR_ENGINE_ID": "pod-1", "KVCELLAR_ENGINES": "2"},
            EngineNames(f"{UUID}_dp9", 9, 1),
            "pod-1_dp1",
        ),
        (
            {"KVCELLAR_ENGINE_ID": "pod-1", "KVCELLAR_ENGINES": "1"},
            EngineNames(f"{UUID}_dp9", 9, 0),
            "pod-1",
        ),
        ({}, EngineNames(f"{UUID}_dp9", 9, 1), f"{UUID}_dp9"),
    ],
)
def test_the_region_is_named_after_the_engine_on_this_node(
    environ: dict[str, str], names: EngineNames, expected: str
) -> None:
    assert region_name(environ, names) == expected


@pytest.mark.parametrize("text", ["", "a/b", "..", ".a", "a" * 129, "a,b", "ä", "a b", "a\0"])
def test_names_that_cannot_be_files_are_refused(text: str) -> None:
    with pytest.raises(InvalidEngineId, match=r"^KVCELLAR_ENGINE_ID: "):
        region_name({"KVCELLAR_ENGINE_ID": text}, ALONE)
    with pytest.raises(InvalidEngineId, match=r"^engine_id of the KV transfer"):
        region_name({}, EngineNames(text, 0, 0))


def test_a_name_may_not_outgrow_its_limit_by_the_rank() -> None:
    with pytest.raises(InvalidEngineId, match="133 characters"):
        region_name({"KVCELLAR_ENGINE_ID": "a" * 128}, EngineNames("x_dp10", 10, 10))


def test_a_data_parallel_engine_without_a_local_rank_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unset it"):
        region_name({"KVCELLAR_ENGINE_ID": "pod"}, EngineNames("x_dp1", 1, None))


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_a_bad_number_of_engines_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="KVCELLAR_ENGINES"):
        region_name(
            {"KVCELLAR_ENGINE_ID": "pod", "KVCELLAR_ENGINES": text}, EngineNames("x_dp1", 1, 1)
        )


@pytest.mark.parametrize("installed", ["0.31.0", "0.32.0", "0.32.1+cpu", "0.32.0rc1", "0.32"])
def test_tested_versions_pass(installed: str) -> None:
    check_version(installed, is_untested_allowed=False)


@pytest.mark.parametrize("installed", ["0.30.9", "0.33.0", "0.320.0", "1.31.0", "dev", ""])
def test_other_versions_are_refused_in_one_sentence_unless_allowed(installed: str) -> None:
    with pytest.raises(Unsupported) as refusal:
        check_version(installed, is_untested_allowed=False)
    assert f"vLLM {installed} is installed" in str(refusal.value)
    assert "0.31 and 0.32" in str(refusal.value)
    assert "KVCELLAR_VLLM_UNTESTED=1" in str(refusal.value)
    check_version(installed, is_untested_allowed=True)

"""OffloadProfiles as values: defaults, what is read, what is refused with which words."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from kvcellar.contract import Contents, Janitor, Mode, OnFailure, StartGate
from kvcellar_operator.profile_reader import (
    InvalidProfile,
    parse_profile,
    parse_profile_spec,
    parse_served_profile,
)
from kvcellar_operator.profiles import Capacity, ImagePythonPath, Profile, VllmArgument

GIB = 2**30


def test_an_empty_spec_is_the_profile_of_defaults() -> None:
    assert parse_profile_spec({}) == Profile()
    assert parse_profile({"metadata": {"name": "a"}}) == Profile(name="a")


def test_the_default_capacity_is_half_of_the_engines_limits() -> None:
    assert Profile().capacity == Capacity("50%", share=Fraction(1, 2))


def test_vllm_finds_the_room_at_dev_shm_that_it_wants() -> None:
    # vLLM 0.32 with two ranks: 160 MiB and 240 MiB are looked for beside the region.
    assert Profile().shm_headroom_bytes >= (160 + 240) * 2**20


def test_every_field_is_read() -> None:
    spec = {
        "enabled": False,
        "capacity": "200Gi",
        "engines": 8,
        "mode": "stock",
        "contents": "keep",
        "retention": "15m",
        "startGate": "settled",
        "onFailure": "fail",
        "attachTimeout": "90s",
        "janitor": "off",
        "pin": "never",
        "hugePages": "never",
        "containers": ["vllm"],
        "shmHeadroom": "2Gi",
        "imagePythonPath": "ignore",
        "vllmArgument": "never",
        "sidecar": {
            "image": "example/x:1",
            "port": 9000,
            "hostNetwork": True,
            "resources": {"cpuRequest": "250m", "cpuLimit": 1, "memoryOverhead": "128Mi"},
            "securityContext": {"runAsUser": 7, "runAsGroup": 8},
            "env": [{"name": "A", "value": "a"}, {"name": "KVCELLAR_LOG_LEVEL"}],
        },
    }

    profile = parse_profile({"metadata": {"name": "all"}, "spec": spec})

    assert profile.capacity == Capacity("200Gi", size_bytes=200 * GIB)
    assert (profile.is_enabled, profile.engines, profile.mode) == (False, 8, Mode.STOCK)
    assert (profile.contents, profile.retention) == (Contents.KEEP, "15m")
    assert (profile.start_gate, profile.on_failure) == (StartGate.SETTLED, OnFailure.FAIL)
    assert (profile.attach_timeout, profile.janitor) == ("90s", Janitor.OFF)
    assert (profile.containers, profile.shm_headroom_bytes) == (("vllm",), 2 * GIB)
    assert profile.image_python_path is ImagePythonPath.IGNORE
    assert profile.vllm_argument is VllmArgument.NEVER
    sidecar = profile.sidecar
    assert (sidecar.image, sidecar.port, sidecar.is_host_network_allowed) == (
        "example/x:1",
        9000,
        True,
    )
    assert (sidecar.cpu_request_millis, sidecar.cpu_limit_millis) == (250, 1000)
    assert (sidecar.run_as_user, sidecar.run_as_group) == (7, 8)
    assert sidecar.env == (("A", "a"), ("KVCELLAR_LOG_LEVEL", ""))


@pytest.mark.parametrize(
    ("text", "share"), [("100%", 1), ("1%", Fraction(1, 100)), ("12.5%", Fraction(1, 8))]
)
def test_a_share_is_exact(text: str, share: Fraction) -> None:
    assert parse_profile_spec({"capacity": text}).capacity == Capacity(text, share=share)


@pytest.mark.parametrize("value", ["1.5Gi", 1610612736, "1536Mi", "1610612736"])
def test_a_capacity_in_bytes(value: object) -> None:
    assert parse_profile_spec({"capacity": value}).capacity.size_bytes == 1610612736


@pytest.mark.parametrize("gate", list(StartGate))
def test_stock_vllm_waits_for_a_reserved_file_at_least(gate: StartGate) -> None:
    profile = parse_profile_spec({"mode": "stock", "startGate": str(gate)})

    assert profile.gate is (StartGate.RESERVED if gate is StartGate.PLAN else gate)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"capacity": "200GB"}, "spec.capacity"),
    ({"capacity": "12582912.5"}, "fraction of a byte"),
    ({"capacity": "-5Gi"}, "spec.capacity"),
    ({"capacity": -5}, "spec.capacity"),
    ({"capacity": 0}, "not above zero"),
    ({"capacity": "1Mi"}, "at least 2Mi"),
    ({"capacity": "150%"}, "at most 100%"),
    ({"capacity": "0%"}, "above 0%"),
    ({"capacity": "0.5"}, "spec.capacity"),
    ({"capacity": True}, "spec.capacity"),
    ({"capacity": "9Ei"}, "spec.capacity"),
    ({"capacity": []}, "spec.capacity"),
    ({"engines": 0}, "from 1 to 64"),
    ({"engines": True}, "from 1 to 64"),
    ({"engines": "2"}, "from 1 to 64"),
    ({"mode": "fast"}, "plugin or stock"),
    ({"mode": ["plugin"]}, "plugin or stock"),
    ({"enabled": "yes"}, "true or false"),
    ({"retention": "0s"}, "duration above zero"),
    ({"retention": ""}, "duration above zero"),
    ({"retention": "forever"}, "duration above zero"),
    ({"attachTimeout": "keep"}, "duration above zero"),
    ({"attachTimeout": 5}, "duration above zero"),
    ({"containers": ["A"]}, "list of container names"),
    ({"containers": "vllm"}, "list of container names"),
    ({"containers": ["a", "a"]}, "each once"),
    ({"shmHeadroom": "-1"}, "spec.shmHeadroom"),
    ({"shmHeadroom": {}}, "spec.shmHeadroom"),
    ({"unknown": 1}, "spec.unknown is no field"),
    ({"sidecar": "x"}, "spec.sidecar of the OffloadProfile is no object"),
    ({"sidecar": {"port": 80}}, "from 1024"),
    ({"sidecar": {"image": "a b"}}, "reference of an image"),
    ({"sidecar": {"resources": {"cpuRequest": 2, "cpuLimit": 1}}}, "no more than cpuLimit"),
    ({"sidecar": {"resources": {"cpuLimit": "0"}}}, "CPUs above zero"),
    ({"sidecar": {"resources": {"cpu": 1}}}, "spec.sidecar.resources.cpu is no field"),
    ({"sidecar": {"securityContext": {"runAsUser": 0}}}, "from 1"),
    ({"sidecar": {"securityContext": {"privileged": True}}}, "privileged is no field"),
    ({"sidecar": {"env": [{"name": "KVCELLAR_CAPACITY"}]}}, "profile's own fields"),
    ({"sidecar": {"env": [{"name": "A"}, {"name": "A"}]}}, "set twice"),
    ({"sidecar": {"env": [{"name": "1 A"}]}}, "name: NAME"),
    ({"sidecar": {"env": [{"name": "A", "value": 1}]}}, "name: NAME"),
    ({"sidecar": {"env": {"A": "a"}}}, "name: NAME"),
    ({"sidecar": {"env": [{"name": "A", "text": "a"}]}}, r"spec.sidecar.env\[0\].text is no field"),
]


@pytest.mark.parametrize(("spec", "words"), BAD)
def test_what_cannot_be_used_is_refused_with_its_path(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidProfile, match=words):
        parse_profile_spec(spec)


NEWER = {
    "engines": 2,
    "ofTheNextRelease": "usual",
    "sidecar": {
        "more": 1,
        "resources": {"gpus": 0},
        "securityContext": {"label": "x"},
        "env": [{"name": "A", "value": "a"}, {"name": "B", "value": "b", "optional": False}],
    },
}


def test_fields_of_a_newer_crd_are_let_be_and_named_in_what_the_api_server_serves() -> None:
    served = parse_served_profile({"metadata": {"name": "a"}, "spec": NEWER})

    assert served.unknown_fields == (
        "spec.ofTheNextRelease",
        "spec.sidecar.env[1].optional",
        "spec.sidecar.more",
        "spec.sidecar.resources.gpus",
        "spec.sidecar.securityContext.label",
    )
    assert (served.name, served.engines) == ("a", 2)
    assert served.sidecar.env == (("A", "a"), ("B", "b"))


@pytest.mark.parametrize("entry", [{}, {"value": ""}, {"value": None}])
def test_a_variable_whose_value_is_in_a_field_of_a_newer_crd_is_left_out(
    entry: dict[str, Any],
) -> None:
    entry = {"name": "A", **entry, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    spec = {"sidecar": {"env": [entry, {"name": "B"}]}}
    served = parse_served_profile({"metadata": {"name": "a"}, "spec": spec})

    assert served.sidecar.env == (("B", ""),)
    assert served.unknown_fields == ("spec.sidecar.env[0].valueFrom",)
    with pytest.raises(InvalidProfile, match=r"spec.sidecar.env\[0\].valueFrom is no field"):
        parse_profile_spec(spec)


@pytest.mark.parametrize("field", sorted(NEWER.keys() - {"engines"}))
def test_the_same_fields_are_typos_in_a_file(field: str) -> None:
    with pytest.raises(
        InvalidProfile, match=r"is no field of an OffloadProfile: correct or remove"
    ):
        parse_profile({"metadata": {"name": "a"}, "spec": {field: NEWER[field]}})


@pytest.mark.parametrize(("spec", "words"), [each for each in BAD if "is no field" not in each[1]])
def test_what_cannot_be_used_is_refused_in_what_the_api_server_serves_too(
    spec: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidProfile, match=words):
        parse_served_profile({"metadata": {"name": "a"}, "spec": spec})


@pytest.mark.parametrize("parse", [parse_profile, parse_served_profile])
@pytest.mark.parametrize("body", [{}, {"metadata": {}}, {"metadata": {"name": 3}}])
def test_a_profile_without_a_name_is_none(
    body: dict[str, Any], parse: Callable[[dict[str, Any]], Profile]
) -> None:
    with pytest.raises(InvalidProfile, match="name"):
        parse(body)


@pytest.mark.parametrize("spec", [[], "x", 3])
def test_a_spec_that_is_no_object_is_refused(spec: object) -> None:
    with pytest.raises(InvalidProfile, match="no object"):
        parse_profile_spec(spec)

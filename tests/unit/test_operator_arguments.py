"""vLLM's `--kv-transfer-config`: when it is added, and what it is merged to."""

import json
from typing import Any

import pytest

from kvcellar.contract import Mode
from kvcellar_operator.arguments import FLAG, PLUGIN_SPEC, Argument, decide
from kvcellar_operator.profiles import VllmArgument
from kvcellar_operator.reasons import Notice

SERVE = ["vllm", "serve", "m"]


def on(
    command: list[str] | None = None,
    args: list[str] | None = None,
    image: str = "app",
    mode: Mode = Mode.PLUGIN,
    policy: VllmArgument = VllmArgument.AUTO,
) -> Argument:
    container = {"name": "engine", "image": image, "command": command, "args": args}
    return decide(container, mode, policy, 2**30)


@pytest.mark.parametrize(
    ("command", "args", "image"),
    [
        (SERVE, None, "app"),
        (["/opt/venv/bin/vllm"], ["serve", "m"], "app"),
        (["python", "-m", "vllm.entrypoints.openai.api_server"], [], "app"),
        (["python", "-m", "vllm.entrypoints.cli.main", "serve"], [], "app"),
        (["numactl", "--interleave=all", "vllm", "serve", "m"], [], "app"),
        (None, ["--model", "m"], "app"),
        (None, ["--model=m"], "app"),
        (None, ["m"], "example/vllm-openai@sha256:00"),
        (None, ["m"], "example:5000/vllm-openai:1"),
    ],
)
def test_it_is_added_where_vllm_runs(
    command: list[str] | None, args: list[str] | None, image: str
) -> None:
    flag, text = on(command, args, image).words

    assert flag == FLAG
    assert json.loads(text)["kv_connector_extra_config"] == PLUGIN_SPEC


@pytest.mark.parametrize(
    ("command", "args", "notice"),
    [
        (["sh", "-c", "vllm serve m"], None, Notice.ARGUMENT_SHELL),
        (["/bin/bash", "-euo", "pipefail", "-c"], ["vllm serve m"], Notice.ARGUMENT_SHELL),
        (["env", "A=b", "bash", "-lc", "vllm serve m"], None, Notice.ARGUMENT_SHELL),
        (["busybox", "sh", "-c", "vllm serve m"], None, Notice.ARGUMENT_SHELL),
        (["bash", "start.sh"], None, Notice.ARGUMENT_UNKNOWN_PROGRAM),
        (["vllm", "bench", "serve"], None, Notice.ARGUMENT_UNKNOWN_PROGRAM),
        (["python", "server.py"], ["--model", "m"], Notice.ARGUMENT_UNKNOWN_PROGRAM),
        (None, None, Notice.ARGUMENT_UNKNOWN_PROGRAM),
        (None, ["serve", "m"], Notice.ARGUMENT_UNKNOWN_PROGRAM),
        ([*SERVE, "--config", "x.yaml"], None, Notice.ARGUMENT_CONFIG_FILE),
        ([*SERVE, "--kv-offloading-backend", "lmcache"], None, Notice.ARGUMENT_OTHER_BACKEND),
    ],
)
def test_it_is_not_added_where_it_might_not_mean_what_it_says(
    command: list[str] | None, args: list[str] | None, notice: Notice
) -> None:
    decided = on(command, args)

    assert (decided.notice, decided.words) == (notice, [])
    assert decided.config is not None


def test_the_profile_can_say_always_but_not_for_a_script() -> None:
    always = VllmArgument.ALWAYS

    assert on(["python", "server.py"], policy=always).words
    assert on([*SERVE, "--config", "x"], policy=always).words
    assert on(["sh", "-c", "x"], policy=always).notice is Notice.ARGUMENT_SHELL
    assert on(SERVE, policy=VllmArgument.NEVER).notice is Notice.ARGUMENT_OFF


def own(config: object, **more: Any) -> Argument:  # noqa: ANN401 - arguments of `on`
    return on(SERVE, [FLAG, json.dumps(config)], **more)


def test_a_configuration_that_uses_kvcellar_is_left_as_it_is() -> None:
    config = {
        "kv_connector": "KVCellarConnector",
        "kv_connector_extra_config": {**PLUGIN_SPEC, "eviction_policy": "arc"},
    }

    assert own(config) == Argument(None, Notice.ARGUMENT_PRESENT)


def test_an_offloading_connector_gets_our_spec_and_keeps_the_rest() -> None:
    decided = own(
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"block_size": 64}}
    )

    assert decided.notice is Notice.ARGUMENT_OWN_CONFIG
    assert decided.config == {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"block_size": 64, **PLUGIN_SPEC},
    }


def test_another_connector_is_joined_by_ours() -> None:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

    config = own(nixl).config

    assert config is not None
    assert config["kv_connector"] == "MultiConnector"
    listed = config["kv_connector_extra_config"]["connectors"]
    assert [each["kv_connector"] for each in listed] == ["NixlConnector", "KVCellarConnector"]
    assert listed[0] == nixl


def test_one_of_several_connectors_becomes_ours() -> None:
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [{"kv_connector": "A"}, {"kv_connector": "OffloadingConnector"}],
            "other": 1,
        },
    }

    config = own(several).config

    assert config is not None
    extra = config["kv_connector_extra_config"]
    assert extra["other"] == 1
    assert [each["kv_connector"] for each in extra["connectors"]] == ["A", "OffloadingConnector"]
    assert extra["connectors"][1]["kv_connector_extra_config"] == PLUGIN_SPEC
    assert own(config) == Argument(None, Notice.ARGUMENT_PRESENT)


@pytest.mark.parametrize(
    "args",
    [
        [FLAG],
        [FLAG, "{"],
        [FLAG, "[]"],
        [f"{FLAG}={{}}"],
        ["--kv_transfer_config", "{}"],
        ["--kv-transfer-config.kv_connector", "X"],
        [FLAG, '{"kv_connector_extra_config": 3, "kv_connector": "MultiConnector"}'],
        [
            FLAG,
            '{"kv_connector_extra_config": {"connectors": [1]}, "kv_connector": "MultiConnector"}',
        ],
    ],
)
def test_what_cannot_be_read_is_never_added_to(args: list[str]) -> None:
    decided = on(SERVE, args)

    assert (decided.notice, decided.words) == (Notice.ARGUMENT_OWN_CONFIG, [])


def test_vllms_size_flag_needs_vllms_own_connector() -> None:
    config = on([*SERVE, "--kv-offloading-size=8"]).config

    assert config is not None
    assert config["kv_connector"] == "OffloadingConnector"
    assert "kv_connector_module_path" not in config


def test_stock_vllm_is_told_the_engine_id() -> None:
    decided = on(SERVE, mode=Mode.STOCK)

    assert decided.words
    assert decided.config is not None
    assert decided.config["engine_id"] == "$(KVCELLAR_ENGINE_ID)"
    assert decided.config["kv_connector_extra_config"] == {"cpu_bytes_to_use": 2**30}
    assert own(decided.config, mode=Mode.STOCK).notice is Notice.ARGUMENT_PRESENT

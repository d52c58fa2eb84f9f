"""vLLM's `--kv-transfer-config`: whether an engine's arguments can carry it, and what it has to be. Pure.

An argument is added only where that is sure to mean what it says: on a program that is known to be vLLM,
started without a shell, that has no such argument. Everywhere else the exact value goes into the
annotation, merged with what the user has.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvcellar.contract import ENV_ENGINE_ID, Mode
from kvcellar_operator.pods import Container
from kvcellar_operator.profiles import VllmArgument
from kvcellar_operator.reasons import Notice

FLAG = "--kv-transfer-config"
PLUGIN_SPEC = {"spec_name": "KVCellarOffloadingSpec", "spec_module_path": "kvcellar.vllm"}
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh", "ksh", "busybox"})
_OFFLOADING = "OffloadingConnector"
_OWN_CONNECTORS = (_OFFLOADING, "KVCellarConnector")

Config = dict[str, Any]
"""A value of `--kv-transfer-config`."""


@dataclass(frozen=True, slots=True)
class Argument:
    """What an engine's `--kv-transfer-config` is, or should be.

    Attributes:
        config: the exact value; None if the engine's own already uses kvcellar.
        notice: why it was not added; None if it is to be added.
    """

    config: Config | None
    notice: Notice | None

    @property
    def words(self) -> list[str]:
        """The arguments to append; none if nothing is to be added."""
        if self.notice is not None or self.config is None:
            return []
        return [FLAG, json.dumps(self.config, separators=(",", ":"))]


def decide(container: Container, mode: Mode, policy: VllmArgument, capacity_bytes: int) -> Argument:
    """Decide on one engine container."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    own = _own_config(words)
    if own is not None:
        return _merged(own, mode, capacity_bytes)
    config = _config(mode, capacity_bytes, is_size_given=_has(words, "--kv-offloading-size"))
    if mode is Mode.STOCK and _has(words, "--kv-offloading-size"):
        # vLLM would ask for that size, and wait for a file that has it.
        return Argument(config, Notice.ARGUMENT_OTHER_BACKEND)
    return Argument(config, _obstacle(container, words, policy))


def _obstacle(container: Container, words: list[str], policy: VllmArgument) -> Notice | None:
    """Why nothing can be added to the arguments; None if it can."""
    backend = _value_of(words, "--kv-offloading-backend")
    if backend not in (None, "native"):
        return Notice.ARGUMENT_OTHER_BACKEND
    if policy is VllmArgument.NEVER:
        return Notice.ARGUMENT_OFF
    if _is_shell_script(words):
        return Notice.ARGUMENT_SHELL
    if policy is VllmArgument.ALWAYS:
        return None
    if not _is_vllm(container):
        return Notice.ARGUMENT_UNKNOWN_PROGRAM
    return Notice.ARGUMENT_CONFIG_FILE if _has(words, "--config") else None


def _config(mode: Mode, capacity_bytes: int, *, is_size_given: bool) -> Config:
    """The value for an engine that has none.

    With `--kv-offloading-size` vLLM itself sets the connector to its own, which would not be found in
    our module. Source: VllmConfig._post_init_kv_transfer_config of vLLM 0.31 and 0.32.
    """
    if mode is Mode.STOCK:
        return {
            "kv_connector": _OFFLOADING,
            "kv_role": "kv_both",
            "engine_id": f"$({ENV_ENGINE_ID})",
            "kv_connector_extra_config": {"cpu_bytes_to_use": capacity_bytes},
        }
    if is_size_given:
        return {
            "kv_connector": _OFFLOADING,
            "kv_role": "kv_both",
            "kv_connector_extra_config": dict(PLUGIN_SPEC),
        }
    return {
        "kv_connector": "KVCellarConnector",
        "kv_connector_module_path": "kvcellar.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(PLUGIN_SPEC),
    }


def _merged(own: Config, mode: Mode, capacity_bytes: int) -> Argument:
    """The user's own value with ours in it: the same connector, or both under vLLM's MultiConnector."""
    ours = _config(mode, capacity_bytes, is_size_given=False)
    connector = own.get("kv_connector")
    if connector in _OWN_CONNECTORS:
        merged = _with_ours(own, ours, mode)
    elif connector == "MultiConnector":
        merged = _among_several(own, ours, mode)
    elif connector is None:
        merged = {**ours, **own}
    else:
        merged = _several([own, ours])
    if mode is Mode.STOCK:
        merged = {**merged, "engine_id": f"$({ENV_ENGINE_ID})"}
    if merged == own:
        return Argument(None, Notice.ARGUMENT_PRESENT)
    return Argument(merged, Notice.ARGUMENT_OWN_CONFIG)


def _with_ours(own: Config, ours: Config, mode: Mode) -> Config:
    """The user's offloading connector, made to use our spec, or in stock mode vLLM's own."""
    extra = own.get("kv_connector_extra_config")
    extra = dict(extra) if isinstance(extra, dict) else {}
    if mode is Mode.STOCK:
        extra.setdefault("cpu_bytes_to_use", ours["kv_connector_extra_config"]["cpu_bytes_to_use"])
    else:
        extra.update(PLUGIN_SPEC)
    return {**own, "kv_connector_extra_config": extra}


def _among_several(own: Config, ours: Config, mode: Mode) -> Config:
    extra = own.get("kv_connector_extra_config")
    listed = extra.get("connectors") if isinstance(extra, dict) else None
    connectors = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    names = [connector.get("kv_connector") for connector in connectors]
    for position, name in enumerate(names):
        if name in _OWN_CONNECTORS:
            connectors[position] = _with_ours(connectors[position], ours, mode)
            break
    else:
        connectors.append(ours)
    rest = {key: value for key, value in own.items() if key != "kv_connector_extra_config"}
    others = dict(extra) if isinstance(extra, dict) else {}
    return {**rest, "kv_connector_extra_config": {**others, "connectors": connectors}}


def _several(connectors: list[Config]) -> Config:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
    }


def _own_config(words: list[str]) -> Config | None:
    """The user's value; an empty one if it is given in a way that cannot be read, None if not at all."""
    if not _has(words, FLAG):
        return None
    try:
        own = json.loads(_value_of(words, FLAG) or "{}")
    except ValueError:
        return {}
    return own if isinstance(own, dict) else {}


def _flag_of(word: str) -> str:
    """The flag of a word, as vLLM's parser reads it: `--a_b=1` and `--a-b.c` are `--a-b`."""
    if not word.startswith("--"):
        return ""
    return word.partition("=")[0].partition(".")[0].replace("_", "-")


def _has(words: list[str], flag: str) -> bool:
    return any(_flag_of(word) == flag for word in words)


def _value_of(words: list[str], flag: str) -> str | None:
    """The last value of a flag, as `--flag value` or `--flag=value`."""
    found = None
    for position, word in enumerate(words):
        if _flag_of(word) != flag or "." in word.partition("=")[0]:
            continue
        _, equals, value = word.partition("=")
        following = words[position + 1] if position + 1 < len(words) else None
        found = value if equals else following
    return found


def _program(word: str) -> str:
    return word.rpartition("/")[2]


def _is_shell_script(words: list[str]) -> bool:
    """Whether a shell gets its script as an argument (`sh -c`), so that words behind it are not vLLM's."""
    for position, word in enumerate(words):
        if _program(word) in _SHELLS:
            options = words[position + 1 : position + 4]
            return any(o.startswith("-") and not o.startswith("--") and "c" in o for o in options)
    return False


def _is_vllm(container: Container) -> bool:
    """Whether a container is known to run vLLM's server.

    Without a command the image's own runs: vLLM's images serve, and arguments are put behind. Without
    arguments too, ours would take the place of the image's, which cannot be seen.
    """
    command, args = container.get("command") or [], container.get("args") or []
    words = [*command, *args]
    for word, following in pairwise(words):
        if _program(word) == "vllm" and following == "serve":
            return True
        if word == "-m" and following.startswith("vllm.entrypoints."):
            return True
    if command or not args:
        return False
    name = str(container.get("image") or "").rpartition("@")[0] or str(container.get("image") or "")
    return "vllm" in name or any(_flag_of(word) == "--model" for word in args)

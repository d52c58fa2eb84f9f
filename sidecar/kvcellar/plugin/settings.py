"""What the plug-in is told: environment variables, vLLM's extra configuration, vLLM's version.

Owns the parsing of both sources and the sentence that refuses a bad value. `kvcellar.vllm` reads them
once in each process and passes the result down; nothing else in the engine reads the environment.

Invariants: an unknown name stops the start and is named; no bad value is replaced by a default. This
module must not know vLLM's types, so that it can be tested without vLLM.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from kvcellar import contract
from kvcellar.contract import EngineId, OnFailure, Owner, Pin, parse_capacity, parse_engine_id
from kvcellar.errors import ConfigurationError, InvalidCapacity, InvalidEngineId, Unsupported
from kvcellar.index.policies import PolicyName

TESTED_VERSIONS = ((0, 31), (0, 32))
"""Minor versions of vLLM that the tests run with. vLLM calls its plug-in API experimental and changes
it in any minor version, so another one is refused until it was tried."""

_VLLM_KEYS = frozenset(
    {
        "spec_name",
        "spec_module_path",
        "block_size",
        "blocks_per_chunk",
        "offload_prompt_only",
        "self_describing_kv_events",
    }
)
"""Keys that vLLM's connector reads itself. Source: vllm/distributed/kv_transfer/kv_connector/v1/offloading
and vllm/v1/kv_offload/base.py of 0.31 and 0.32."""

_OWN_KEYS = frozenset({"cpu_bytes_to_use", "eviction_policy"})
"""Keys that kvcellar reads, named as in vLLM's own CPUOffloadingSpec."""

_REFUSED_KEYS = {
    "canonical_layout": "kvcellar keeps the bytes of each rank as they are on the device",
    "cache_policy_module_path": "kvcellar has its own policies, lru and arc, and loads no others",
    "store_threshold": "kvcellar stores every chunk that vLLM offers",
    "max_tracker_size": "it belongs to store_threshold, which kvcellar does not have",
}
"""Keys of vLLM's own specs that ask for something kvcellar does not do, and why not."""

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class EngineNames:
    """How vLLM names and counts this engine.

    Attributes:
        vllm_id: `engine_id` of its KV transfer configuration; a new one at each start unless the user
            set one. vLLM appends `_dp<rank over all nodes>` if, and only if, it runs data parallel.
        dp_index: rank of this engine among its data-parallel siblings on all nodes.
        dp_local: rank of this engine among those of this node. Not a sign of data parallelism: it is 0
            without.
    """

    vllm_id: str
    dp_index: int
    dp_local: int | None


@dataclass(frozen=True, slots=True)
class Settings:
    """All that can be set, in one process of an engine. Make one with `read`.

    Attributes:
        directory: where regions are (KVCELLAR_DIR).
        owner: who makes this engine's region (KVCELLAR_OWNER).
        engine_id: the name of the region.
        on_failure: what to do without a region (KVCELLAR_ON_FAILURE).
        attach_timeout_s: how long to wait for it without progress (KVCELLAR_ATTACH_TIMEOUT).
        pin: whether to register the region with the device driver (KVCELLAR_PIN).
        cpu_bytes_to_use: bytes of host memory for all ranks together, if vLLM was told so. A region
            that the sidecar made has a capacity of its own, which wins.
        policy: how chunks are replaced (eviction_policy).
    """

    directory: Path
    owner: Owner
    engine_id: EngineId
    on_failure: OnFailure
    attach_timeout_s: float
    pin: Pin
    cpu_bytes_to_use: int | None
    policy: PolicyName

    @classmethod
    def read(
        cls, environ: Mapping[str, str], extra: Mapping[str, object], names: EngineNames
    ) -> "Settings":
        """Read the environment and vLLM's `kv_connector_extra_config`.

        Raises:
            ConfigurationError: an unknown or impossible setting, by its name.
            Unsupported: a key that asks for what kvcellar does not do.
        """
        unknown = contract.unknown_variables(frozenset(environ))
        if unknown:
            raise ConfigurationError(
                f"{', '.join(unknown)} in the environment is not a setting of kvcellar; the engine "
                "does not start with it, since a mistyped name would go unnoticed: correct or unset it"
            )
        _check_keys(extra)
        owner = _owner(environ)
        capacity_bytes = _cpu_bytes(extra)
        if owner is Owner.ENGINE and capacity_bytes is None:
            raise ConfigurationError(
                "the engine owns its region (KVCELLAR_OWNER=engine, the default without KVCELLAR_ROOT "
                "and KVCELLAR_DIR), and no size was given: set cpu_bytes_to_use in "
                "kv_connector_extra_config, or KVCELLAR_ROOT to use a sidecar's region"
            )
        return cls(
            directory=_directory(environ),
            owner=owner,
            engine_id=region_name(environ, names),
            on_failure=_choice(environ, contract.ENV_ON_FAILURE, OnFailure.DEGRADE),
            attach_timeout_s=_seconds(environ),
            pin=_choice(environ, contract.ENV_PIN, Pin.AUTO),
            cpu_bytes_to_use=capacity_bytes,
            policy=_policy(extra),
        )


def check_version(installed: str, *, is_untested_allowed: bool) -> None:
    """Refuse a vLLM that kvcellar was not tested with.

    Args:
        installed: vLLM's version, such as `0.32.0` or `0.32.1+cpu`.
        is_untested_allowed: whether KVCELLAR_VLLM_UNTESTED is 1.

    Raises:
        Unsupported: another minor version, and no leave to use it.
    """
    match = re.match(r"(\d+)\.(\d+)(?!\d)", installed)
    version = (int(match[1]), int(match[2])) if match else None
    if version in TESTED_VERSIONS or is_untested_allowed:
        return
    tested = " and ".join(f"{major}.{minor}" for major, minor in TESTED_VERSIONS)
    raise Unsupported(
        f"vLLM {installed} is installed, and this kvcellar was tested with {tested}: install one of "
        f"these, or set {contract.ENV_VLLM_UNTESTED}=1 to try it all the same"
    )


def region_name(environ: Mapping[str, str], names: EngineNames) -> EngineId:
    """The id of this engine's region.

    KVCELLAR_ENGINE_ID, with `_dp<rank on this node>` under data parallelism, as the sidecar names its
    regions if KVCELLAR_ENGINES is above 1; an engine that is told KVCELLAR_ENGINES=1 has the pod for
    itself, so nothing is appended. Without KVCELLAR_ENGINE_ID vLLM's own id, which tells data-parallel
    siblings apart already.

    Raises:
        InvalidEngineId: the name cannot be used.
        ConfigurationError: KVCELLAR_ENGINES is not a number, or vLLM does not say the local rank.
    """
    base = environ.get(contract.ENV_ENGINE_ID)
    if base is None:
        return _engine_id("engine_id of the KV transfer configuration", names.vllm_id)
    is_data_parallel = names.vllm_id.endswith(f"_dp{names.dp_index}")
    if not is_data_parallel or _has_pod_for_itself(environ):
        return _engine_id(contract.ENV_ENGINE_ID, base)
    if names.dp_local is None:
        raise ConfigurationError(
            f"{contract.ENV_ENGINE_ID}={base!r} names the region of a data-parallel engine, and vLLM does "
            "not say which of this node's engines this is: unset it, so that vLLM's own id is used"
        )
    return _engine_id(contract.ENV_ENGINE_ID, f"{base}_dp{names.dp_local}")


def _engine_id(source: str, text: str) -> EngineId:
    try:
        return parse_engine_id(text)
    except InvalidEngineId as error:
        raise InvalidEngineId(f"{source}: {error}") from error


def _has_pod_for_itself(environ: Mapping[str, str]) -> bool:
    text = environ.get(contract.ENV_ENGINES)
    if text is None:
        return False
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise ConfigurationError(
            f"{contract.ENV_ENGINES}={text!r} cannot be used: give the number of engines in this pod"
        )
    return int(text) == 1


def _check_keys(extra: Mapping[str, object]) -> None:
    """Refuse what kvcellar does not do and what nobody reads.

    A key that is off (false, 0 or null) asks for nothing.
    """
    for key, why in _REFUSED_KEYS.items():
        if extra.get(key):
            raise Unsupported(
                f"{key}={extra[key]!r} in kv_connector_extra_config is not supported: {why}; leave it out"
            )
    unknown = sorted(set(extra) - _VLLM_KEYS - _OWN_KEYS - set(_REFUSED_KEYS))
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)} in kv_connector_extra_config is read by nobody; known are "
            f"{', '.join(sorted(_VLLM_KEYS | _OWN_KEYS))}: correct the name or leave it out"
        )


def _owner(environ: Mapping[str, str]) -> Owner:
    is_beside_sidecar = contract.ENV_ROOT in environ or contract.ENV_DIR in environ
    default = Owner.SIDECAR if is_beside_sidecar else Owner.ENGINE
    return _choice(environ, contract.ENV_OWNER, default)


def _directory(environ: Mapping[str, str]) -> Path:
    root = _absolute(environ, contract.ENV_ROOT, Path(contract.DEFAULT_ROOT))
    return _absolute(environ, contract.ENV_DIR, root / contract.DIRECTORY_NAME)


def _absolute(environ: Mapping[str, str], name: str, default: Path) -> Path:
    text = environ.get(name)
    if text is None:
        return default
    if not text.startswith("/") or "\0" in text:
        raise ConfigurationError(f"{name}={text!r} cannot be used: give an absolute path")
    return Path(text)


def _choice(environ: Mapping[str, str], name: str, default: _Choice) -> _Choice:
    text = environ.get(name)
    if text is None:
        return default
    kind = type(default)
    if text not in tuple(kind):
        raise ConfigurationError(f"{name}={text!r} cannot be used: give {' or '.join(kind)}")
    return kind(text)


def _seconds(environ: Mapping[str, str]) -> float:
    name = contract.ENV_ATTACH_TIMEOUT
    text = environ.get(name)
    if text is None:
        return contract.DEFAULT_ATTACH_TIMEOUT_S
    seconds = contract.parse_timeout_s(text)
    if seconds is None:
        raise ConfigurationError(
            f"{name}={text!r} cannot be used: give seconds above zero, or a duration such as 90s or 5m"
        )
    return seconds


def _cpu_bytes(extra: Mapping[str, object]) -> int | None:
    """`cpu_bytes_to_use`: whole bytes, a float as `--kv-offloading-size` gives it, or a quantity."""
    value = extra.get("cpu_bytes_to_use")
    match value:
        case None | 0 | "":
            return None
        case str():
            return _quantity("cpu_bytes_to_use", value)
        case bool():
            is_usable = False
        case int() | float():
            is_usable = math.isfinite(value) and 1 <= value <= contract.MAX_CAPACITY_BYTES
        case _:
            is_usable = False
    if not is_usable or not isinstance(value, int | float):
        raise InvalidCapacity(
            f"cpu_bytes_to_use={value!r} cannot be used: give bytes above zero and below 2^63, for all "
            "ranks together"
        )
    return int(value)


def _quantity(key: str, text: str) -> int:
    try:
        return parse_capacity(text)
    except InvalidCapacity as error:
        raise InvalidCapacity(f"{key}: {error}") from error


def _policy(extra: Mapping[str, object]) -> PolicyName:
    value = extra.get("eviction_policy", "lru")
    match value:
        case "lru":
            return "lru"
        case "arc":
            return "arc"
        case _:
            raise ConfigurationError(f"eviction_policy={value!r} cannot be used: give lru or arc")

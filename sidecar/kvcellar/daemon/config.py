"""The settings of the sidecar and the command line, read once from the environment.

Owns: the parsing of every `KVCELLAR_*` variable and the sentence that refuses a bad one. Entry points
call `Settings.load` once and pass the values down; nothing below reads the environment.

Invariants: a name that nothing reads stops the start, and so does a value that cannot be used; no
value is replaced by a default in silence. Reference: docs/reference/settings.md.
"""

import os
import re
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PlainValidator, ValidationInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from kvcellar import contract
from kvcellar.contract import Contents, HugePages, Janitor, Mode, OnFailure, Owner, Pin
from kvcellar.daemon.retention import Retention, parse_retention
from kvcellar.errors import ConfigurationError, InvalidCapacity
from kvcellar.region.geometry import HUGE_PAGE_BYTES

_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_MAX_ENGINES = 64
"""Engines of one pod: no node has more devices than that."""
_MAX_SETTLE_THREADS = 64


def _refuse(name: str, text: str, allowed: str) -> ConfigurationError:
    return ConfigurationError(f"{name}={text!r} cannot be used: give {allowed}")


_Parse = Callable[[str, str], object]
"""Makes a value of (variable's name, text), or raises ConfigurationError, which pydantic lets pass."""


def _parsed(parse: _Parse) -> PlainValidator:
    """Let `parse` alone decide on a field, without pydantic's own coercions."""

    def validate(value: object, info: ValidationInfo) -> object:
        field = Settings.model_fields[info.field_name or ""]
        return parse(str(field.validation_alias), str(value))

    return PlainValidator(validate)


def _variable(name: str) -> Any:  # noqa: ANN401 - pydantic's own return type
    return Field(validation_alias=name)


def _choice(kind: type[StrEnum]) -> PlainValidator:
    def parse(name: str, text: str) -> StrEnum:
        if text not in tuple(kind):
            raise _refuse(name, text, " or ".join(kind))
        return kind(text)

    return _parsed(parse)


def _whole(low: int, high: int) -> PlainValidator:
    def parse(name: str, text: str) -> int:
        if not re.fullmatch("[0-9]{1,9}", text) or not low <= int(text) <= high:
            raise _refuse(name, text, f"a whole number from {low} to {high}")
        return int(text)

    return _parsed(parse)


def _path(name: str, text: str) -> Path:
    if not text.startswith("/"):
        raise _refuse(name, text, "an absolute path")
    return Path(text)


def _capacity(name: str, text: str) -> int:
    try:
        size_bytes = contract.parse_capacity(text)
    except InvalidCapacity as error:
        raise InvalidCapacity(f"{name}: {error}") from error
    if size_bytes < HUGE_PAGE_BYTES:
        raise InvalidCapacity(
            f"{name}: capacity {text!r} cannot be used: a region is a multiple of 2 MiB "
            f"({HUGE_PAGE_BYTES} bytes) and has at least one"
        )
    return size_bytes


def _memory_limit(name: str, text: str) -> int:
    if text == "0":
        return 0
    try:
        return contract.parse_capacity(text)
    except InvalidCapacity as error:
        raise InvalidCapacity(f"{name}: {error}; 0 means none") from error


def _retention(name: str, text: str) -> Retention:
    retention = parse_retention(text)
    if retention is None:
        raise _refuse(name, text, "keep, now, or a duration above zero such as 90s, 15m or 1h30m")
    return retention


def _timeout_s(name: str, text: str) -> float:
    seconds = contract.parse_timeout_s(text)
    if seconds is None:
        raise _refuse(name, text, "seconds above zero, or a duration such as 90s or 5m")
    return seconds


def _host(name: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9.:_%-]{1,253}", text):
        raise _refuse(name, text, "an address of this machine such as 127.0.0.1, 0.0.0.0 or ::")
    return text


def _log_level(name: str, text: str) -> str:
    if text.upper() not in _LOG_LEVELS:
        raise _refuse(name, text, " or ".join(_LOG_LEVELS))
    return text.upper()


def _pod_uid(name: str, text: str) -> str:
    if not re.fullmatch("[!-~]{1,128}", text):
        raise _refuse(name, text, "the pod's metadata.uid")
    return text


def _engine_ids(_name: str, text: str) -> str:
    contract.expand_engine_ids(text, 1)
    return text


class Settings(BaseSettings):
    """Every variable that the sidecar, or a command beside it, understands. Make it with `load`.

    Some are read by the engine's processes alone. They are parsed here as well, so that a mistake in
    the environment that a pod's containers share is refused by whichever starts first.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        case_sensitive=True,
        extra="ignore",
        enable_decoding=False,
        validate_default=False,
    )

    root: Annotated[Path, _variable(contract.ENV_ROOT), _parsed(_path)] = Path(
        contract.DEFAULT_ROOT
    )
    """Mount of the pod's memory-backed volume; vLLM itself uses the default."""
    directory: Annotated[Path | None, _variable(contract.ENV_DIR), _parsed(_path)] = None
    """Directory of the regions; use `region_directory`, which knows the default."""
    owner: Annotated[Owner, _variable(contract.ENV_OWNER), _choice(Owner)] = Owner.SIDECAR
    """Who makes the region. A sidecar does not start beside engines that own theirs."""
    engine_id: Annotated[str | None, _variable(contract.ENV_ENGINE_ID), _parsed(_engine_ids)] = None
    """Comma list; use `engine_ids`, which adds the suffixes of data-parallel engines."""
    engines: Annotated[int, _variable(contract.ENV_ENGINES), _whole(1, _MAX_ENGINES)] = 1
    """Data-parallel engines of each id: above 1, X means X_dp0 ... X_dp(n-1)."""
    capacity_bytes: Annotated[int | None, _variable(contract.ENV_CAPACITY), _parsed(_capacity)] = (
        None
    )
    """Bytes of each region; floored to 2 MiB when the region is made."""
    contents: Annotated[Contents, _variable(contract.ENV_CONTENTS), _choice(Contents)] = (
        Contents.DISCARD
    )
    """Whether the next engine start may adopt the contents; the default is the safe one."""
    retention: Annotated[Retention, _variable(contract.ENV_RETENTION), _parsed(_retention)] = (
        Retention("keep", None)
    )
    """How long a region outlives its last holder; kept, so that a crashed engine finds it again."""
    mode: Annotated[Mode, _variable(contract.ENV_MODE), _choice(Mode)] = Mode.PLUGIN
    """Who lays out the data file."""
    on_failure: Annotated[OnFailure, _variable(contract.ENV_ON_FAILURE), _choice(OnFailure)] = (
        OnFailure.DEGRADE
    )
    """What happens without a region: serve without the host tier, or stop."""
    attach_timeout_s: Annotated[
        float, _variable(contract.ENV_ATTACH_TIMEOUT), _parsed(_timeout_s)
    ] = contract.DEFAULT_ATTACH_TIMEOUT_S
    """Seconds without progress after which an engine gives up; read by the engine."""
    pin: Annotated[Pin, _variable(contract.ENV_PIN), _choice(Pin)] = Pin.AUTO
    """Whether workers register the region with the driver; read by the engine."""
    settle_threads: Annotated[
        int, _variable(contract.ENV_SETTLE_THREADS), _whole(1, _MAX_SETTLE_THREADS)
    ] = 1
    """Threads that settle a region: one is enough up to four cores (docs/design.md)."""
    huge_pages: Annotated[HugePages, _variable(contract.ENV_HUGE_PAGES), _choice(HugePages)] = (
        HugePages.AUTO
    )
    """Whether reserving tries to make huge pages; what it cannot make gets small ones."""
    janitor: Annotated[Janitor, _variable(contract.ENV_JANITOR), _choice(Janitor)] = Janitor.RECLAIM
    """What happens to files of stock vLLM that nobody holds."""
    pod_memory_limit_bytes: Annotated[
        int, _variable(contract.ENV_POD_MEMORY_LIMIT), _parsed(_memory_limit)
    ] = 0
    """Sum of the pod's memory limits, which a container cannot see with cgroup v1; 0: unknown."""
    pod_uid: Annotated[str | None, _variable(contract.ENV_POD_UID), _parsed(_pod_uid)] = None
    """UID of the pod: a desired state of another pod is not used."""
    desired_file: Annotated[Path | None, _variable(contract.ENV_DESIRED_FILE), _parsed(_path)] = (
        None
    )
    """The desired state, as the kubelet writes it; may be missing or empty."""
    http_host: Annotated[str, _variable(contract.ENV_HTTP_HOST), _parsed(_host)] = (
        contract.DEFAULT_HTTP_HOST
    )
    """Address that the sidecar listens on; local unless it is asked for more."""
    http_port: Annotated[int, _variable(contract.ENV_HTTP_PORT), _whole(1, 65535)] = (
        contract.DEFAULT_HTTP_PORT
    )
    """TCP port that the sidecar listens on."""
    log_level: Annotated[str, _variable(contract.ENV_LOG_LEVEL), _parsed(_log_level)] = "INFO"
    """Least level of the log lines on stderr."""

    @classmethod
    def load(cls, **instead: str) -> "Settings":
        """Read this process's environment. For entry points only.

        Args:
            instead: texts that count instead of the environment's, by the variable's name.

        Raises:
            ConfigurationError: an unknown name or a bad value; the message names it.
        """
        unknown = contract.unknown_variables(set(os.environ))
        if unknown:
            raise ConfigurationError(
                f"{unknown[0]} is not a setting of kvcellar: correct or remove it; "
                f"known are {', '.join(sorted(contract.ENV_NAMES))}"
            )
        settings = cls(**instead)  # type: ignore[arg-type] # pydantic takes the texts of the aliases
        if settings.engine_id is not None:
            contract.expand_engine_ids(settings.engine_id, settings.engines)
        return settings

    @property
    def region_directory(self) -> Path:
        """Directory of the regions: `KVCELLAR_DIR`, or `kvcellar` in the root."""
        return self.directory or self.root / contract.DIRECTORY_NAME

    @property
    def engine_ids(self) -> list[contract.EngineId]:
        """The engines whose regions a sidecar owns.

        Raises:
            ConfigurationError: `KVCELLAR_ENGINE_ID` is not set.
        """
        if self.engine_id is None:
            raise ConfigurationError(
                f"{contract.ENV_ENGINE_ID} is not set: name the engine that the region is for"
            )
        return contract.expand_engine_ids(self.engine_id, self.engines)

    @property
    def required_capacity_bytes(self) -> int:
        """Bytes of each region.

        Raises:
            ConfigurationError: `KVCELLAR_CAPACITY` is not set.
        """
        if self.capacity_bytes is None:
            raise ConfigurationError(
                f"{contract.ENV_CAPACITY} is not set: give each region's size, such as 200Gi"
            )
        return self.capacity_bytes

    @property
    def client_host(self) -> str:
        """The address at which a process of this pod reaches the sidecar.

        Every pod's loopback has the IPv4 address, those without another one included.
        """
        is_any = self.http_host in ("0.0.0.0", contract.ALL_ADDRESSES)  # noqa: S104 - compared, not bound
        return "127.0.0.1" if is_any else self.http_host

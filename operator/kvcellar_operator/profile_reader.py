"""Makes a `Profile` of an OffloadProfile object. Pure.

The API server checks the same by the schema and its CEL rules; this is for objects that it has not seen,
and for an operator that is older than the CRD. Nothing is replaced by a default in silence.

A field that is unknown here is somebody's typo in a file, and refused. In an object that the API server
serves it is a field of a newer CRD, whose default the server fills into every object: refusing it would
skip every pod while a chart is upgraded, so it is named in the profile and let be.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar

from kvcellar.contract import ENV_PREFIX, parse_capacity
from kvcellar.errors import ConfigurationError
from kvcellar.region.geometry import HUGE_PAGE_BYTES
from kvcellar_operator import profiles
from kvcellar_operator.profiles import Capacity, Profile, SidecarOptions
from kvcellar_operator.quantities import parse_bytes, parse_millicpus

_MAX_ID = 2**31 - 1
_Value = TypeVar("_Value")
_Choice = TypeVar("_Choice", bound=StrEnum)


class InvalidProfile(ConfigurationError):
    """An OffloadProfile with a field that is unknown, or whose value cannot be used."""


def parse_profile(body: Mapping[str, Any]) -> Profile:
    """Read an OffloadProfile object of a file, whose name becomes the profile's.

    Raises:
        InvalidProfile: with the path of the field and what is allowed.
    """
    return parse_profile_spec(body.get("spec") or {}, _name(body))


def parse_served_profile(body: Mapping[str, Any]) -> Profile:
    """Read an OffloadProfile that the API server serves: `unknown_fields` names those of a newer CRD.

    Raises:
        InvalidProfile: with the path of the field and what is allowed.
    """
    unknown: _Unknown = {}
    profile = _profile(body.get("spec") or {}, _name(body), unknown)
    return replace(profile, unknown_fields=tuple(sorted(unknown)))


def parse_profile_spec(spec: object, name: str = "") -> Profile:
    """Read the spec of an OffloadProfile; the chart's default profile is one without a name.

    Raises:
        InvalidProfile: with the path of the field and what is allowed.
    """
    unknown: _Unknown = {}
    profile = _profile(spec, name, unknown)
    if unknown:
        path = min(unknown)
        raise InvalidProfile(
            f"{path} is no field of an OffloadProfile: correct or remove it; known are "
            f"{', '.join(unknown[path])}"
        )
    return profile


_Unknown = dict[str, list[str]]
"""Paths of fields that nothing reads, each with those that would be read in its place."""


def _name(body: Mapping[str, Any]) -> str:
    metadata = body.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        raise InvalidProfile("metadata.name of the OffloadProfile is missing: give it a name")
    return name


def _profile(spec: object, name: str, unknown: _Unknown) -> Profile:
    fields = _Fields(spec, "spec", unknown)
    defaults = Profile()
    profile = Profile(
        name=name,
        is_enabled=fields.flag("enabled", defaults.is_enabled),
        capacity=fields.read("capacity", _capacity, defaults.capacity),
        engines=fields.whole("engines", (1, profiles.MAX_ENGINES), defaults.engines),
        mode=fields.choice("mode", defaults.mode),
        contents=fields.choice("contents", defaults.contents),
        retention=fields.read("retention", _retention, defaults.retention),
        start_gate=fields.choice("startGate", defaults.start_gate),
        on_failure=fields.choice("onFailure", defaults.on_failure),
        attach_timeout=fields.read("attachTimeout", _duration, defaults.attach_timeout),
        janitor=fields.choice("janitor", defaults.janitor),
        pin=fields.choice("pin", defaults.pin),
        huge_pages=fields.choice("hugePages", defaults.huge_pages),
        containers=fields.read("containers", _containers, defaults.containers),
        shm_headroom_bytes=fields.read("shmHeadroom", parse_bytes, defaults.shm_headroom_bytes),
        image_python_path=fields.choice("imagePythonPath", defaults.image_python_path),
        vllm_argument=fields.choice("vllmArgument", defaults.vllm_argument),
        sidecar=_sidecar(fields.child("sidecar")),
    )
    fields.note_others()
    return profile


def _sidecar(fields: "_Fields") -> SidecarOptions:
    defaults = SidecarOptions()
    resources = fields.child("resources")
    user = fields.child("securityContext")
    cpu_limit = resources.read("cpuLimit", _some_cpu, defaults.cpu_limit_millis)
    cpu_request = resources.read("cpuRequest", _some_cpu, defaults.cpu_request_millis)
    if cpu_request > cpu_limit:
        raise resources.refusal("cpuRequest", "no more than cpuLimit")
    options = SidecarOptions(
        image=fields.read("image", _image, defaults.image),
        port=fields.whole("port", (profiles.MIN_PORT, 65535), defaults.port),
        is_host_network_allowed=fields.flag("hostNetwork", defaults.is_host_network_allowed),
        cpu_request_millis=cpu_request,
        cpu_limit_millis=cpu_limit,
        memory_overhead_bytes=resources.read(
            "memoryOverhead", parse_bytes, defaults.memory_overhead_bytes
        ),
        run_as_user=user.optional_whole("runAsUser", (1, _MAX_ID)),
        run_as_group=user.optional_whole("runAsGroup", (1, _MAX_ID)),
        env=fields.read("env", fields.env, defaults.env),
    )
    for part in (fields, resources, user):
        part.note_others()
    return options


class _Fields:
    """The fields of one object, each read once; what was never read is noted at the end as unknown."""

    def __init__(self, value: object, path: str, unknown: _Unknown) -> None:
        if not isinstance(value, Mapping):
            raise InvalidProfile(f"{path} of the OffloadProfile is no object: give a map of fields")
        self._values: Mapping[str, Any] = value
        self._path = path
        self._unknown = unknown
        self._read: set[str] = set()

    def child(self, name: str) -> "_Fields":
        self._read.add(name)
        return _Fields(self._values.get(name) or {}, f"{self._path}.{name}", self._unknown)

    def read(self, name: str, parse: Callable[[Any], _Value], default: _Value) -> _Value:
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            return default
        try:
            return parse(value)
        except ConfigurationError as error:
            raise InvalidProfile(f"{self._path}.{name} of the OffloadProfile: {error}") from error

    def flag(self, name: str, default: bool) -> bool:
        value = self.read(name, _as_is, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def whole(self, name: str, limits: tuple[int, int], default: int) -> int:
        value = self.optional_whole(name, limits)
        return default if value is None else value

    def optional_whole(self, name: str, limits: tuple[int, int]) -> int | None:
        value = self.read(name, _as_is, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refusal(name, f"a whole number from {limits[0]} to {limits[1]}")
        if not limits[0] <= value <= limits[1]:
            raise self.refusal(name, f"a whole number from {limits[0]} to {limits[1]}")
        return value

    def choice(self, name: str, default: _Choice) -> _Choice:
        kind = type(default)
        value = self.read(name, _as_is, default)
        if value not in tuple(kind):
            raise self.refusal(name, " or ".join(kind))
        return kind(value)

    def env(self, value: object) -> tuple[tuple[str, str], ...]:
        """Read a list of variables, of whose entries each has fields of its own.

        Left out are those whose value may be in a field that is unknown here: empty they would be wrong.
        """
        if not isinstance(value, list):
            return _env(value)
        return _env(
            [entry for number, entry in enumerate(value) if self._is_readable(entry, number)]
        )

    def _is_readable(self, entry: object, number: int) -> bool:
        if not isinstance(entry, Mapping):
            return True
        fields = _Fields(entry, f"{self._path}.env[{number}]", self._unknown)
        fields.note_others("name", "value")
        return bool(entry.get("value")) or entry.keys() <= {"name", "value"}

    def note_others(self, *more: str) -> None:
        """Note what was never read, and is not one of `more` that somebody else reads."""
        known = self._read.union(more)
        for name in set(self._values) - known:
            self._unknown[f"{self._path}.{name}"] = sorted(known)

    def refusal(self, name: str, allowed: str) -> InvalidProfile:
        return InvalidProfile(
            f"{self._path}.{name} of the OffloadProfile is {self._values.get(name)!r}: give {allowed}"
        )


def _as_is(value: Any) -> Any:  # noqa: ANN401 - a field of any type, checked by the caller
    return value


def _capacity(value: object) -> Capacity:
    text = "" if isinstance(value, bool) else str(value)
    if re.fullmatch(profiles.SHARE_PATTERN, text):
        share = Fraction(text.removesuffix("%")) / 100
        if share > 0:
            return Capacity(text, share=share)
    if "%" in text:
        raise InvalidProfile(f"{text!r} cannot be used: a share is above 0% and at most 100%")
    size_bytes = parse_capacity(text)
    if size_bytes < HUGE_PAGE_BYTES:
        raise InvalidProfile(f"{text!r} cannot be used: a region has at least 2Mi")
    return Capacity(text, size_bytes=size_bytes)


def _retention(value: object) -> str:
    if value in ("keep", "now"):
        return str(value)
    return _duration(value)


def _duration(value: object) -> str:
    text = value if isinstance(value, str) else ""
    if not re.fullmatch(profiles.DURATION_PATTERN, text) or not re.search("[1-9]", text):
        raise InvalidProfile(f"{value!r} cannot be used: give a duration above zero, such as 1h30m")
    return text


def _some_cpu(value: object) -> int:
    millicpus = parse_millicpus(value)
    if millicpus < 1:
        raise InvalidProfile(f"{value!r} cannot be used: give CPUs above zero, such as 500m")
    return millicpus


def _image(value: object) -> str:
    if not isinstance(value, str) or re.search(r"\s", value):
        raise InvalidProfile(f"{value!r} cannot be used: give the reference of an image")
    return value


def _containers(value: object) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [None]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(profiles.CONTAINER_PATTERN, name):
            raise InvalidProfile(f"{value!r} cannot be used: give a list of container names")
    if len(set(names)) < len(names) or len(names) > profiles.MAX_ENGINE_CONTAINERS:
        raise InvalidProfile(
            f"{value!r} cannot be used: give up to {profiles.MAX_ENGINE_CONTAINERS} names, each once"
        )
    return tuple(names)


def _env(value: object) -> tuple[tuple[str, str], ...]:
    entries = value if isinstance(value, list) else [None]
    pairs: list[tuple[str, str]] = []
    for entry in entries:
        name, text = _env_entry(entry)
        if name.startswith(ENV_PREFIX) and name not in profiles.SIDECAR_ENV_ALLOWED:
            raise InvalidProfile(
                f"{name} cannot be set here: the profile's own fields say it; of kvcellar's variables "
                f"{', '.join(profiles.SIDECAR_ENV_ALLOWED)} can"
            )
        if name in dict(pairs):
            raise InvalidProfile(f"{name} is set twice: set it once")
        pairs.append((name, text))
    if len(pairs) > profiles.MAX_SIDECAR_ENV:
        raise InvalidProfile(f"give no more than {profiles.MAX_SIDECAR_ENV} variables")
    return tuple(pairs)


def _env_entry(entry: object) -> tuple[str, str]:
    fields = entry if isinstance(entry, Mapping) else {}
    name, text = fields.get("name"), fields.get("value", "")
    is_name = isinstance(name, str) and re.fullmatch("[-._A-Za-z][-._A-Za-z0-9]*", name)
    if not is_name or not isinstance(text, str):
        raise InvalidProfile(
            f"{entry!r} cannot be used: give a list of {{name: NAME, value: TEXT}}"
        )
    return str(name), text

"""The environment of engines, sidecar and start gate. Pure; it changes no pod.

`KVCELLAR_POD_UID` comes first in every list, since the kubelet expands a reference only to an entry
before it.
"""

from typing import Any

from kvcellar import contract
from kvcellar_operator.parts import Parts


def engine_env(parts: Parts, engine_id: str) -> list[dict[str, Any]]:
    """The variables of an engine; those that it sets itself are left out by whoever adds them."""
    profile = parts.profile
    named = [_uid_entry(contract.ENV_POD_UID), _engine_id_entry(engine_id)]
    if not parts.has_library:
        return named  # an unmodified vLLM reads none, but its arguments refer to the id
    # A data-parallel engine names its region `<id>_dp<rank>`, as a sidecar with several engines does, unless
    # it is told that it is the pod's only one. Whether it is data-parallel may stand where no webhook looks
    # (a script, a --config file), and to another engine the variable says nothing.
    alone = {contract.ENV_ENGINES: 1} if profile.engines == 1 else {}
    values = {
        contract.ENV_ROOT: contract.DEFAULT_ROOT,
        contract.ENV_OWNER: contract.Owner.SIDECAR,
        **alone,
        contract.ENV_ON_FAILURE: profile.on_failure,
        contract.ENV_ATTACH_TIMEOUT: profile.attach_timeout,
        contract.ENV_PIN: profile.pin,
    }
    return [*named, *_literals(values)]


def wait_env(parts: Parts) -> list[dict[str, Any]]:
    """The variables of the start gate: where the sidecar answers, and what a refusal means."""
    values = {
        contract.ENV_ON_FAILURE: parts.profile.on_failure,
        contract.ENV_HTTP_HOST: _http_host(parts),
        contract.ENV_HTTP_PORT: parts.profile.sidecar.port,
    }
    return _literals(values)


def sidecar_env(parts: Parts) -> list[dict[str, Any]]:
    """The variables of the sidecar, but for the pod's memory limit, which is known only at the end."""
    profile = parts.profile
    values = {
        contract.ENV_ENGINE_ID: ",".join(parts.engine_ids),
        contract.ENV_ENGINES: profile.engines,
        contract.ENV_ROOT: contract.DEFAULT_ROOT,
        contract.ENV_CAPACITY: parts.sizing.capacity_bytes,
        contract.ENV_CONTENTS: profile.contents,
        contract.ENV_RETENTION: profile.retention,
        contract.ENV_MODE: profile.mode,
        contract.ENV_ON_FAILURE: profile.on_failure,
        contract.ENV_JANITOR: profile.janitor,
        contract.ENV_HUGE_PAGES: profile.huge_pages,
        contract.ENV_DESIRED_FILE: contract.DESIRED_FILE,
        contract.ENV_HTTP_HOST: _http_host(parts),
        contract.ENV_HTTP_PORT: profile.sidecar.port,
        **{name: text for name, text in profile.sidecar.env if name != contract.ENV_HTTP_HOST},
    }
    of_mount = [dict(entry) for entry in parts.shm.env if entry["name"] not in values]
    return [_uid_entry(contract.ENV_POD_UID), *_literals(values), *of_mount]


def _http_host(parts: Parts) -> str:
    # All of them: the kubelet and the operator ask from outside the pod.
    return dict(parts.profile.sidecar.env).get(contract.ENV_HTTP_HOST, contract.ALL_ADDRESSES)


def _engine_id_entry(engine_id: str) -> dict[str, Any]:
    if engine_id == f"$({contract.ENV_POD_UID})":
        return _uid_entry(contract.ENV_ENGINE_ID)
    return {"name": contract.ENV_ENGINE_ID, "value": engine_id}


def _uid_entry(name: str) -> dict[str, Any]:
    field = {"apiVersion": "v1", "fieldPath": "metadata.uid"}
    return {"name": name, "valueFrom": {"fieldRef": field}}


def _literals(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "value": str(value)} for name, value in values.items()]

"""`kvcellar wait`: the start gate of a pod, run as an init container behind the sidecar.

It asks the sidecar until the regions are as far as the gate wants. Under `degrade` a region that failed
opens the gate too: the engine then serves without the host tier. Under `fail` it ends with the reason.
"""

import json
import sys
import time
from typing import Any

from kvcellar.cli.client import SidecarClient
from kvcellar.contract import OnFailure, RegionState, StartGate, printable
from kvcellar.daemon.config import Settings
from kvcellar.daemon.status import GIVEN_UP
from kvcellar.errors import DoesNotFit, NotReady
from kvcellar.region.states import ATTACHABLE

_POLL_S = 0.2
_REPORT_S = 10.0
_ENOUGH = {
    StartGate.RESERVED: ATTACHABLE,
    StartGate.SETTLED: frozenset({RegionState.READY}),
}


def run(gate: StartGate, timeout_s: float | None) -> int:
    """Wait for the gate; print the plan if it was refused.

    Raises:
        DoesNotFit: under `fail`, the plan was refused.
        NotReady: under `fail`, there is no region; or the deadline has passed.
    """
    settings = Settings.load()
    client = SidecarClient(settings.client_host, settings.http_port)
    began = time.monotonic()
    reported = began
    while True:
        reason = _why_shut(client, gate, settings.on_failure)
        if not reason:
            _print_refusal(client)
            return 0
        now = time.monotonic()
        if timeout_s is not None and now - began >= timeout_s:
            raise NotReady(f"waited {timeout_s:g} s for the gate '{gate}' to open: {reason}")
        if now - reported >= _REPORT_S:
            sys.stderr.write(f"kvcellar: waiting for the gate '{gate}': {reason}\n")
            reported = now
        time.sleep(_POLL_S)


def _why_shut(client: SidecarClient, gate: StartGate, on_failure: OnFailure) -> str:
    """Why the gate is shut; empty if it is open."""
    started = client.get("/startupz")
    if started is None:
        return f"no sidecar answers at {client.address}"
    regions = _regions(client)
    if on_failure is OnFailure.FAIL:
        _stop_if_refused(client, regions)
    if started.status != 200:
        return started.detail
    if not regions:  # it has just ended, or is no sidecar
        return f"the sidecar at {client.address} shows no region"
    if gate is StartGate.PLAN:
        return ""
    enough = _ENOUGH[gate] | (GIVEN_UP if on_failure is OnFailure.DEGRADE else frozenset())
    behind = [region for region in regions if region.get("state") not in enough]
    return _sentence(behind[0]) if behind else ""


def _stop_if_refused(client: SidecarClient, regions: list[dict[str, Any]]) -> None:
    failed = next((region for region in regions if region.get("state") in GIVEN_UP), None)
    if failed is None:
        return
    plan = client.get("/v1/plan")
    if plan is None or plan.status != 200 or plan.json().get("fits", True):
        raise NotReady(_sentence(failed))
    _print_refusal(client)
    raise DoesNotFit(
        printable(str(failed.get("reason"))),
        asked_bytes=_whole(plan.json().get("askedBytes")),
        free_bytes=_whole(plan.json().get("freeBytes")),
        binding_limit=str(plan.json().get("bindingLimit", "")),
    )


def _print_refusal(client: SidecarClient) -> None:
    """Print the plan if it was refused, and a sentence for each region that will not be there."""
    plan = client.get("/v1/plan")
    if plan is not None and plan.status == 200 and not plan.json().get("fits", True):
        sys.stdout.write(json.dumps(plan.json()) + "\n")
    for region in _regions(client):
        if region.get("state") in GIVEN_UP:
            sys.stderr.write(f"kvcellar: {_sentence(region)}\n")


def _regions(client: SidecarClient) -> list[dict[str, Any]]:
    answer = client.get("/v1/regions")
    return answer.regions() if answer else []


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _sentence(region: dict[str, Any]) -> str:
    text = f"region {region.get('engineId')} is {region.get('state')}"
    reserved, capacity = region.get("reservedBytes"), region.get("capacityBytes")
    if region.get("state") == RegionState.RESERVING:
        text += f", {reserved} of {capacity} bytes reserved"
    return printable(text + (f": {region['reason']}" if region.get("reason") else ""))

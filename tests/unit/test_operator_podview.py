"""Why a pod does not start, in the kubelet's words: the statuses are as a kubelet of 1.36 writes them."""

from typing import Any

import pytest

from kvcellar.contract import RegionState
from kvcellar_operator.crd_region import Condition
from kvcellar_operator.heard import Heard, condition
from kvcellar_operator.observe import observe
from kvcellar_operator.podview import PodView, view_pod
from kvcellar_operator.words import Told, Why
from tests.support.fake_sidecars import region

NOW = "2030-01-01T00:00:00Z"
BACK_OFF = {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
NO_SHELL = {
    "exitCode": 128,
    "reason": "StartError",
    "message": 'failed to create containerd task: exec: "sh": executable file not found in $PATH',
}
DOES_NOT_FIT = {"exitCode": 3, "reason": "Error", "message": "region r needs 1 GiB"}
GOOD_END = {"exitCode": 0, "reason": "Completed"}


def pod(name: str, state: dict[str, Any], last: dict[str, Any] | None = None) -> PodView:
    """An injected pod, with the status of one of its init containers."""
    status = {"name": name, "state": state, "lastState": {"terminated": last} if last else {}}
    metadata = {
        "namespace": "ns",
        "name": "engine-0",
        "uid": "7b0c",
        "resourceVersion": "5",
        "annotations": {"kvcellar.dev/injected": '{"engineIds":["7b0c"]}'},
    }
    spec = {"initContainers": [{"name": "kvcellar"}]}
    return view_pod(
        {"metadata": metadata, "spec": spec, "status": {"initContainerStatuses": [status]}}
    )


@pytest.mark.parametrize(
    ("state", "last", "message"),
    [
        ({"running": {}}, None, ""),
        ({"running": {}}, DOES_NOT_FIT, ""),
        ({"waiting": {"reason": "PodInitializing"}}, None, ""),
        ({"terminated": DOES_NOT_FIT}, None, "Error: region r needs 1 GiB"),
        ({"waiting": BACK_OFF}, DOES_NOT_FIT, "CrashLoopBackOff, Error: region r needs 1 GiB"),
        (
            {"waiting": {"reason": "ErrImagePull", "message": "not found"}},
            None,
            "ErrImagePull: not found",
        ),
        ({"terminated": {"exitCode": 1}}, None, "the kubelet gives no reason"),
    ],
)
def test_a_sidecar_that_does_not_run_is_told_of_by_what_it_ended_with(
    state: dict[str, Any], last: dict[str, Any] | None, message: str
) -> None:
    assert pod("kvcellar", state, last).sidecar_message == message


@pytest.mark.parametrize("name", ["kvcellar-path", "kvcellar-path-2", "kvcellar-wait"])
def test_an_init_container_of_ours_that_fails_is_named_with_its_last_words(name: str) -> None:
    for state, last in (({"terminated": NO_SHELL}, None), ({"waiting": BACK_OFF}, NO_SHELL)):
        message = pod(name, state, last).start_message
        assert message.startswith(f"init container {name} failed: StartError: ")
        assert '"sh"' in message


@pytest.mark.parametrize(
    ("name", "state", "last"),
    [
        ("kvcellar-path", {"waiting": {"reason": "PodInitializing"}}, None),
        ("kvcellar-path", {"running": {}}, None),
        ("kvcellar-wait", {"terminated": GOOD_END}, None),
        # It failed once, and then it did not.
        ("kvcellar-wait", {"terminated": GOOD_END}, DOES_NOT_FIT),
        ("download", {"terminated": NO_SHELL}, None),
    ],
)
def test_nothing_is_said_of_a_start_that_goes_on_or_that_others_hold_up(
    name: str, state: dict[str, Any], last: dict[str, Any] | None
) -> None:
    assert pod(name, state, last).start_message == ""


def test_of_a_long_log_the_end_is_told_from_the_start_of_a_line() -> None:
    log = "".join(f"line {number}\n" for number in range(300)) + "the reason"
    ended = {"exitCode": 1, "reason": "Error", "message": log}
    message = pod("kvcellar", {"waiting": BACK_OFF}, ended).sidecar_message
    assert message.startswith("CrashLoopBackOff, Error: line 2")
    assert message.endswith("\nthe reason")
    assert len(message) < 700


def test_a_start_that_fails_degrades_the_region_and_is_told_once() -> None:
    status: dict[str, Any] = {}
    told, degraded = [], []
    for ended in (NO_SHELL, NO_SHELL, GOOD_END):
        body = {"metadata": {"generation": 1}, "spec": {"engineID": "7b0c"}, "status": status}
        view = pod("kvcellar-path", {"terminated": ended})
        seen = observe(view, Heard(region("7b0c")), body, NOW)
        status = seen.status
        told += [each.told for each in seen.transitions]
        degraded.append(condition(status, Condition.DEGRADED))
    assert [each["reason"] for each in degraded] == ["StartFailed", "StartFailed", "AsExpected"]
    assert [each["status"] for each in degraded] == ["True", "True", "False"]
    assert '"sh"' in degraded[0]["message"]
    assert told.count(Told.START_FAILED) == 1


def test_a_region_that_failed_is_the_reason_that_counts() -> None:
    failed = region("7b0c", RegionState.FAILED, reason="too large")
    body = {"metadata": {"generation": 1}, "spec": {"engineID": "7b0c"}}
    view = pod("kvcellar-wait", {"terminated": DOES_NOT_FIT})
    status = observe(view, Heard(failed), body, NOW).status
    assert condition(status, Condition.DEGRADED)["reason"] == Why.REGION_FAILED

"""How often a sidecar has been silent in a row, which is what the pauses between questions grow by."""

import asyncio
from typing import Any, cast

import pytest

from kvcellar.contract import CONTAINER_SIDECAR
from kvcellar_operator.listening import Listener
from kvcellar_operator.metrics import ControllerMetrics
from kvcellar_operator.objects import Key
from kvcellar_operator.podview import PodView, view_pod
from kvcellar_operator.sidecars import NoAnswer, Sidecars
from kvcellar_operator.words import Why

KEY = Key("ns", "engine-0")


class Silent:
    """Sidecars of which none gives an answer that can be used."""

    def __init__(self, why: Why = Why.OTHER_CONTRACT) -> None:
        self.why = why

    async def ask_regions(self, _pod: PodView) -> dict[str, Any]:
        raise NoAnswer(self.why, "no answer")


def pod(restarts: int = 0, **state: object) -> PodView:
    """A pod whose sidecar runs, unless `state` says otherwise."""
    sidecar = {
        "name": CONTAINER_SIDECAR,
        "restartCount": restarts,
        "state": state or {"running": {}},
    }
    metadata = {"namespace": "ns", "name": "engine-0", "uid": "7b0c", "resourceVersion": "1"}
    status = {"podIP": "10.0.0.1", "phase": "Running", "initContainerStatuses": [sidecar]}
    return view_pod({"metadata": metadata, "status": status})


def silences_after(
    *looks: PodView, why: Why = Why.OTHER_CONTRACT, was_reachable: bool = False
) -> int:
    """As the controller looks: what was called silent is not reachable any more."""
    listener = Listener(cast("Sidecars", Silent(why)), ControllerMetrics())
    for each in looks:
        reachable = was_reachable and not listener.silences(KEY)
        asyncio.run(listener.hear(KEY, each, was_reachable=reachable))
    return listener.silences(KEY)


def test_silences_in_a_row_are_counted() -> None:
    assert silences_after(*[pod()] * 5) == 5


def test_a_sidecar_that_was_started_again_is_asked_as_often_as_a_new_one() -> None:
    assert silences_after(*[pod()] * 5, pod(restarts=1)) == 1


def test_a_sidecar_that_is_not_there_has_not_failed_to_answer() -> None:
    assert silences_after(*[pod()] * 5, pod(terminated={"reason": "OOMKilled"})) == 0


@pytest.mark.parametrize(("was_reachable", "tolerated"), [(False, 4), (True, 1)])
def test_pauses_begin_to_grow_with_the_first_silence_and_a_silence_stays_one(
    was_reachable: bool, tolerated: int
) -> None:
    for number in range(1, 10):
        looks = [pod()] * number
        found = silences_after(*looks, why=Why.CONNECTION_FAILED, was_reachable=was_reachable)
        assert found == max(0, number - tolerated)


@pytest.mark.parametrize(
    ("why", "was_reachable", "looks"),
    [
        (Why.CONNECTION_FAILED, False, 5),
        (Why.CONNECTION_FAILED, True, 2),
        (Why.TIMEOUT, True, 2),
        (Why.TIMEOUT, False, 1),
        (Why.OTHER_CONTRACT, False, 1),
    ],
)
def test_a_sidecar_is_called_silent_after_as_many_looks_as_it_may_need(
    why: Why, was_reachable: bool, looks: int
) -> None:
    """One that has just started does not listen yet: a warning at each start would be of no use."""
    listener = Listener(cast("Sidecars", Silent(why)), ControllerMetrics())
    seen = 1
    while asyncio.run(listener.hear(KEY, pod(), was_reachable=was_reachable)) is None:
        seen += 1
    assert seen == looks

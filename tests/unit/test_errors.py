"""Errors: what a process can do differently, and a status for the command line."""

import inspect
import pickle

import pytest

from kvcellar import errors
from kvcellar.errors import DoesNotFit, KVCellarError

ALL = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, KVCellarError)
]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_and_stands_in_the_tree(kind: type[KVCellarError]) -> None:
    assert 1 <= kind.exit_status <= 6
    assert f"{kind.__name__} " in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_between_two_processes(kind: type[KVCellarError]) -> None:
    again = pickle.loads(pickle.dumps(kind("why")))  # noqa: S301 - our own
    assert (type(again), str(again)) == (kind, "why")


def test_the_numbers_of_a_refusal_survive_too() -> None:
    error = DoesNotFit("why", asked_bytes=3, free_bytes=2, binding_limit="tmpfs")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (again.asked_bytes, again.free_bytes, again.binding_limit) == (3, 2, "tmpfs")

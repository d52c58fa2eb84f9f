"""Errors: what a process can do differently, and a status for the command line."""

import ast
import inspect
import pickle
import re
from pathlib import Path

import pytest

import kvcellar
from kvcellar import errors
from kvcellar.errors import DoesNotFit, KVCellarError

ALL = [
    found
    for _, found in inspect.getmembers(errors, inspect.isclass)
    if issubclass(found, KVCellarError)
]


Tree = dict[str, tuple[str, int]]
"""Parent and exit status of each error, by its name."""


def _drawn() -> Tree:
    """The tree as the docstring draws it."""
    tree: Tree = {"KVCellarError": ("Exception", 1)}
    above = ["KVCellarError"]
    for indent, name, status in re.findall(
        r"^ {4}((?:[| ] {3})*)\+-- (\w+) +\[(\d)\]", errors.__doc__ or "", re.MULTILINE
    ):
        depth = len(indent) // 4
        tree[name] = (above[depth], int(status))
        above[depth + 1 :] = [name]
    return tree


def _written() -> Tree:
    """The tree as the classes of the whole package make it, read without importing them."""
    found: dict[str, tuple[list[str], int | None]] = {}
    for path in Path(kvcellar.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                found[node.name] = (bases, _own_status(node))
    tree: Tree = {"KVCellarError": ("Exception", 1)}
    while True:
        new = {
            name: (base, status or tree[base][1])
            for name, (bases, status) in found.items()
            for base in bases
            if base in tree and name not in tree
        }
        if not new:
            return tree
        tree |= new


def _own_status(node: ast.ClassDef) -> int | None:
    for line in node.body:
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "exit_status":
            return int(ast.unparse(line.value))
    return None


def test_the_tree_draws_every_error_of_the_package_and_no_other() -> None:
    assert _drawn() == _written()


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_status_of_the_command_line(kind: type[KVCellarError]) -> None:
    assert 1 <= kind.exit_status <= 6


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_between_two_processes(kind: type[KVCellarError]) -> None:
    again = pickle.loads(pickle.dumps(kind("why")))  # noqa: S301 - our own
    assert (type(again), str(again)) == (kind, "why")


def test_the_numbers_of_a_refusal_survive_too() -> None:
    error = DoesNotFit("why", asked_bytes=3, free_bytes=2, binding_limit="tmpfs")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (again.asked_bytes, again.free_bytes, again.binding_limit) == (3, 2, "tmpfs")

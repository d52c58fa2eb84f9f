"""The layout that the editable install and the stdlib's ``operator`` module rest on.

``sidecar/`` and ``operator/`` are both on ``sys.path`` of an editable install, so
whatever lies loose in them can be imported by its bare name.
"""

import operator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_operator_folder_is_no_package() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_no_test_folder_is_named_operator() -> None:
    assert not (ROOT / "tests" / "operator").exists()


def test_operator_is_the_module_of_the_standard_library() -> None:
    assert operator.add(2, 3) == 5
    assert ROOT not in Path(operator.__file__ or "").parents


@pytest.mark.parametrize(
    ("folder", "package"), [("sidecar", "kvcellar"), ("operator", "kvcellar_operator")]
)
def test_a_source_folder_holds_its_package_alone(folder: str, package: str) -> None:
    found = {path.name for path in (ROOT / folder).iterdir()} - {"__pycache__"}

    assert found == {package}


@pytest.mark.parametrize("package", ["sidecar/kvcellar", "operator/kvcellar_operator"])
def test_a_package_says_that_it_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()

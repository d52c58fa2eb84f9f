"""kvcellar's image as another release would be: this tree with a contract version that the other does not know.

Only kvcellar's own packages differ from the usual image, so they are laid over it.
"""

import re
import shutil
from pathlib import Path

from kvcellar.contract import CONTRACT_VERSION
from tests.cluster.images import recipes

IMAGE = f"{recipes.REPOSITORY}/kvcellar:bumped"
CONTRACT = CONTRACT_VERSION + 1
RELEASE = "99.0.0"

_DOCKERFILE = recipes.HERE / "bumped.Dockerfile"
_PACKAGES = ("sidecar/kvcellar", "operator/kvcellar_operator")
_CHANGES = {
    "sidecar/kvcellar/contract/__init__.py": (
        r"^CONTRACT_VERSION = \d+$",
        f"CONTRACT_VERSION = {CONTRACT}",
    ),
    "sidecar/kvcellar/__init__.py": (r'^__version__ = ".*"$', f'__version__ = "{RELEASE}"'),
}
"""The line to be changed in a file, and what it becomes."""


def image() -> recipes.Image:
    """The image, made if it is not there yet.

    Raises:
        BoxError: it cannot be made.
    """
    usual = next(each for each in recipes.images() if each.name == recipes.KVCELLAR_IMAGE)
    changes = repr(_CHANGES)
    return recipes.image_on(usual, IMAGE, "bumped", [_DOCKERFILE, changes], _fill)


def _fill(folder: Path) -> None:
    """Lay down what the Dockerfile takes."""
    shutil.copy(_DOCKERFILE, folder / "Dockerfile")
    for package in _PACKAGES:
        shutil.copytree(
            recipes.ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name, (line, changed) in _CHANGES.items():
        path = folder / name
        text, n_changes = re.subn(line, changed, path.read_text(), flags=re.MULTILINE)
        if n_changes != 1:
            raise ValueError(f"{name} has {n_changes} lines like {line}")
        path.write_text(text)

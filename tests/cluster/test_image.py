"""The image that the Dockerfile makes, as a runtime finds it and as a pod runs it."""

import json
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcellar import __version__
from tests.cluster.box.access import until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import ROOT, Cluster
from tests.cluster.images import recipes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

GOAL_BYTES = 90_000_000
"""What the image may add to its base."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An image in a tar file."""

    layer_bytes: dict[str, int]
    """By the layer's name in the file, the base's first."""
    config: JsonObject

    @classmethod
    def read(cls, path: Path) -> "Archive":
        with tarfile.open(path) as tar:

            def read(name: str) -> Any:  # noqa: ANN401 - whatever JSON it is
                file = tar.extractfile(name)
                assert file is not None
                return json.load(file)

            (image,) = read("manifest.json")
            layers = {name: tar.getmember(name).size for name in image["Layers"]}
            return cls(layers, read(image["Config"]))


def test_the_image_is_small_says_what_it_is_and_is_not_root(
    images: dict[str, Path],
) -> None:
    archives = {name: Archive.read(archive) for name, archive in images.items()}
    image = archives[recipes.KVCELLAR_IMAGE]
    config = image.config["config"]
    assert config["User"] == "65532:65532"
    environment = dict(entry.split("=", 1) for entry in config["Env"])
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    labels = {name.rpartition(".")[2]: text for name, text in config["Labels"].items()}
    assert labels["title"] == "kvcellar"
    assert labels["version"] == __version__
    assert labels["licenses"] == "Apache-2.0"
    assert labels["revision"]

    base, *own = image.layer_bytes
    assert base in archives[recipes.ENGINE_IMAGE].layer_bytes
    assert sum(image.layer_bytes[name] for name in own) < GOAL_BYTES


# ---- as a pod runs it


ARBITRARY_UID = 1_000_690_000
"""As OpenShift gives to a namespace; its group is 0."""


@pytest.fixture(scope="module")
def running(node_box: Cluster) -> Iterator[Cluster]:
    """The image in a pod with a read-only root, a user that it has never heard of, and group 0."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsGroup": 0,
        "runAsNonRoot": True,
        "runAsUser": ARBITRARY_UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "kvcellar",
        "image": recipes.KVCELLAR_IMAGE,
        "command": ["sleep", "600"],
        "securityContext": security,
    }
    spec = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
    }
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "image"}, "spec": spec}
    service_account = ("get", "sa", "default")
    until(
        lambda: node_box.kubectl(*service_account, check=False).returncode == 0,
        "the namespace takes pods",
    )
    node_box.api.create("/api/v1/namespaces/default/pods", body)
    node_box.kubectl("wait", "--for=condition=Ready", "pod/image", "--timeout=90s", timeout_s=100)
    yield node_box
    node_box.kubectl("delete", "pod", "image", "--grace-period=0", "--force")


def in_image(cluster: Cluster, *argv: str) -> subprocess.CompletedProcess[str]:
    return cluster.kubectl("exec", "image", "--", *argv, check=False)


@pytest.mark.parametrize(
    "argv",
    [
        ("kvcellar", "--version"),
        ("kvcellar", "sidecar", "--help"),
        ("kvcellar", "wait", "--help"),
        ("kvcellar-operator", "webhook", "--help"),
        ("kvcellar-operator", "controller", "--help"),
    ],
    ids=" ".join,
)
def test_every_program_runs_under_any_user(running: Cluster, argv: tuple[str, ...]) -> None:
    done = in_image(running, *argv)
    assert done.returncode == 0, done.stderr


MISSING = """
import importlib.util, shutil, sys
modules = [name for name in ("pip", "setuptools", "numpy", "torch", "ensurepip")
           if importlib.util.find_spec(name)]
programs = [name for name in ("pip", "pip3", "gcc", "cc", "ld", "make") if shutil.which(name)]
sys.exit(str(modules + programs) if modules + programs else 0)
"""

WITHOUT_BYTE_CODE = """
import importlib, sys
for name in ("kvcellar.daemon.app", "kvcellar.cli", "kvcellar_operator.webhook",
             "kvcellar_operator.controller"):
    importlib.import_module(name)
import os
found = [module.__name__ for module in list(sys.modules.values())
         if getattr(module, "__cached__", None) and getattr(module, "__file__", "").endswith(".py")
         and not os.path.exists(module.__cached__)]
sys.exit(str(found) if found else 0)
"""


def test_nothing_that_installs_or_compiles_is_in_the_image(running: Cluster) -> None:
    done = in_image(running, "python3", "-c", MISSING)
    assert done.returncode == 0, done.stderr


def test_every_module_has_its_byte_code_so_that_none_is_written(running: Cluster) -> None:
    done = in_image(running, "python3", "-c", WITHOUT_BYTE_CODE)
    assert done.returncode == 0, done.stderr


# ---- what goes into it


def test_the_locks_of_the_image_name_no_index_and_hash_everything() -> None:
    for name in ("image.txt", "image-build.txt"):
        text = (ROOT / "requirements" / name).read_text()
        assert "://" not in text.replace("via", "")
        assert text.count("==") <= text.count("--hash=")
    assert "numpy==" not in (ROOT / "requirements" / "image.txt").read_text()

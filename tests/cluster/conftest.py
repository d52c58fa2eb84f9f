"""What cluster tests share: a cluster for the whole run, and a namespace and nodes for each test.

With ``KVCELLAR_TEST_KUBECONFIG`` naming a kubeconfig, `cluster` is that cluster, with the kubectl and
helm of the PATH; what only a cluster of the run's own can do (`box`) is skipped then.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.cluster.box import simulated
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.errors import ApiError, NoGoToolchain
from tests.cluster.box.programs import programs, programs_folder
from tests.cluster.box.settings import Settings

_KUBECONFIG = "KVCELLAR_TEST_KUBECONFIG"


class MakeNode(Protocol):
    """Adds a simulated node that is ready; returns its name.

    `capacity` is what it offers besides CPU, memory and disk, such as ``{"nvidia.com/gpu": "8"}``.
    """

    def __call__(
        self, labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None
    ) -> str: ...


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the programs before the first test that needs them: a test may not take that long."""
    needed = any(
        {"box", "cluster"} & set(getattr(item, "fixturenames", ())) for item in session.items
    )
    if needed and not session.config.option.collectonly and _KUBECONFIG not in os.environ:
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and not programs_folder().is_dir():
            terminal.write_line("building the programs of the test cluster: once, for minutes")
        # Where they cannot be built, each test says so itself.
        with contextlib.suppress(NoGoToolchain):
            programs()


@pytest.fixture(scope="session")
def box(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """The run's own cluster; its logs stay in the run's temporary folder if a test fails."""
    if _KUBECONFIG in os.environ:
        pytest.skip(f"{_KUBECONFIG} is set, and this test needs a cluster of its own")
    folder = tmp_path_factory.mktemp("cluster")
    try:
        with Cluster.running(Settings.choose(folder / "state", folder / "logs")) as running:
            yield running
    except NoGoToolchain as error:
        pytest.skip(str(error))
    if not request.session.testsfailed:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Access]:
    """The cluster to test on, as its administrator."""
    if _KUBECONFIG in os.environ:
        scratch = tmp_path_factory.mktemp("access")
        with Access(Path(os.environ[_KUBECONFIG]).resolve(), None, scratch) as access:
            yield access
    else:
        yield request.getfixturevalue("box")


@pytest.fixture
def namespace(cluster: Access) -> Iterator[str]:
    """A namespace of the test's own, ready for pods."""
    name = f"kvc-test-{secrets.token_hex(4)}"
    body: JsonObject = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    cluster.api.create("/api/v1/namespaces", body)

    def has_service_account() -> bool:
        try:
            cluster.api.get(f"/api/v1/namespaces/{name}/serviceaccounts/default")
        except ApiError:
            return False
        return True

    until(has_service_account, f"the default ServiceAccount of namespace {name}")
    yield name
    simulated.delete_pods(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def make_node(cluster: Access) -> Iterator[MakeNode]:
    """Makes simulated nodes, which are gone after the test."""
    made: list[str] = []

    def make(labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None) -> str:
        name = f"kvc-node-{secrets.token_hex(4)}"
        made.append(name)
        simulated.create_node(cluster, name, labels, capacity)
        return name

    yield make
    for name in made:
        simulated.delete_node(cluster, name)

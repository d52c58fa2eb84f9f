"""What cluster tests share: clusters for the whole run, and a namespace and nodes for each test.

`box` is a control plane with simulated nodes; `node_box` has a real node, and runs pods.

With ``KVCELLAR_TEST_KUBECONFIG`` naming a kubeconfig, `cluster` is that cluster, with the kubectl and
helm of the PATH; what only a cluster of the run's own can do (`box`) is skipped then.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from tests.cluster import charts, evidence, figures, namespaces, traces
from tests.cluster.box import simulated
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.cluster import Cluster
from tests.cluster.box.errors import ApiError, BoxError, NoGoToolchain
from tests.cluster.box.programs import programs, programs_folder
from tests.cluster.box.settings import Settings
from tests.cluster.charts import OPERATOR_NAMESPACE, delete_crds
from tests.cluster.images import bumped, recipes

_KUBECONFIG = "KVCELLAR_TEST_KUBECONFIG"
_NEEDS_ROOT = (
    "a real node takes namespaces, mounts and cgroups: run as root the {} tests that need one"
)
_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
_HAS_FAILED = pytest.StashKey[bool]()
_HAS_PASSED = pytest.StashKey[bool]()
_NODE_TESTS = pytest.StashKey[int]()
_FIGURES = pytest.StashKey[figures.Figures]()


class MakeNode(Protocol):
    """Adds a simulated node that is ready; returns its name.

    `capacity` is what it offers besides CPU, memory and disk, such as ``{"nvidia.com/gpu": "8"}``.
    """

    def __call__(
        self, labels: dict[str, str] | None = None, capacity: dict[str, str] | None = None
    ) -> str: ...


# After -m and -k have chosen.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without root, one of the tests that need a node fails for all of them, and with their number."""
    on_node = [item for item in items if "node_box" in getattr(item, "fixturenames", ())]
    config.stash[_NODE_TESTS] = len(on_node)
    if os.geteuid() != 0 and _KUBECONFIG not in os.environ and on_node:
        config.hook.pytest_deselected(items=on_node[1:])
        items[:] = [item for item in items if item not in on_node[1:]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build programs and images before the first test that needs them: a test may not take that long."""
    needed = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if session.config.option.collectonly or _KUBECONFIG in os.environ:
        return
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")

    def say(line: str) -> None:
        if terminal is not None:
            terminal.write_line(line)

    # Where they cannot be built, each test says so itself.
    if needed & {"box", "cluster", "node_box"}:
        if not programs_folder().is_dir():
            say("building the programs of the test cluster: once, for minutes")
        with contextlib.suppress(NoGoToolchain):
            programs()
    if "node_box" in needed and os.geteuid() == 0:
        if not recipes.are_there():
            say("making the images of the test cluster: once, for minutes")
        with contextlib.suppress(BoxError):
            _make_images(needed)


def _make_images(needed: set[str]) -> None:
    recipes.images()
    if "other_engines" in needed:
        recipes.other_engines()
    if "other_release" in needed:
        bumped.image()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember what a test came to, for the fixtures that are torn down after it; write its figures."""
    report = yield
    if report.failed:
        item.stash[_HAS_FAILED] = True
    if call.when == "call":
        item.stash[_HAS_PASSED] = report.passed
    if call.when == "teardown" and report.passed and item.stash.get(_HAS_PASSED, False):
        _figures_of(item).write(item.nodeid)
    return report


def _figures_of(item: pytest.Item) -> figures.Figures:
    return item.stash.setdefault(_FIGURES, figures.Figures())


@pytest.fixture
def record_figure(request: pytest.FixtureRequest) -> figures.RecordFigure:
    """Keeps what a test has measured, by a name, for docs/reference/stories.md."""

    def record(name: str, measured: str) -> None:
        _figures_of(request.node).more[name] = measured

    return record


@pytest.fixture(scope="session", autouse=True)
def leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The run fails if anything of it is left on this machine when its last cluster is gone."""
    with traces.nothing_left(tmp_path_factory.getbasetemp()):
        yield


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
def images() -> dict[str, Path]:
    """The archives of the images, by name: those of the tree as the run found it."""
    return {image.name: image.archive for image in recipes.images()}


@pytest.fixture(scope="session")
def node_box(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster of the run's own with a real node, which has the images; nothing is left of it."""
    if _KUBECONFIG in os.environ:
        pytest.skip(f"{_KUBECONFIG} is set, and this test needs a cluster of its own")
    if os.geteuid() != 0:
        pytest.fail(_NEEDS_ROOT.format(request.config.stash[_NODE_TESTS]), pytrace=False)
    archives: dict[str, Path] = request.getfixturevalue("images")
    folder = tmp_path_factory.mktemp("node")
    settings = Settings.choose(folder / "state", folder / "logs", node=True)
    with Cluster.running(settings) as running:
        for archive in archives.values():
            running.node.import_image(archive)
        yield running
        until(lambda: not namespaces.pods_left(running), "the pods of the tests have ended", 90.0)
    assert running.traces() == []
    if not request.session.testsfailed:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def installed(node_box: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """`node_box` with the chart in it, in a namespace for restricted pods; its pods are ready."""
    space = {"metadata": {"name": OPERATOR_NAMESPACE, "labels": _RESTRICTED}}
    node_box.api.create("/api/v1/namespaces", space)
    try:
        charts.install(node_box)
        yield node_box
    finally:
        evidence.save(node_box, OPERATOR_NAMESPACE, tmp_path_factory.mktemp("operator"))


@pytest.fixture(scope="session")
def other_engines(node_box: Cluster) -> None:
    """Gives the node the engine in images of other shapes."""
    for image in recipes.other_engines():
        node_box.node.import_image(image.archive)


@pytest.fixture
def pod_namespace(
    request: pytest.FixtureRequest, node_box: Cluster, tmp_path: Path
) -> Iterator[str]:
    """A namespace on the real node that takes restricted pods only; a failed test leaves evidence."""
    with _namespace_of(request.node, node_box, tmp_path) as name:
        yield name


@pytest.fixture
def pod_namespaces(
    request: pytest.FixtureRequest, node_box: Cluster, tmp_path: Path
) -> Iterator[Sequence[str]]:
    """Three of `pod_namespace`, for pods that bear the same name."""
    with contextlib.ExitStack() as stack:
        each = (_namespace_of(request.node, node_box, tmp_path) for _ in range(3))
        yield [stack.enter_context(one) for one in each]


@pytest.fixture(scope="module")
def shared_namespace(
    request: pytest.FixtureRequest, node_box: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """As `pod_namespace`, but one for all tests of a module."""
    failed_before = request.session.testsfailed
    with _restricted_namespace(node_box) as name:
        yield name
        if request.session.testsfailed > failed_before:
            evidence.save(node_box, name, tmp_path_factory.mktemp("evidence"))


@pytest.fixture
def record_pods(
    request: pytest.FixtureRequest, node_box: Cluster, shared_namespace: str
) -> Iterator[None]:
    """Keeps how the pods of `shared_namespace` have fared until a test's end, as `pod_namespace` does."""
    yield
    if not request.node.stash.get(_HAS_FAILED, False):
        _figures_of(request.node).add_pods(node_box, shared_namespace)


@contextlib.contextmanager
def _namespace_of(test: pytest.Item, node_box: Cluster, folder: Path) -> Iterator[str]:
    """A restricted namespace of one test, whose pods are evidence if it fails, and figures if not."""
    with _restricted_namespace(node_box) as name:
        yield name
        if test.stash.get(_HAS_FAILED, False):
            evidence.save(node_box, name, folder / "evidence" / name)
        else:
            _figures_of(test).add_pods(node_box, name)


@contextlib.contextmanager
def _restricted_namespace(node_box: Cluster) -> Iterator[str]:
    name = namespaces.new_name()
    space = {"metadata": {"name": name, "labels": _RESTRICTED}}
    node_box.api.create("/api/v1/namespaces", space)
    until(
        lambda: node_box.kubectl("get", "sa", "default", "-n", name, check=False).returncode == 0,
        f"the default ServiceAccount of namespace {name}",
    )
    yield name
    # They end beside the next test; `node_box` waits for all.
    pods = ("delete", "pods", "--all", "--namespace", name)
    node_box.kubectl(*pods, "--grace-period=1", "--wait=false", timeout_s=90)
    node_box.kubectl("delete", "namespace", name, "--wait=false")


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
    name = namespaces.new_name()
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


@pytest.fixture(scope="module")
def without_crds(box: Cluster) -> Iterator[None]:
    """Helm makes the CRDs in these tests, and takes over none that somebody else made."""
    delete_crds(box)
    yield
    delete_crds(box)

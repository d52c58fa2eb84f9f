"""Every golden shape and generated pods, as a real API server takes them.

The shapes of tests/data/inject go through the real webhook: what it stamps is what the golden output has,
and the API server takes the pod that comes out. Nothing is kept: each is created as a dry run.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from kvcellar.contract import ANNOTATION_INJECTED, ANNOTATION_SKIPPED, LABEL_INJECT
from kvcellar_operator.inject import InjectSettings, Profile, inject
from kvcellar_operator.pods import Pod
from tests.cluster.box.access import Access, until
from tests.cluster.box.api import JsonObject
from tests.cluster.box.errors import ApiError
from tests.cluster.operators import install_crds, own_namespace
from tests.cluster.webhooks import Webhook, started
from tests.support.generated_pods import PROFILES, pods

pytestmark = pytest.mark.cluster

SHAPES = Path(__file__).resolve().parents[1] / "data" / "inject"
OF_THE_INJECTOR = ("image", "version", "contractVersion")
SETTINGS = InjectSettings(image="kvcellar:test", version="0")
REFUSED_ANYWAY = {"ephemeral-containers"}
"""Shapes that the API server refuses whether or not they have opted in: these are not for creation."""


def shapes() -> dict[str, tuple[JsonObject, JsonObject | None, JsonObject]]:
    """Input, profile and output of each; those without a profile first."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for path in SHAPES.glob("*.in.yaml"):
        name = path.name.removesuffix(".in.yaml")
        pod, *profiles = yaml.load_all(path.read_text(), loader)
        (out,) = yaml.load_all((SHAPES / f"{name}.out.yaml").read_text(), loader)
        found[name] = (pod, profiles[0] if profiles else None, out)
    return dict(sorted(found.items(), key=lambda item: (item[1][1] is not None, item[0])))


@pytest.fixture(scope="module")
def webhook(cluster: Access, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    install_crds(cluster)
    folder = tmp_path_factory.mktemp("webhook")
    with own_namespace(cluster) as namespace, started(cluster, namespace, folder) as running:
        yield running


def stamped(pod: JsonObject) -> dict[str, Any]:
    """What the annotations say, without what is the injector's own."""
    marks = pod["metadata"].get("annotations") or {}
    stamp = json.loads(marks.get(ANNOTATION_INJECTED, "{}"))
    kept = {key: value for key, value in stamp.items() if key not in OF_THE_INJECTOR}
    return {"injected": kept, "skipped": marks.get(ANNOTATION_SKIPPED, "").partition(":")[0]}


def attempt(webhook: Webhook, pod: JsonObject) -> JsonObject | str:
    """The pod as it would be created, or why the API server refuses it."""
    pod = copy.deepcopy(pod)
    pod["metadata"].pop("namespace", None)
    try:
        return webhook.create(pod)
    except ApiError as error:
        return str(error)


def test_every_shape_becomes_by_the_webhook_what_its_golden_output_says(webhook: Webhook) -> None:
    profiles = f"/apis/kvcellar.dev/v1alpha1/namespaces/{webhook.namespace}/offloadprofiles"
    refused = {}
    every = shapes()
    for name, (pod, profile, out) in every.items():
        if profile is not None:
            profile["metadata"]["namespace"] = webhook.namespace
            webhook.cluster.api.create(profiles, profile)
        expected = stamped(out)

        def is_as_expected(pod: JsonObject = pod, expected: dict[str, Any] = expected) -> bool:
            made = attempt(webhook, pod)
            return isinstance(made, str) or stamped(made) == expected

        until(is_as_expected, f"{name} becomes {expected}, not {attempt(webhook, pod)}", 10.0)
        if isinstance(made := attempt(webhook, pod), str):
            refused[name] = made
        if profile is not None:
            webhook.cluster.api.delete(f"{profiles}/{profile['metadata']['name']}")
    for name in refused:
        # Not by what was put into it.
        pod = copy.deepcopy(every[name][0])
        pod["metadata"].get("labels", {}).pop(LABEL_INJECT, None)
        assert isinstance(attempt(webhook, pod), str), refused[name]
    assert refused.keys() == REFUSED_ANYWAY, refused


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(pods(), PROFILES)
def test_what_the_api_server_takes_it_takes_with_the_sidecar(
    webhook: Webhook, pod: Pod, profile: Profile
) -> None:
    injected = inject(pod, webhook.namespace, profile, SETTINGS).pod
    # The webhook is not asked here: the pod comes as it would leave it.
    plain, given_it = copy.deepcopy(pod), copy.deepcopy(injected)
    for each in (plain, given_it):
        each["metadata"]["labels"] = {}
    if isinstance(attempt(webhook, plain), str):
        return
    made = attempt(webhook, given_it)
    assert not isinstance(made, str), made

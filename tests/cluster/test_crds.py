"""What a real API server says to profiles and regions that cannot be."""

import json
from typing import Any

import pytest

from kvcellar.contract import API_GROUP, API_VERSION
from tests.cluster.box.access import Access
from tests.cluster.operators import install_crds

pytestmark = pytest.mark.cluster

CAPACITY = "capacity is whole bytes of at least 2Mi and below 8E"
RETENTION = "retention is keep, now, or a duration"
FIXED = "cannot be changed: the region belongs to one pod"
BAD_PROFILES: list[tuple[dict[str, Any], str]] = [
    ({"capacity": "10X"}, CAPACITY),
    ({"capacity": "1.5"}, CAPACITY),
    ({"capacity": "2097152.5"}, CAPACITY),
    ({"capacity": "-1Gi"}, CAPACITY),
    ({"capacity": -1}, CAPACITY),
    ({"capacity": 1}, CAPACITY),
    ({"capacity": "1Mi"}, CAPACITY),
    ({"capacity": "8E"}, CAPACITY),
    ({"capacity": ""}, CAPACITY),
    ({"capacity": "0%"}, CAPACITY),
    ({"capacity": "101%"}, CAPACITY),
    ({"capacity": "50.5.5%"}, CAPACITY),
    ({"capacity": "200 Gi"}, CAPACITY),
    ({"size": "1Gi"}, 'unknown field "spec.size"'),
    ({"sidecar": {"ports": 1}}, 'unknown field "spec.sidecar.ports"'),
    ({"mode": "native"}, 'supported values: "plugin", "stock"'),
    ({"retention": "for ever"}, RETENTION),
    ({"retention": "0s"}, RETENTION),
    ({"attachTimeout": "5"}, "attachTimeout is a duration"),
    ({"engines": 0}, "greater than or equal to 1"),
    ({"engines": 1.5}, "must be of type integer"),
    ({"enabled": "yes"}, "must be of type boolean"),
    ({"containers": ["a", "a"]}, "Duplicate value"),
]
GOOD_PROFILES: list[dict[str, Any]] = [
    {},
    {"capacity": "200Gi"},
    {"capacity": "1.5Gi"},
    {"capacity": 2097152},
    {"capacity": "100%"},
    {"capacity": "12.5%"},
    {"capacity": "1e12"},
    {"retention": "1h30m"},
    # More than any pod's limit is no mistake: it comes on top of the engine's own memory.
    {"capacity": "7E"},
]
REGION = {"engineID": "chat", "podName": "p", "podUID": "u", "capacity": "1Gi"}
BAD_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"engineID": "other"}, FIXED),
    ({"podUID": "other"}, FIXED),
    ({"capacity": "2Gi"}, "capacity cannot be changed"),
    ({"capacity": None}, "capacity cannot be added or removed"),
    ({"contents": "some"}, 'supported values: "discard", "keep"'),
    ({"retention": "soon"}, RETENTION),
]


@pytest.fixture(autouse=True)
def _crds(cluster: Access) -> None:
    install_crds(cluster)


def document(kind: str, spec: dict[str, Any]) -> str:
    body = {
        "apiVersion": f"{API_GROUP}/{API_VERSION}",
        "kind": kind,
        "metadata": {"name": "tried"},
        "spec": spec,
    }
    return json.dumps(body)


def test_profiles_that_cannot_be_are_refused_with_a_sentence_that_says_what_can(
    cluster: Access, namespace: str
) -> None:
    create = ("create", "-n", namespace, "--dry-run=server", "-f", "-")
    for spec, words in BAD_PROFILES:
        done = cluster.kubectl(*create, stdin=document("OffloadProfile", spec), check=False)
        assert done.returncode != 0, spec
        assert words in done.stderr, (spec, done.stderr)
    for spec in GOOD_PROFILES:
        cluster.kubectl(*create, stdin=document("OffloadProfile", spec))


def test_a_region_can_be_changed_in_what_is_wished_and_in_nothing_else(
    cluster: Access, namespace: str
) -> None:
    cluster.kubectl("create", "-n", namespace, "-f", "-", stdin=document("OffloadRegion", REGION))
    patch = ("patch", "-n", namespace, "kvreg", "tried", "--type=merge", "-p")
    for change, words in BAD_CHANGES:
        done = cluster.kubectl(*patch, json.dumps({"spec": change}), check=False)
        assert done.returncode != 0, change
        assert words in done.stderr, (change, done.stderr)
    cluster.kubectl(*patch, json.dumps({"spec": {"contents": "keep", "retention": "now"}}))

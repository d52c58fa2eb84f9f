"""The names of the namespaces that tests make, each for itself."""

import secrets

from tests.cluster.box.cluster import Cluster

_PREFIX = "kvc-test-"


def new_name() -> str:
    """A name that no other test has."""
    return f"{_PREFIX}{secrets.token_hex(4)}"


def pods_left(cluster: Cluster) -> list[str]:
    """The pods that are still in namespaces of tests, which may be ending."""
    metadata = (each["metadata"] for each in cluster.api.get("/api/v1/pods")["items"])
    return [each["name"] for each in metadata if each["namespace"].startswith(_PREFIX)]

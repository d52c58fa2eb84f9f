"""What a pod asks for, by Kubernetes' own rules."""

from typing import Any

import pytest

from kvcellar_operator.demands import (
    QosClass,
    aggregate,
    container_amount,
    memory_limit_bytes,
    qos_class,
)
from kvcellar_operator.reasons import InjectionRefused

GIB = 2**30


def container(cpu: str = "", memory: str = "", kind: str = "both", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    level = {name: text for name, text in (("cpu", cpu), ("memory", memory)) if text}
    kinds = ["requests", "limits"] if kind == "both" else [kind]
    return {"name": "c", "resources": {each: dict(level) for each in kinds}, **more}


def pod(
    *mains: dict[str, Any],
    init: list[dict[str, Any]] | None = None,
    **spec: Any,  # noqa: ANN401 - fields of a spec
) -> dict[str, Any]:
    return {"spec": {"containers": list(mains), "initContainers": init or [], **spec}}


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (pod(container("1", "1Gi")), QosClass.GUARANTEED),
        (pod(container("1", "1Gi", "limits")), QosClass.GUARANTEED),
        (pod(container("1", "1Gi", "requests")), QosClass.BURSTABLE),
        (pod(container(memory="1Gi")), QosClass.BURSTABLE),
        (pod(container()), QosClass.BEST_EFFORT),
        (pod(container("0", "0")), QosClass.BEST_EFFORT),
        (pod(container("1", "1Gi"), container()), QosClass.BURSTABLE),
        (pod(container("1", "1Gi"), init=[container()]), QosClass.BURSTABLE),
        (pod(container("1", "1Gi"), init=[container("1", "1Gi", **SIDECAR)]), QosClass.GUARANTEED),
        (pod(container(), resources={"requests": {"cpu": "0"}}), QosClass.BEST_EFFORT),
        (
            pod(container(), resources={"limits": {"cpu": "1", "memory": "1Gi"}}),
            QosClass.GUARANTEED,
        ),
        (
            pod(
                container("500m", "", "requests"),
                resources={"limits": {"cpu": "1", "memory": "1Gi"}},
            ),
            QosClass.BURSTABLE,
        ),
        (pod(container("1", "1Gi"), resources={"limits": {"cpu": "2"}}), QosClass.BURSTABLE),
        (
            pod(container(memory="1Gi"), resources={"requests": {"cpu": "0"}}),
            QosClass.BEST_EFFORT,
        ),
    ],
)
def test_the_qos_class(given: dict[str, Any], expected: QosClass) -> None:
    assert qos_class(given) is expected


def test_init_containers_count_with_the_sidecars_before_them() -> None:
    given = pod(
        container("1", "1Gi"),
        container("1", "1Gi"),
        init=[
            container("1", "1Gi", **SIDECAR),
            container("1", "4Gi"),
            container("1", "2Gi", **SIDECAR),
            container("1", "1Gi"),
        ],
    )

    assert aggregate(given, "requests", "memory") == 5 * GIB
    assert aggregate(given, "requests", "cpu") == 4000


def test_one_container_without_a_limit_leaves_the_pod_without_one() -> None:
    assert memory_limit_bytes(pod(container(memory="1Gi"), container())) == 0
    assert memory_limit_bytes(pod(container(memory="1Gi"), init=[container()])) == 0
    assert memory_limit_bytes(pod(container(memory="1Gi"), container(memory="1Gi"))) == 2 * GIB


def test_the_pods_own_limit_comes_first_and_overhead_is_added() -> None:
    given = pod(container(), resources={"limits": {"memory": "8Gi"}}, overhead={"memory": "1Gi"})

    assert memory_limit_bytes(given) == 9 * GIB


def test_what_is_no_quantity_is_an_invalid_pod() -> None:
    with pytest.raises(InjectionRefused, match="no quantity"):
        container_amount(container(memory="lots"), "limits", "memory")

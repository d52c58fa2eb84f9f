"""The bench of the operator, with a few pods: it runs, and the bounds hold."""

from pathlib import Path

import pytest

from bench.operator_scale import Scale, measure, table
from tests.cluster.box.cluster import Cluster

pytestmark = pytest.mark.cluster

FEW = Scale(n_pods=20, load_s=7.0, n_rounds=1, spread_s=4.0, n_deleted=5, held_s=0.0, reviews_s=1.5)


def test_a_few_pods_keep_the_bounds(box: Cluster, tmp_path: Path) -> None:
    figures = measure(box, FEW, tmp_path)
    assert figures.is_within(), "\n".join(table(figures, FEW))
    assert figures.object_writes == pytest.approx(3.0, abs=0.5)
    assert figures.events == pytest.approx(2.0, abs=0.3)
    assert figures.reviews.per_s > 10

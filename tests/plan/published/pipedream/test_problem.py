import math
import random

import pytest

from harness.domain.cluster import Cluster, Device, Link, Node
from harness.errors import PlanError
from harness.plan.published.pipedream.cost import (
    data_parallel_s,
    levels_of,
    n_in_flight,
)
from harness.plan.published.pipedream.planner import levels_for
from harness.plan.published.pipedream.problem import OperatorDag


def workload(producers, seed=0):
    rng = random.Random(seed)
    n = len(producers)
    outputs = [rng.randint(1, 9) for _ in range(n)]
    return OperatorDag(
        names=[f"op{i}" for i in range(n)],
        compute_ticks=[rng.randint(0, 5) for _ in range(n)],
        parameter_bytes=[rng.randint(0, 5) for _ in range(n)],
        activation_bytes=outputs,
        output_bytes=outputs,
        producers=producers,
    )


# 0 -> (1 -> 2), (3), (4 -> 5 -> 6) -> 7 -> 8
MODULE = [[], [0], [1], [0], [0], [4], [5], [2, 3, 6], [7]]


def shape(level):
    return level.n_workers, level.bandwidth, level.inner


def test_data_parallel_time_on_two_levels_by_hand():
    # inside: (8 + 4 x 3 x 1 / (2 x 4)) / 4 = 2.375; between: (2.375 + 4 x 1 / (1 x 2) / 4) / 2
    levels = levels_of([4, 2], [2.0, 1.0])
    assert data_parallel_s(8.0, 1.0, levels) == pytest.approx((2.375 + 0.5) / 2)


@pytest.mark.parametrize(
    ("replicas", "behind", "minibatches"), [(1, 0, 1), (1, 3, 4), (2, 3, 3), (3, 1, 2), (4, 0, 1)]
)
def test_minibatches_in_flight(replicas, behind, minibatches):
    assert n_in_flight(replicas, behind) == minibatches


def cluster(*sizes):
    return Cluster(
        nodes=[
            Node(
                name=f"n{i}",
                devices=[
                    Device(name=f"n{i}:{j}", kind="gpu", memory_bytes=10**9) for j in range(size)
                ],
            )
            for i, size in enumerate(sizes)
        ]
    )


def linked(base, missing=0):
    names = [device.name for device in base.devices]
    pairs = [(a, b) for a in names for b in names if a != b]
    links = [
        Link(
            source=a,
            target=b,
            latency_s=0.0,
            bandwidth_bytes_per_s=8.0 if a[:2] == b[:2] else 2.0 + k / 100,
        )
        for k, (a, b) in enumerate(pairs)
    ]
    return Cluster(nodes=base.nodes, links=links[: len(links) - missing])


def levels_at(base, limit=None):
    work = workload(MODULE)
    work.parameter_bytes[:] = [10**9] * work.n_operators  # so that no limit is above all needs
    return levels_for(base, limit, work)


def test_equal_nodes_become_two_levels_at_their_slowest_links():
    inside, between = levels_at(linked(cluster(2, 2)))
    assert inside.memory_bytes == 1e9
    assert shape(inside) == (2, 8.0, 1)
    assert shape(between) == (2, pytest.approx(2.01), 2)
    assert between.memory_bytes == math.inf


def test_nodes_of_one_device_become_one_level():
    (level,) = levels_at(linked(cluster(1, 1, 1)), limit=5)
    assert level.n_workers == 3
    assert level.memory_bytes == 5


def test_nodes_of_unequal_size_become_one_level_at_the_slowest_link():
    (level,) = levels_at(linked(cluster(2, 1)))
    assert shape(level) == (3, pytest.approx(2.01), 1)


def test_missing_link_is_named():
    with pytest.raises(PlanError, match="no link n1:0 -> n0:0"):
        levels_at(linked(cluster(1, 1), missing=1))

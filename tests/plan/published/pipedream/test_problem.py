from __future__ import annotations

import random

import numpy as np
import pytest

from harness.domain.cluster import Cluster, Device, Link, Node
from harness.errors import PlanError
from harness.plan.bottleneck import all_pairs
from harness.plan.published.pipedream.cost import (
    Level,
    Stages,
    data_parallel_s,
    levels_of,
    n_in_flight,
)
from harness.plan.published.pipedream.planner import levels_for
from harness.plan.published.pipedream.problem import Cuts, Lattice, OperatorDag


def workload(producers: list[list[int]], seed: int = 0) -> OperatorDag:
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


def test_module_with_three_branches_has_the_product_of_their_cuts() -> None:
    found = Lattice(workload(MODULE)).every(1000)
    assert found is not None
    # nothing; within the branches after operator 0: (2 + 1) (1 + 1) (3 + 1); with 7; with 8
    assert len(found) == 1 + 3 * 2 * 4 + 2
    assert len({cut.members for cut in found}) == len(found)


def test_listing_stops_at_the_limit() -> None:
    assert Lattice(workload(MODULE)).every(26) is None
    assert Lattice(workload(MODULE)).every(27) is not None


def test_crossing_counts_last_outputs_and_open_forks() -> None:
    work = workload(MODULE)
    size = work.output_bytes
    every = Lattice(work).every(100)
    assert every is not None
    crossing = {cut.members: cut.crossing_bytes for cut in every}
    assert crossing[0b000000001] == size[0]
    assert crossing[0b000000111] == size[2] + size[0]  # 0 still feeds 3 and 4
    assert crossing[0b011111111] == size[7]
    assert crossing[0b111111111] == 0
    # All branches are inside, not joined: the fork is counted though nobody outside reads it.
    assert crossing[0b001111111] == size[2] + size[3] + size[6] + size[0]


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_closed_under_producers_and_sum_their_members(seed: int) -> None:
    rng = random.Random(seed)
    producers = [[j for j in range(i) if rng.random() < 0.3] for i in range(10)]
    work = workload(producers, seed)
    every = Lattice(work).every(5000)
    assert every is not None
    closed = [
        members
        for members in range(1 << 10)
        if all(members >> j & 1 for i in range(10) if members >> i & 1 for j in producers[i])
    ]
    assert sorted(cut.members for cut in every) == closed
    for cut in every:
        inside = [i for i in range(10) if cut.members >> i & 1]
        assert cut.ticks == sum(work.compute_ticks[i] for i in inside)
        assert cut.parameter_bytes == sum(work.parameter_bytes[i] for i in inside)
        assert cut.activation_bytes == sum(work.activation_bytes[i] for i in inside)
    assert {c.members for c in Lattice(work).line()} <= {c.members for c in every}


def test_merging_joins_branches_and_keeps_the_trunk() -> None:
    work = workload(MODULE)
    merged = Lattice(work).merged(most_ticks=1000)
    assert merged.workload.producers == [[], [0], [0], [0], [1, 2, 3], [4]]
    fine, coarse = Lattice(work).every(100), merged.every(100)
    assert fine is not None
    assert coarse is not None
    known = {cut.covers: cut for cut in fine}
    assert coarse[-1].covers == 0b111111111
    for cut in coarse:
        assert cut[1:6] == known[cut.covers][1:6]


def test_merged_operator_is_bounded_in_compute() -> None:
    producers = [[], *[[i] for i in range(4)], [0], [4, 5]]
    work = workload(producers)
    work.compute_ticks[:] = [1] * 7
    merged = Lattice(work).merged(most_ticks=2).workload
    assert merged.names == ["op0", "op2", "op4", "op5", "op6"]
    assert merged.compute_ticks == [1, 2, 2, 1, 1]


def test_blocked_is_the_complement_of_inclusion() -> None:
    every = Lattice(workload(MODULE)).every(100)
    assert every is not None
    cuts = Cuts.from_cuts(every)
    for i, a in enumerate(cuts.members):
        for j, b in enumerate(cuts.members):
            assert cuts.blocked[i, j] == (i == j or bool(a & ~b))
            assert i <= j or a & ~b  # a cut stands after those that it includes


def test_thinned_cuts_keep_the_ends_and_the_cheapest() -> None:
    every = Lattice(workload(MODULE)).every(100)
    assert every is not None
    cuts = Cuts.from_cuts(every)
    thin = cuts.thin(1, 1)
    assert thin.members[0] == 0
    assert thin.members[-1] == cuts.members[-1]
    assert len(thin) <= 3
    assert cuts.thin(10, len(cuts)).members == cuts.members


def test_all_pairs_of_two_workers_equal_their_definition() -> None:
    every = Lattice(workload(MODULE)).every(100)
    assert every is not None
    cuts = Cuts.from_cuts(every)
    stages = Stages(cuts, levels_of([2], [1e13])[0])
    whole = slice(0, len(cuts))
    both, head, tail = (
        stages.block(0, 2, whole),
        stages.block(0, 1, whole),
        stages.block(1, 1, whole),
    )
    receive_s, send_s = stages.transfers(1, 1)
    found = all_pairs(stages)
    for i in range(len(cuts)):
        for j in range(len(cuts)):
            pairs = [max(head[i, k], tail[k, j], receive_s[k], send_s[j]) for k in range(i + 1, j)]
            assert found[i, j] == min([both[i, j], tail[i, j], *pairs])


def shape(level: Level) -> tuple[int, float, int]:
    return level.n_workers, level.bandwidth, level.inner


def test_levels_know_the_workers_just_below() -> None:
    assert [shape(level) for level in levels_of([4, 2], [1e10, 1e9])] == [
        (4, 1e10, 1),
        (2, 1e9, 4),
    ]


def test_data_parallel_time_on_two_levels_by_hand() -> None:
    # inside: (8 + 4 x 3 x 1 / (2 x 4)) / 4 = 2.375; between: (2.375 + 4 x 1 / (1 x 2) / 4) / 2
    levels = levels_of([4, 2], [2.0, 1.0])
    assert data_parallel_s(8.0, 1.0, levels) == pytest.approx((2.375 + 0.5) / 2)


@pytest.mark.parametrize(
    ("replicas", "behind", "minibatches"), [(1, 0, 1), (1, 3, 4), (2, 3, 3), (3, 1, 2), (4, 0, 1)]
)
def test_minibatches_in_flight(replicas: int, behind: int, minibatches: int) -> None:
    assert n_in_flight(replicas, behind) == minibatches


def cluster(*sizes: int) -> Cluster:
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


def linked(base: Cluster, missing: int = 0) -> Cluster:
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


def levels_at(base: Cluster, speeds: list[float], limit: int | None = None) -> list[Level]:
    work = workload(MODULE)
    work.parameter_bytes[:] = [10**9] * work.n_operators  # so that no limit is above all needs
    return levels_for(base, limit, speeds, work)


def test_equal_nodes_become_two_levels_at_their_slowest_links() -> None:
    inside, between = levels_at(linked(cluster(2, 2)), [1.0] * 4)
    assert (inside.memory_bytes == 1e9).all()
    assert shape(inside) == (2, 8.0, 1)
    assert shape(between) == (2, pytest.approx(2.01), 2)
    assert np.isinf(between.memory_bytes).all()


def test_nodes_of_one_device_become_one_level() -> None:
    (level,) = levels_at(linked(cluster(1, 1, 1)), [1.0] * 3, limit=5)
    assert level.n_workers == 3
    assert (level.memory_bytes == 5).all()


@pytest.mark.parametrize(("sizes", "speeds"), [((2, 1), [1.0, 1.0, 1.0]), ((3,), [1.0, 0.5, 1.0])])
def test_unlike_nodes_or_devices_become_one_level_in_order(
    sizes: tuple[int, ...], speeds: list[float]
) -> None:
    (level,) = levels_at(linked(cluster(*sizes)), speeds)
    assert level.n_workers == 3
    assert level.rate[0, 3] == sum(speeds)


def test_a_limit_that_no_plan_reaches_is_none() -> None:
    (level,) = levels_for(linked(cluster(2)), None, [1.0] * 2, workload(MODULE))
    assert np.isinf(level.memory_bytes).all()


def test_missing_link_is_named() -> None:
    with pytest.raises(PlanError, match="no link n1:0 -> n0:0"):
        levels_at(linked(cluster(1, 1), missing=1), [1.0, 1.0])

from __future__ import annotations

import random

import numpy as np
import pytest

from harness.domain.cluster import Cluster, Device, Link, Node
from harness.errors import PlanError
from harness.plan.published.pipedream.cluster_levels import machines_of
from harness.plan.published.pipedream.cost import Level, data_parallel_s, levels_of, n_in_flight
from harness.plan.published.pipedream.cuts import Cuts
from harness.plan.published.pipedream.lattice import Cut, Lattice, merge_branches
from harness.plan.published.pipedream.nested import product
from harness.plan.published.pipedream.workload import Workload


def workload(producers: list[list[int]], seed: int = 0) -> Workload:
    rng = random.Random(seed)
    n = len(producers)
    consumers: list[list[int]] = [[] for _ in producers]
    for i, sources in enumerate(producers):
        for source in sources:
            consumers[source].append(i)
    outputs = [rng.randint(1, 9) for _ in range(n)]
    return Workload(
        names=[f"op{i}" for i in range(n)],
        compute_ticks=[rng.randint(0, 5) for _ in range(n)],
        parameter_bytes=[rng.randint(0, 5) for _ in range(n)],
        activation_bytes=outputs,
        output_bytes=outputs,
        producers=producers,
        consumers=consumers,
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
    lattice, size = Lattice(work), work.output_bytes
    assert lattice.cut(0b000000001).crossing_bytes == size[0]
    assert lattice.cut(0b000000111).crossing_bytes == size[2] + size[0]  # 0 still feeds 3 and 4
    assert lattice.cut(0b011111111).crossing_bytes == size[7]
    assert lattice.cut(0b111111111).crossing_bytes == 0
    # All branches are inside, not joined: the fork is counted though nobody outside reads it.
    assert lattice.cut(0b001111111).crossing_bytes == size[2] + size[3] + size[6] + size[0]


def same(a: Cut, b: Cut) -> bool:
    return a._replace(ready=(), members=0) == b._replace(ready=(), members=0) and set(
        a.ready
    ) == set(b.ready)


@pytest.mark.parametrize("seed", range(20))
def test_grown_and_shrunk_cuts_equal_those_built_from_members(seed: int) -> None:
    rng = random.Random(seed)
    producers = [[j for j in range(i) if rng.random() < 0.3] for i in range(10)]
    lattice = Lattice(workload(producers, seed))
    every = lattice.every(5000)
    assert every is not None
    assert all(same(cut, lattice.cut(cut.members)) for cut in every)
    middle = every[len(every) // 2].members
    near = lattice.around(middle, 40)
    assert len(near) == min(40, len(every))
    assert all(same(cut, lattice.cut(cut.members)) for cut in near)
    assert {c.members for c in lattice.beam(3)} <= {c.members for c in every}
    assert {c.members for c in lattice.principal()} <= {c.members for c in every}


def test_merging_joins_branches_and_keeps_the_trunk() -> None:
    work = workload(MODULE)
    merged, units = merge_branches(Lattice(work), most_ticks=1000)
    assert units == [0b1, 0b110, 0b1000, 0b1110000, 0b10000000, 0b100000000]
    assert merged.producers == [[], [0], [0], [0], [1, 2, 3], [4]]
    fine = Lattice(work)
    coarse = Lattice(merged, units).every(100)
    assert coarse is not None
    for cut in coarse:
        known = fine.cut(cut.covers)
        assert cut[1:6] == known[1:6]


def test_merged_operator_is_bounded_in_compute() -> None:
    producers = [[], *[[i] for i in range(4)], [0], [4, 5]]
    work = workload(producers)
    work.compute_ticks[:] = [1] * 7
    _, units = merge_branches(Lattice(work), most_ticks=2)
    assert units == [0b1, 0b110, 0b11000, 0b100000, 0b1000000]


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


def test_min_max_product_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    n = 7
    left, right = rng.random((n, n)), rng.random((n, n))
    into = rng.random((n, n)) + 0.3
    expected = into.copy()
    for i in range(n):
        for j in range(n):
            for k in range(i + 1, j):
                expected[i, j] = min(expected[i, j], max(left[i, k], right[k, j]))
    product(left, right, into)
    np.testing.assert_array_equal(into, expected)


def test_levels_know_the_workers_just_below() -> None:
    assert levels_of([4, 2], [1e10, 1e9]) == [Level(4, 1e10, 1), Level(2, 1e9, 4)]


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


def test_equal_nodes_become_two_levels_at_their_slowest_links() -> None:
    machines = machines_of(linked(cluster(2, 2)), None, [1.0] * 4)
    assert machines.unlike is None
    assert machines.memory == 1e9
    inside, between = machines.levels
    assert inside == Level(2, 8.0, 1)
    assert between.n_workers == 2
    assert between.bandwidth == pytest.approx(2.01)
    assert between.inner == 2


def test_nodes_of_one_device_become_one_level() -> None:
    machines = machines_of(linked(cluster(1, 1, 1)), 5, [1.0] * 3)
    assert [level.n_workers for level in machines.levels] == [3]
    assert machines.memory == 5


@pytest.mark.parametrize(("sizes", "speeds"), [((2, 1), [1.0, 1.0, 1.0]), ((3,), [1.0, 0.5, 1.0])])
def test_unlike_nodes_or_devices_become_one_level_in_order(
    sizes: tuple[int, ...], speeds: list[float]
) -> None:
    machines = machines_of(linked(cluster(*sizes)), None, speeds)
    assert [level.n_workers for level in machines.levels] == [3]
    assert machines.unlike is not None
    assert machines.unlike.rate[0, 3] == sum(speeds)


def test_missing_link_is_named() -> None:
    with pytest.raises(PlanError, match="no link n1:0 -> n0:0"):
        machines_of(linked(cluster(1, 1), missing=1), None, [1.0, 1.0])

"""The pipeline search against exhaustive enumeration by an independent reading of the formula."""

import itertools
import math
import random

import pytest
from made_graphs import layers, links_between, profile_of, request_of
from made_runs import cluster_of

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.errors import ClusterError
from harness.plan.published.pipedream.planner import _workers, levels_for, pipeline_strategy
from harness.plan.published.pipedream.problem import (
    OperatorDag,
    data_parallel_s,
    levels_of,
    n_in_flight,
    workload_from,
)
from harness.plan.published.pipedream.search import (
    DeviceStage,
    PipelineProblem,
    device_stages,
    search,
)

RELATIVE = 1e-9  # prefix sums and single sums round differently


def random_workload(rng, n):
    """A DAG with branches; times in ms, sizes in kB; some operators cost nothing."""
    operators, seconds = [], {}
    for i in range(n):
        parents = [f"op{j}" for j in range(i) if rng.random() < (0.6 if j == i - 1 else 0.25)]
        operators.append(
            Operator(
                name=f"op{i}",
                kind="other",
                inputs=parents,
                parameter_bytes=rng.choice([0, 0, 1000, 20_000, 400_000]),
                activation_bytes=rng.choice([100, 5_000, 30_000, 90_000]),
            )
        )
        seconds[f"op{i}"] = rng.choice([0.0, 0.001, 0.002, 0.005]), rng.choice([0.0, 0.001, 0.007])
    graph = Graph(name="random", operators=operators)
    return workload_from(graph, profile_of(graph, seconds), "device")


class Oracle:
    """Costs and enumerates plans over sets of operator positions."""

    def __init__(self, work):
        self.work = work
        n = work.n_operators
        self.below = [set() for _ in range(n)]
        for i in range(n):
            for p in work.producers[i]:
                self.below[i] |= self.below[p] | {p}
        self.cuts = [
            frozenset(each)
            for size in range(n + 1)
            for each in itertools.combinations(range(n), size)
            if all(self.below[i] <= set(each) for i in each)
        ]
        self.all = frozenset(range(n))

    def crossing(self, cut):
        """Bytes of PipeDream's augmented antichain."""
        if cut == self.all:
            return 0
        tops = [i for i in cut if not any(i in self.below[j] for j in cut)]
        sent = set(tops)
        for top in tops:
            for p in self.below[top]:
                if any(c not in self.below[top] and c != top for c in self.work.consumers[p]):
                    sent.add(p)
        return sum(self.work.activation_bytes[i] for i in sent)

    def compute_s(self, a, b):
        return sum(self.work.compute_ticks[i] for i in b - a) * 1e-13

    def parameters(self, a, b):
        return sum(self.work.parameter_bytes[i] for i in b - a)

    def fits(self, a, b, r, after, limit):
        """Parameters, gradients, momentum, a stashed copy per extra minibatch, activations."""
        in_flight = math.ceil(after / r) + 1
        kept = sum(self.work.activation_bytes[i] for i in b - a) + self.crossing(a)
        return (2 + in_flight) * self.parameters(a, b) + in_flight * kept <= limit

    def chains(self, a, b, most):
        """All chains of at most `most` stages from cut a to cut b."""
        yield [a, b]
        if most > 1:
            for middle in self.cuts:
                if a < middle < b:
                    for rest in self.chains(middle, b, most - 1):
                        yield [a, *rest]


def compositions(total, parts):
    """Ordered positive counts that sum to at most `total`."""
    for counts in itertools.product(range(1, total + 1), repeat=parts):
        if sum(counts) <= total:
            yield counts


def best_uniform(oracle, levels, limit, a, b, copies=1, after=0):
    """Least bottleneck by trying everything; levels innermost first."""
    level, inner = levels[-1], levels[:-1]
    width = math.prod(each.n_workers for each in inner)
    best = math.inf
    for chain in oracle.chains(a, b, level.n_workers):
        for counts in compositions(level.n_workers, len(chain) - 1):
            worst, behind = 0.0, sum(counts)
            for s, r in enumerate(counts):
                start, end = chain[s], chain[s + 1]
                behind -= r
                n_after = behind * width * copies + after
                if inner:
                    compute = best_uniform(oracle, inner, limit, start, end, copies * r, n_after)
                elif oracle.fits(start, end, r * copies, n_after, limit):
                    compute = oracle.compute_s(start, end)
                else:
                    compute = math.inf
                sync = 4 * (r - 1) * oracle.parameters(start, end) / (level.bandwidth * r)
                worst = max(worst, (compute + sync / level.inner) / r)
                if s > 0:
                    carried = max(oracle.crossing(start), oracle.crossing(end))
                    worst = max(worst, 2 * carried / (level.bandwidth * r))
                if worst >= best:
                    break
            best = min(best, worst)
    return best


def solve(work, levels):
    return search(PipelineProblem(work, levels))


def check(rng, work, counts, bandwidths, *, is_limited):
    limit = rng.uniform(1e5, 3e6) if is_limited else math.inf
    levels, oracle = levels_of(counts, bandwidths, limit), Oracle(work)
    expected_s = best_uniform(oracle, levels, limit, frozenset(), oracle.all)
    found = solve(work, levels)
    if expected_s == math.inf:
        assert found is None
    else:
        assert found.is_exact
        assert found.step_s == pytest.approx(expected_s, rel=RELATIVE)


@pytest.mark.parametrize("seed", range(100))
def test_flat_search_equals_exhaustive_search(seed):
    rng = random.Random(seed)
    work = random_workload(rng, rng.randint(1, 6))
    counts, bandwidths = [rng.randint(1, 4)], [rng.choice([1e6, 1e7, 1e8])]
    check(rng, work, counts, bandwidths, is_limited=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(100, 160))
def test_hierarchical_search_equals_exhaustive_search(seed):
    rng = random.Random(seed)
    work = random_workload(rng, rng.randint(2, 4))
    counts = rng.choice([[2, 2], [3, 2], [2, 3]])
    bandwidths = [rng.choice([1e7, 1e8]), rng.choice([1e6, 1e7])]
    check(rng, work, counts, bandwidths, is_limited=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(300, 330))
def test_stages_of_the_plan_take_the_searched_time(seed):
    rng = random.Random(seed)
    work = random_workload(rng, rng.randint(3, 8))
    limit = rng.choice([math.inf, 3e6])
    levels = levels_of([3, 2], [1e8, 1e7], limit)
    found = solve(work, levels)
    if found is None:
        return
    assert max(stage.total_s for stage in found.stages) == pytest.approx(found.step_s, rel=RELATIVE)
    for stage in found.stages:
        inside_s = max((each.total_s for each in stage.inner), default=0.0)
        assert stage.compute_s == pytest.approx(inside_s / stage.n_replicas, rel=RELATIVE)
    placed = device_stages(found, levels)
    assert max(stage.memory_bytes for stage in placed) <= limit
    assert sorted(i for stage in placed for i in stage.operators) == list(range(work.n_operators))
    devices = [device for stage in placed for device in stage.devices]
    assert len(set(devices)) == len(devices)
    assert set(devices) <= set(range(6))


def chain_workload(compute_s, parameters, outputs):
    n = len(compute_s)
    return OperatorDag(
        names=[f"op{i}" for i in range(n)],
        compute_ticks=[round(s * 1e13) for s in compute_s],
        parameter_bytes=parameters,
        activation_bytes=outputs,
        producers=[[i - 1] if i else [] for i in range(n)],
    )


def test_replicas_pay_for_gradients():
    # (c + 4 (r - 1) P / (B r)) / r with c = 4, P = 8e6, B = 1e6, r = 2: (4 + 16) / 2
    work = chain_workload([4.0], [8 * 10**6], [0])
    levels = levels_of([2], [1e6])
    found = solve(work, levels)
    assert found.step_s == 4.0  # one device, the other idles: 10 s together
    assert levels[0].sync_s_per_byte(2) * 8e6 == 8.0


def test_device_with_too_little_memory_for_everything_makes_a_pipeline():
    work = chain_workload([1.0, 1.0], [10**6, 10**6], [1000, 1000])
    # Replicated: 3 x 2e6 of state and 2000 of activations. As a pipeline the first stage has two
    # minibatches in flight: 4 x 1e6 + 2 x 1000, the second one: 3 x 1e6 + 1000 + 1000 received.
    enough = 4 * 10**6 + 2000
    found = solve(work, levels_of([2], [1e9], enough))
    assert [s.n_replicas for s in found.stages] == [1, 1]
    assert solve(work, levels_of([2], [1e9], enough - 1)) is None


@pytest.mark.parametrize(
    ("batch", "written", "n_microbatches"), [(64, 64, 2), (3, 3, 1), (1, 4, 2)]
)
def test_a_strategy_has_a_microbatch_for_each_stage_that_its_replicas_can_share(
    batch, written, n_microbatches
):
    graph, profile = layers(2, batch=batch)
    request = request_of(graph, profile)
    placed = [
        DeviceStage(operators=[k], devices=devices, in_flight=1, memory_bytes=0)
        for k, devices in enumerate([[0, 1], [2]])
    ]
    workload = workload_from(graph, profile, "device")
    found = pipeline_strategy(request, workload, placed, name="pipedream")
    assert (found.batch, found.n_microbatches) == (written, n_microbatches)
    assert found.schedule == ("1f1b" if n_microbatches > 1 else "gpipe")


def test_many_parallel_branches_are_planned_without_listing_every_cut():
    """40 branches of 3 operators have 4**40 cuts; 4 devices can share them evenly."""
    producers: list[list[int]] = [[]]
    for _ in range(40):
        for depth in range(3):
            producers.append([0] if depth == 0 else [len(producers) - 1])
    producers.append([i for i in range(1, 121) if i % 3 == 0])
    n = len(producers)
    work = OperatorDag(
        names=[f"op{i}" for i in range(n)],
        compute_ticks=[10**10] * n,
        parameter_bytes=[10**9] * n,
        activation_bytes=[1] * n,
        producers=producers,
    )
    found = solve(work, levels_of([4], [1e9]))
    assert not found.is_exact
    assert found.step_s <= 1.05 * n * 1e-3 / 4


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


def linked(*sizes, missing=0):
    """Nodes of so many devices; links between them are unlike, and some may be missing."""
    hosts = [f"n{i}" for i, size in enumerate(sizes) for _ in range(size)]
    cluster = cluster_of(hosts, memory_bytes=10**9)
    names = [device.name for device in cluster.devices]
    rates = itertools.count(2.0, 0.01)
    links = links_between(names, lambda a, b: (0.0, 8.0 if a[:2] == b[:2] else next(rates)))
    return Cluster(nodes=cluster.nodes, links=links[: len(links) - missing])


def levels_at(cluster, limit=None):
    work = chain_workload([1.0] * 9, [10**9] * 9, [1] * 9)  # no limit is above all needs
    return levels_for(cluster, limit, work)


def test_equal_nodes_become_two_levels_at_their_slowest_links():
    inside, between = levels_at(linked(2, 2))
    assert inside.memory_bytes == 1e9
    assert shape(inside) == (2, 8.0, 1)
    assert shape(between) == (2, 2.0, 2)
    assert between.memory_bytes == math.inf


def test_nodes_of_one_device_become_one_level():
    (level,) = levels_at(linked(1, 1, 1), limit=5)
    assert level.n_workers == 3
    assert level.memory_bytes == 5


def test_nodes_of_unequal_size_become_one_level_at_the_slowest_link():
    (level,) = levels_at(linked(2, 1))
    assert shape(level) == (3, 2.0, 1)


def test_missing_link_is_named():
    with pytest.raises(ClusterError, match="no link n1:0 -> n0:0"):
        levels_at(linked(1, 1, missing=1))


@pytest.mark.parametrize(
    ("n_replicas", "inside", "words"),
    [
        (2, [], "2 devices"),
        (3, [4], "3 nodes of 4 devices"),
        (2, [1], "2 nodes of 1 device"),
        (1, [2, 1], "1 node, in stages on 2-1 devices"),
    ],
)
def test_the_workers_of_a_stage_in_words(n_replicas, inside, words):
    assert _workers(n_replicas, inside) == words

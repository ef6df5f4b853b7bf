"""What a search chooses among: standard strategies to start from, and the menu of each operator.

The menu has cuts and devices. On few devices every subset is offered. On many, only sets that a
person would think of: runs of neighbours, nodes and groups of nodes, one device of each node, the
k fastest with fast links. A random set of devices is hardly ever a good one, and makes most
proposals useless.

A search must not lose to a standard strategy. Pipelines among them are balanced by the profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import msgspec
import numpy as np

from harness.domain.checkpoints import MOST_OF_STAGE, can_recompute, with_recomputation
from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.key_forms import POSITIONS, key_forms
from harness.domain.partition import REPLICA, SAMPLE, Cut
from harness.domain.schedule import ScheduleName
from harness.domain.shard_state import ShardState
from harness.domain.sharding import CONTRACTION, HEADS, cuttable_dims, may_have_copies
from harness.domain.strategy import OperatorPlan, Strategy
from harness.plan import builders
from harness.plan.bottleneck import Balanced, balance, balance_in_turn
from harness.plan.patterns import experts_of
from harness.plan.report import memory_saved
from harness.plan.simulate.costs import Costs
from harness.plan.simulate.network import SLOWER, Network
from harness.plan.simulate.sharded_state import useful_states
from harness.plan.simulate.simulator import Simulator, crossing_seconds, operator_seconds
from harness.units import format_count

ALL_SUBSETS_UP_TO = 4  # devices


def device_sets(cluster: Cluster, device_s: Sequence[float]) -> list[tuple[int, ...]]:
    """Sets of at least two devices that an operator may be spread over, without repetition.

    Args:
        device_s: seconds of the model on each device.
    """
    n = cluster.n_devices
    if n <= ALL_SUBSETS_UP_TO:
        return [s for k in range(2, n + 1) for s in combinations(range(n), k)]
    likely = _likely_sets(cluster, Network(cluster).promising(device_s))
    return list(dict.fromkeys(tuple(sorted(s)) for s in likely if len(s) > 1))


def _likely_sets(cluster: Cluster, promising: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    n, node_of = cluster.n_devices, cluster.node_of()
    by_node = [[d for d in range(n) if node_of[d] == k] for k in range(len(cluster.nodes))]
    yield tuple(range(n))
    yield from (tuple(own) for own in by_node)
    for k in range(1, max(map(len, by_node)) + 1):
        yield tuple(d for own in by_node for d in own[:k])
    for groups in ([[d] for d in range(n)], by_node):
        width = 2
        while width < len(groups):
            for a in range(0, len(groups) - width + 1, width):
                yield tuple(d for own in groups[a : a + width] for d in own)
            width *= 2
    yield from (promising[:k] for k in range(2, n))


class Space:
    """Every operator's menu of plans, for one size of microbatch.

    Operators that are planned alike, such as the calls of one batch norm, have one menu.
    """

    def __init__(self, costs: Costs, cluster: Cluster, placed: list[int]) -> None:
        self._costs = costs
        self._n_devices = cluster.n_devices
        self._sets = device_sets(cluster, self._device_seconds(cluster, placed))
        self.menus: dict[int, list[OperatorPlan]] = {}
        shared: dict[object, list[OperatorPlan]] = {}
        for op in placed:
            operator, shape = costs.graph.operators[op], costs.shapes[op]
            key = *shape.items(), operator.profile_key, operator.kind, operator.reads_samples
            if key not in shared:
                shared[key] = self._menu(op)
            self.menus[op] = shared[key]
        index = costs.graph.index()
        for first, other in costs.graph.planned_alike():
            allowed = self.menus.pop(index[other])
            kept = [plan for plan in self.menus[index[first]] if plan in allowed]
            self.menus[index[first]] = kept

    def _menu(self, op: int) -> list[OperatorPlan]:
        forms = key_forms(self._costs.graph.operators[op], self._costs.graph)
        whole = [OperatorPlan({}, [device]) for device in range(self._n_devices)]
        spread = [
            OperatorPlan(cuts, list(devices), keys=keys)
            for devices in self._sets
            for cuts in self._cuts(op, devices)
            for keys in (forms if POSITIONS in cuts else forms[:1])
        ]
        return whole + spread

    def _cuts(self, op: int, devices: tuple[int, ...]) -> Iterator[dict[str, Cut]]:
        shape, n = self._costs.units(op), len(devices)
        dims = cuttable_dims(self._costs.graph.operators[op], shape)
        for dim in dims:
            if shape[dim] >= n and dim != "width":
                yield {dim: n}
        if may_have_copies(self._costs.graph.operators[op]):
            yield {REPLICA: n}
        if SAMPLE in dims:
            shares = self._shares(op, devices)
            if shares is not None:
                yield {SAMPLE: shares}
            yield from self._mixed_cuts(op, n, dims)

    def _mixed_cuts(self, op: int, n: int, dims: list[str]) -> Iterator[dict[str, Cut]]:
        """By samples and another of `dims`, or by samples and copies."""
        shape = self._costs.units(op)
        second = [dim for dim in ("feature", HEADS, CONTRACTION) if dim in dims]
        fewer = [a for a in range(2, n // 2 + 1) if n % a == 0 and shape[SAMPLE] >= a]
        for dim in second:
            for a in fewer:
                if shape[dim] >= n // a:
                    yield {SAMPLE: a, dim: n // a}
        if may_have_copies(self._costs.graph.operators[op]):
            for a in fewer:
                yield {SAMPLE: a, REPLICA: n // a}

    def _shares(self, op: int, devices: tuple[int, ...]) -> list[int] | None:
        """Samples in proportion to how fast each device runs this operator; None when alike."""
        samples = self._costs.units(op)[SAMPLE]
        if samples < len(devices):
            return None
        return proportional_shares([self._whole_s(op, device) for device in devices], samples)

    def _whole_s(self, op: int, device: int) -> float:
        """Seconds of a whole operator."""
        whole = tuple((0, size) for size in self._costs.shapes[op].values())
        return self._costs.times.block_s(op, whole, device).total_s

    def _device_seconds(self, cluster: Cluster, placed: Sequence[int]) -> list[float]:
        """Of all operators on each device."""
        alike = [(device.kind, device.speed) for device in cluster.devices]
        first = {key: k for k, key in reversed(list(enumerate(alike)))}
        found = {key: sum(self._whole_s(op, k) for op in placed) for key, k in first.items()}
        return [found[key] for key in alike]


def proportional_shares(seconds: list[float], samples: int) -> list[int] | None:
    """Whole samples per device, inversely to their seconds; None when equal shares do as well.

    Largest remainders get the samples that rounding down leaves; nobody gets none.
    """
    if min(seconds) <= 0 or max(seconds) < 1.02 * min(seconds):
        return None
    rates = [1 / s for s in seconds]
    exact = [samples * rate / sum(rates) for rate in rates]
    shares = [max(1, int(value)) for value in exact]
    order = sorted(range(len(exact)), key=lambda k: (shares[k] - exact[k], k))
    for k in order:
        if sum(shares) < samples:
            shares[k] += 1
    while sum(shares) > samples:
        shares[shares.index(max(shares))] -= 1
    return shares if len(set(shares)) > 1 else None


# Microbatches for each device that are tried where nobody names a number.
_MICROBATCHES_EACH = (1, 2, 4)


def balanced_pipeline(
    simulator: Simulator,
    batch: int,
    n_microbatches: int,
    *,
    n_stages: int = 0,
    schedule: ScheduleName = "1f1b",
    name: str = "pipeline",
    devices: Sequence[int] | None = None,
) -> Strategy:
    """Stages of about equal time at this size of microbatch, on the devices as they are: of those
    equal in computing, and those equal in computing and transfers, what is predicted to be faster.

    Args:
        devices: in the order of their stages; None for all as the cluster has them.
        n_stages: 0 is one for each device, or two under `interleaved`, which devices take in turn.
            Fewer have replicas.

    Raises:
        StrategyError: more stages than the model or the devices allow.
    """
    graph = simulator.graph
    order = list(range(simulator.cluster.n_devices) if devices is None else devices)
    n_devices = len(order)
    names = [graph.operators[op].name for op in simulator.placed]
    seconds = operator_seconds(simulator, batch, n_microbatches)[order].tolist()
    found: list[Balanced] = []
    for crossing_s in ([], crossing_seconds(simulator, batch, n_microbatches, order)):
        if schedule == "interleaved":
            stages = balance_in_turn(seconds, n_stages or 2 * n_devices, crossing_s)
        else:
            stages = balance(seconds, n_stages or min(n_devices, len(names)), crossing_s)
        found += [stages] if stages not in found else []
    pipelines = [
        builders.pipeline(
            graph,
            batch,
            [names[a:b] for a, b in pairwise((0, *stages.ends))],
            [[order[k] for k in group] for group in stages.groups],
            n_microbatches=n_microbatches,
            schedule=schedule,
            name=name,
        )
        for stages in found
    ]
    return simulator.fastest([p for p in pipelines if _has_like_plans(p, graph)] or pipelines[:1])


def _has_like_plans(strategy: Strategy, graph: Graph) -> bool:
    """Whether operators that share a batch norm or a written buffer are planned alike."""
    plans = strategy.operators
    return all(plans[first] == plans[other] for first, other in graph.planned_alike())


def usual_microbatches(simulator: Simulator, batch: int) -> list[int]:
    """One, two and four for each device, as far as there are samples, of which each is one where
    devices are more; one in all where an operator needs the whole batch."""
    if simulator.graph.mixing_operator() is not None:
        return [1]
    n = simulator.cluster.n_devices
    return [k * n for k in _MICROBATCHES_EACH if k * n <= batch] or [batch]


def standard_strategies(
    simulator: Simulator, batch: int, shard_state: ShardState | None = None
) -> Iterator[Strategy]:
    """All that apply: single on the fastest device first, then ddp, tensor parallel, hybrids,
    balanced pipelines, unless they plan calls of one batch norm, or operators that share a written
    buffer, unlike each other. All shard the same state; None shards nothing."""
    for strategy in _unsharded(simulator, batch):
        if _has_like_plans(strategy, simulator.graph):
            yield msgspec.structs.replace(strategy, shard_state=shard_state or "none")


def leaner(
    strategy: Strategy, simulator: Simulator, shard_state: ShardState | None = None
) -> Iterator[Strategy]:
    """Forms of a standard strategy that need less memory: ddp with each state sharded, unless all
    are to shard `shard_state`; recomputed, a pipeline by stages and by segments."""
    found = [strategy]
    if strategy.name == "ddp" and shard_state is None:
        network = simulator.network
        states = useful_states(network.n_devices, simulator.options, network.n_in_node)
        found += [msgspec.structs.replace(strategy, shard_state=state) for state in states]
    if can_recompute(simulator.graph):
        plain = [strategy, found[-1]] if len(found) > 1 else found[:1]
        counts = (1, MOST_OF_STAGE) if len(strategy.stages) > 1 else (MOST_OF_STAGE,)
        found += [with_recomputation(one, simulator.graph, n) for one in plain for n in counts]
    for one in found[1:]:
        yield msgspec.structs.replace(one, name=strategy.name + memory_saved(one))


def _unsharded(simulator: Simulator, batch: int) -> Iterator[Strategy]:
    graph, cluster = simulator.graph, simulator.cluster
    seconds = operator_seconds(simulator, batch).sum(axis=1).tolist()
    fastest = seconds.index(min(seconds))
    yield builders.single(graph, batch, device=fastest)
    if cluster.n_devices == 1:
        return
    if batch >= cluster.n_devices:
        yield builders.ddp(graph, cluster, batch)
        shares = proportional_shares(seconds, batch)
        if shares is not None:
            yield builders.ddp(graph, cluster, batch, shares=shares)
    yield from _ddp_on_part(simulator, batch, seconds)
    yield builders.tensor_parallel(graph, cluster, batch)
    if any(op.kind == "linear" for op in graph.operators) or experts_of(graph).inside:
        yield builders.hybrid(graph, cluster, batch)
    if any(op.kind == "embedding" for op in graph.operators):
        yield builders.tables_on_devices(graph, cluster, batch)
    yield from _pipelines(simulator, batch)


def _ddp_on_part(simulator: Simulator, batch: int, seconds: Sequence[float]) -> Iterator[Strategy]:
    """Data parallel on the node that computes most, for slow links between nodes; and without the
    devices that are slower than others, or whose links are.

    Args:
        seconds: of the batch on each device.
    """
    network, node_of = simulator.network, simulator.cluster.node_of()
    node = int(np.bincount(node_of, 1 / np.maximum(seconds, 1e-30)).argmax())
    parts = [tuple(k for k, at in enumerate(node_of) if at == node)]
    order, is_slow = network.promising(seconds), network.has_slow_link
    for k, (a, b) in enumerate(pairwise(order), 1):
        if is_slow[a] != is_slow[b] or seconds[b] > SLOWER * seconds[a]:
            parts.append(tuple(sorted(order[:k])))
    for devices in dict.fromkeys(parts):
        if 1 < len(devices) < len(seconds) and len(devices) <= batch:
            shares = proportional_shares([seconds[k] for k in devices], batch)
            yield builders.ddp(
                simulator.graph, simulator.cluster, batch, shares=shares, devices=devices
            )


def _pipelines(simulator: Simulator, batch: int) -> Iterator[Strategy]:
    """One stage per device under 1F1B with up to 4 microbatches each, and two stages per device
    taken in turn, which shortens fill and drain."""
    n, n_ops = simulator.cluster.n_devices, len(simulator.placed)
    for m in usual_microbatches(simulator, batch):
        if n_ops >= n:
            name = f"pipeline of {n}, {format_count(m, 'microbatch')}"
            yield balanced_pipeline(simulator, batch, m, name=name)
        if n_ops >= 2 * n and m % n == 0:
            name = f"interleaved pipeline of 2 x {n}, {m} microbatches"
            yield balanced_pipeline(simulator, batch, m, schedule="interleaved", name=name)


def microbatch_counts(simulator: Simulator, batch: int) -> list[int]:
    """Powers of two and the usual multiples of the devices, up to four for each device, or eight,
    and to the samples of the batch; one where an operator needs the whole batch."""
    if simulator.graph.mixing_operator() is not None:
        return [1]
    most = max(8, 4 * simulator.cluster.n_devices)
    powers = [2**k for k in range(most.bit_length()) if 2**k <= min(most, batch)]
    return sorted({*powers, *usual_microbatches(simulator, batch)})

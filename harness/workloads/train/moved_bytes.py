"""The bytes that a change of strategy will move, estimated from the two strategies alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

from harness.domain.sharding import weight_dims
from harness.domain.strategy import Strategy
from harness.plan.simulate.simulator import Simulator
from harness.runtime.executor.change.migration import Placement, find_migrations
from harness.runtime.executor.geometry.slices import WeightSlice

PairBytes = dict[tuple[int, int], int]


def estimate_moved_bytes(simulator: Simulator, before: Strategy, after: Strategy) -> PairBytes:
    """Bytes that a change moves, by (sender, reader).

    An engine, once built, says it exactly (`ElasticExecutor.predict_bytes`). Here the weights of an
    operator count as one tensor, and sharded state as replicated.

    Args:
        simulator: of the model with the layers frozen that are after the change.
    """
    options, operators = simulator.options, simulator.graph.operators
    bytes_of = {operator.name: operator.parameter_bytes for operator in operators}
    shapes = _weight_shapes(simulator)
    found: Counter[tuple[int, int]] = Counter()
    placed_before, placed_after = (_placement(simulator, one, shapes) for one in (before, after))
    for one in find_migrations(placed_before, placed_after):
        if one.source != one.target:
            name = one.region.name
            n_tensors = 1 + options.n_optimizer_states * (name not in options.frozen)
            share = one.n_elements / math.prod(shapes[name].values())
            found[one.source, one.target] += round(bytes_of[name] * share * n_tensors)
    return dict(found)


def _weight_shapes(simulator: Simulator) -> dict[str, dict[str, int]]:
    """Sizes of the dims that cut the weights, of each operator with weights."""
    shapes = simulator.costs(1).shapes
    operators = [(op, simulator.graph.operators[op]) for op in simulator.placed]
    return {
        operator.name: {dim: shapes[op][dim] for dim in weight_dims(operator) if dim in shapes[op]}
        for op, operator in operators
        if operator.parameter_bytes
    }


def _placement(
    simulator: Simulator, strategy: Strategy, shapes: dict[str, dict[str, int]]
) -> Placement:
    """The devices of each slice of each operator's weights."""
    costs, index = simulator.costs(max(strategy.microbatch_sizes())), simulator.graph.index()
    found: defaultdict[WeightSlice, set[int]] = defaultdict(set)
    for name, sizes in shapes.items():
        op, plan = index[name], strategy.operators[name]
        for block, device in zip(costs.blocks(op, plan), plan.devices, strict=True):
            intervals = dict(zip(costs.shapes[op], block, strict=True))
            found[WeightSlice(name, tuple(intervals[dim] for dim in sizes))].add(device)
    return {piece: tuple(sorted(devices)) for piece, devices in found.items()}

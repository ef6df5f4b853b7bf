"""The standard strategies of a request: what a search starts from and must not lose to."""

from __future__ import annotations

from collections.abc import Iterator

from harness.domain.partition import SAMPLE
from harness.domain.sharding import full_shape
from harness.domain.strategy import Strategy
from harness.plan import builders
from harness.plan.search.space import proportional_shares
from harness.plan.simulate.simulator import Simulator


def whole_seconds(simulator: Simulator, batch: int, device: int) -> float:
    """Forward and backward of the whole model on one device."""
    costs = simulator.costs(batch)
    return sum(
        sum(costs.block_s(op, tuple((0, size) for size in costs.shapes[op].values()), device))
        for op in simulator.placed
    )


def standard_strategies(simulator: Simulator, batch: int) -> Iterator[Strategy]:
    """All that apply: single on the fastest device first, then ddp, tensor parallel, hybrids,
    balanced pipelines."""
    graph, cluster = simulator.graph, simulator.cluster
    seconds = [whole_seconds(simulator, batch, d) for d in range(cluster.n_devices)]
    fastest = seconds.index(min(seconds))
    yield builders.single(graph, batch, device=fastest)
    if cluster.n_devices == 1:
        return
    if batch >= cluster.n_devices:
        yield builders.ddp(graph, cluster, batch)
        shares = proportional_shares(seconds, batch)
        if shares is not None:
            yield builders.ddp(graph, cluster, batch, shares=shares)
    yield builders.tensor_parallel(graph, cluster, batch)
    if any(op.kind == "linear" for op in graph.operators):
        yield builders.hybrid(graph, cluster, batch)
    if any(op.kind == "embedding" for op in graph.operators):
        yield builders.tables_on_devices(graph, cluster, batch)
    yield from _pipelines(simulator, batch)


def _balanced(simulator: Simulator, batch: int, n_stages: int) -> list[list[str]]:
    """Names of consecutive operators in stages of about equal time, as if devices were alike."""
    costs, operators = simulator.costs(batch), simulator.graph.operators
    whole = {op: tuple((0, s) for s in costs.shapes[op].values()) for op in simulator.placed}
    seconds = [sum(costs.block_s(op, whole[op], 0)) for op in simulator.placed]
    names = [operators[op].name for op in simulator.placed]
    return builders.balanced_stages(names, seconds, n_stages)


def _pipelines(simulator: Simulator, batch: int) -> Iterator[Strategy]:
    """One stage per device under 1F1B with 1 to 4 microbatches each, and two stages per device
    taken in turn, which shortens fill and drain."""
    graph, n = simulator.graph, simulator.cluster.n_devices
    n_ops = len(simulator.placed)
    if n_ops >= n:
        stages, devices = _balanced(simulator, batch, n), [[k] for k in range(n)]
        for m in (n, 2 * n, 4 * n):
            if batch >= m:
                name = f"pipeline of {n}, {m} microbatches"
                yield builders.pipeline(graph, batch, stages, devices, n_microbatches=m, name=name)
    if n_ops >= 2 * n and batch >= n:
        yield builders.pipeline(
            graph,
            batch,
            _balanced(simulator, batch, 2 * n),
            [[k % n] for k in range(2 * n)],
            n_microbatches=n,
            schedule="interleaved",
            name=f"interleaved pipeline of 2 x {n}, {n} microbatches",
        )


def microbatch_counts(simulator: Simulator, batch: int) -> list[int]:
    """Powers of two that leave every operator a sample per microbatch, up to four per device."""
    most = max(8, 4 * simulator.cluster.n_devices)
    found, n = [], 1
    while n <= min(most, batch):
        shapes = (
            full_shape(op, batch=batch // n, graph_batch=simulator.graph.batch)
            for op in simulator.graph.operators
        )
        if all(shape.get(SAMPLE, 1) >= 1 for shape in shapes):
            found.append(n)
        n *= 2
    return found

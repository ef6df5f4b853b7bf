"""Where a stage that recomputes is cut into segments (activation checkpointing).

    forward   | segment 0 | segment 1 | segment 2 |    keeps only values that cross a cut
    backward  forward 2, backward 2, forward 1, backward 1, forward 0, backward 0

The values of one segment exist at once. Chen et al., "Training Deep Nets with Sublinear Memory
Cost" (2016), balance them with those that cross cuts; here cuts are where few bytes cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import msgspec

from harness.domain.graph import KEPT, Graph
from harness.domain.sharding import has_tasks
from harness.domain.strategy import Stage, Strategy

# Most segments of a stage, because finding cuts takes time in proportion.
MOST_OF_STAGE = 64


def segment_numbers(graph: Graph, operators: Sequence[int], n_segments: int) -> list[int]:
    """The segment of each operator of a stage: of cuts into at most `n_segments`, those that need
    the fewest bytes.

    Args:
        operators: those of the stage with tasks, in topological order.
    """
    starts = _best_cuts(graph, operators, n_segments)
    found = [0] * len(operators)
    for start in starts:
        found[start] += 1
    return list(accumulate(found))


def recomputed_segments(graph: Graph, strategy: Strategy) -> dict[str, int]:
    """The segment of each operator of the stages that have several."""
    found: dict[str, int] = {}
    for number, stage in enumerate(strategy.stages):
        if stage.segments > 1:
            own = stage_operators(graph, strategy, number)
            numbers = segment_numbers(graph, own, stage.segments)
            if any(numbers):
                found |= zip((graph.operators[op].name for op in own), numbers, strict=True)
    return found


def stage_operators(graph: Graph, strategy: Strategy, stage: int) -> list[int]:
    """The operators of a stage with tasks, in topological order."""
    return [
        at
        for at, op in enumerate(graph.operators)
        if has_tasks(op) and strategy.operators[op.name].stage == stage
    ]


def can_recompute(graph: Graph) -> bool:
    """Whether forward may run twice: it writes no buffer of the model."""
    return not any(op.attrs.get("writes_buffers") for op in graph.operators)


def with_recomputation(strategy: Strategy, graph: Graph, n_segments: int | None) -> Strategy:
    """The strategy with recomputation in all stages.

    Args:
        n_segments: most of each stage, of which as many are used as need the fewest bytes; None:
            their number in a single stage, else 1, so that a stage of a pipeline runs forward again
            while it waits for gradients.
    """
    if n_segments is None:
        n_segments = 1
        if len(strategy.stages) == 1:
            n_segments = n_segments_of_least_memory(graph, stage_operators(graph, strategy, 0))
    stages = [Stage(recompute=True, segments=n_segments)] * len(strategy.stages)
    return msgspec.structs.replace(strategy, stages=stages)


def n_segments_of_least_memory(graph: Graph, operators: Sequence[int]) -> int:
    """The number of segments with which a stage needs the fewest bytes."""
    return 1 + len(_best_cuts(graph, operators, MOST_OF_STAGE))


def _best_cuts(graph: Graph, operators: Sequence[int], most: int) -> list[int]:
    """The positions at which a segment begins, but the first."""
    if most == 1:
        return []
    inside = [_kept_bytes(graph, op) for op in operators]
    before = [0, *accumulate(inside)]
    crossing = _crossing_bytes(graph, operators)
    best: list[int] = []
    least = before[-1]
    most = min(most, MOST_OF_STAGE)
    for quarters in range(4, 4 * most + 1):
        cuts = _cuts(before, crossing, 4 * before[-1] / quarters)
        if len(cuts) >= most:
            continue
        segments = pairwise((0, *cuts, len(operators)))
        needed = sum(crossing[cut] for cut in cuts)
        needed += max(before[stop] - before[start] for start, stop in segments)
        if needed < least:
            best, least = cuts, needed
    return best


def _cuts(before: Sequence[int], crossing: Sequence[int], limit: float) -> list[int]:
    """Cut at the cheapest place of the second half of what is within `limit` bytes, repeatedly."""
    cuts: list[int] = []
    start, end = 0, len(before) - 1
    while True:
        stop = start + 1
        while stop < end and before[stop + 1] - before[start] <= limit:
            stop += 1
        if stop >= end:
            return cuts
        half = start + 1 + (stop - start) // 2
        start = min(range(min(half, stop), stop + 1), key=lambda at: (crossing[at], -at))
        cuts.append(start)


def _kept_bytes(graph: Graph, op: int) -> int:
    """Bytes that an operator keeps until its backward, at the graph's batch."""
    operator = graph.operators[op]
    kept = operator.attrs.get(KEPT)
    return kept if isinstance(kept, int) else operator.activation_bytes


def _crossing_bytes(graph: Graph, operators: Sequence[int]) -> list[int]:
    """Bytes of the stage's values from before each position that are read from there on."""
    position = {op: at for at, op in enumerate(operators)}
    changes = [0] * (len(operators) + 1)
    for producer, readers in enumerate(graph.consumers()):
        own = [position[reader] for reader in readers if reader in position]
        if producer in position and own and has_tasks(graph.operators[producer]):
            n_bytes = graph.operators[producer].activation_bytes
            changes[position[producer] + 1] += n_bytes
            changes[max(own) + 1] -= n_bytes
    return list(accumulate(changes))

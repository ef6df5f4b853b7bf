"""Random valid strategies for any graph, each a function of its generator alone, and named ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import msgspec
from made_graphs import replicated_pipeline, small_cluster

from harness.domain.graph import Graph, Operator
from harness.domain.key_forms import POSITIONS, key_forms
from harness.domain.partition import REPLICA, SAMPLE, Cut, count_parts, cut_dim
from harness.domain.schedule import ScheduleName
from harness.domain.sharding import HEADS, cuttable_dims, full_shape, has_tasks, may_have_copies
from harness.domain.strategy import OperatorPlan, Stage, Strategy, validate
from harness.errors import StrategyError
from harness.plan.builders import ddp, hybrid, single, tables_on_devices, tensor_parallel

MAX_BLOCKS = 8
_N_DRAWS = 200


@dataclass(frozen=True, kw_only=True)
class Flow:
    """How microbatches run through stages, before operators are placed.

    Attributes:
        groups: disjoint sets of devices; stage s is on group s modulo their number.
    """

    sizes: list[int]
    schedule: ScheduleName
    groups: list[list[int]]
    n_stages: int


def _draw_groups(rng: Random, n_devices: int, n_groups: int) -> list[list[int]]:
    devices = rng.sample(range(n_devices), n_devices)
    n_used = n_devices if rng.random() < 0.7 else rng.randint(n_groups, n_devices)
    cuts = sorted(rng.sample(range(1, n_used), n_groups - 1))
    return [devices[a:b] for a, b in pairwise([0, *cuts, n_used])]


def draw_flow(
    rng: Random,
    n_devices: int,
    batch: int,
    *,
    schedule: ScheduleName,
    n_operators: int,
    min_microbatch: int,
) -> Flow:
    """Draw microbatches, groups of devices and stages that the schedule can serve."""
    n_groups = rng.randint(1, min(n_devices, n_operators))
    n_chunks = 1
    if schedule in ("gpipe", "interleaved"):
        n_chunks = rng.randint(1, max(1, min(3, n_operators // n_groups)))
    most = min(4, batch // min_microbatch)
    if schedule == "interleaved" and n_chunks > 1:
        n_groups = min(n_groups, most)
        n_microbatches = rng.choice([m for m in range(1, most + 1) if m % n_groups == 0])
    else:
        n_microbatches = rng.randint(1, most)
    return Flow(
        sizes=[stop - start for start, stop in cut_dim(batch, n_microbatches)],
        schedule=schedule,
        groups=_draw_groups(rng, n_devices, n_groups),
        n_stages=n_groups * n_chunks,
    )


def draw_stages(rng: Random, graph: Graph, n_stages: int) -> dict[str, int]:
    """Draw each operator's stage, none before its producers'; consecutive, or as branches go."""
    placed = [op for op in graph.operators if has_tasks(op)]
    cuts = sorted(rng.sample(range(1, len(placed)), n_stages - 1))
    bounds = list(pairwise([0, *cuts, len(placed)]))
    stage = {op.name: s for s, (a, b) in enumerate(bounds) for op in placed[a:b]}
    if rng.random() < 0.3:
        for op in placed:
            earliest = max((stage[name] for name in op.inputs if name in stage), default=0)
            stage[op.name] = rng.randint(earliest, max(earliest, stage[op.name]))
    return stage


def _is_possible(cut: Cut, sizes: Sequence[int]) -> bool:
    try:
        for size in sizes:
            cut_dim(size, cut)
    except StrategyError:
        return False
    return True


class _Plans:
    """Draws the plans of one graph's operators, some of them like the one before."""

    def __init__(self, rng: Random, graph: Graph, sizes: list[int]) -> None:
        self._rng = rng
        self._graph = graph
        self._sizes = sorted(set(sizes))
        self._before = OperatorPlan({}, [0])
        self._shapes: dict[str, list[dict[str, int]]] = {}

    def shapes(self, operator: Operator) -> list[dict[str, int]]:
        """For each size of microbatch."""
        if operator.name not in self._shapes:
            self._shapes[operator.name] = [
                ({} if operator.reads_samples else {SAMPLE: n})
                | full_shape(operator, batch=n, graph_batch=self._graph.batch)
                for n in self._sizes
            ]
        return self._shapes[operator.name]

    def draw(self, operator: Operator, stage: int, devices: list[int]) -> OperatorPlan:
        style = self._rng.random()
        if style < 0.4 and self._fits(operator, self._before.partition, devices):
            plan = OperatorPlan(dict(self._before.partition), list(self._before.devices), stage)
        elif style < 0.5:
            plan = OperatorPlan({}, [self._rng.choice(devices)], stage)
        else:
            cuts = self._cuts(operator)
            plan = OperatorPlan(cuts, self._devices(count_parts(cuts), devices), stage)
        self._before = plan
        return plan

    def covering(self, operator: Operator, stage: int, devices: list[int]) -> OperatorPlan | None:
        """A plan on all the devices; None when no dim has as many elements."""
        for dim in cuttable_dims(operator, self.shapes(operator)[0]):
            if _is_possible(len(devices), [shape[dim] for shape in self.shapes(operator)]):
                return OperatorPlan({dim: len(devices)}, list(devices), stage)
        return None

    def _fits(self, operator: Operator, cuts: dict[str, Cut], devices: list[int]) -> bool:
        shapes = self.shapes(operator)
        return set(self._before.devices) <= set(devices) and all(
            dim in cuttable_dims(operator, shapes[0])
            and _is_possible(cut, [shape[dim] for shape in shapes])
            for dim, cut in cuts.items()
        )

    def _cuts(self, operator: Operator) -> dict[str, Cut]:
        rng, shapes = self._rng, self.shapes(operator)
        dims = cuttable_dims(operator, shapes[0])
        cuts: dict[str, Cut] = {}
        for dim in rng.sample(dims, min(len(dims), rng.choice([0, 1, 1, 1, 2, 2, 3]))):
            sizes = [shape[dim] for shape in shapes]
            most = min(*sizes, 5, MAX_BLOCKS // count_parts(cuts))
            if most < 2:
                continue
            n = rng.randint(2, most)
            shares: Cut = [rng.randint(1, 4) for _ in range(n)]
            cuts[dim] = shares if rng.random() < 0.4 and _is_possible(shares, sizes) else n
        return cuts

    def _devices(self, n_blocks: int, devices: list[int]) -> list[int]:
        rng = self._rng
        if n_blocks <= len(devices) and rng.random() < 0.6:
            return rng.sample(devices, n_blocks)
        if rng.random() < 0.1:
            return [rng.choice(devices)] * n_blocks
        return [rng.choice(devices) for _ in range(n_blocks)]


def _cover_stages(
    rng: Random, graph: Graph, plans: _Plans, placed: dict[str, OperatorPlan], flow: Flow
) -> None:
    """Make stages that share a group use all of it, or they would not be on one pipeline rank."""
    if flow.n_stages == len(flow.groups):
        return
    index = graph.index()
    for stage in range(flow.n_stages):
        group = flow.groups[stage % len(flow.groups)]
        own = [name for name, plan in placed.items() if plan.stage == stage]
        if {device for name in own for device in placed[name].devices} == set(group):
            continue
        for name in rng.sample(own, len(own)):
            plan = plans.covering(graph.operators[index[name]], stage, group)
            if plan is not None:
                placed[name] = plan
                break


def _draw(
    rng: Random, graph: Graph, n_devices: int, batch: int, schedule: ScheduleName, smallest: int
) -> Strategy:
    n_operators = sum(has_tasks(op) for op in graph.operators)
    flow = draw_flow(
        rng, n_devices, batch, schedule=schedule, n_operators=n_operators, min_microbatch=smallest
    )
    stage_of = draw_stages(rng, graph, flow.n_stages)
    plans = _Plans(rng, graph, flow.sizes)
    placed = {
        op.name: plans.draw(op, stage, flow.groups[stage % len(flow.groups)])
        for op in graph.operators
        if (stage := stage_of.get(op.name)) is not None
    }
    _cover_stages(rng, graph, plans, placed, flow)
    return Strategy(
        name="random",
        batch=batch,
        operators=placed,
        n_microbatches=len(flow.sizes),
        schedule=schedule,
        stages=[_draw_stage(rng) for _ in range(flow.n_stages)],
    )


def _draw_stage(rng: Random) -> Stage:
    """Recomputed by three of ten, in up to four segments."""
    return Stage(True, rng.choice((1, 2, 4))) if rng.random() < 0.3 else Stage()


def random_strategy(
    rng: Random,
    graph: Graph,
    n_devices: int,
    batch: int,
    *,
    schedule: ScheduleName,
    min_microbatch: int = 1,
) -> Strategy:
    """Draw a valid strategy: any cuts, any devices, any stages that `schedule` can serve."""
    cluster = small_cluster(n_devices)
    for _ in range(_N_DRAWS):
        strategy = _draw(rng, graph, n_devices, batch, schedule, min_microbatch)
        try:
            validate(strategy, graph, cluster)
        except StrategyError:
            continue
        return strategy
    raise AssertionError(f"none of {_N_DRAWS} draws fits {graph.name} on {n_devices} devices")


def with_copies(rng: Random, strategy: Strategy, graph: Graph) -> Strategy:
    """Let several of a stage's devices compute the blocks of some operators without weights."""
    groups = strategy.stage_devices()
    plans = dict(strategy.operators)
    for op in filter(may_have_copies, graph.operators):
        plan = plans[op.name]
        group = groups[plan.stage]
        if len(group) < 2 or rng.random() < 0.4:
            continue
        if rng.random() < 0.5:  # all of it on all of them
            devices = rng.sample(group, len(group))
            plans[op.name] = OperatorPlan({REPLICA: len(group)}, devices, plan.stage)
            continue
        n = rng.randint(2, len(group))
        others = [rng.sample([d for d in group if d != own], n - 1) for own in plan.devices]
        devices = [d for own, more in zip(plan.devices, others, strict=True) for d in (own, *more)]
        plans[op.name] = OperatorPlan({**plan.partition, REPLICA: n}, devices, plan.stage)
    return msgspec.structs.replace(strategy, operators=plans)


def with_attention_by_positions(rng: Random, strategy: Strategy, graph: Graph) -> Strategy:
    """Cut most attentions by positions over their stage's devices, some by heads or samples too,
    whose keys and values get where they are wanted in any way."""
    groups, plans = strategy.stage_devices(), dict(strategy.operators)
    smallest = min(strategy.microbatch_sizes())
    for op in graph.operators:
        shape = full_shape(op, batch=smallest, graph_batch=graph.batch)
        if op.kind != "attention" or POSITIONS not in cuttable_dims(op, shape):
            continue
        plan = plans[op.name]
        devices = rng.sample(groups[plan.stage], len(groups[plan.stage]))
        if len(devices) < 2 or rng.random() < 0.2:
            continue
        cuts: dict[str, Cut] = {POSITIONS: len(devices)}
        second = rng.choice([HEADS, SAMPLE])
        if len(devices) == 4 and shape.get(second, 1) > 1 and rng.random() < 0.5:
            cuts = {POSITIONS: 2, second: 2}
        elif rng.random() < 0.4:
            cuts = {POSITIONS: [rng.randint(1, 2) for _ in devices]}
        keys = rng.choice(key_forms(op, graph))
        plans[op.name] = OperatorPlan(cuts, devices, plan.stage, keys)
    return msgspec.structs.replace(strategy, operators=plans)


def _pipelines(graph: Graph, n_devices: int, batch: int) -> dict[str, Strategy]:
    each = [[d] for d in range(n_devices)]
    found = {
        "gpipe": replicated_pipeline(graph, batch, each, schedule="gpipe"),
        "1f1b": replicated_pipeline(graph, batch, each, schedule="1f1b", recompute=True),
        "zero_bubble": replicated_pipeline(graph, batch, each, schedule="zero_bubble"),
    }
    if 2 * n_devices <= sum(has_tasks(op) for op in graph.operators):
        found["interleaved"] = replicated_pipeline(
            graph, batch, each * 2, schedule="interleaved", n_microbatches=n_devices
        )
    if n_devices > 2:
        uneven = [list(range(n_devices - 1)), [n_devices - 1]]
        for schedule in ("1f1b", "gpipe", "zero_bubble"):
            found[f"{n_devices - 1}-1 {schedule}"] = replicated_pipeline(
                graph, batch, uneven, schedule=schedule, n_microbatches=2
            )
        found[f"1-{n_devices - 1}"] = replicated_pipeline(
            graph, batch, [uneven[1], uneven[0]], n_microbatches=2
        )
    return found


def named_strategies(graph: Graph, n_devices: int, batch: int) -> dict[str, Strategy]:
    """The strategies that a user asks for by name, and PipeDream's with unequal replicas."""
    cluster = small_cluster(n_devices)
    found = {"single": single(graph, batch, device=n_devices - 1)}
    if n_devices > 1:
        found |= {
            "ddp": ddp(graph, cluster, batch),
            "ddp by speed": ddp(graph, cluster, batch, shares=range(1, n_devices + 1)),
            "tensor parallel": tensor_parallel(graph, cluster, batch),
            "hybrid": hybrid(graph, cluster, batch),
            **_pipelines(graph, n_devices, batch),
        }
    if any(op.kind == "embedding" for op in graph.operators):
        found["tables on devices"] = tables_on_devices(graph, cluster, batch)
    return found


def hand_split_alexnet(graph: Graph, batch: int, *, dim: str = "feature") -> Strategy:
    """AlexNet over two devices: the convolutions in halves, the classifier once, on device 1, on
    all rows."""

    def plan(op: Operator) -> OperatorPlan:
        if op.name.startswith("classifier") or op.kind in ("flatten", "loss"):
            return OperatorPlan({}, [1])
        shape = full_shape(op, batch=batch, graph_batch=graph.batch)
        is_cut = dim in cuttable_dims(op, shape) and shape[dim] > 1
        return OperatorPlan({dim if is_cut else SAMPLE: 2}, [0, 1])

    plans = {op.name: plan(op) for op in graph.operators if has_tasks(op)}
    return Strategy(name="hand-split", batch=batch, operators=plans)

"""The well-known strategies: single, ddp, balanced pipeline, tensor parallel, hybrids.

A search starts from them and must beat them; users ask for them by name.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.einsum import expert_dim
from harness.domain.graph import Graph, Operator
from harness.domain.key_forms import POSITIONS, key_features, key_forms
from harness.domain.partition import REPLICA, SAMPLE, Cut
from harness.domain.schedule import ScheduleName
from harness.domain.sharding import (
    CONTRACTION,
    HEADS,
    cuttable_dims,
    full_units,
    has_tasks,
    is_partial,
    may_have_copies,
    weight_cuts,
    weight_dims,
)
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import StrategyError
from harness.plan.patterns import contracted, experts_of, linear_pairs

# Operators that the parts of a sequence do not meet in.
_BETWEEN = ("elementwise", "add", "layer_norm")
Planner = Callable[[Operator], OperatorPlan]


def _build(name: str, graph: Graph, batch: int, plan: Planner) -> Strategy:
    plans = {op.name: plan(op) for op in graph.operators if has_tasks(op)}
    return Strategy(name=name, batch=batch, operators=plans)


def cut_or_whole(
    operator: Operator, graph: Graph, batch: int, dim: str, cut: Cut, devices: Sequence[int]
) -> OperatorPlan:
    """Cut along `dim` over the devices where that is possible; else by the samples that it reads;
    else whole."""
    shape = full_units(operator, batch=batch, graph_batch=graph.batch)
    allowed = cuttable_dims(operator, shape)
    n = len(devices)
    if n > 1 and dim in allowed and shape[dim] >= n:
        return OperatorPlan({dim: cut}, list(devices))
    is_by_samples = operator.reads_samples and SAMPLE in allowed
    if n > 1 and is_by_samples and shape[SAMPLE] >= n:
        return OperatorPlan({SAMPLE: n}, list(devices))
    return OperatorPlan({}, [devices[0]])


def single(graph: Graph, batch: int, *, device: int = 0) -> Strategy:
    """Everything on one device."""
    return _build("single", graph, batch, lambda op: OperatorPlan({}, [device]))


def ddp(
    graph: Graph,
    cluster: Cluster,
    batch: int,
    *,
    shares: Sequence[int] | None = None,
    devices: Sequence[int] | None = None,
) -> Strategy:
    """Every operator cut by samples over devices.

    Args:
        shares: samples in proportion, for unlike devices; equal when None.
        devices: that take part, ascending; None: all.

    Raises:
        StrategyError: fewer samples than devices.
    """
    node_of = cluster.node_of()
    used = list(range(cluster.n_devices)) if devices is None else list(devices)
    if batch < len(used):
        raise StrategyError(
            f"data parallel needs a sample per device: batch {batch} on {len(used)} devices"
        )
    cut: Cut = list(shares) if shares is not None else len(used)
    name = "ddp" if shares is None else "ddp by speed"
    if len(used) < cluster.n_devices:
        nodes = {node_of[k] for k in used}
        is_node = len(nodes) == 1 and len(used) == node_of.count(node_of[used[0]])
        name += f" on {cluster.nodes[nodes.pop()].name if is_node else f'{len(used)} devices'}"
    return _build(name, graph, batch, lambda op: cut_or_whole(op, graph, batch, SAMPLE, cut, used))


def tensor_parallel(graph: Graph, cluster: Cluster, batch: int) -> Strategy:
    """Every operator with weights cut along them over all devices; the others likewise if they can
    be, else by samples. Of linear operators in a row every second is cut by its contraction, and
    what lies between its sums and the next cut is computed by all (Shoeybi et al., 2019).

    Of a sequence, norms, sums and dropout between attentions and MLPs are cut by positions
    (Korthikanti et al., 2022), as are attentions with too few heads, and output layer, loss and a
    tied embedding by the vocabulary. In a model with mixtures they are cut by samples, because a
    router takes whole samples.
    """
    devices = list(range(cluster.n_devices))
    tied = _tied(graph)
    read = {name for op in graph.operators if op.kind == "loss" for name in op.inputs}
    heads = {  # linear operators that give the loss one row of logits for each position
        op.name
        for op in graph.operators
        if op.name in read and op.kind == "linear" and "seq" in op.shape
    }
    pairs = [(pair, graph.operators[pair.second].name) for pair in linear_pairs(graph)]
    rows = {graph.operators[k].name for k in contracted(graph)} - heads
    inside = {graph.operators[k].name for pair, name in pairs if name in rows for k in pair.between}
    routed = _expert_dims(graph, batch, len(devices))

    def dim_of(op: Operator) -> str:
        if op.name in routed:
            return routed[op.name]
        if op.name in rows or (op.kind == "embedding" and op.name in tied):
            return CONTRACTION
        if op.kind == "loss" and heads.issuperset(op.inputs):
            return CONTRACTION
        if op.kind in _BETWEEN and op.name not in inside:
            if routed and batch >= len(devices):
                return SAMPLE
            if "seq" in op.shape:
                return "seq"
        return next(iter(weight_dims(op)), "feature")

    def plan(op: Operator) -> OperatorPlan:
        found = cut_or_whole(op, graph, batch, dim_of(op), len(devices), devices)
        if op.kind == "attention" and HEADS not in found.partition and not routed:
            return _by_positions(op, graph, batch, devices)
        return found

    found = _build("tensor parallel", graph, batch, plan)
    found = _cut_alike(found, graph, batch, devices)
    return _copied_inputs(_copied_after_sums(found, graph), graph)


def _by_positions(
    operator: Operator, graph: Graph, batch: int, devices: Sequence[int]
) -> OperatorPlan:
    """An attention with fewer groups of heads than devices, cut by positions if it can be; it
    gathers its input, or keys and values if those are smaller."""
    found = cut_or_whole(operator, graph, batch, POSITIONS, len(devices), devices)
    is_cut = POSITIONS in found.partition and len(key_forms(operator, graph)) > 1
    if is_cut and key_features(operator) < operator.shape["feature"]:
        return msgspec.structs.replace(found, keys="gathered")
    return found


def _expert_dims(graph: Graph, batch: int, n_devices: int) -> dict[str, str]:
    """The dims of mixtures' operators, whose experts are cut. Tokens travel to the devices of their
    experts; where there are fewer samples than devices, each device picks its experts' tokens out
    of all, and results are partial sums."""
    experts = experts_of(graph)
    around = dict.fromkeys(experts.around, SAMPLE) if batch >= n_devices else experts.around
    return around | experts.inside


def _tied(graph: Graph) -> set[str]:
    """Operators that share a weight with another one."""
    return {graph.operators[k].name for users in graph.ties() for k in users}


def unlike_ties(graph: Graph, plans: Mapping[str, OperatorPlan]) -> list[list[str]]:
    """Operators that share a weight and do not cut it alike, by weight."""
    found = []
    for ks in graph.ties():
        used = [op for op in (graph.operators[k] for k in ks) if op.name in plans]
        cuts = [weight_cuts(op, plans[op.name].partition) for op in used]
        if any(other != cuts[0] for other in cuts):
            found.append([op.name for op in used])
    return found


def _cut_alike(strategy: Strategy, graph: Graph, batch: int, devices: Sequence[int]) -> Strategy:
    """Cut operators by samples that share a weight but would cut it unlike, because each device
    would compute all of them; and the losses that read them."""
    plans = dict(strategy.operators)
    unlike = set(itertools.chain(*unlike_ties(graph, plans)))
    for op in graph.operators:
        if op.name in unlike or (op.kind == "loss" and not unlike.isdisjoint(op.inputs)):
            plans[op.name] = cut_or_whole(op, graph, batch, SAMPLE, len(devices), devices)
    return msgspec.structs.replace(strategy, operators=plans)


def hybrid(graph: Graph, cluster: Cluster, batch: int) -> Strategy:
    """Convolutions data parallel, fully connected layers cut by feature (Krizhevsky, 2014), every
    second one of a row by its contraction, what lies between by feature too, what follows by
    copies. With a mixture, its experts are cut, and all else is data parallel (Lepikhin et al.,
    2021)."""
    devices = list(range(cluster.n_devices))
    rows = contracted(graph)
    inside = {k for pair in linear_pairs(graph) if pair.second in rows for k in pair.between}
    dims = dict.fromkeys(_tied(graph), SAMPLE)
    dims |= {graph.operators[k].name: CONTRACTION for k in rows}
    dims |= {graph.operators[k].name: "feature" for k in inside}
    routed = _expert_dims(graph, batch, len(devices))
    if routed:
        dims = dict.fromkeys(dims, SAMPLE) | routed

    def plan(op: Operator) -> OperatorPlan:
        is_wide = op.kind == "linear" and not routed
        dim = dims.get(op.name, "feature" if is_wide else SAMPLE)
        return cut_or_whole(op, graph, batch, dim, len(devices), devices)

    return _copied_inputs(_copied_after_sums(_build("hybrid", graph, batch, plan), graph), graph)


def _copied_after_sums(strategy: Strategy, graph: Graph) -> Strategy:
    """Let all devices compute the operators after partial sums, or those who read all.

    The sums meet once forward, and gradients once backward if anybody reads more than the loss;
    cut by samples, both would be scattered and gathered each way.
    """
    plans = dict(strategy.operators)
    placed, readers = _placed_and_readers(strategy, graph)
    sums = {n for n, op in placed.items() if any(is_partial(op, d) for d in plans[n].partition)}
    whole = {n for n, op in placed.items() if _reads_all(op, plans[n])}
    copied = {name for name, op in placed.items() if may_have_copies(op)}
    n_before = len(copied) + 1
    while len(copied) < n_before:
        n_before = len(copied)
        copied = {
            name
            for name in copied
            for sources in ([n for n in placed[name].inputs if n in placed],)
            if sources and copied.union(sums).issuperset(sources)
            if copied.union(whole).issuperset(readers[name])
        }
    for name in filter(copied.__contains__, placed):  # producers first: their plans change too
        given = (plans[n].devices for n in placed[name].inputs if n in placed)
        devices = sorted(set(itertools.chain(*given)))
        plans[name] = OperatorPlan({REPLICA: len(devices)}, devices)
    return msgspec.structs.replace(strategy, operators=plans)


def _copied_inputs(strategy: Strategy, graph: Graph) -> Strategy:
    """Let every device that wants all of what the model's inputs give compute that itself, such as
    the indices that a part of a table looks up: each rank is fed the data that it needs."""
    plans = dict(strategy.operators)
    placed, readers = _placed_and_readers(strategy, graph)
    given: set[str] = set()  # computed from the model's inputs alone
    for name, op in placed.items():
        if may_have_copies(op) and given.issuperset(n for n in op.inputs if n in placed):
            given.add(name)
    copied: set[str] = set()
    for name in filter(given.__contains__, reversed(placed)):
        wanted = readers[name]
        if wanted and all(n in copied or _reads_all(placed[n], plans[n]) for n in wanted):
            copied.add(name)
            devices = sorted(set(itertools.chain(*(plans[n].devices for n in readers[name]))))
            plans[name] = OperatorPlan({REPLICA: len(devices)} if devices[1:] else {}, devices)
    return msgspec.structs.replace(strategy, operators=plans)


def _placed_and_readers(
    strategy: Strategy, graph: Graph
) -> tuple[dict[str, Operator], dict[str, list[str]]]:
    """Operators that the strategy places, by name, and who reads each."""
    placed = {op.name: op for op in graph.operators if op.name in strategy.operators}
    readers: dict[str, list[str]] = {name: [] for name in placed}
    for op in placed.values():
        for name in filter(placed.__contains__, op.inputs):
            readers[name].append(op.name)
    return placed, readers


def _reads_all(operator: Operator, plan: OperatorPlan) -> bool:
    """Whether each of its blocks reads all that its producers give, for weights of its own."""
    return set(plan.partition) <= set(weight_dims(operator)) - {CONTRACTION, expert_dim(operator)}


def tables_on_devices(graph: Graph, cluster: Cluster, batch: int) -> Strategy:
    """Embedding tables whole, each where most room is left; the rest data parallel."""
    devices = list(range(cluster.n_devices))
    room = [float(device.memory_bytes) for device in cluster.devices]

    def plan(op: Operator) -> OperatorPlan:
        if op.kind != "embedding":
            return cut_or_whole(op, graph, batch, SAMPLE, len(devices), devices)
        device = max(devices, key=lambda d: (room[d], -d))
        room[device] -= max(1, op.parameter_bytes)
        return OperatorPlan({}, [device])

    return _copied_inputs(_build("tables on devices", graph, batch, plan), graph)


def pipeline(
    graph: Graph,
    batch: int,
    stages: Sequence[Sequence[str]],
    devices: Sequence[Sequence[int]],
    *,
    n_microbatches: int,
    schedule: ScheduleName = "1f1b",
    name: str = "pipeline",
) -> Strategy:
    """Consecutive operators on different devices; a stage on several is data parallel there."""
    samples = max(1, batch // n_microbatches)
    index = graph.index()
    plans = {}
    for stage, (names, own) in enumerate(zip(stages, devices, strict=True)):
        for operator in (graph.operators[index[name]] for name in names):
            plan = cut_or_whole(operator, graph, samples, SAMPLE, len(own), own)
            plans[operator.name] = OperatorPlan(plan.partition, plan.devices, stage)
    return Strategy(
        name=name,
        batch=batch,
        operators=plans,
        n_microbatches=n_microbatches,
        schedule=schedule,
        stages=[Stage() for _ in stages],
    )


def check_replicas(strategy: Strategy, graph: Graph) -> None:
    """Refuse to average the replicas of a strategy, if one computes an operator for all.

    Raises:
        StrategyError: an operator is not cut by samples.
    """
    for name, plan in strategy.operators.items():
        if SAMPLE not in plan.partition:
            kind = graph.operators[graph.index()[name]].kind
            raise StrategyError(
                f"--sync-every averages replicas that exchange nothing else, and operator {name!r} "
                f"({kind}) is computed by one of them for all: drop it, or use "
                "--engine torch --strategy ddp"
            )

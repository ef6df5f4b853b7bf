"""A parallelisation as data: each operator's partition and devices, microbatches, schedule, stages.

One `Strategy` expresses data parallelism, pipelines with unequal replicas, tensor parallelism and
per-operator placement. Its file (JSON) can be read, edited, sent and run again:

    {"schema": "harness-strategy", "version": 1, "name": "hybrid", "batch": 64,
     "n_microbatches": 4, "schedule": "1f1b", "stages": [{}, {"recompute": true}],
     "operators": {"conv1": {"partition": {"sample": 2}, "devices": [0, 1]},
                   "fc1": {"partition": {"feature": 2}, "devices": [2, 3], "stage": 1}},
     "made_for": {...}}

`harness.domain.sharding` defines partitions for each kind of operator; `validate` checks that a
strategy fits a graph and a cluster, `check_fresh` that it is not stale.
"""

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.files import Count, FileKind, JsonFile
from harness.domain.fingerprint import MadeFor, differences, fingerprint
from harness.domain.graph import Graph, Operator
from harness.domain.key_forms import KeyForm, check_keys
from harness.domain.partition import REPLICA, SAMPLE, count_parts, cut_dim, n_parts, n_replicas
from harness.domain.schedule import SCHEDULES, ScheduleName, check_schedule
from harness.domain.shard_state import ShardState, shards_gradients, shards_parameters
from harness.domain.sharding import (
    CONTRACTION,
    cuttable_dims,
    full_blocks,
    full_units,
    has_tasks,
    may_have_copies,
)
from harness.errors import WITHOUT_PLAN, StrategyError

SCHEMA = "harness-strategy"
SCHEMA_VERSION = 1
_MOST_MICROBATCHES = 2**16


class OperatorPlan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Partition and devices of one operator.

    Attributes:
        partition: cuts of its output's dims: a number of equal parts, or shares such as [2, 1] for
            devices of different speeds. A dim that is not named stays whole. Samples are cut within
            each microbatch. {"replica": 2} is not a cut: two devices compute the same block and its
            gradient, without communication between them. Only operators without weights allow it
            (Unity's replica dim, DTensor's Replicate).
        devices: device k (a position in `Cluster.devices`) computes block k; a device may repeat.
        keys: of an attention that is cut by positions, see `domain.key_forms`.
    """

    partition: dict[str, Count | list[Count]]
    devices: list[Count]
    stage: Count = 0
    keys: KeyForm = "input"


def copies_of(plan: OperatorPlan, k: int) -> tuple[int, ...]:
    """The devices that compute the same block as device k, ascending; empty if it is the only
    one."""
    n = n_replicas(plan.partition)
    first = k // n * n
    return tuple(sorted(plan.devices[first : first + n])) if n > 1 else ()


class Stage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One pipeline stage.

    Attributes:
        recompute: keep only the stage's input, and run forward again before backward.
        segments: of a stage that recomputes: parts whose inputs are kept, each run again just
            before its own backward (`domain.checkpoints`).
    """

    recompute: bool = False
    segments: Count = 1


class Strategy(JsonFile, frozen=True, kw_only=True):
    """Every operator's plan, with microbatches, schedule and stages.

    Attributes:
        name: kind of strategy, such as `ddp` or `searched`.
        batch: samples per optimizer step over all devices.
        operators: by name; all operators of the graph but its inputs.
        stages: in order; operators of stage s read only from stages up to s.
        shard_state: see `domain.shard_state`.
    """

    FILE = FileKind("strategy file", SCHEMA, SCHEMA_VERSION, StrategyError, "search again")

    name: str
    batch: Count
    operators: dict[str, OperatorPlan]
    n_microbatches: Count = 1
    schedule: ScheduleName = "gpipe"
    stages: list[Stage] = msgspec.field(default_factory=lambda: [Stage()])
    shard_state: ShardState = "none"
    made_for: MadeFor = MadeFor()
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

    @property
    def shards_gradients(self) -> bool:
        """Whether a device keeps the summed gradients of its own parts only."""
        return shards_gradients(self.shard_state, self.n_microbatches)

    def stage_devices(self) -> list[tuple[int, ...]]:
        """The devices of each stage, ascending."""
        found: list[set[int]] = [set() for _ in self.stages]
        for plan in self.operators.values():
            found[plan.stage].update(plan.devices)
        return [tuple(sorted(devices)) for devices in found]

    @property
    def n_devices(self) -> int:
        """Devices from 0 to the last one that it uses."""
        return 1 + max((device for own in self.stage_devices() for device in own), default=0)

    def n_ranks(self) -> int:
        """Number of pipeline ranks: stages before their device sets repeat."""
        sets = self.stage_devices()
        return next(
            p
            for p in range(1, len(sets) + 1)
            if len(sets) % p == 0 and all(sets[i] == sets[i % p] for i in range(len(sets)))
        )

    def microbatch_sizes(self) -> list[int]:
        """Samples of each microbatch."""
        return [stop - start for start, stop in cut_dim(self.batch, self.n_microbatches)]


def check_fresh(strategy: Strategy, graph: Graph, cluster: Cluster) -> None:
    """Refuse a strategy that was planned for another graph or other devices.

    A strategy without hashes (written by hand, imported) passes, and so does one whose links or
    operators have been measured again since, because no two measurements are equal.
    """
    if not strategy.made_for.graph_hash:
        return
    found = differences(strategy.made_for, fingerprint(graph, cluster))
    if found:
        raise StrategyError(
            f"strategy {strategy.name!r} is stale: {'; '.join(found)}: search again, or remove "
            "its made_for to use it as it is"
        )


def validate(strategy: Strategy, graph: Graph, cluster: Cluster) -> None:
    """Refuse a strategy that does not fit a graph and a cluster."""
    check_numbers(strategy)
    check_names(strategy, graph)
    sizes = sorted(set(strategy.microbatch_sizes()))
    for operator in graph.operators:
        if has_tasks(operator):
            plan = strategy.operators[operator.name]
            for size in sizes:
                _check_plan(operator, plan, size, graph.batch, cluster.n_devices)
            check_keys(operator, plan.keys, plan.partition, plan.devices, graph)
            if not 0 <= plan.stage < len(strategy.stages):
                raise StrategyError(
                    f"operator {operator.name!r} is in stage {plan.stage}, the strategy has stages "
                    f"0 to {len(strategy.stages) - 1}"
                )
    _check_stages(strategy, graph)
    check_microbatches(strategy, graph)
    check_buffers(strategy, graph)
    check_norms(strategy, graph)


def check_microbatches(strategy: Strategy, graph: Graph) -> None:
    """Refuse microbatches where an operator needs all samples of the batch at once."""
    mixing = graph.mixing_operator()
    if mixing is not None and strategy.n_microbatches > 1:
        function = mixing.attrs.get("function", mixing.kind)
        raise StrategyError(
            f"operator {mixing.name!r} ({function}) needs all samples of a batch at once, "
            f"strategy {strategy.name!r} cuts it into "
            f"{strategy.n_microbatches} microbatches: use 1 microbatch, or {WITHOUT_PLAN}"
        )


def check_buffers(strategy: Strategy, graph: Graph) -> None:
    """Refuse a buffer that is written twice in a step, or on another device than it is read on."""
    first: dict[str, str] = {}
    for operator in (op for op in graph.operators if op.name in strategy.operators):
        names = operator.attrs.get("writes_buffers", [])
        for name in names if isinstance(names, list) else []:
            other = first.setdefault(str(name), operator.name)
            plan, theirs = strategy.operators[operator.name], strategy.operators[other]
            if plan.devices != theirs.devices or len(plan.devices) > 1:
                raise StrategyError(
                    f"forward writes the buffer {name!r}, which operator {other!r} has on devices "
                    f"{theirs.devices} and {operator.name!r} on {plan.devices}: put both on one, "
                    f"or {WITHOUT_PLAN}"
                )
            if strategy.stages[plan.stage].recompute:
                raise StrategyError(
                    f"operator {operator.name!r} writes the buffer {name!r}, and strategy "
                    f"{strategy.name!r} computes its stage {plan.stage} again: drop its recompute"
                )


def check_norms(strategy: Strategy, graph: Graph) -> None:
    """Refuse calls of one batch norm that are planned unlike each other: devices would update
    separate statistics, and a stage those of several microbatches before the next stage starts."""
    for first, other in graph.norm_calls():
        known, plan = strategy.operators.get(first), strategy.operators.get(other)
        if known is None or plan is None:
            raise StrategyError(
                f"operator {other!r} shares_norm_with {first!r}, not in {graph.name!r}: add it"
            )
        if plan != known:
            raise StrategyError(
                f"operators {first!r} and {other!r} call one batch norm, and strategy "
                f"{strategy.name!r} gives them unlike stages, devices or cuts (stages "
                f"{known.stage} and {plan.stage}, devices {known.devices} and {plan.devices}): "
                "plan them alike, or freeze the norm (its eval(), or train --batch-norm frozen)"
            )


def check_numbers(strategy: Strategy) -> None:
    """Refuse numbers of samples, microbatches, stages and segments that no strategy has."""
    most = min(strategy.batch, _MOST_MICROBATCHES)
    if strategy.batch < 1 or not 1 <= strategy.n_microbatches <= most:
        raise StrategyError(
            f"strategy {strategy.name!r} cuts a batch of {strategy.batch} into "
            f"{strategy.n_microbatches} microbatches: both must be >= 1, each needs a sample, and "
            f"{_MOST_MICROBATCHES} are the most"
        )
    if not strategy.stages:
        raise StrategyError(f"strategy {strategy.name!r} has no stage: it needs at least one")
    for k, stage in enumerate(strategy.stages):
        if stage.segments < 1 or (stage.segments > 1 and not stage.recompute):
            raise StrategyError(
                f"stage {k} of strategy {strategy.name!r} has {stage.segments} segments and "
                f"recompute {stage.recompute}: make segments 1 or more, and above 1 with recompute"
            )
    if shards_parameters(strategy.shard_state) and SCHEDULES[strategy.schedule].splits_backward:
        raise StrategyError(
            f"strategy {strategy.name!r} shards parameters, which are freed after a backward, and "
            f"its schedule {strategy.schedule} computes gradients of weights later: use 1f1b, or "
            "shard gradients"
        )


def check_names(strategy: Strategy, graph: Graph) -> None:
    """Refuse a strategy that does not place exactly the operators of a graph without its inputs."""
    known = {op.name: has_tasks(op) for op in graph.operators}
    wanted = [name for name, is_wanted in known.items() if is_wanted]
    if not wanted:
        raise StrategyError(f"graph {graph.name!r} has only inputs: there is nothing to place")
    foreign = [name for name in strategy.operators if name not in known]
    placed_inputs = [name for name in known if name in strategy.operators and not known[name]]
    missing = [name for name in wanted if name not in strategy.operators]
    if foreign:
        raise StrategyError(
            f"strategy {strategy.name!r} places operator {foreign[0]!r}, which graph "
            f"{graph.name!r} does not have ({len(foreign)} of {len(strategy.operators)} unknown): "
            "it is for another model"
        )
    if placed_inputs:
        raise StrategyError(
            f"strategy {strategy.name!r} places {placed_inputs[0]!r}, which is an input of graph "
            f"{graph.name!r}: remove its entry, every device loads the samples that it reads"
        )
    if missing:
        raise StrategyError(
            f"strategy {strategy.name!r} does not place operator {missing[0]!r} of graph "
            f"{graph.name!r} ({len(missing)} of {len(wanted)} missing): add it, or "
            "give a strategy of this model"
        )


def _check_plan(
    operator: Operator, plan: OperatorPlan, microbatch: int, graph_batch: int | None, n_devices: int
) -> None:
    shape = full_units(operator, batch=microbatch, graph_batch=graph_batch)
    allowed = cuttable_dims(operator, shape) + [REPLICA] * may_have_copies(operator)
    for dim, cut in plan.partition.items():
        if dim not in allowed and not (dim in (*shape, REPLICA) and n_parts(cut) == 1):
            raise StrategyError(
                f"operator {operator.name!r} ({operator.kind}) cannot be cut along {dim!r}: "
                f"it can along {', '.join(allowed) or 'nothing'}"
            )
    if count_parts(plan.partition) != len(plan.devices):
        raise StrategyError(
            f"operator {operator.name!r} has {count_parts(plan.partition)} blocks and "
            f"{len(plan.devices)} devices: name one device per block"
        )
    try:
        full_blocks(operator, plan.partition, batch=microbatch, graph_batch=graph_batch)
    except StrategyError as error:
        raise StrategyError(
            f"operator {operator.name!r} at microbatch {microbatch}: {error}"
        ) from None
    n_copies = n_replicas(plan.partition)
    for first in range(0, len(plan.devices), n_copies):
        copies = plan.devices[first : first + n_copies]
        if len(set(copies)) < n_copies:
            raise StrategyError(
                f"operator {operator.name!r} has {n_copies} copies of a block on devices {copies}: "
                "give each copy a device of its own"
            )
    outside = [device for device in plan.devices if not 0 <= device < n_devices]
    if outside:
        raise StrategyError(
            f"operator {operator.name!r} is on device {outside[0]}, the cluster has devices "
            f"0 to {n_devices - 1}"
        )


def _check_stages(strategy: Strategy, graph: Graph) -> None:
    for operator in graph.operators:
        for name in operator.inputs:
            if name not in strategy.operators or operator.name not in strategy.operators:
                continue
            before, after = strategy.operators[name].stage, strategy.operators[operator.name].stage
            if before > after:
                raise StrategyError(
                    f"operator {operator.name!r} of stage {after} reads from {name!r} of stage "
                    f"{before}: stages must follow the flow"
                )
    n_stages, used = len(strategy.stages), {plan.stage for plan in strategy.operators.values()}
    empty = next((stage for stage in range(n_stages) if stage not in used), None)
    if empty is not None:
        raise StrategyError(f"stage {empty} of {n_stages} has no operator: remove it")
    sets = strategy.stage_devices()
    first_on: dict[int, int] = {}
    for i, devices in enumerate(sets):
        for device in devices:
            j = first_on.setdefault(device, i)
            if sets[j] != devices:
                raise StrategyError(
                    f"stages {j} and {i} share device {device} but not all their devices: give "
                    "stages equal or separate devices"
                )
    n_ranks = strategy.n_ranks()
    if len(set(sets)) != n_ranks:
        raise StrategyError(
            f"{len(sets)} stages use {len(set(sets))} device sets in no repeating order: "
            "put stage s on the devices of stage s modulo the number of sets"
        )
    check_schedule(
        strategy.schedule,
        n_stages=len(sets),
        n_microbatches=strategy.n_microbatches,
        n_ranks=n_ranks,
    )


def samples_per_device(strategy: Strategy, operator: str) -> dict[int, int]:
    """Samples of the global batch that each device computes of one operator; samples of copies
    count for the lowest device, those of partial sums for the first part's."""
    plan = strategy.operators[operator]
    counts: dict[int, int] = {}
    cut = plan.partition.get(SAMPLE, 1)
    n_rest = count_parts(plan.partition) // n_parts(cut)
    n_copies = n_replicas(plan.partition)
    for size in strategy.microbatch_sizes():
        for k, (start, stop) in enumerate(cut_dim(size, cut)):
            first = k * n_rest
            rest = plan.devices[first : first + n_rest]
            end = n_copies if CONTRACTION in plan.partition else n_rest
            counted = (min(rest[at : at + n_copies]) for at in range(0, end, n_copies))
            for device in dict.fromkeys(counted):
                counts[device] = counts.get(device, 0) + stop - start
    return counts

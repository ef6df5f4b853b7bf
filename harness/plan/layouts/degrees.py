"""A strategy from degrees: tensor x data x pipeline parallel, as Megatron-LM and DeepSpeed name it.

Device of stage p, replica d and part t is (p * dp + d) * tp + t, so a tensor-parallel group is on
neighbouring devices (of one node, where tp divides its devices), and stages are farthest apart.

All groups of a layout on equal nodes are alike, so `Group` simulates one of them, on the first
devices of a node. An operator's seconds last from its start to that of the next one, and so contain
the all-reduces that it waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.partition import SAMPLE, Cut, n_parts
from harness.domain.profile import Profile
from harness.domain.schedule import ScheduleName
from harness.domain.sharding import full_units, has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import StrategyError
from harness.inputs import find_int, shorten
from harness.plan import builders
from harness.plan.bottleneck import balance
from harness.plan.simulate.activations import gradients_passed
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator, Trial, crossing_seconds, operator_seconds
from harness.plan.simulate.transfers import Floats, Ints

_MOST_DEGREE = 4096
_FORM = "tp=2,dp=4,pp=2"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism.

    Attributes:
        cuts: position of the first operator of each stage but the first; balanced when None.
        shares: samples of each replica, in proportion; equal when None.
        devices: position of each device in the order above; 0 to n - 1 when None.
    """

    tp: int = 1
    dp: int = 1
    pp: int = 1
    cuts: tuple[int, ...] | None = None
    shares: tuple[int, ...] | None = None
    devices: tuple[int, ...] | None = None

    @property
    def n_devices(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def order(self) -> tuple[int, ...]:
        """Devices, stage by stage and replica by replica."""
        return self.devices or tuple(range(self.n_devices))

    @property
    def name(self) -> str:
        return f"tp{self.tp} dp{self.dp} pp{self.pp}"


def parse_layout(text: str) -> ParallelLayout:
    """Degrees of `tp=2,dp=4,pp=2`; each is 1 if it is not named. `cuts=6-12` begins the second and
    third stage with operators 6 and 12, `shares=2-1` gives the first replica two thirds of the
    samples, and `devices=0-1-4-5` names devices.

    Raises:
        StrategyError: anything else.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name in found:
            raise StrategyError(f"layout {shorten(text)}: write it like {_FORM}")
        found[name] = value
    degrees = {name: _degree(text, found.pop(name, "1")) for name in ("tp", "dp", "pp")}
    lists = {name: _numbers(text, found.pop(name, None)) for name in ("cuts", "shares", "devices")}
    if found:
        raise StrategyError(
            f"layout {shorten(text)} has {shorten(next(iter(found)))}: use tp, dp, pp, cuts, "
            "shares and devices"
        )
    return ParallelLayout(
        tp=degrees["tp"],
        dp=degrees["dp"],
        pp=degrees["pp"],
        cuts=lists["cuts"],
        shares=lists["shares"],
        devices=lists["devices"],
    )


def _degree(text: str, value: str) -> int:
    number = find_int(value, 1, _MOST_DEGREE)
    if number is None:
        raise StrategyError(
            f"layout {shorten(text)}: {shorten(value)} is no degree from 1 to {_MOST_DEGREE}"
        )
    return number


def _numbers(text: str, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    numbers = [find_int(part) for part in value.split("-")]
    if None in numbers:
        raise StrategyError(
            f"layout {shorten(text)}: {shorten(value)} is no list of whole numbers like 6-12"
        )
    return tuple(number for number in numbers if number is not None)


def layout_strategy(
    layout: ParallelLayout,
    graph: Graph,
    cluster: Cluster,
    batch: int,
    *,
    n_microbatches: int = 1,
    schedule: ScheduleName = "1f1b",
    seconds: Sequence[Sequence[float]] | None = None,
    crossing_s: Sequence[float] = (),
) -> Strategy:
    """Every operator on the devices of its stage, cut by samples over replicas and by weights over
    the devices of a tensor-parallel group (`builders.tensor_parallel`).

    Args:
        seconds: by device, of each operator that is placed: stages are balanced by their slowest
            device. By FLOPs when None.
        crossing_s: seconds of the transfers at a cut before each of them; none by default.

    Raises:
        StrategyError: the degrees do not fit the cluster, the batch or the graph.
    """
    _check(layout, cluster, batch, n_microbatches)
    names = [op.name for op in graph.operators if has_tasks(op)]
    cuts = _cuts(layout, graph, names, seconds, crossing_s)
    samples = max(1, batch // n_microbatches)
    group = Cluster.uniform(1, layout.tp, inside_bytes_per_s=1.0, memory_bytes=1)
    parts = builders.tensor_parallel(graph, group, samples // layout.dp).operators
    index, devices = graph.index(), layout.order
    plans = {}
    for stage, (start, end) in enumerate(pairwise((0, *cuts, len(names)))):
        first = stage * layout.dp * layout.tp
        own = devices[first : first + layout.dp * layout.tp]
        for name in names[start:end]:
            units = full_units(graph.operators[index[name]], batch=samples, graph_batch=graph.batch)
            plan = _replicated(name, parts[name], layout, units, own)
            plans[name] = msgspec.structs.replace(plan, stage=stage)
    return Strategy(
        name=layout.name,
        batch=batch,
        operators=plans,
        n_microbatches=n_microbatches,
        schedule=schedule,
        stages=[Stage() for _ in range(layout.pp)],
    )


def profiled_layout(
    layout: ParallelLayout,
    simulator: Simulator,
    batch: int,
    *,
    n_microbatches: int = 1,
    schedule: ScheduleName = "1f1b",
) -> Strategy:
    """The strategy of a layout: of stages equal in computing, and those equal in computing and
    transfers, what is predicted to be faster.

    Raises:
        StrategyError: as `layout_strategy`.
    """
    seconds: list[list[float]] | None = None
    crossings: list[list[float]] = [[]]
    if layout.pp > 1 and layout.cuts is None:
        _check(layout, simulator.cluster, batch, n_microbatches)
        seconds = operator_seconds(simulator, batch, n_microbatches).tolist()
        crossing_s = crossing_seconds(simulator, batch, n_microbatches)
        # Beside computing that a stage's devices share: on links of their own, and on a shared NIC.
        crossings += [[n * one for one in crossing_s] for n in {1, layout.tp * layout.dp}]
    found = [
        layout_strategy(
            layout,
            simulator.graph,
            simulator.cluster,
            batch,
            n_microbatches=n_microbatches,
            schedule=schedule,
            seconds=seconds,
            crossing_s=crossing_s,
        )
        for crossing_s in crossings
    ]
    return simulator.fastest(found)


def _check(layout: ParallelLayout, cluster: Cluster, batch: int, n_microbatches: int) -> None:
    n = layout.n_devices
    if n > cluster.n_devices:
        raise StrategyError(
            f"layout {layout.name} needs {n} devices, the cluster has {cluster.n_devices}: lower a "
            "degree"
        )
    devices = layout.devices
    if devices is not None and (len(devices) != n or len(set(devices)) != n):
        raise StrategyError(
            f"layout {layout.name} needs {n} distinct devices, devices names {len(set(devices))}"
        )
    if devices is not None and max(devices) >= cluster.n_devices:
        raise StrategyError(
            f"layout {layout.name} has device {max(devices)}, the cluster has {cluster.n_devices}: "
            f"name devices from 0 to {cluster.n_devices - 1}"
        )
    if layout.shares is not None and len(layout.shares) != layout.dp:
        raise StrategyError(
            f"layout {layout.name} has {layout.dp} replicas and {len(layout.shares)} shares: give "
            "one per replica"
        )
    if not 1 <= n_microbatches <= batch or batch // n_microbatches < layout.dp:
        raise StrategyError(
            f"{n_microbatches} microbatches of {layout.dp} replicas need a sample each, the batch "
            f"has {batch}: lower dp or the microbatches"
        )


def _cuts(
    layout: ParallelLayout,
    graph: Graph,
    names: Sequence[str],
    seconds: Sequence[Sequence[float]] | None,
    crossing_s: Sequence[float],
) -> tuple[int, ...]:
    if layout.cuts is None:
        index = graph.index()
        if seconds is None:
            flops = [graph.operators[index[n]].forward_flops or 1.0 for n in names]
            seconds = [flops] * layout.n_devices
        by_device = np.asarray(seconds)[list(layout.order)]
        slowest = by_device.reshape(layout.pp, -1, len(names)).max(axis=1)
        return tuple(balance(slowest.tolist(), layout.pp, crossing_s).ends[:-1])
    bounds = (0, *layout.cuts, len(names))
    if len(layout.cuts) != layout.pp - 1 or any(a >= b for a, b in pairwise(bounds)):
        raise StrategyError(
            f"layout {layout.name} of {len(names)} operators cannot be cut at "
            f"{'-'.join(map(str, layout.cuts))}: give {layout.pp - 1} ascending positions"
        )
    return layout.cuts


def _replicated(
    name: str,
    plan: OperatorPlan,
    layout: ParallelLayout,
    units: dict[str, int],
    devices: Sequence[int],
) -> OperatorPlan:
    """A group's plan on every replica."""
    if layout.dp == 1:
        return msgspec.structs.replace(plan, devices=[devices[k] for k in plan.devices])
    if units.get(SAMPLE, 0) < layout.dp:
        raise StrategyError(f"operator {name!r} cannot be cut into {layout.dp} replicas: lower dp")
    own = plan.partition.get(SAMPLE, 1)
    rest = {dim: cut for dim, cut in plan.partition.items() if dim != SAMPLE}
    n_own = n_parts(own)
    cut: Cut = layout.dp * n_own
    if layout.shares is not None:
        cut = [share for share in layout.shares for _ in range(n_own)]
    found = [devices[d * layout.tp + k] for d in range(layout.dp) for k in plan.devices]
    return msgspec.structs.replace(plan, partition={SAMPLE: cut, **rest}, devices=found)


class GroupCosts(NamedTuple):
    """By operator that is placed, on one device of the group.

    Attributes:
        again_s: of its forward in a stage that recomputes, where values from others have stayed.
        kept_bytes: that forward keeps for backward.
        passed_bytes: (2, operators) of gradients while its backward runs, of one microbatch a step
            and of several.
        sent_bytes: of the whole output.
        last_reader: position of the output's last reader, -1 for none.
        crossing_bytes: (2, 2, operators) of the outputs that cross a cut before the operator and of
            their gradients: those of a device, and between the two devices that exchange most.
        tied: positions of operators that share weights, and bytes of these, of which
            `weight_bytes` counts the first operator's.
    """

    forward_s: Floats
    again_s: Floats
    backward_s: Floats
    weight_bytes: Floats
    kept_bytes: Floats
    passed_bytes: Floats
    sent_bytes: Floats
    last_reader: Ints
    crossing_bytes: Floats
    tied: list[tuple[list[int], float]]


class Group:
    """Groups of one size, by the first devices of the first node."""

    def __init__(
        self, graph: Graph, profile: Profile, cluster: Cluster, tp: int, options: SimulatorOptions
    ) -> None:
        self._graph, self._tp = graph, tp
        self._cluster = msgspec.structs.replace(cluster.part(range(tp)), collectives=[])
        self._simulator = Simulator(graph, profile, self._cluster, options=options)
        self._known: dict[int, GroupCosts] = {}
        kind = cluster.devices[0].kind
        two = Cluster.uniform(1, 2 * tp, inside_bytes_per_s=1.0, memory_bytes=1, kind=kind)
        self._two = Simulator(graph, profile, two, options=options)

    def costs(self, samples: int) -> GroupCosts:
        """For a microbatch of so many samples.

        Raises:
            StrategyError: the group cannot share the operators.
        """
        if samples not in self._known:
            self._known[samples] = self._simulate(samples)
        return self._known[samples]

    def _simulate(self, samples: int) -> GroupCosts:
        layout = ParallelLayout(tp=self._tp)
        strategy = layout_strategy(layout, self._graph, self._cluster, samples, schedule="gpipe")
        trial = Trial.from_strategy(self._simulator, strategy)
        found, tables, placed = trial.outcome(), trial.tables, self._simulator.placed
        costs, returns = self._simulator.costs(samples), self._simulator.returns
        rows = found.lowered.rows
        first = np.flatnonzero(rows % self._tp == 0)
        ops, end_s = rows[first] // self._tp, float(found.finish[first].max())
        backward = found.start[first + len(rows)]
        passed = [gradients_passed(tables, n, returns) for n in (1, 2)]
        at = {op: k for k, op in enumerate(placed)}
        readers = [[c for c in found if c in at] for found in self._graph.consumers()]
        last_reader = [max((at[c] for c in readers[op]), default=-1) for op in placed]
        crossing = np.zeros((2, 2, len(placed)))
        for k, last in enumerate(last_reader):
            if last > k:
                sent = self._sent_bytes(placed[k], readers[placed[k]], tables.plans, samples)
                crossing[:, :, k + 1 : last + 1] += sent[:, :, None]
        return GroupCosts(
            _seconds(found.start[first], ops, placed, end_s),
            tables.forward_s[placed].max(axis=1),
            _seconds(backward, ops, placed, float(found.device_end_s[0])),
            tables.weight_bytes[placed].max(axis=1),
            (tables.output_bytes + tables.saved_bytes)[placed].max(axis=1),
            np.array([one[placed].max(axis=1) for one in passed]) * costs.knows_saved,
            np.array([costs.wire_bytes(op) for op in placed]),
            np.array(last_reader),
            crossing,
            [
                ([at[op] for op in ops], float(tables.weight_bytes[ops[0]].max()))
                for ops in tables.tied.values()
            ],
        )

    def _sent_bytes(
        self, op: int, readers: list[int], plans: dict[int, OperatorPlan], samples: int
    ) -> Floats:
        """(2, 2) bytes of an output and of its gradient, if its readers are on another group: those
        of a device, and between the two devices that exchange most."""
        moved = [
            (c, msgspec.structs.replace(plans[c], devices=[self._tp + k for k in plans[c].devices]))
            for c in readers
        ]
        costs, n = self._two.costs(samples), 2 * self._tp
        edges = costs.transfers(op, plans[op], moved, syncs_norms=False)
        if edges.sums:  # each device adds to all of it
            return np.full((2, 2), costs.wire_bytes(op))
        pairs = edges.source % n * n + edges.target % n
        ways = (edges.goes, edges.returns & self._simulator.returns[op])
        found = [np.bincount(pairs, edges.n_bytes * way, minlength=1) for way in ways]
        return np.array([[one.sum() / self._tp for one in found], [one.max() for one in found]])


def _seconds(start: Floats, ops: Ints, placed: list[int], end_s: float) -> Floats:
    """By placed operator: from its start to the next one's, 0 where it has no task."""
    runs = np.flatnonzero(~np.isnan(start))
    order = runs[np.argsort(start[runs], kind="stable")]
    found = dict.fromkeys(placed, 0.0)
    ends = [*start[order[1:]].tolist(), end_s]
    for op, begin, end in zip(ops[order].tolist(), start[order].tolist(), ends, strict=True):
        found[op] += max(0.0, end - begin)
    return np.array([found[op] for op in placed])

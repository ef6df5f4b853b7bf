"""A strategy from degrees: tensor x data x pipeline parallel, as Megatron-LM and DeepSpeed name it.

Device of stage p, replica d and part t is (p * dp + d) * tp + t, so a tensor-parallel group is on
neighbouring devices (of one node, where tp divides its devices), and stages are farthest apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, Cut, n_parts
from harness.domain.schedule import ScheduleName
from harness.domain.sharding import cuttable_dims, full_units, has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import StrategyError
from harness.inputs import find_int, find_ints, shorten
from harness.plan import builders
from harness.plan.bottleneck import balance
from harness.plan.search.space import usual_microbatches
from harness.plan.simulate.simulator import Simulator, crossing_seconds, operator_seconds

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

    def with_replicas_together(self) -> ParallelLayout:
        """The same with each replica on devices in a row, unless devices are named."""
        if self.devices:
            return self
        numbers = np.arange(self.n_devices).reshape(self.dp, self.pp, self.tp)
        return replace(self, devices=tuple(numbers.swapaxes(0, 1).ravel().tolist()))

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
    fields: dict[str, Any] = {}
    fields |= {name: _degree(text, found.pop(name, "1")) for name in ("tp", "dp", "pp")}
    for name in ("cuts", "shares", "devices"):
        fields[name] = _numbers(text, found.pop(name, None))
    if found:
        raise StrategyError(
            f"layout {shorten(text)} has {shorten(next(iter(found)))}: use tp, dp, pp, cuts, "
            "shares and devices"
        )
    return ParallelLayout(**fields)


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
    numbers = find_ints(value.split("-"))
    if numbers is None:
        raise StrategyError(
            f"layout {shorten(text)}: {shorten(value)} is no list of whole numbers like 6-12"
        )
    return numbers


def layout_strategy(
    layout: ParallelLayout,
    graph: Graph,
    cluster: Cluster,
    batch: int,
    *,
    n_microbatches: int = 1,
    schedule: ScheduleName = "1f1b",
    seconds: Sequence[Sequence[float]] = (),
    crossing_s: Sequence[float] = (),
) -> Strategy:
    """Every operator on the devices of its stage, cut by samples over replicas and by weights over
    the devices of a tensor-parallel group (`builders.tensor_parallel`).

    Args:
        seconds: by device, of each operator that is placed: several stages without cuts are
            balanced by their slowest device.
        crossing_s: seconds of the transfers at a cut before each of them; none by default.

    Raises:
        StrategyError: the degrees do not fit the cluster, the batch or the graph.
    """
    _check(layout, cluster, batch, n_microbatches)
    names = [op.name for op in graph.operators if has_tasks(op)]
    cuts = _cuts(layout, names, seconds, crossing_s)
    samples = max(1, batch // n_microbatches)
    group = Cluster.uniform(1, layout.tp, inside_bytes_per_s=1.0, memory_bytes=1)
    parts = builders.tensor_parallel(graph, group, samples // layout.dp).operators
    if layout.tp > 1 and all(set(plan.partition) <= {SAMPLE} for plan in parts.values()):
        raise StrategyError(
            f"no operator of {graph.name!r} can be cut into {layout.tp} parts, but by samples: "
            "lower tp, or use dp"
        )
    index, devices = graph.index(), layout.order
    plans = {}
    for stage, (start, end) in enumerate(pairwise((0, *cuts, len(names)))):
        first = stage * layout.dp * layout.tp
        own = devices[first : first + layout.dp * layout.tp]
        for name in names[start:end]:
            operator = graph.operators[index[name]]
            units = full_units(operator, batch=samples, graph_batch=graph.batch)
            plan = _replicated(operator, parts[name], layout, units, own)
            plans[name] = msgspec.structs.replace(plan, stage=stage)
    return Strategy(
        name=layout.name,
        batch=batch,
        operators=plans,
        n_microbatches=n_microbatches,
        schedule=schedule,
        stages=[Stage() for _ in range(layout.pp)],
    )


def microbatches_of(layout: ParallelLayout, simulator: Simulator, batch: int) -> list[int]:
    """Numbers of microbatches to choose from where nobody names one: the usual ones that have a
    sample for each replica; one where there is one stage."""
    if layout.pp == 1:
        return [1]
    usual = usual_microbatches(simulator, batch)
    return [n for n in usual if batch // n >= layout.dp] or [max(1, batch // layout.dp)]


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
    seconds: list[list[float]] = []
    crossings: list[list[float]] = [[]]
    if layout.pp > 1 and layout.cuts is None:
        _check(layout, simulator.cluster, batch, n_microbatches)
        seconds = operator_seconds(simulator, batch, n_microbatches).tolist()
        crossing_s = crossing_seconds(
            simulator, batch, n_microbatches, range(simulator.cluster.n_devices)
        )
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


def check_devices(layout: ParallelLayout, cluster: Cluster) -> None:
    """Refuse a layout of devices that the cluster does not have.

    Raises:
        StrategyError: it has too few, or the layout names others.
    """
    n = layout.n_devices
    if n > cluster.n_devices:
        raise StrategyError(
            f"layout {layout.name} needs {n} devices, the cluster has {cluster.n_devices}: lower a "
            "degree"
        )
    devices = layout.devices
    if devices is not None and (len(devices) != n or len(set(devices)) != n):
        raise StrategyError(
            f"layout {layout.name} needs {n} distinct devices, devices names "
            f"{'-'.join(map(str, devices))}: name each device once"
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


def _check(layout: ParallelLayout, cluster: Cluster, batch: int, n_microbatches: int) -> None:
    check_devices(layout, cluster)
    if not 1 <= n_microbatches <= batch or batch // n_microbatches < layout.dp:
        raise StrategyError(
            f"{n_microbatches} microbatches of {layout.dp} replicas need a sample each, the batch "
            f"has {batch}: lower dp or the microbatches"
        )


def _cuts(
    layout: ParallelLayout,
    names: Sequence[str],
    seconds: Sequence[Sequence[float]],
    crossing_s: Sequence[float],
) -> tuple[int, ...]:
    if layout.cuts is None:
        if layout.pp == 1:
            return ()
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
    operator: Operator,
    plan: OperatorPlan,
    layout: ParallelLayout,
    units: dict[str, int],
    devices: Sequence[int],
) -> OperatorPlan:
    """A group's plan on every replica."""
    # Not where a function is unknown, nor a loss of whole batches.
    is_cut = SAMPLE in cuttable_dims(operator, units)
    if layout.dp == 1 or not is_cut:
        return msgspec.structs.replace(plan, devices=[devices[k] for k in plan.devices])
    if units[SAMPLE] < layout.dp:
        raise StrategyError(
            f"operator {operator.name!r} cannot be cut into {layout.dp} replicas: lower dp"
        )
    own = plan.partition.get(SAMPLE, 1)
    rest = {dim: cut for dim, cut in plan.partition.items() if dim != SAMPLE}
    n_own = n_parts(own)
    cut: Cut = layout.dp * n_own
    if layout.shares is not None:
        cut = [share for share in layout.shares for _ in range(n_own)]
    found = [devices[d * layout.tp + k] for d in range(layout.dp) for k in plan.devices]
    return msgspec.structs.replace(plan, partition={SAMPLE: cut, **rest}, devices=found)

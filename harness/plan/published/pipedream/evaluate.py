"""Cost a given plan by PipeDream's formula, stage by stage, apart from the search that found it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.plan.published.pipedream.cost import Level, Stage, memory_bytes, n_in_flight
from harness.plan.published.pipedream.dynamic import Workers
from harness.plan.published.pipedream.lattice import Lattice, bits
from harness.plan.published.pipedream.workload import TICK_S


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """Seconds per minibatch of one stage: the largest of `busy_s`, `receive_s` and `send_s`.

    Attributes:
        compute_s: of one replica's share; for a group of devices, its pipeline's bottleneck.
        sync_s: gradient synchronisation among the replicas.
        receive_s, send_s: activations and their gradients; 0 where the formula leaves them out.
    """

    compute_s: float
    sync_s: float
    receive_s: float
    send_s: float

    @property
    def busy_s(self) -> float:
        return self.compute_s + self.sync_s

    @property
    def total_s(self) -> float:
        return max(self.busy_s, self.receive_s, self.send_s)

    @property
    def binding(self) -> str:
        """What sets the stage's pace."""
        if self.total_s > self.busy_s:
            return f"{'receiving' if self.receive_s >= self.send_s else 'sending'} activations"
        return "gradient synchronisation" if self.sync_s > self.compute_s else "compute"


def stage_costs(
    lattice: Lattice,
    stages: Sequence[Stage],
    levels: Sequence[Level],
    unlike: Workers | None = None,
) -> list[StageCost]:
    """Costs of the outermost level's stages.

    Args:
        levels: innermost first.
        unlike: the workers of the only level when they differ.
    """
    workers = unlike or Workers.uniform(levels[-1])
    costs = []
    for position, stage in enumerate(stages):
        start, end = lattice.cut(stage.start), lattice.cut(stage.end)
        if stage.inner:
            compute_s = max(cost.total_s for cost in stage_costs(lattice, stage.inner, levels[:-1]))
        else:
            compute_s = (end.ticks - start.ticks) * TICK_S
        group = stage.first, stage.n_replicas
        parameters = end.parameter_bytes - start.parameter_bytes
        pays = position > 0  # the formula charges no transfers to the first stage of a level
        costs.append(
            StageCost(
                compute_s=compute_s / float(workers.rate[group]),
                sync_s=float(workers.sync_s_per_byte[group]) * parameters,
                receive_s=pays * float(workers.receive_s_per_byte[group]) * start.crossing_bytes,
                send_s=pays * float(workers.send_s_per_byte[group]) * end.crossing_bytes,
            )
        )
    return costs


@dataclass(frozen=True)
class DeviceStage:
    """A stage as devices see it, all levels taken apart.

    Attributes:
        operators: positions in the workload.
        devices: one per replica, in order.
        in_flight: minibatches that a replica holds activations of.
        memory_bytes: of each replica.
    """

    operators: list[int]
    devices: list[int]
    in_flight: int
    memory_bytes: int


def device_stages(
    lattice: Lattice, stages: Sequence[Stage], levels: Sequence[Level]
) -> list[DeviceStage]:
    """Take the levels apart; stages in order of flow."""
    found = []
    for stage, devices, n_after in _flatten(stages, levels, [0], 0):
        start, end = lattice.cut(stage.start), lattice.cut(stage.end)
        in_flight = n_in_flight(len(devices), n_after)
        held = end.activation_bytes - start.activation_bytes + start.crossing_bytes
        parameters = end.parameter_bytes - start.parameter_bytes
        found.append(
            DeviceStage(
                operators=list(bits(stage.end & ~stage.start)),
                devices=devices,
                in_flight=in_flight,
                memory_bytes=math.ceil(memory_bytes(parameters, held, in_flight)),
            )
        )
    return found


def _flatten(
    stages: Sequence[Stage], levels: Sequence[Level], bases: list[int], n_after: int
) -> Iterator[tuple[Stage, list[int], int]]:
    """Innermost stages with their devices and how many devices lie behind them.

    Args:
        bases: first device of each replica of the surrounding stage.
        n_after: devices behind the surrounding stage.
    """
    width = math.prod(level.n_workers for level in levels[:-1])
    for stage in stages:
        end = stage.first + stage.n_replicas
        starts = [base + w * width for base in bases for w in range(stage.first, end)]
        behind = (levels[-1].n_workers - end) * width * len(bases) + n_after
        if stage.inner:
            yield from _flatten(stage.inner, levels[:-1], starts, behind)
        else:
            yield stage, starts, behind

"""The parts of an engine that depend on how its strategy shards the training state.

| shard_state | gradients | weights |
|---|---|---|
| none | all-reduced | every holder updates its copy |
| optimizer | all-reduced | gathered after the optimizer |
| gradients | summed to their owners | gathered after the optimizer |
| parameters | summed to their owners | gathered before each use, then freed |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.executor.gradients.deferred import ImmediateSink, count_uses
from harness.runtime.executor.gradients.scatter import GradientScatter
from harness.runtime.executor.gradients.sums import GradientSync
from harness.runtime.executor.gradients.weight_gradients import GradientBuffers
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.run.residence import Residence
from harness.runtime.executor.shards.forms import Forms
from harness.runtime.executor.state.owners import Group, Owners
from harness.runtime.executor.state.units import WeightUnit, freed_slices, plan_units
from harness.runtime.executor.state.weights import Holders, Weights
from harness.runtime.executor.transport.moves import Moves
from harness.runtime.executor.transport.transfers import Groups
from harness.runtime.ranks.world import World

Programs = Mapping[int, tuple[Program, Moves]]


class GradientContext(NamedTuple):
    """What summing gradients needs beside the weights."""

    world: World
    recorder: Recorder
    bucket_bytes: int


class Sharding:
    """Plans units of weights, and makes the objects that exchange and keep parts of the state.

    Args:
        forms: by microbatch size; they mark the operators that use freed weights.
        unit_bytes: weights that are gathered together.
    """

    def __init__(
        self, strategy: Strategy, holders: Holders, forms: Collection[Forms], unit_bytes: int
    ) -> None:
        self._strategy, self._holders = strategy, holders
        self._groups: dict[Group, Any] = {}
        is_freeing = strategy.shard_state == "parameters"
        self._freed = freed_slices(holders) if is_freeing else frozenset()
        is_sharded = strategy.shard_state != "none"
        self._plans = plan_units(holders, self._freed, unit_bytes) if is_sharded else []
        number_of = {
            piece: number
            for number, unit in enumerate(self._plans)
            if unit.is_freed
            for piece in unit.pieces
        }
        for form in forms:
            form.find_units(number_of)

    def make_groups(self, groups: Groups) -> None:
        """Make the groups that exchange weights; all ranks must call it.

        Raises:
            StrategyError: under NCCL, a rank has too many groups.
        """
        exchanging = sorted({unit.devices for unit in self._plans})
        self._groups = {devices: groups.for_sums(devices) for devices in exchanging}

    def owners(self, weights: Weights, rank: int) -> Owners:
        """The owners of all parts, and this rank's own; frees weights."""
        return Owners(self._holders, weights, self._strategy.shard_state, rank, self._freed)

    def units(self, owners: Owners, world: World) -> list[WeightUnit]:
        """The units that this rank holds."""
        slices = {one.piece: one for one in owners.shared}
        return [
            WeightUnit(number, plan, slices, self._groups[plan.devices], world)
            for number, plan in enumerate(self._plans)
            if world.rank in plan.devices
        ]

    def residence(
        self, units: Sequence[WeightUnit], programs: Programs, phases: Phases
    ) -> Residence:
        """What gathers and frees this rank's weights during a step."""
        sizes = self._strategy.microbatch_sizes()

        def needs(microbatch: int, stage: int) -> list[frozenset[int]]:
            program, _ = programs[sizes[microbatch]]
            return [segment.units for segment in program.stages[stage]]

        freed = {unit.number: unit for unit in units if unit.plan.is_freed}
        return Residence(self._plans, freed, needs, phases)

    def gradient_sync(
        self,
        owners: Owners,
        weights: Weights,
        programs: Programs,
        groups: Mapping[Group, Any],
        buffers: GradientBuffers,
        context: GradientContext,
    ) -> GradientSync | GradientScatter:
        """What sums gradients over the devices that hold the same weights.

        Args:
            groups: process groups by their devices.
            buffers: receives the views of buckets that gradients can be written into.
        """
        sizes = self._strategy.microbatch_sizes()

        def uses(counts: Mapping[int, int]) -> Counter[nn.Parameter]:
            return count_uses(
                (n, programs[size][0].differentiable_modules()) for size, n in counts.items()
            )

        world, recorder, bucket_bytes = context
        if self._strategy.shards_gradients:
            by_size = {size: uses({size: 1}) for size in set(sizes)}
            rounds = [by_size[size] for size in sizes]
            return GradientScatter(world, owners.shared, groups, rounds, recorder, bucket_bytes)
        return GradientSync(
            world,
            [(p.name, each, self._holders.of(p)) for p, each in weights.trainable().items()],
            groups,
            uses(Counter(sizes)),
            recorder,
            bucket_bytes,
            buffers,
        )


def immediate_sink(
    world: World, plan: ExecutorPlan, reached: Callable[[nn.Parameter], None]
) -> ImmediateSink | None:
    """A sink that writes gradients directly into buckets; None if that saves no copies.

    Asynchronous training uses none, because stashed weights have no buckets, nor do sharded
    gradients, whose buckets are packed by owner.
    """
    has_copies = world.size > 1 or plan.strategy.n_microbatches > 1
    # On a GPU the overhead of an autograd function in Python exceeds the time of a copy.
    is_faster = world.device.type == "cpu"
    has_buckets = not (plan.is_asynchronous or plan.strategy.shards_gradients)
    return ImmediateSink(reached) if has_copies and is_faster and has_buckets else None

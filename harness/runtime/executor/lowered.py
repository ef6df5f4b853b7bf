"""A strategy lowered for all ranks: which rank computes and holds what, and who exchanges what."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from harness.domain.shard_state import Group
from harness.runtime.capture.capture import Captured
from harness.runtime.engines.engine import EngineOptions
from harness.runtime.executor.cache.boundary import check_rows
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.gradients.update import ParameterHooks
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.sharded.replicas import Replicas
from harness.runtime.executor.sharded.units import (
    UnitPlan,
    find_units,
    rounds_slice,
    warn_if_unsharded,
)
from harness.runtime.executor.shards.forms import Forms, choose_forms, warn_of_gathered
from harness.runtime.executor.state.weights import Holders
from harness.runtime.executor.transport.messages import Message, find_messages, shared_sums
from harness.runtime.models.task import Task
from harness.runtime.ranks.world import World


class LoweredStrategy(NamedTuple):
    """The exchanges of a strategy before any process group is made; equal on all ranks.

    Attributes:
        forms, messages: by size of microbatch, ascending.
        holders: of the slices of all sizes.
        sums, collectives: sets of ranks that sum parts of an activation, and that communicate
            within an operator.
        units: of slices whose state several ranks share.
    """

    forms: dict[int, Forms]
    messages: dict[int, list[Message]]
    holders: Holders
    sums: set[Group]
    collectives: set[Group]
    replicas: Replicas
    units: list[UnitPlan]


def prepare_model(
    task: Task, captured: Captured, plan: ExecutorPlan, world: World
) -> ParameterHooks:
    """Check the plan against a model, and freeze what is not trained; returns the hooks of the
    model's parameters.

    Raises:
        StrategyError: they do not fit each other.
    """
    plan.check(captured.graph, world.size)
    captured.freeze_untrained(task.model)
    hooks = ParameterHooks(task.model)
    plan.check_hooks(hooks.first())
    return hooks


def lower_strategy(
    captured: Captured, meta: MetaModel, plan: ExecutorPlan, world: World, options: EngineOptions
) -> LoweredStrategy:
    """Lower a strategy; the first rank warns of operators and weights that it cannot divide.

    Raises:
        ModelError, StrategyError: the executor cannot carry it out.
    """
    strategy, holders = plan.strategy, Holders(captured.module)
    by_size = choose_forms(captured, meta, plan, sorted(set(strategy.microbatch_sizes())))
    forms = list(by_size.values())
    for form in forms:
        check_rows(form.layout)
        holders.merge(form.holders)
    plan.check_tied(holders.trained())
    sums = {one.devices for form in forms for one in shared_sums(form.layout).values()}
    collectives = {group for form in forms for group in form.collective_groups()}
    replicas = Replicas(strategy, world)
    if options.outer is not None and world.size > 1:
        ends = {ends for form in forms for ends in form.layout.exchanges()}
        replicas = Replicas.of_exchanges(strategy, world, (*ends, *sums, *collectives))
    recomputed_at = forms[0].recomputed_at
    is_rounded = partial(rounds_slice, captured, holders)
    units = find_units(holders, strategy, replicas, options.bucket_bytes, recomputed_at, is_rounded)
    for form in forms:
        form.find_units([plan.unit for plan in units])
    if world.is_first:
        warn_of_gathered(forms[0])
        warn_if_unsharded(holders, strategy, replicas)
    messages = {size: find_messages(form, world.size) for size, form in by_size.items()}
    return LoweredStrategy(by_size, messages, holders, sums, collectives, replicas, units)

"""Evaluate a model under its strategy, on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from harness.domain.graph import LOSS
from harness.errors import ConfigError
from harness.runtime.capture.operators import DropoutOff
from harness.runtime.data import count_targets, load_batches
from harness.runtime.data.batch import BatchPlan
from harness.runtime.data.own import PaddedData
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import gather_numbers, gather_objects, raise_on_all_ranks
from harness.runtime.ranks.world import World

if TYPE_CHECKING:
    from harness.runtime.executor.engine import ExecutorEngine
    from harness.runtime.executor.shards.loss import Metric


@contextmanager
def evaluating(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules as in evaluation, also functions that their traces call as in training, and
    without compiling them."""
    trained = [module for root in roots for module in root.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with torch.compiler.set_stance("force_eager"), DropoutOff():
            yield
    finally:
        for module in trained:
            module.training = True


def evaluate_held_out(
    engine: ExecutorEngine,
    task: Task,
    data: Any,
    metrics: Mapping[str, Metric],
    world: World,
    *,
    is_mixing: bool = False,
    n_workers: int = 0,
) -> dict[str, float]:
    """The mean loss over data, as `loss`, and each metric; all ranks must call it. The engine
    trains on as if it had not run.

    Args:
        data: a BatchedData.
        metrics: their sums are divided by the number of targets that count, as the loss is.
        is_mixing: the model mixes samples, so those after the last whole batch are left out.

    Raises:
        ConfigError: on every rank, if a metric fails, or if ranks have unlike metrics.
    """
    sums = engine.metric_sums
    raise_on_all_ranks(lambda: sums.start(metrics), world)
    for rank, names in enumerate(found := gather_objects(world, [*metrics])):
        if names != found[0]:
            raise ConfigError(
                f"rank {rank} has the metrics {names}, rank 0 has {found[0]}: give all ranks the "
                "same, in the same order"
            )
    batch = engine.plan.strategy.batch
    n_samples = len(data) - (len(data) % batch if is_mixing else 0)
    padded = PaddedData(data, n_samples, batch)
    plan = BatchPlan(n_samples=len(padded), shares=(batch,), positions=(tuple(engine.samples),))
    totals = torch.zeros(1 + len(metrics), dtype=torch.float64, device=world.device)
    engine.flush()
    agreeing = engine.held_state().gatherer.agreeing_buffers()
    with agreeing, torch.random.fork_rng(devices=[]):  # a loader draws from it
        batches = load_batches(padded, plan, 0, n_workers=n_workers, device=world.device)
        for at, one in zip(range(0, len(padded), batch), batches, strict=False):
            n_counted = batch if at < n_samples else -padded.n_filled
            loss = engine.evaluate(one).to(totals) * batch
            totals += torch.stack([loss, *(x.to(totals) for x in sums.take())]) * n_counted / batch
    raise_on_all_ranks(sums.check, world)
    counted = sum(count_targets(data, task, range(world.rank, n_samples, world.size)))
    n_targets = max(1.0, sum(gather_numbers(counted, world)))
    wholes = [sum(gather_numbers(total, world)) for total in totals.tolist()]
    return {name: x / n_targets for name, x in zip((LOSS, *metrics), wholes, strict=True)}

"""What a primed rank calls first beside pending receives; importable by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import equivalence_training
from equivalence_cases import Case, part_of
from equivalence_training import make_engine, options_of, small_pieces, train_step
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from harness.runtime.data.batch import Batch, MemoryData
from harness.runtime.executor.run.evaluation import evaluate_held_out
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.ranks.world import World

# Views, what the allocator alone does, and a copy to the host.
_WITHOUT_KERNELS = ("aten.split", "aten.view", "aten.detach", "aten.empty", "aten._local_scalar")


class Called(TorchDispatchMode):
    """Notes the operators that are called with tensors of some dtypes, where the channels are muted
    and elsewhere."""

    def __init__(self, channels: Channels) -> None:
        super().__init__()
        self._channels = channels
        self.found: dict[bool, set[str]] = {True: set(), False: set()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name = f"{func} {[x.dtype for x in tensors]} {kwargs.get('dtype', '')}"
        if func.namespace != "c10d" and not name.startswith(_WITHOUT_KERNELS):
            self.found[self._channels.is_muted].add(name)
        return func(*args, **kwargs)


def first_called_beside_receives(case: Case, world: World) -> list[str]:
    """The operators that a step calls while receives may wait, and that its priming has not. Sums
    of gradients are sent in bf16."""
    options = replace(options_of(case), reduce_dtype="bf16")
    given = mock.patch.object(equivalence_training, "options_of", return_value=options)
    with small_pieces(case), given:
        engine = make_engine(case, world)
    called, prime = Called(engine._channels), engine._prime
    update, gather = engine._update, engine.gathers.gather_updated

    def primed(*told: Any) -> None:
        prime(*told)
        called.found[False].clear()

    def unseen(run: Callable[[], None]) -> None:
        with _disable_current_modes():
            run()

    engine.is_priming_due, engine._prime = True, primed  # type: ignore[method-assign]
    if not case.is_asynchronous:
        engine._update = partial(unseen, update)  # type: ignore[method-assign]
        engine.gathers.gather_updated = partial(unseen, gather)  # type: ignore[method-assign]
    with called:
        train_step(engine, case, 0)
    return sorted(called.found[False] - called.found[True])


def evaluated(case: Case, world: World) -> list[float]:
    """This rank's part of the loss of a batch and its samples, by two evaluations, and how many of
    the forwards that they take are without messages."""
    engine = make_engine(case, world)
    batch, found = part_of(case.batch(engine._task, 0), engine.samples), []
    forward, n_muted = engine.compute_forward, []

    def counted(part: Batch | None) -> Tensor:
        n_muted.append(engine._channels.is_muted)
        return forward(part)

    engine.compute_forward = counted  # type: ignore[method-assign]
    for _ in range(2):
        engine.metric_sums.start({"samples": _count_samples})
        loss = float(engine.evaluate(batch))
        found += [loss, *map(float, engine.metric_sums.take())]
        engine.metric_sums.check()
    return [*found, sum(n_muted)]


def evaluated_by_both(case: Case, world: World) -> tuple[float, float]:
    """The mean loss of some samples after a step, by the engine and by the model of its state."""
    task, engine = case.make_task(), make_engine(case, world)
    train_step(engine, case, 0)
    samples = part_of(case.batch(task, 1), range(case.strategy.batch - 3))
    data = MemoryData(samples.inputs, samples.targets)
    found = evaluate_held_out(engine, task, data, {}, world)["loss"]
    task.model.load_state_dict(engine.model_state())
    outputs = task.model.eval()(*samples.inputs)
    return found, float(task.sum_loss(outputs, samples.targets)) / len(data)


def _count_samples(outputs: Tensor, labels: Tensor) -> int:
    assert len(outputs) == len(labels)
    return len(labels)

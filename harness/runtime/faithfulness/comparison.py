"""Compare a captured graph with its model, because tracing may drop a construct without an error.

Both train two batches of different sizes from equal weights, buffers and random states. Loss,
gradients, buffers and random states must be equal bit by bit; if they are not, float64 separates
rounding from errors. The error names the first operator whose output or gradient differs
(`first_difference`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from harness.errors import WITHOUT_PLAN, HarnessError, ModelError, first_line
from harness.runtime.capture.capture import Captured
from harness.runtime.data.batch import Batch
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.devices.precision import Precision, repeatable
from harness.runtime.devices.random_sources import RandomSources, seed_all
from harness.runtime.engines.replicas import fingerprint
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.run.evaluation import evaluating
from harness.runtime.faithfulness.first_difference import find_first_difference
from harness.runtime.faithfulness.foreign_hooks import watched_hooks
from harness.runtime.faithfulness.loss import hold_own_loss
from harness.runtime.faithfulness.outcomes import (
    EXACT,
    AccumulatesTwice,
    Keep,
    Loss,
    Narrowing,
    OperatorRun,
    Side,
    TrainedBatch,
    bits_of,
    difference_of,
    first_beyond,
    in_float64,
    is_equal,
    keep_bits,
    keep_distance,
    keep_values,
    names_beyond,
    rounding_of,
    widened,
)
from harness.runtime.faithfulness.state import counted_on, counters, preserved, writes_copies
from harness.runtime.models.own_loss import BatchLossTask
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import raise_on_all_ranks
from harness.runtime.ranks.world import World

# Different, above 1 for batch normalization, and small because models are large.
_SIZES = (3, 2)
_SEED = 20
# Steps after which a model that counts may compute something else.
_LATER = (7, 100, 10_000, 10_000_000)
_LONGEST = 160  # characters quoted from another library's message


def hold_to_model(task: Task, captured: Captured, name: str, dtype: str = "fp32") -> None:
    """Check that a captured graph trains as its model does, on the model's device.

    Costs four forward and backward passes of two or three samples and five forward passes, and
    memory for gradients and copies of buffers. Restores the model.

    Args:
        dtype: training dtype, as in `Precision`; the check runs in fp32 and under its autocast.

    Raises:
        ModelError: graph and model differ (names the first operator that differs and the cause, if
            known), or one device cannot train the model.
    """
    for precision in dict.fromkeys(("fp32", dtype)):
        _Comparison(task, captured, name, precision).compare()
    hold_own_loss(task, name)


def evaluates_alike(task: Task, captured: Captured) -> bool:
    """Whether a captured graph computes in evaluation mode what its model does there.

    Costs two forward passes of two samples. Restores the model.
    """
    return _Comparison(task, captured, task.model._get_name(), "fp32").evaluates_alike()


def hold_alike(task: Task, captured: Captured, dtype: str, world: World) -> None:
    """Run `hold_to_model` on every rank's device; all ranks must call it.

    Raises:
        ModelError: on every rank, if any rank finds a difference.
    """
    name = task.model._get_name()
    raise_on_all_ranks(lambda: hold_to_model(task, captured, name, dtype), world)


class _Comparison:
    def __init__(self, task: Task, captured: Captured, name: str, dtype: str) -> None:
        self._task, self._captured, self._name = task, captured, name
        tensors = (*task.model.parameters(), *task.model.buffers())
        self._device = next((t.device for t in tensors), torch.device("cpu"))
        self._precision = Precision(dtype, self._device)
        self._meta = MetaModel.of(captured, task.inputs, self._device)
        self._outputs: Any = None  # the model's latest outputs
        root = task.model
        names = [name for name, _ in root.named_buffers()]  # without those that forward registers
        self._model = Side(
            self._call_model,
            lambda: dict(root.named_parameters()),
            lambda: {name: root.get_buffer(name) for name in names},
        )
        buffers = {name: x.clone() for name, x in root.named_buffers()}
        self._graph = Side(
            self._call_graph,
            partial(self._of_graph, "named_parameters", dict(root.named_parameters())),
            # Buffers that the graph lacks keep their values, whatever a hook elsewhere writes.
            partial(self._of_graph, "named_buffers", buffers),
        )

    def _call_model(self, batch: Batch) -> Any:
        self._outputs = None
        with self._precision.autocast():
            # Copies, because a forward may alter its inputs in place.
            self._outputs = self._task.model(*batch.each(torch.clone).inputs)
        return self._outputs

    def _call_graph(self, batch: Batch) -> Any:
        run = OperatorRun(self._captured, self._meta, len(batch.targets))
        with self._precision.autocast():
            return run.run(*batch.each(torch.clone).inputs)

    def _of_graph(self, kind: str, others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The graph's tensors by the model's names, or others; an export has copies of those it
        uses."""
        copies = dict(getattr(self._captured.module, kind)(remove_duplicate=False))
        return {name: copies.get(name, x) for name, x in others.items()}

    def evaluates_alike(self) -> bool:
        """Compare loss, buffers and random states; see the function."""
        (batch,) = self._batches(_SIZES[1:])
        try:
            expected = self._evaluated(batch, self._model, nullcontext())
            found = self._evaluated(batch, self._graph, evaluating([self._captured.module]))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return False
        tolerance = rounding_of(self._task.model, "fp32")
        return math.isclose(found[0], expected[0], rel_tol=tolerance) and found[1:] == expected[1:]

    def _evaluated(
        self, batch: Batch, side: Side, mode: AbstractContextManager[None]
    ) -> tuple[float, dict[str, list[Any]], dict[str, str]]:
        roots = self._task.model, self._captured.module
        with preserved(*roots), repeatable(self._device), mode, torch.no_grad():
            self._task.model.eval()
            seed_all(_SEED)
            loss = float(self._sum_loss(side.call(batch), batch))
            buffers = {name: bits_of(b).tolist() for name, b in side.buffers().items()}
            return loss, buffers, RandomSources().digests()

    def compare(self) -> None:
        """Compare; see `hold_to_model`."""
        with repeatable(self._device):
            before = fingerprint(self._task.model)
            batches, expected = self._train_model()
            is_written = not torch.equal(before, fingerprint(self._task.model))
            if is_written or writes_copies(self._task.model, lambda: self._call_model(batches[-1])):
                raise ModelError(
                    f"the forward of {self._name} writes its own parameters, which a graph cannot: "
                    f"write them between steps, or {WITHOUT_PLAN}"
                )
            with watched_hooks(self._captured.module, self._task.model) as used:
                found = self._train_graph(batches)
            if not is_equal(found, expected):
                self._explain(batches)
            for tensor, operator in used.items():
                raise ModelError(
                    f"a hook on {operator} of {self._name} uses {tensor}, which is not of that "
                    "module, and a strategy may cut it or keep it elsewhere: let a hook use its "
                    f"own module alone, compute this in forward, or {WITHOUT_PLAN}"
                )
            self._check_counters(batches[:1])

    def _check_counters(self, batches: Sequence[Batch]) -> None:
        """Refuse a model that will compute something else later, because its forward counts."""
        model = self._task.model
        found = counters(model, lambda: self._call_model(batches[0]))
        expected = self._train(self._model, batches, keep=keep_values) if found else []
        for n_steps in _LATER if found else ():
            try:
                with counted_on(found, n_steps):
                    later = self._train(self._model, batches, keep=keep_distance(expected))
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                continue  # the model counts a place, such as that in a queue, never so far
            if difference_of(later) > rounding_of(model, self._precision.dtype):
                names = ", ".join(each.name for each in found)
                raise ModelError(
                    f"the forward of {self._name} counts in {names} and computes otherwise when "
                    f"that is {n_steps} larger, which a graph cannot: choose between steps, or "
                    f"{WITHOUT_PLAN}"
                )

    # Running

    def _batches(self, sizes: Sequence[int]) -> list[Batch]:
        return [draw_batch(self._task, n, k, self._device) for k, n in enumerate(sizes)]

    def _train_model(self) -> tuple[list[Batch], list[TrainedBatch]]:
        """Train batches of `_SIZES`, or two of the captured size if the model accepts no other."""
        reasons: list[str] = []
        for sizes in (_SIZES, (self._captured.graph.batch or 1,) * 2):
            try:
                batches = self._batches(sizes)
                return batches, self._train(self._model, batches)
            except HarnessError:
                raise
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                reasons.append(self._reason(error, sizes[0]))
        raise ModelError(f"one device cannot train {self._name} ({reasons[-1]}")

    def _reason(self, error: Exception, samples: int) -> str:
        message, outputs = f"{type(error).__name__}: {first_line(error)[:_LONGEST]}", self._outputs
        is_table = isinstance(outputs, Tensor) and outputs.dim() == 2 and len(outputs) == samples
        if is_table or (outputs is not None and self._task.loss == "own"):
            return f"{message}): fix its forward first"
        if outputs is None:
            return (
                f"{message}): fix its forward first, which gets random numbers, and integers of "
                "the factory's example (any from 0 to the largest, if some are negative)"
            )
        given = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        return (
            f"{message}): its forward returns {given} for {samples} samples, let it return a "
            "tensor of one row of logits per sample"
        )

    def _sum_loss(self, outputs: Any, batch: Batch) -> Tensor:
        return self._task.sum_loss(outputs, batch.targets) / batch.targets.numel()

    def _train(
        self,
        side: Side,
        batches: Sequence[Batch],
        loss_of: Loss | None = None,
        keep: Keep = keep_bits,
    ) -> list[TrainedBatch]:
        try:
            with preserved(self._task.model, self._captured.module):
                return side.train(batches, loss_of or self._sum_loss, keep, _SEED)
        except AccumulatesTwice:  # which it does not raise again
            return self._train(side, batches, loss_of, keep)

    def _train_graph(
        self, batches: Sequence[Batch], loss_of: Loss | None = None, keep: Keep = keep_bits
    ) -> list[TrainedBatch]:
        try:
            return self._train(self._graph, batches, loss_of, keep)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            sizes = " and ".join(str(len(batch.targets)) for batch in batches)
            message = f"{type(error).__name__}: {first_line(error)[:_LONGEST]}"
            raise ModelError(
                f"the graph captured of {self._name} cannot train {sizes} samples, the model can "
                f"({message}): remove control flow and sizes that depend on the batch, or "
                f"{WITHOUT_PLAN}"
            ) from error

    # Comparing

    def _explain(self, batches: Sequence[Batch]) -> None:
        """Return if the difference is rounding or recomputation; else raise ModelError."""
        expected = self._train(self._model, batches, keep=keep_values)
        again = self._train(self._model, batches, keep=keep_distance(expected))
        found = self._train_graph(batches, keep=keep_distance(expected))
        noise = difference_of(again)
        if again[-1].random != expected[-1].random or not noise < 0.1:
            raise ModelError(
                f"{self._name} gives another result each time it starts from the same weights and "
                "random numbers: draw from torch's default generator alone, and keep no counts or "
                "states outside of buffers"
            )
        drawn = [k for k, v in expected[-1].random.items() if found[-1].random[k] != v]
        difference = difference_of(found)
        tolerance = max(10 * noise, rounding_of(self._task.model, self._precision.dtype))
        exact = None if drawn else self._difference_in_float64(batches)
        is_rounding = difference <= tolerance if exact is None else exact <= EXACT
        if not drawn and (is_rounding or self._is_recomputation(batches[0], found)):
            return
        self._refuse(batches, found, expected, drawn)

    def _is_recomputation(self, batch: Batch, found: list[TrainedBatch]) -> bool:
        """Whether only running statistics differ because torch.utils.checkpoint, which runs layers
        again in backward, makes the model update them twice and the graph once."""
        model = self._task.model
        names = names_beyond(found)
        if not names or not all(name.startswith("buffer ") for name in names):
            return False
        paths = {name.removeprefix("buffer ").rpartition(".")[0] for name in names}
        norms = [model.get_submodule(path) for path in paths]
        is_backward, again = [False], set()
        with preserved(model):
            for norm in norms:
                norm.register_forward_pre_hook(
                    lambda module, _: again.add(module) if is_backward[0] else None
                )
            loss = self._sum_loss(self._call_model(batch), batch)
            is_backward[0] = True
            loss.backward()
        return len(again) == len(norms) and all(isinstance(n, _NormBase) for n in norms)

    def _difference_in_float64(self, batches: Sequence[Batch]) -> float | None:
        """The largest relative difference in float64; None if the model cannot run in float64 or
        casts to a narrower dtype."""

        def project(outputs: Any, batch: Batch) -> Tensor:
            if isinstance(self._task, BatchLossTask):  # the model repeats its mean
                return self._sum_loss(outputs, batch)
            count = torch.arange(outputs.numel(), device=outputs.device, dtype=torch.float64)
            projected: Tensor = (outputs * torch.cos(count).view(outputs.shape)).sum()
            return projected

        wide = [Batch(tuple(map(widened, b.inputs)), b.targets) for b in batches]
        try:
            with in_float64(self._task.model, self._captured.module):
                with Narrowing() as narrowing:
                    expected = self._train(self._model, wide, project, keep_values)
                if narrowing.is_detected:
                    return None
                return difference_of(self._train_graph(wide, project, keep_distance(expected)))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _refuse(
        self,
        batches: Sequence[Batch],
        found: list[TrainedBatch],
        expected: list[TrainedBatch],
        drawn: Sequence[str],
    ) -> None:
        sides = self._task.model, self._captured.module
        with preserved(*sides), self._precision.autocast():
            first = find_first_difference(self._task, self._captured, self._meta, batches, _SEED)
        if drawn:
            summary = f"the graph does not draw the random numbers that the model does ({drawn[0]})"
        else:
            k, name = first_beyond(found)
            summary = f"with {len(batches[k].targets)} samples its {name} differs"
            if name == "loss":
                summary += f" ({found[k].loss:.6g}, not {expected[k].loss:.6g})"
        details = "; ".join(filter(None, (summary, first)))
        dtype = self._precision.dtype
        under, other = ("", "") if dtype == "fp32" else (f" in {dtype}", ", use fp32")
        raise ModelError(
            f"the graph captured of {self._name} does not train{under} what the model does: "
            f"{details}: rewrite that part{other}, or {WITHOUT_PLAN}"
        )

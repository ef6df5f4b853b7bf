"""Train a few batches by a model or by its graph, and keep what they computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from harness.runtime.data.batch import Batch
from harness.runtime.faithfulness.outcomes import Keep, RandomSources, TrainedBatch, seed_all

Loss = Callable[[Any, Batch], Tensor]


class AccumulatesTwice(Exception):
    """A backward adds to a gradient that has been kept and freed."""


class Side:
    """One of the two compared: the model or its graph.

    A gradient is freed once it is kept, because those of a large model need as much memory as its
    weights.

    Args:
        parameters, buffers: return tensors by the model's names.
    """

    def __init__(
        self,
        call: Callable[[Batch], Any],
        parameters: Callable[[], Mapping[str, Tensor]],
        buffers: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.call, self._parameters, self.buffers = call, parameters, buffers
        self.frees_gradients = True

    def train(
        self, batches: Sequence[Batch], loss_of: Loss, keep: Keep, seed: int
    ) -> list[TrainedBatch]:
        """Run forward and backward of each batch, without optimizer steps.

        Raises:
            AccumulatesTwice: a second call, from the same state, will keep all gradients to the
                end.
        """
        seed_all(seed)
        return [self._train(k, batch, loss_of, keep) for k, batch in enumerate(batches)]

    def _train(self, k: int, batch: Batch, loss_of: Loss, keep: Keep) -> TrainedBatch:
        parameters = self._parameters()
        for parameter in parameters.values():
            parameter.grad = None
        loss = loss_of(self.call(batch), batch)

        def keep_gradient(name: str, gradient: Tensor) -> Tensor:
            return keep(k, f"gradient of {name}", gradient)

        with self._freed(parameters, keep_gradient) as kept:
            loss.backward()
        zero = torch.zeros(1, dtype=torch.float64)
        for name, parameter in parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None or name not in kept:
                kept[name] = keep_gradient(name, zero if gradient is None else gradient)
        tensors = {"loss": keep(k, "loss", loss)}
        tensors |= {f"gradient of {name}": kept[name] for name in parameters}
        for name, buffer in self.buffers().items():
            tensors[f"buffer {name}"] = keep(k, f"buffer {name}", buffer)
        return TrainedBatch(float(loss.detach()), tensors, RandomSources().digests())

    @contextmanager
    def _freed(
        self, parameters: Mapping[str, Tensor], keep: Callable[[str, Tensor], Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Keep and free each gradient when backward has computed it."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        kept: dict[str, Tensor] = {}

        def free(parameter: Tensor) -> None:
            name = names[id(parameter)]
            if name in kept:
                self.frees_gradients = False
                raise AccumulatesTwice
            if parameter.grad is not None:
                kept[name] = keep(name, parameter.grad)
                parameter.grad = None

        is_freed = self.frees_gradients
        trained = [p for p in parameters.values() if is_freed and p.is_leaf and p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(free) for p in trained]
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()

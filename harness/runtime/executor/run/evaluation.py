"""Run the forward of a step alone, as in training or as in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from harness.domain.schedule import Action
from harness.runtime.data.batch import Batch
from harness.runtime.engines.engine import Share
from harness.runtime.executor.run.feed import Feed
from harness.runtime.executor.run.priming import kept_alike
from harness.runtime.executor.run.runner import Runner
from harness.runtime.tracing.constructs import function_name


@torch.no_grad()
def run_forward(
    runner: Runner,
    feed: Feed,
    actions: Sequence[Action],
    batch: Batch | None,
    n_samples: int,
    device: torch.device,
) -> Tensor:
    """Run the forward actions of a step alone, without a change of buffers or random states.

    Args:
        batch: this device's samples.
        n_samples: of the global batch.

    Returns:
        This device's part of the summed loss, divided by `n_samples`.
    """
    share = Share(n_local=len(feed.samples), n_global=n_samples)
    flights = feed.split(batch, share, 1.0, is_asynchronous=False)
    with kept_alike(runner.buffers(), device):
        runner.run(tuple(action for action in actions if action.kind == "forward"), flights)
    runner.forget()
    return runner.loss


_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout",
}  # fmt: skip


class _WithoutDropout(TorchFunctionMode):
    """Calls dropouts and attentions that a trace has called as in training without dropout."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = function_name(func), kwargs or {}
        if name == "scaled_dot_product_attention" and len(args) > 4:
            args = *args[:4], 0.0, *args[5:]
        elif name == "scaled_dot_product_attention":
            kwargs = {**kwargs, "dropout_p": 0.0}
        elif name in _DROPOUTS and args:
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def evaluating(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules as in evaluation, also functions that their traces call as in training, and
    without compiling them."""
    trained = [module for root in roots for module in root.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with torch.compiler.set_stance("force_eager"), _WithoutDropout():
            yield
    finally:
        for module in trained:
            module.training = True

"""Trace a model into a graph that computes what the model does, forward and backward.

torch.fx follows the model, and keeps modules (a convolution, an attention) as single operators.
Where it cannot, torch.export does, whose operators are smaller. Where neither can follow one of the
model's modules, that module is kept whole.
"""

from __future__ import annotations

import logging

from torch import Tensor, fx, nn

from harness.errors import ModelError, first_line
from harness.runtime.tracing.export import export
from harness.runtime.tracing.finish import finish
from harness.runtime.tracing.tracer import LostError, ModelTracer

_log = logging.getLogger(__name__)

_REMEDY = "or train it by --engine torch, which needs no plan"


def trace(model: nn.Module, examples: tuple[Tensor, ...]) -> fx.GraphModule:
    """Trace a model that is called on `examples`.

    Raises:
        ModelError: the model cannot be followed, or not without losing a part of its meaning.
    """
    whole: set[str] = set()
    exported = ""
    while True:
        tracer = ModelTracer(whole, len(examples))
        try:
            graph = tracer.trace(model)
            finish(graph, model, tracer.has_gradient)
            return fx.GraphModule(model, graph, type(model).__name__)
        except Exception as error:
            path, reason = tracer.module_path, error
        if not exported and not isinstance(reason, LostError):
            try:
                module = export(model, examples)
                finish(module.graph, module)
                module.recompile()
                return module
            except Exception as error:
                exported = first_line(error)
        if not path or path in whole:
            raise _refused(model, reason, exported) from reason
        _log.info("module %s is kept whole: torch.fx cannot trace it (%s)", path, reason)
        whole.add(path)


def _refused(model: nn.Module, reason: Exception, exported: str) -> ModelError:
    name = type(model).__name__
    if isinstance(reason, LostError):
        return ModelError(f"{name} cannot be captured: {first_line(reason)}, {_REMEDY}")
    return ModelError(
        f"{name} can be captured neither by torch.fx ({first_line(reason)}) nor by torch.export "
        f"({exported}): remove control flow that depends on values, {_REMEDY}"
    )

"""Trace a model into a graph with the same outputs and gradients.

torch.fx comes first, because it keeps modules (a convolution, an attention) as single operators.
If it fails, torch.export follows, whose operators are smaller. If both fail in a module, that
module is kept as one operator.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection

import torch
from torch import Tensor, fx, nn

from harness.errors import HarnessError, ModelError, first_line
from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.tracing.autocast import keep_regions
from harness.runtime.tracing.chance import no_random_draws
from harness.runtime.tracing.constants import fold_constants
from harness.runtime.tracing.constructs import CALLS, WRITTEN, ConstructError
from harness.runtime.tracing.export import export
from harness.runtime.tracing.finish import finish
from harness.runtime.tracing.norms import is_own_norm, plain_norm
from harness.runtime.tracing.refusals import refusal
from harness.runtime.tracing.tracer import ModelTracer

_log = logging.getLogger(__name__)

# A module with a larger share of the model's parameters is not kept whole for a written buffer.
_LARGEST_SHARE = 0.5


def trace(model: nn.Module, examples: tuple[Tensor, ...]) -> fx.GraphModule:
    """Trace a model that takes `examples`.

    Raises:
        ModelError: the model cannot be traced, or a graph cannot represent one of its constructs.
    """
    whole: set[str] = set()
    states: dict[str, str] = {}
    exported: Exception | None = None
    while True:
        tracer = ModelTracer(whole, states, len(examples))
        try:
            with no_random_draws():
                graph = tracer.trace(model)
            if not tracer.states.writes:
                finish(graph, model, tracer.has_gradient)
                return _module(model, graph, states, whole, examples)
        except Exception as error:
            reason = error
        if tracer.states.writes:
            for name, path in tracer.states.writes.items():
                states[name] = _place(model, name, path)
            whole |= set(states.values()) - {""}
            continue
        if isinstance(reason, HarnessError) and not isinstance(reason, ConstructError):
            raise reason
        if exported is None and not isinstance(reason, ConstructError):
            try:
                with no_random_draws():
                    module = export(model, examples)
                finish(module.graph, module)
                fold_constants(module, examples)
                keep_regions(module)
                return module
            except Exception as error:
                exported = error
        path = tracer.module_path
        if not path or path in whole:
            reasons = (reason,) if exported is None else (reason, exported)
            raise refusal(type(model).__name__, *reasons) from reason
        _log.info(
            "module %s is kept whole: torch.fx cannot trace it (%s)", path, first_line(reason)
        )
        whole.add(path)


def _module(
    model: nn.Module,
    graph: fx.Graph,
    states: Collection[str],
    whole: Collection[str],
    examples: tuple[Tensor, ...],
) -> fx.GraphModule:
    module = fx.GraphModule(model, graph, type(model).__name__)
    for path, part in list(module.named_modules()):
        if is_own_norm(part) and path not in whole:
            module.set_submodule(path, plain_norm(part))
    module.meta[WRITTEN] = frozenset(states)
    _check_runs(module, examples)
    fold_constants(module, examples)
    keep_regions(module)
    return module


def _check_runs(module: fx.GraphModule, examples: tuple[Tensor, ...]) -> None:
    """Raise the error of a graph that does not run, such as one that reads an output's attribute
    of a class that torch.fx does not know."""
    (output,) = module.graph.find_nodes(op="output")
    if not any(_is_computed(node) for node in output.all_input_nodes):
        raise ModelError(f"{module._get_name()} returns no tensor that its operators computed")
    with torch.enable_grad(), torch.device("meta"):
        fx.Interpreter(meta_copy(module)).run(*(x.to("meta") for x in examples))


def _is_computed(node: fx.Node) -> bool:
    return node.op in CALLS or any(map(_is_computed, node.all_input_nodes))


def _place(model: nn.Module, buffer: str, writer: str) -> str:
    """The innermost module that contains a buffer and its writer, to be kept whole; empty if it is
    too large a part of the model, so that the graph passes the buffer's values on."""
    steps = zip(buffer.split(".")[:-1], writer.split("."), strict=False)
    place = ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], steps))
    n_inside = sum(p.numel() for p in model.get_submodule(place).parameters())
    return place if n_inside < _LARGEST_SHARE * sum(p.numel() for p in model.parameters()) else ""

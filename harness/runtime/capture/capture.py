"""Capture a model as a Graph: trace it, then derive shapes and FLOPs on the meta device.

torch.utils.flop_counter counts the FLOPs of each operator's forward and backward.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from harness.domain.graph import INNER, INNER_HALF, KEPT, KEPT_HALF, LOSS, Graph, Operator
from harness.errors import HarnessError, ModelError
from harness.runtime.capture.builder import BY_SOFTMAX, OperatorBuilder
from harness.runtime.capture.meta_copy import restored_buffers
from harness.runtime.capture.meta_run import run_on_meta
from harness.runtime.capture.operators import Attributes
from harness.runtime.capture.sample_dims import join_samples
from harness.runtime.capture.sample_losses import split_by_samples
from harness.runtime.models import build_task, fit_options
from harness.runtime.models.factory import weights_on_meta
from harness.runtime.models.task import ModelOptions, Task, check_memory, check_weights
from harness.runtime.tracing.refusals import refusal
from harness.runtime.tracing.trace import trace
from harness.runtime.tracing.writes import replace_in_place_writes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A traced model and its graph.

    Attributes:
        module: executes the nodes; holds the model's parameters.
        nodes: by operator name; inputs and the loss have none.
        untrained: names of parameters that require a gradient and never get one.
        apart: frozen operators in segments of their own, so that outputs and times are recorded.
        shared: what is derived of the module for all its users; a `MetaModel`.
    """

    graph: Graph
    module: fx.GraphModule
    nodes: dict[str, fx.Node]
    untrained: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()
    shared: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def freeze_untrained(self, model: nn.Module) -> None:
        """Clear requires_grad of untrained parameters, so that optimizers skip them."""
        for owner in (self.module, model):
            for name, parameter in owner.named_parameters(remove_duplicate=False):
                if name in self.untrained:
                    parameter.requires_grad_(False)


def _loss_operator(task: Task, producer: Operator, batch: int) -> Operator:
    n_classes = math.prod(size for dim, size in producer.shape.items() if dim != "sample")
    attrs: Attributes = {"function": str(task.loss)}
    if task.loss in BY_SOFTMAX:  # in fp32: log-softmax, its gradient, and that of fp32 outputs
        n_bytes = 4 * batch * n_classes
        attrs |= dict.fromkeys((KEPT, KEPT_HALF, INNER), n_bytes)
        attrs[INNER_HALF] = n_bytes + n_bytes // 2  # one is an input's, counted in 16 bits
    if producer.shape and next(iter(producer.shape)) != "sample":  # such as logits of all pairs
        attrs["is_cut_by_samples"] = False
    *others, last = producer.shape.values() or (0,)
    has_classes_last = 0 < len(others) < 3 and tuple(others[1:]) == task.target_shape
    if task.loss == "cross_entropy" and has_classes_last:
        attrs["n_classes"] = last
    return Operator(
        name=LOSS,
        kind="loss",
        inputs=[producer.name],
        shape={"sample": batch},
        activation_bytes=4 * batch,
        signature=f"loss(function={task.loss}) {n_classes} -> ",
        attrs=attrs,
    )


def _tell_unknown(builder: OperatorBuilder) -> None:
    """Name the functions that the planner does not know, those with most FLOPs first, if any."""
    flops = {operator.name: operator.forward_flops for operator in builder.operators}
    costs = {f: sum(flops[name] for name in names) for f, names in builder.unknown.items()}
    if not any(costs.values()):
        return
    shown = [
        f"{function} ({names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''})"
        for function, names in sorted(builder.unknown.items(), key=lambda item: -costs[item[0]])
    ]
    _log.warning(
        "the planner does not know %s: operators with %.3g of %.3g FLOPs are planned as cut by "
        "samples or not at all", ", ".join(shown), sum(costs.values()), sum(flops.values()),
    )  # fmt: skip


def capture(task: Task, batch: int, name: str) -> Captured:
    """Trace a task's model for a global batch of `batch` samples; allocates no activations.

    Raises:
        ModelError: the model cannot be traced or run on the meta device.
    """
    try:
        # Detection of anomalies reads values, which the meta device has not.
        with torch.autograd.set_detect_anomaly(False), restored_buffers(task.model):
            return _capture(task, batch, name)
    except HarnessError:
        raise
    except Exception as error:  # a model's operators may raise anything
        raise refusal(name, error) from error


def _capture(task: Task, batch: int, name: str) -> Captured:
    check_weights(task.model)
    device = next((parameter.device for parameter in task.model.parameters()), None)
    examples = tuple(
        torch.zeros(batch, *spec.shape, dtype=spec.dtype, device=device) for spec in task.inputs
    )
    module = trace(task.model, examples)
    check_memory(module)
    with torch.device("meta"):  # for tensors that modules create
        join_samples(module, examples)
        replace_in_place_writes(module, examples)
        values = split_by_samples(task, module, examples)
        measured = run_on_meta(module, examples)
        builder = OperatorBuilder(module, measured, values, batch)
        for node in module.graph.nodes:
            builder.add(node)
    _tell_unknown(builder)
    if not builder.output:
        raise ModelError(f"{name} returns no tensor that its operators computed")
    last = next(o for o in builder.operators if o.name == builder.output)
    operators = [*builder.with_kept_bytes(task.loss), _loss_operator(task, last, batch)]
    graph = Graph.from_unordered(name, operators, batch=batch)
    return Captured(graph=graph, module=module, nodes=builder.nodes, untrained=builder.untrained)


def capture_model(name: str, batch: int, options: ModelOptions | None = None) -> Graph:
    """Capture a named model or a user's factory without allocating its weights.

    Raises:
        ModelError: no such model, or it cannot be captured.
    """
    with weights_on_meta():
        task = build_task(name, fit_options(name, options or ModelOptions()))
    return capture(task, batch, name).graph

"""Capture a model as a Graph: trace it, then derive shapes and FLOPs on the meta device.

torch.utils.flop_counter counts the FLOPs of each operator's forward and backward.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, fx, nn

from harness.domain.graph import (
    INNER,
    INNER_HALF,
    KEPT,
    KEPT_HALF,
    LOSS,
    SCORE_FLOPS,
    Attribute,
    Graph,
    Operator,
)
from harness.errors import HarnessError, ModelError
from harness.runtime.capture.meta_run import MetaResult, parameters_of, run_on_meta, untrained
from harness.runtime.capture.operators import (
    Attributes,
    describe_node,
    draws_random,
    is_dropout,
    is_known,
    is_opaque,
    updates_statistics,
)
from harness.runtime.capture.products import EinsumProduct, describe_product
from harness.runtime.capture.sample_dims import (
    Values,
    batch_sizes,
    changing_dims,
    is_cut_by_samples,
    join_samples,
    named_shape,
    sample_dims,
)
from harness.runtime.capture.sample_losses import split_by_samples
from harness.runtime.capture.saved import KeptBytes, tensors_within
from harness.runtime.models import build_task, fit_options
from harness.runtime.models.factory import weights_on_meta
from harness.runtime.models.task import ModelOptions, Task, check_memory, check_weights, logits_of
from harness.runtime.tracing.constructs import WRITES, WRITTEN, function_name
from harness.runtime.tracing.hooks import has_gradient_hooks
from harness.runtime.tracing.mixing import SampleMixing
from harness.runtime.tracing.refusals import refusal
from harness.runtime.tracing.trace import trace
from harness.runtime.tracing.writes import replace_in_place_writes

_log = logging.getLogger(__name__)

_BY_SOFTMAX = ("cross_entropy", "span_cross_entropy")


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


def _text(shape: Iterable[int]) -> str:
    return "x".join(str(size) for size in shape)


def _signature(kind: str, attrs: dict[str, Any], inputs: list[Tensor], output: Tensor) -> str:
    shown = {k: v for k, v in sorted(attrs.items()) if k not in ("module", "parameters")}
    words = [f"{name}={value}" for name, value in shown.items()]
    shapes = ", ".join(_text(tensor.shape[1:]) for tensor in inputs)
    return f"{kind}({', '.join(words)}) {shapes} -> {_text(output.shape[1:])}"


def argument_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes among a node's arguments, in order, with repetitions."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


class _Builder:
    """Turns nodes into operators; skips nodes that compute no tensor."""

    def __init__(
        self,
        module: fx.GraphModule,
        measured: dict[fx.Node, MetaResult],
        by_batch: list[Values],
        batch: int,
    ) -> None:
        self._module, self._by_batch, self._batch = module, by_batch, batch
        self._batches = batch_sizes(by_batch)
        self._mixing = SampleMixing(module, by_batch)
        self._modules = dict(module.named_modules())
        self._measured, self.untrained = measured, untrained(module, measured)
        self._has_frozen = not all(p.requires_grad for p in module.parameters())
        # A node that is no operator (an element of a tuple) has the name of its producer.
        self._name_of: dict[fx.Node, str] = {}
        self._waiting: dict[fx.Node, dict[str, nn.Parameter]] = {}
        self._first_user: dict[int, str] = {}  # of each parameter, by its id
        self._unsampled: set[str] = set()  # operators that no sample affects
        self._first_call: dict[object, str] = {}  # of each batch norm with running statistics
        self._taken = {LOSS}
        self._written: frozenset[str] = module.meta.get(WRITTEN, frozenset())
        self.operators: list[Operator] = []
        self.unknown: defaultdict[str, list[str]] = defaultdict(list)
        self.nodes: dict[str, fx.Node] = {}
        self.output = ""

    def add(self, node: fx.Node) -> None:
        """Add the next node in execution order."""
        if node.op == "output":
            last = [n for n in node.all_input_nodes if n in self._name_of]
            self.output = self._name_of[last[0]] if last else ""
            if last:
                logits_of(self._measured[last[0]].value)  # raises if the loss cannot use it
            return
        value = self._measured[node].value
        if node.op == "placeholder":
            self._add_input(node, value)
        elif node.op == "get_attr":
            self._waiting[node] = parameters_of(node, self._module)
        elif tensors := tensors_within(value):
            source = next(iter(node.all_input_nodes), node)
            is_of_tuple = not isinstance(self._measured[source].value, Tensor)
            if function_name(node.target) == "getitem" and is_of_tuple:
                self._name_of[node] = self._name_of[source]  # an element or slice of a tuple
            else:
                self._add_operator(node, tensors[0])

    def with_kept_bytes(self, loss: str) -> list[Operator]:
        """The operators with the bytes that each keeps until backward; see `saved`."""
        values = {n: tensors_within(found.value) for n, found in self._measured.items()}
        saved = {n: found.saved for n, found in self._measured.items()}
        operators = {operator.name: operator for operator in self.operators}
        kept = {KEPT: KeptBytes(values, saved, is_half=False)}
        kept[KEPT_HALF] = KeptBytes(values, saved, is_half=True)
        of_node = {node: operators[name] for name, node in self.nodes.items()}
        for one in kept.values():
            for node in values:
                one.follow(node, argument_nodes(node), of_node.get(node))
            if loss not in _BY_SOFTMAX:  # others save what they read
                one.keep(self.nodes[self.output])
        for name, node in self.nodes.items():
            attrs = operators[name].attrs | {key: one.of(node) for key, one in kept.items()}
            operators[name] = replace(operators[name], attrs=attrs)
        return list(operators.values())

    def _add_input(self, node: fx.Node, value: Tensor) -> None:
        self._name_of[node] = node.name
        self._taken.add(node.name)
        self.operators.append(
            Operator(
                name=node.name,
                kind="input",
                shape=named_shape(value.shape, self._sample_dims(node)),
                dtype=str(value.dtype).removeprefix("torch."),
                activation_bytes=value.numel() * value.element_size(),
            )
        )

    def _sample_dims(self, node: fx.Node) -> tuple[int, ...]:
        by_batch = [tensors_within(values[node])[0].shape for values in self._by_batch]
        return sample_dims(self._shape(node), by_batch, self._batches, self._batch)

    def _shape(self, node: fx.Node) -> torch.Size:
        return tensors_within(self._measured[node].value)[0].shape

    def _growing(self, node: fx.Node) -> tuple[int, ...]:
        """Dims that change with the batch."""
        if not self._by_batch:
            return self._sample_dims(node)
        return changing_dims([tensors_within(values[node])[0].shape for values in self._by_batch])

    def _described(self, node: fx.Node) -> tuple[str, Attributes, EinsumProduct | None]:
        """Kind and attributes; a product by letters, if that is what it is."""
        kind, attrs = describe_node(node, self._modules, len(node.all_input_nodes))
        is_user_code = is_opaque(node, self._modules) or "autocast" in attrs
        product = None if is_user_code else describe_product(node, self._shape, self._growing)
        values = (node, *(n for n in node.all_input_nodes if n in self._name_of))
        if product and all(named_shape(self._shape(n), self._sample_dims(n)) for n in values):
            return "einsum", attrs | product.attributes, product
        return kind, attrs, None

    def _free_name(self, node: fx.Node) -> str:
        """A unique operator name: the path of the node's module, or else the node's name."""
        name = str(node.target) if node.op == "call_module" else node.name
        name = name if name not in self._taken else node.name
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _written_buffers(self, node: fx.Node) -> list[str]:
        """Buffers that a node uses and that some node writes."""
        names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
        if node.op == "call_module":
            owned = self._modules[str(node.target)].named_buffers()
            names = [f"{node.target}.{name}" for name, _ in owned]
        return [name for name in names if name in self._written]

    def _add_operator(self, node: fx.Node, value: Tensor) -> None:
        sources = [n for n in argument_nodes(node) if n in self._name_of]
        inputs = [tensors_within(self._measured[n].value)[0] for n in sources]
        kind, attrs, product = self._described(node)
        is_opaque_node = is_opaque(node, self._modules)
        is_known_node = not is_opaque_node and is_known(kind, str(attrs["function"]))
        is_unknown = not is_opaque_node and not is_known_node
        is_named = is_unknown and "autocast" not in attrs and bool(sources)  # not a made tensor
        parameters = parameters_of(node, self._module)
        for given in node.all_input_nodes:
            parameters |= self._waiting.get(given, {})
        is_hooked = any(map(has_gradient_hooks, parameters.values()))
        if is_hooked:  # its hook must see the whole gradient
            kind, attrs, product = "other", {"function": attrs["function"]}, None
        frozen = [p for n, p in parameters.items() if not p.requires_grad or n in self.untrained]
        signature = _signature(kind, attrs, inputs, value)
        found = self._measured[node]
        if self._has_frozen or found.has_gradient != value.requires_grad:  # other gradients
            flags = [x.requires_grad for x in (*parameters.values(), *inputs)]
            signature += " with gradients " + "".join("01"[x] for x in (*flags, found.has_gradient))
        if product is None:
            mixes = self._mixing.mixes(node, kind, is_known=is_known_node)
        else:
            mixes = product.mixes_samples
        mixes = mixes or self._mixing.is_uneven(node)
        if node.meta.get(WRITES) or mixes:
            attrs |= {"mixes_samples": True, "is_cut_by_samples": False}
        function = "" if is_opaque_node else str(attrs["function"])
        made, *read = [(self._shape(n), self._sample_dims(n)) for n in (node, *sources)]
        if not is_cut_by_samples(kind, function, made, read):
            attrs["is_cut_by_samples"] = False
        is_random = draws_random(node, self._module) and not is_dropout(node, self._module)
        if not is_known_node or is_hooked or is_random:
            attrs["is_repeatable"] = False
        if node.op == "call_module":
            attrs["module"] = str(node.target)
        if buffers := self._written_buffers(node):
            attrs |= {"writes_buffers": buffers, "is_cut_by_samples": False}
        is_alike = {"is_repeatable", "mixes_samples", "writes_buffers"}.isdisjoint(attrs)
        is_alike = is_alike and not self._growing(node) and kind != "batch_norm"
        name = self._free_name(node)
        if is_alike and self._unsampled.issuperset(self._name_of[n] for n in sources):
            self._unsampled.add(name)
            attrs["reads_samples"] = False
        if parameters:
            attrs["parameters"] = list(parameters)
        if updates_statistics(node, self._modules):
            first = self._first_call.setdefault(node.target, name)
            attrs |= {"shares_norm_with": first} if first != name else {}
        self._name_of[node] = name
        if is_named:
            self.unknown[str(attrs["function"])].append(name)
        tied = [p for p in parameters.values() if id(p) in self._first_user]
        if tied:
            attrs |= {"tied_to": self._first_user[id(tied[0])], "tied_bytes": _n_bytes(tied)}
        if frozen:
            attrs["frozen_bytes"] = _n_bytes(frozen)
        new = [p for p in parameters.values() if id(p) not in self._first_user]
        self._first_user |= {id(p): name for p in new}
        self.nodes[name] = node
        n_scores = found.forward.scores + found.backward.scores
        if n_scores and (product is None or not product.has_weights):
            attrs[SCORE_FLOPS] = n_scores
        operator = Operator(
            name=name, kind=kind, inputs=[self._name_of[n] for n in sources],
            shape=named_shape(*made), dtype=str(value.dtype).removeprefix("torch."),
            forward_flops=found.forward.total, backward_flops=found.backward.total,
            parameter_bytes=_n_bytes(new), activation_bytes=_n_bytes(found.received),
            signature=signature, attrs=attrs,
        )  # fmt: skip
        self.operators.append(operator)


def _n_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _loss_operator(task: Task, producer: Operator, batch: int) -> Operator:
    n_classes = math.prod(size for dim, size in producer.shape.items() if dim != "sample")
    attrs: dict[str, Attribute] = {"function": str(task.loss)}
    if task.loss in _BY_SOFTMAX:  # in fp32: log-softmax, its gradient, and that of fp32 outputs
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


def _tell_unknown(builder: _Builder) -> None:
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
        with torch.autograd.set_detect_anomaly(False):
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
        builder = _Builder(module, measured, values, batch)
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

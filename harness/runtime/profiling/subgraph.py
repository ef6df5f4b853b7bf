"""A subgraph of a captured model: consecutive operators, run one by one, forward and then backward.

Each operator is called on the detached outputs of the operators before it, and its backward gets
the gradients of the operators after it:

    forward   a(x) -> y | b(y') -> z | c(z') -> loss          y' is y, detached
    backward  c: dz | b: dz -> dy | a: dy -> dx

So each operator can be timed by itself, with caches and allocator in the same state as in training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from harness.domain.graph import LOSS, Graph
from harness.runtime.capture.capture import Captured
from harness.runtime.capture.saved import tensors_within
from harness.runtime.devices.precision import has_gradients
from harness.runtime.executor.shards.inplace import works_in_place
from harness.runtime.tracing.constructs import callable_of


@dataclass(frozen=True)
class OperatorCall:
    """An operator with its arguments.

    Attributes:
        function: called with args and kwargs; it holds its parameters.
        args, kwargs: nested; `requires_grad` marks tensors that need gradients.
        parameters: parameters of the operator, which need gradients, too.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Tensor, ...] = ()

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def wanted(self) -> list[Tensor]:
        """Distinct tensors that need a gradient: inputs, then parameters."""
        leaves = [*tensors_within((self.args, self.kwargs)), *self.parameters]
        unique = {id(tensor): tensor for tensor in leaves if tensor.requires_grad}
        return list(unique.values())


@dataclass(frozen=True, eq=False)
class Step:
    """One node of a model, or its loss.

    Attributes:
        node: identifies its output in the arguments of later steps.
        name: name of its operator; empty if the node is no operator.
        args, kwargs: nested, with nodes in place of values.
        tensors: the operator's parameters and buffers; the attribute.
        is_carrying: its output depends on parameters.
        is_in_place: the step writes into its input.
    """

    node: fx.Node
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    is_carrying: bool
    is_in_place: bool

    @property
    def is_attribute(self) -> bool:
        """Whether the node is a parameter or buffer that the model reads directly."""
        return self.node.op == "get_attr"

    @property
    def reads(self) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        fx.node.map_arg((self.args, self.kwargs), lambda node: found.setdefault(node, None))
        return list(found)

    def called_on(self, values: Mapping[fx.Node, Any]) -> OperatorCall:
        """Make the call with the values of other steps."""
        args, kwargs = fx.node.map_arg((self.args, self.kwargs), values.__getitem__)
        return OperatorCall(self.function, args, kwargs, self.parameters)


def steps_of(captured: Captured, loss: Callable[[Tensor], Tensor]) -> list[Step]:
    """List a model's nodes in order, with its loss at the end."""
    names = {node: name for name, node in captured.nodes.items()}
    modules = dict(captured.module.named_modules())
    carrying: set[fx.Node] = set()
    found: list[Step] = []
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            continue
        is_loss, tensors = node.op == "output", tuple[Tensor, ...]()
        function = loss if is_loss else callable_of(node, modules)
        if node.op == "get_attr":
            parent, _, name = str(node.target).rpartition(".")
            function = partial(getattr, captured.module.get_submodule(parent), name)
            tensors = tuple(tensors_within(function()))
        elif node.op == "call_module":
            module = modules[str(node.target)]
            tensors = (*module.parameters(), *module.buffers())
        trained = tuple(x for x in tensors if isinstance(x, nn.Parameter) and x.requires_grad)
        if trained or any(before in carrying for before in node.all_input_nodes):
            carrying.add(node)
        found.append(
            Step(
                node=node,
                name=LOSS if is_loss else names.get(node, ""),
                function=function,
                args=(node.all_input_nodes[0],) if is_loss else node.args,
                kwargs={} if is_loss else node.kwargs,
                parameters=trained if node.op == "call_module" else (),
                tensors=tensors,
                is_carrying=node in carrying,
                is_in_place=not is_loss and works_in_place(node, modules),
            )
        )
    return found


@contextmanager
def resident(steps: Iterable[Step], device: torch.device) -> Iterator[None]:
    """Have the tensors of steps on the device within the context; those that are on the host, as of
    a model that does not fit on the device, return there."""
    away = {id(t): (t, t.data) for step in steps for t in step.tensors if t.device != device}
    try:
        for tensor, data in away.values():
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in away.values():
            tensor.data, tensor.grad = data, None


Values = dict[fx.Node, Any]


def values_at(steps: Sequence[Step], start: int, fed: Values, device: torch.device) -> Values:
    """Run the steps before `start` without gradients; returns the values that later steps read.

    Args:
        fed: the model's inputs, by node.
        device: where they run.

    Returns:
        Leaves; `requires_grad` marks those that depend on parameters.
    """
    read = {node for step in steps[start:] for node in step.reads}
    last = {node: k for k, step in enumerate(steps[:start]) for node in step.reads}
    values = dict(fed)
    with torch.no_grad():
        for k, step in enumerate(steps[:start]):
            with resident([step], device):
                output = step.called_on(values)()
            values[step.node] = as_leaves(output, has_gradient=step.is_carrying)
            for node in step.reads:
                if last[node] == k and node not in read:
                    del values[node]
    return {node: value for node, value in values.items() if node in read}


class Pending(NamedTuple):
    """Outputs of a step, each with the gradients from the steps that read it."""

    outputs: list[Tensor]
    gradients: list[list[Tensor]]


# Returns a step's output.
Forward = Callable[[Step, OperatorCall], Any]
# Returns the gradient of each wanted tensor, or None.
Backward = Callable[[Step, Pending, list[Tensor]], Sequence[Tensor | None]]


@dataclass
class SubgraphState:
    """One microbatch between forward and backward.

    Attributes:
        values: detached values that steps read.
        outputs: outputs of steps, with their autograd graphs.
    """

    values: Values
    outputs: Values


class Subgraph:
    """Consecutive steps of a model.

    Args:
        inputs: values that they read from other steps, from `values_at`.
        read_later: nodes that steps after the subgraph read.
    """

    def __init__(
        self, steps: Sequence[Step], inputs: Values, read_later: Collection[fx.Node] = ()
    ) -> None:
        self.steps = list(steps)
        self._inputs = inputs
        self._ends = {step.node for step in steps if step.name == LOSS} | set(read_later)

    def forward(self, run: Forward) -> SubgraphState:
        """Run all steps on detached values."""
        flight = SubgraphState({node: _detached(value) for node, value in self._inputs.items()}, {})
        for step in self.steps:
            if step.is_attribute:
                flight.values[step.node] = step.function()
                continue
            call = step.called_on(flight.values)
            if step.is_in_place:  # the copy is in the cache, like an input that was just written
                call = written(call)
            output = run(step, call)
            flight.outputs[step.node] = output
            flight.values[step.node] = _detached(output)
        return flight

    def backward(self, flight: SubgraphState, run: Backward) -> None:
        """Run all steps' backward in reverse order; values read later get gradients of 1."""
        found: dict[int, list[Tensor]] = {}
        for step in self.steps:
            if step.node in self._ends:
                for leaf in tensors_within(flight.values[step.node]):
                    found[id(leaf)] = [torch.ones_like(leaf)]
        for step in reversed(self.steps):
            if step.is_attribute:
                continue
            leaves = tensors_within(flight.values.pop(step.node))
            outputs = tensors_within(flight.outputs.pop(step.node))
            reached = [
                (output, found.pop(id(leaf)))
                for output, leaf in zip(outputs, leaves, strict=True)
                if output.requires_grad and id(leaf) in found
            ]
            call = step.called_on(flight.values)
            if not reached or not call.wanted:
                continue
            pending = Pending([output for output, _ in reached], [parts for _, parts in reached])
            del reached, outputs, leaves
            for leaf, gradient in zip(call.wanted, run(step, pending, call.wanted), strict=True):
                if gradient is not None:
                    found.setdefault(id(leaf), []).append(gradient)


def as_leaves(value: Any, *, has_gradient: bool) -> Any:
    """Detach nested tensors; real and complex ones get `requires_grad=has_gradient`."""
    return _mapped(lambda x: x.detach().requires_grad_(has_gradient and has_gradients(x)), value)


def _detached(value: Any) -> Any:
    """Detach nested tensors and keep their `requires_grad`."""
    return _mapped(lambda x: x.detach().requires_grad_(x.requires_grad), value)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda x: function(x) if isinstance(x, Tensor) else x)


def written(call: OperatorCall) -> OperatorCall:
    """Make the same call on copies of its tensors, differentiably; equal tensors share a copy."""
    known: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = tensor.clone()
        return known[id(tensor)]

    args, kwargs = _mapped(copied, (call.args, call.kwargs))
    return OperatorCall(call.function, args, kwargs, call.parameters)


def is_microbatch(graph: Graph, samples: int, n_devices: int) -> bool:
    """Whether `samples` are fewer than one device's part of the batch."""
    assert graph.batch is not None, "a captured graph has a batch"
    return samples < graph.batch // n_devices


def stage_bounds(steps: Sequence[Step], graph: Graph, n_stages: int) -> list[tuple[int, int]]:
    """Cut a model's steps into stages of similar FLOPs; returns (begin, end) of each."""
    flops = {op.name: max(op.forward_flops + op.backward_flops, 1.0) for op in graph.operators}
    step_flops = [flops.get(step.name, 0.0) for step in steps]
    total, passed = sum(step_flops), 0.0
    stages: list[int] = []
    for one in step_flops:
        stages.append(min(n_stages - 1, int(n_stages * (passed + one / 2) / total)))
        passed += one
    begins = [k for k, stage in enumerate(stages) if k == 0 or stage != stages[k - 1]]
    return list(zip(begins, [*begins[1:], len(steps)], strict=True))


@dataclass(frozen=True)
class ModelPart:
    """Consecutive steps of a model, with the model's inputs.

    Attributes:
        device: where they run.
        n_in_flight: number of microbatches between forward and backward at a time.
        is_added: whether gradients of weights are added to those of earlier microbatches.
    """

    steps: list[Step]
    fed: dict[fx.Node, Tensor]
    begin: int
    end: int
    device: torch.device
    n_in_flight: int
    is_added: bool

    @property
    def n_steps(self) -> int:
        return self.end - self.begin

    @property
    def names(self) -> set[str]:
        return {step.name for step in self.steps[self.begin : self.end]}

    def cut(self, begin: int, end: int) -> ModelPart:
        return replace(self, begin=begin, end=end)

    def halves(self) -> tuple[ModelPart, ModelPart]:
        middle = (self.begin + self.end) // 2
        return self.cut(self.begin, middle), self.cut(middle, self.end)

    def resident(self) -> AbstractContextManager[None]:
        """The context in which these steps can run; see `resident`."""
        return resident(self.steps[self.begin : self.end], self.device)

    def subgraph(self) -> Subgraph:
        """Make the subgraph of these steps, with inputs computed by the steps before them."""
        inputs = values_at(self.steps, self.begin, self.fed, self.device)
        later = {node for step in self.steps[self.end :] for node in step.reads}
        return Subgraph(self.steps[self.begin : self.end], inputs, later)

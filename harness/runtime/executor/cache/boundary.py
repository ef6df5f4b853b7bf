"""Cut a captured model behind a frozen prefix: the rest, whose inputs are the prefix's outputs.

    input -> a -> b -> c -> d -> loss      with a and b frozen:      b -> c -> d -> loss

The rest is a model like any other, so every strategy trains it. A tap records the tensors of a
device that hold rows of the prefix's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import fx

from harness.domain.freezing import FreezableLayer
from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, Block
from harness.domain.sharding import has_tasks
from harness.domain.strategy import Stage, Strategy
from harness.errors import StrategyError
from harness.runtime.capture.builder import argument_nodes
from harness.runtime.capture.capture import Captured
from harness.runtime.capture.operators import draws_random, is_frozen_norm
from harness.runtime.executor.geometry.layout import Layout, Want, owners
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.program.program import InputKey, PartKey, Recorded, WantKey
from harness.runtime.executor.shards.base import called_module
from harness.runtime.models.task import InputSpec, Task


class UncachedError(StrategyError):
    """A strategy under which the activations at a frozen boundary cannot be kept or used."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """A model without its frozen prefix.

    Attributes:
        values: the cached values among its inputs, in order; the data's inputs follow.
        kept: positions of the data's inputs that it still reads, in order.
    """

    task: Task
    captured: Captured
    values: tuple[str, ...]
    kept: tuple[int, ...]


def prefix_of(graph: Graph, layers: Iterable[FreezableLayer]) -> frozenset[str]:
    """The operators of frozen layers that a graph has."""
    names = {name for layer in layers for name in layer.operators}
    return frozenset(op.name for op in graph.operators if op.name in names)


def boundary_values(captured: Captured, prefix: frozenset[str]) -> list[str]:
    """The values of a prefix that the rest of the model reads, in order."""
    return [node.name for node in _split(captured, prefix)[0]]


def why_not(captured: Captured, prefix: frozenset[str]) -> str:
    """The reason why a prefix's values cannot be kept; empty if they can.

    Args:
        captured: the model with the modules of the prefix in evaluation mode.
    """
    root, graph = captured.module, captured.graph
    inputs = {op.name for op in graph.operators if not has_tasks(op)}
    for operator in graph.operators:
        if operator.name not in prefix:
            continue
        node = captured.nodes[operator.name]
        module = called_module(node, root)
        named = f"operator {operator.name!r} of a frozen layer"
        outside = [name for name in operator.inputs if name not in prefix | inputs]
        if outside:
            return f"{named} reads {outside[0]!r}, which is trained"
        if draws_random(node, root) or operator.attrs.get("is_repeatable") is False:
            return f"{named} may draw random numbers, as dropout does"
        if operator.attrs.get("mixes_samples"):
            return f"{named} mixes the samples of a batch"
        if operator.attrs.get("writes_buffers"):
            return f"{named} writes the buffer {operator.attrs['writes_buffers']}"
        if operator.kind == "batch_norm" and not is_frozen_norm(node, module):
            return f"{named} takes its running statistics from each batch"
    by_node = {node.name: name for node, name in owners(captured).items()}
    operators = {op.name: op for op in graph.operators}
    for value in boundary_values(captured, prefix):
        shape = operators[by_node[value]].shape
        if next(iter(shape), None) != SAMPLE or shape[SAMPLE] != graph.batch:
            return f"the value {value!r} at the frozen boundary has no row of its own for a sample"
    return ""


def cut(
    task: Task, captured: Captured, layers: Sequence[FreezableLayer], device: torch.device
) -> Rest:
    """Remove frozen layers from a model, whose graph is changed; `why_not` must have no reason.

    Args:
        device: of the model's constants.
    """
    prefix = prefix_of(captured.graph, layers)
    meta = MetaModel(captured, task.inputs, device)
    batch = captured.graph.batch
    assert batch is not None, "captured graphs have a batch"
    tensors = {node.name: found for node, found in meta.at(batch).tensors.items()}
    by_node = {node.name: name for node, name in owners(captured).items()}
    operators = {op.name: op for op in captured.graph.operators}
    values = boundary_values(captured, prefix)
    placeholders = list(captured.module.graph.find_nodes(op="placeholder"))
    _replace_prefix(captured, prefix)
    left = set(captured.module.graph.find_nodes(op="placeholder"))
    kept = tuple(k for k, node in enumerate(placeholders) if node in left)
    specs = [InputSpec(name=v, shape=tensors[v].shape[1:], dtype=tensors[v].dtype) for v in values]
    given = [
        msgspec.structs.replace(
            operators[by_node[value]], name=value, kind="input", inputs=[], attrs={},
            forward_flops=0.0, backward_flops=0.0, parameter_bytes=0, signature="",
        )
        for value in values
    ]  # fmt: skip
    nodes = {name: node for name, node in captured.nodes.items() if name not in prefix}
    # By a graph of inputs alone, `owners` knows the placeholders.
    inputs_only = [*given, *(op for op in captured.graph.operators if not has_tasks(op))]
    known = Graph(name=captured.graph.name, operators=inputs_only, batch=batch)
    rest = replace(captured, nodes=nodes)
    names = owners(replace(rest, graph=known))

    def reading(operator: Operator) -> Operator:
        """With its inputs named as in the rest; the loss reads what it read before."""
        if operator.name not in nodes:
            return operator
        read = argument_nodes(nodes[operator.name])
        return msgspec.structs.replace(operator, inputs=[names[n] for n in read if n in names])

    others = [
        reading(op)
        for op in captured.graph.operators
        if op.name not in prefix and (has_tasks(op) or op.name in {n.name for n in left})
    ]
    graph = Graph.from_unordered(captured.graph.name, [*given, *others], batch=batch)
    inputs = (*specs, *(task.inputs[k] for k in kept))
    return Rest(
        task=replace(task, inputs=inputs),
        captured=replace(rest, graph=graph),
        values=tuple(values),
        kept=kept,
    )


def _split(captured: Captured, prefix: frozenset[str]) -> tuple[list[fx.Node], set[fx.Node]]:
    """The values of the prefix that the rest reads, in order, and the nodes of the rest with the
    inputs that it reads."""
    owner, nodes = owners(captured), captured.module.graph.nodes
    waiting = [
        node
        for node in nodes
        if node.op == "output"
        or (node.op != "placeholder" and node in owner and owner[node] not in prefix)
    ]
    found: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if owner.get(node) not in prefix:
            waiting += node.all_input_nodes
    values = [node for node in nodes if node in found and owner.get(node) in prefix]
    return values, found.difference(values)


def _replace_prefix(captured: Captured, prefix: frozenset[str]) -> None:
    """Make the values that the rest reads inputs of the graph, under their names."""
    module = captured.module
    values, rest = _split(captured, prefix)
    first = next(iter(module.graph.nodes))
    given: dict[fx.Node, str] = {}
    for node in values:
        with module.graph.inserting_before(first):
            placeholder = module.graph.placeholder(f"{node.name}_kept")
        node.replace_all_uses_with(placeholder, delete_user_cb=lambda user: user in rest)
        given[placeholder] = node.name
    for node in reversed(list(module.graph.nodes)):
        if node not in rest and node not in given:
            module.graph.erase_node(node)
    for placeholder, name in given.items():
        placeholder.name = placeholder.target = name
    module.recompile()


def rest_of_strategy(strategy: Strategy, graph: Graph) -> Strategy:
    """A strategy of the whole model for the rest of it; stages without operators go."""
    left = {op.name for op in graph.operators if has_tasks(op)}
    plans = {name: plan for name, plan in strategy.operators.items() if name in left}
    used = sorted({plan.stage for plan in plans.values()})
    number = {stage: k for k, stage in enumerate(used)}
    operators = {
        name: msgspec.structs.replace(plan, stage=number[plan.stage])
        for name, plan in plans.items()
    }
    stages: list[Stage] = [strategy.stages[stage] for stage in used]
    return msgspec.structs.replace(strategy, operators=operators, stages=stages)


def recorded_keys(layout: Layout, device: int) -> dict[InputKey, Recorded]:
    """The tensors of a device with outputs of the frozen prefix that its trained tasks read.

    Raises:
        UncachedError: a task reads a part of a sample's row.
    """
    captured, found = layout.captured, dict[InputKey, Recorded]()
    if not captured.apart:
        return found
    values = set(boundary_values(captured, captured.apart))
    for name, parts in layout.parts.items():
        if name in captured.apart:
            continue
        for part in (part for part in parts if part.device == device):
            for _, want in layout.reads(part):
                if want.value in values:
                    found |= _keys(layout, want)
    return found


def check_rows(layout: Layout) -> None:
    """Check that every device reads whole rows at the frozen boundary; before groups are made.

    Raises:
        UncachedError: a device does not.
    """
    for device in range(layout.strategy.n_devices):
        recorded_keys(layout, device)


def _keys(layout: Layout, want: Want) -> dict[InputKey, Recorded]:
    regions: dict[InputKey, Block] = {WantKey(want.number): want.block}
    if not want.is_exchanged:
        node = layout.node(want.value)
        regions = {
            PartKey.of(want.value, part): layout.region(node, part)
            for part in (piece.part for piece in want.pieces)
        }
    sizes = layout.tensor(want.value).shape[1:]
    found: dict[InputKey, Recorded] = {}
    for key, (samples, *rest) in regions.items():
        is_whole = all(cut == (0, n) for cut, n in zip(rest, sizes, strict=False))
        if not is_whole or (want.is_sum and not want.is_exchanged):
            raise UncachedError(
                f"device {want.device} reads a part of {want.value!r}, the value at the frozen "
                "boundary, and the cache keeps whole rows"
            )
        found[key] = Recorded(want.value, samples)
    return found

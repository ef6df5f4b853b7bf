"""Replace in-place writes: a reader of a changed tensor reads the writer's output instead.

A strategy may run operators on other devices and in another order than the model does, so the
graph's edges must determine the value that each operator reads:

    v = y.view(-1, 4, 4)          v = y.view(-1, 4, 4)
    w = v.mul_(2)                 w = v * 2
    z = f(y)                      y2 = written(y, w); z = f(y2)

A run on the meta device shows which tensors share a storage, and, by their version counters, which
operators write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from harness.errors import WITHOUT_PLAN, ModelError
from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.capture.saved import tensors_within
from harness.runtime.executor.shards.inplace import (
    COPIES,
    changes_first,
    out_of_place,
    works_in_place,
)
from harness.runtime.tracing.constructs import OpaqueFunction, function_name, is_view
from harness.runtime.tracing.tuples import check_sizes, drop_empty_parts, split_tuples


class Written(OpaqueFunction):
    """A copy of a tensor in which one view has new values; both inputs get gradients.

    Args:
        view: makes the view of the tensor, which other arguments may follow.
    """

    def __init__(self, view: Callable[..., Tensor]) -> None:
        super().__init__("written")
        self._view = view

    def __call__(self, base: Tensor, value: Tensor, *given: Any) -> Tensor:
        output = base.clone()
        self._view(output, *given).copy_(value)
        return output


class _WriteRun(fx.Interpreter):
    """Records the arguments that each node changes in place."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.changed: dict[fx.Node, list[fx.Node]] = {}

    def run_node(self, n: fx.Node) -> Any:
        given = {a: self.env[a] for a in n.all_input_nodes}
        before = {a: x._version for a, x in given.items() if isinstance(x, Tensor)}
        value = super().run_node(n)
        if changed := [a for a, version in before.items() if given[a]._version != version]:
            self.changed[n] = changed
        return value


class _Memory:
    """The nodes of a graph that share memory, and those that write it."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
        run = _WriteRun(meta_copy(module), module.graph)
        run.run(*(example.to("meta") for example in examples))
        self.values, self.changed = run.env, run.changed
        self._storages = {
            node: int(value.untyped_storage()._cdata)
            for node, value in self.values.items()
            if isinstance(value, Tensor)
        }

    def writers(self) -> list[fx.Node]:
        """Nodes that change another node's output; writes of buffers do not count."""
        return [n for n in self.changed if self.chain(self.target(n))[0].op != "get_attr"]

    def target(self, writer: fx.Node) -> fx.Node:
        """The argument that a node changes (the first, if several share memory)."""
        return self.changed[writer][0]

    def aliases(self, writer: fx.Node) -> list[fx.Node]:
        """Earlier nodes that share memory with a writer's target, in order."""
        written = self._storages[self.target(writer)]
        return [
            node for node, storage in self._storages.items() if storage == written and node < writer
        ]

    def late_readers(self, writer: fx.Node, alias: fx.Node) -> list[fx.Node]:
        """Readers of an alias after the writer; reads of its size or dtype do not count."""
        later = (user for user in alias.users if user > writer)
        return [
            user
            for user in later
            if user.op == "output"
            or user in self.changed  # which may return nothing
            or tensors_within(self.values.get(user))
        ]

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """The chain of views from a base tensor, or a writer's output, to a node."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or source not in self._storages or node in self.changed:
            return [node]
        if self._storages[source] != self._storages[node]:
            return [node]
        return [*self.chain(source), node]

    def is_whole(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes have the same elements in the same order."""
        a, b = self.values[node], self.values[other]
        return bool(
            a.shape == b.shape
            and a.stride() == b.stride()
            and a.storage_offset() == b.storage_offset()
        )


def replace_in_place_writes(module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
    """Rewrite a traced model so that no operator reads a tensor that another changed in place, and
    operators take tensors instead of tuples.

    A module that works in place on shared memory gets the mark `COPIES`: it must work on a copy if
    the other users run elsewhere or later.

    Raises:
        ModelError: an operator's in-place change has no out-of-place form, or is of a parameter.
    """
    memory = _Memory(module, examples)
    _check_parameters(module, memory)
    if drop_empty_parts(module, memory.values):
        memory = _Memory(module, examples)
    check_sizes(memory.values)
    if split_tuples(module, memory.values):
        module.recompile()
        memory = _Memory(module, examples)
    while any(_rewire_readers(module, memory, writer) for writer in memory.writers()):
        memory = _Memory(module, examples)
    for writer in memory.writers():
        if not _is_shared(memory, writer):
            continue
        if writer.op == "call_module":
            writer.meta[COPIES] = True
        else:
            _work_out_of_place(module, memory, writer)
    module.graph.lint()
    module.recompile()


def _check_parameters(module: fx.GraphModule, memory: _Memory) -> None:
    """Refuse changes of parameters, but of the rows that a lookup shortens."""
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for writer in memory.changed:
        base = memory.chain(memory.target(writer))[0]
        is_lookup = function_name(writer.target).startswith("embedding")
        if base.op == "get_attr" and base.target in names and not is_lookup:
            raise ModelError(
                f"forward changes the parameter {base.target!r} in place "
                f"({function_name(writer.target)}): change it between steps, or compute with a "
                f"copy (clone) of it, or {WITHOUT_PLAN}"
            )


def _is_shared(memory: _Memory, writer: fx.Node) -> bool:
    """Whether a node that is not a previous in-place writer shares the target's memory.

    In relu_(add_(conv)), the convolution does not count, because only add_ reads it. A copy that
    the target makes of a whole tensor, as flatten may, can be a view of a region.
    """
    target = memory.target(writer)
    others = set(memory.aliases(writer)) - {target}
    while target in memory.changed:
        target = memory.target(target)
        others.discard(target)
    return bool(others) or is_view(target)


def _rewire_readers(module: fx.GraphModule, memory: _Memory, writer: fx.Node) -> bool:
    """Rewire the late readers of one writer's target; return whether there were any."""
    readers = {
        a: users for a in memory.aliases(writer) if (users := memory.late_readers(writer, a))
    }
    if not readers:
        return False
    target = memory.target(writer)
    _work_out_of_place(module, memory, writer)
    base = writer
    if any(not memory.is_whole(alias, target) for alias in readers):
        base = _updated_base(module, memory, target, writer)
    for alias, users in readers.items():
        is_same = memory.is_whole(alias, target)
        source = writer if is_same else _replay(module, memory, alias, base)
        for user in users:
            user.replace_input_with(alias, source)
    return True


def _work_out_of_place(module: fx.GraphModule, memory: _Memory, writer: fx.Node) -> None:
    """Make a writer return a new tensor instead of changing its argument."""
    if "out" in writer.kwargs:
        writer.kwargs = {k: v for k, v in writer.kwargs.items() if k != "out"}
        return
    target, owned = memory.target(writer), dict(module.named_modules())
    if writer.args[:1] != (target,) or not works_in_place(writer, owned):
        raise ModelError(
            f"operator {writer.name} ({function_name(writer.target)}) changes {target.name} in "
            "place, which others read, and has no known out-of-place form: compute a new tensor "
            "instead"
        )
    out_of_place(writer, owned)
    if writer.op == "call_module":
        module.add_submodule(str(writer.target), owned[str(writer.target)])


def _updated_base(
    module: fx.GraphModule, memory: _Memory, target: fx.Node, value: fx.Node
) -> fx.Node:
    """A node for the base tensor in which the view `target` has the new value."""
    base, *chain = memory.chain(target)
    if not chain:
        return value
    read = dict.fromkeys(node for step in chain for node in step.all_input_nodes)
    given = [node for node in read if node not in (base, *chain)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in (base, *given)}
    for step in chain:
        copies[step] = graph.node_copy(step, copies.__getitem__)
    graph.output(copies[target])
    written = Written(fx.GraphModule(module, graph))
    with module.graph.inserting_after(value):
        return module.graph.call_function(written, (base, value, *given))


def _replay(module: fx.GraphModule, memory: _Memory, alias: fx.Node, base: fx.Node) -> fx.Node:
    """Apply an alias's chain of views to a new base tensor."""
    for step in memory.chain(alias)[1:]:
        with module.graph.inserting_after(base):
            copied = module.graph.node_copy(step)
        copied.args = (base, *step.args[1:])
        base = copied
    return base


def read_written(graph: fx.Graph) -> None:
    """Let later readers of a value that an exported operator changes in place read its result,
    where no view of the value exists. This shows which operators an attention has."""
    alone: set[fx.Node] = set()
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        if not _shares_memory(node):
            alone.add(node)
            continue
        if source not in alone or not changes_first(node.target):
            continue
        later = {user for user in source.users if user > node}
        if not any(_shares_memory(user) for user in source.users if user not in {node, *later}):
            source.replace_all_uses_with(node, later.__contains__)
            alone.add(node)


def _shares_memory(node: fx.Node) -> bool:
    """Whether a node's value may share memory with another."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return any(result.alias_info is not None for result in node.target._schema.returns)

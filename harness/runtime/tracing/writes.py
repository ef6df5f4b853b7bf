"""Let those who read what an operator changes in place read that operator's result.

A strategy may run the operators of a graph on other devices and in another order than the model
does, so what a reader sees must follow from the graph alone:

    v = y.view(-1, 4, 4)          v = y.view(-1, 4, 4)
    w = v.mul_(2)                 w = v * 2
    z = f(y)                      y2 = written(y, w); z = f(y2)

What shares memory is found on the meta device: tensors that have one storage, of which an operator
raises the version.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, fx

from harness.errors import ModelError
from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.capture.operators import function_name
from harness.runtime.executor.shards.inplace import COPIES, copying_call, works_in_place
from harness.runtime.tracing.functions import OpaqueFunction
from harness.runtime.tracing.tuples import check_sizes, spread_tuples


@dataclass(frozen=True)
class _Ref:
    """An argument that is given at the call, by position."""

    position: int


class View(NamedTuple):
    """A step of a chain of views: what is called on the value before it, and the rest."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Written(OpaqueFunction):
    """A copy of a tensor of which a view has other values; the gradient goes to both.

    Args:
        views: from the tensor to the view that is written.
    """

    def __init__(self, views: Sequence[View]) -> None:
        super().__init__("written")
        self._views = tuple(views)

    def __call__(self, base: Tensor, value: Tensor, *given: Any) -> Tensor:
        output = base.clone()
        view: Any = output
        for call, args, kwargs in self._views:
            args, kwargs = fx.node.map_aggregate(
                (args, kwargs), lambda x: given[x.position] if isinstance(x, _Ref) else x
            )
            view = call(view, *args, **kwargs)
        view.copy_(value)
        return output


class _Run(fx.Interpreter):
    """Notes each node's value, and which of its arguments it changed."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.changed: dict[fx.Node, list[fx.Node]] = {}

    def run_node(self, n: fx.Node) -> Any:
        before = {a: self.env[a]._version for a in n.all_input_nodes if _is_tensor(self.env[a])}
        value = super().run_node(n)
        changed = [a for a, version in before.items() if self.env[a]._version != version]
        if changed:
            self.changed[n] = changed
        return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Memory:
    """Which nodes of a graph share memory, and who writes to it."""

    def __init__(self, module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
        meta = meta_copy(module)
        run = _Run(meta)
        run.run(*(example.to("meta") for example in examples))
        pairs = zip(meta.graph.nodes, module.graph.nodes, strict=True)
        twins: dict[fx.Node, fx.Node] = dict(pairs)
        self.place = {node: k for k, node in enumerate(module.graph.nodes)}
        self.values = {twins[twin]: value for twin, value in run.env.items()}
        self._storages = {
            node: _storage(value) for node, value in self.values.items() if _is_tensor(value)
        }
        self.changed: dict[fx.Node, list[fx.Node]] = {
            twins[n]: [twins[a] for a in own] for n, own in run.changed.items()
        }

    def writers(self) -> list[fx.Node]:
        """Nodes that change what another node gave; buffers are the model's own."""
        return [n for n in self.changed if self.chain(self.target(n))[0].op != "get_attr"]

    def target(self, writer: fx.Node) -> fx.Node:
        """The argument that a node changes; of several that share memory the first."""
        return self.changed[writer][0]

    def aliases(self, writer: fx.Node) -> list[fx.Node]:
        """Nodes before a writer that share memory with what it changes, in order."""
        own = self._storages[self.target(writer)]
        return [
            node
            for node, storage in self._storages.items()
            if storage == own and self.place[node] < self.place[writer]
        ]

    def late(self, writer: fx.Node, alias: fx.Node) -> list[fx.Node]:
        """Those that read an alias after the writer; a size or dtype may be read at any time."""
        return [
            user
            for user in alias.users
            if self.place[user] > self.place[writer] and self._reads_elements(user)
        ]

    def _reads_elements(self, user: fx.Node) -> bool:
        return user.op == "output" or bool(_tensors(self.values.get(user)))

    def chain(self, node: fx.Node) -> list[fx.Node]:
        """The views from a tensor to a node, which is the last; the first may be a writer's."""
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


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []


def settle(module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
    """Rewrite a traced model so that nobody reads what somebody else has changed in place, and
    that operators are handed tensors alone.

    A module that works in place on what others share gets the mark `COPIES`: where they run
    elsewhere or later, it must work on a copy.

    Raises:
        ModelError: names the operator whose change cannot be written out of place.
    """
    memory = _Memory(module, examples)
    check_sizes(memory.values)
    if spread_tuples(module, memory.values):
        module.recompile()
    while True:
        memory = _Memory(module, examples)
        if not any(_settle(module, memory, writer) for writer in memory.writers()):
            break
    for writer in memory.writers():
        if not _is_shared(memory, writer):
            continue
        if writer.op == "call_module":
            writer.meta[COPIES] = True
        else:
            _work_out_of_place(module, memory, writer)
    module.graph.lint()
    module.recompile()


def _is_shared(memory: _Memory, writer: fx.Node) -> bool:
    """Whether somebody else holds what it changes, but for operators that worked in place before.

    Those handed it on: relu_(add_(conv)) shares memory with the convolution, which nobody reads.
    """
    target = memory.target(writer)
    others = set(memory.aliases(writer)) - {target}
    while target in memory.changed:
        target = memory.target(target)
        others.discard(target)
    return bool(others)


def _settle(module: fx.GraphModule, memory: _Memory, writer: fx.Node) -> bool:
    """Rewire the late readers of what one operator changes; whether there were any."""
    late = {a: users for a in memory.aliases(writer) if (users := memory.late(writer, a))}
    if not late:
        return False
    target = memory.target(writer)
    _work_out_of_place(module, memory, writer)
    base = new = writer
    if any(not memory.is_whole(alias, target) for alias in late):
        base = _put(module, memory, target, new)
    for alias, users in late.items():
        is_same = memory.is_whole(alias, target)
        source = new if is_same else _replay(module, memory, alias, base)
        for user in users:
            user.replace_input_with(alias, source)
    return True


def _refused(writer: fx.Node, target: fx.Node) -> ModelError:
    return ModelError(
        f"operator {writer.name} ({function_name(writer.target)}) changes {target.name} in place, "
        "which others read, in a way that its name does not tell: compute a new tensor there"
    )


def _work_out_of_place(module: fx.GraphModule, memory: _Memory, writer: fx.Node) -> None:
    """Let a node give the changed tensor, and change none."""
    if "out" in writer.kwargs:
        writer.kwargs = {k: v for k, v in writer.kwargs.items() if k != "out"}
        return
    is_first = bool(writer.args) and writer.args[0] is memory.target(writer)
    if not is_first or not works_in_place(writer, dict(module.named_modules())):
        raise _refused(writer, memory.target(writer))
    if writer.op == "call_module":
        _copy_module(module, writer)
    elif writer.kwargs.get("inplace"):
        writer.kwargs = {**writer.kwargs, "inplace": False}
    else:
        writer.op, writer.target = "call_function", copying_call(writer)


def _copy_module(module: fx.GraphModule, writer: fx.Node) -> None:
    copying = copy.copy(module.get_submodule(str(writer.target)))
    copying.inplace = False  # type: ignore[assignment]
    path = f"{writer.target}_copying".replace(".", "_")
    module.add_submodule(path, copying)
    writer.target = path


def _put(module: fx.GraphModule, memory: _Memory, target: fx.Node, value: fx.Node) -> fx.Node:
    """The whole tensor with what was written to a view of it."""
    base, *chain = memory.chain(target)
    if not chain:
        return value
    given: list[fx.Node] = []
    views = [_view(module, step, given) for step in chain]
    with module.graph.inserting_after(value):
        return module.graph.call_function(Written(views), (base, value, *given))


def _view(module: fx.GraphModule, step: fx.Node, given: list[fx.Node]) -> View:
    def referred(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        given.append(argument)
        return _Ref(len(given) - 1)

    calls: dict[str, Callable[[str], Any]] = {
        "call_module": module.get_submodule,
        "call_method": partial(getattr, Tensor),
    }
    call: Any = calls[step.op](str(step.target)) if step.op in calls else step.target
    found: Any = fx.node.map_aggregate((step.args[1:], dict(step.kwargs)), referred)
    return View(call, *found)


def _replay(module: fx.GraphModule, memory: _Memory, alias: fx.Node, base: fx.Node) -> fx.Node:
    """The same view of the new tensor."""
    found = base
    for step in memory.chain(alias)[1:]:
        with module.graph.inserting_after(found):
            source = found
            copy_of = module.graph.node_copy(step, lambda node: node)
            copy_of.args = (source, *step.args[1:])
            found = copy_of
    return found

"""Turn the tracer's marks into nodes of the graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from harness.runtime.executor.shards.inplace import works_in_place
from harness.runtime.models.outputs import choose_logits, named_outputs
from harness.runtime.tracing.constructs import HOOKS, IS_DATA, NO_GRAD, ConstructError
from harness.runtime.tracing.functions import GradientHooks, detach

# Names of values that the executor adds.
_RESERVED = ("loss", "targets")


def finish(
    graph: fx.Graph, model: nn.Module, has_gradient: Callable[[fx.Node], bool] | None = None
) -> None:
    """Insert gradient hooks, detach the outputs of no_grad regions and rename reserved nodes.

    Args:
        has_gradient: whether a node's value requires a gradient; None: unknown.

    Raises:
        ConstructError: the model uses a construct that the graph cannot represent.
    """
    modules = dict(model.named_modules())
    _return_logits(graph)
    for node in list(graph.nodes):
        if node.args and isinstance(node.args[0], fx.Node) and works_in_place(node, modules):
            _check_in_place(node, node.args[0], has_gradient)
        if node.name in _RESERVED:
            node._rename(f"{node.name}_")
        if hooks := node.meta.get(HOOKS):
            _insert_hooks(graph, node, GradientHooks(hooks))
    _end_regions(graph)


def _return_logits(graph: fx.Graph) -> None:
    """Return only the tensor from which the loss is computed."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    made: fx.Node | None = None
    if isinstance(returned, fx.Node):
        if not isinstance(returned.target, type):
            return
        made, kind = returned, returned.target  # a named tuple, or a dataclass
        outputs = dict(zip(getattr(kind, "_fields", ()), made.args, strict=False)) | made.kwargs
    else:
        kind, outputs = type(returned), dict(named_outputs(returned))
    name = kind.__name__.removeprefix("immutable_")
    output.args = (choose_logits(outputs, name),)
    if made is not None:
        graph.erase_node(made)


@contextmanager
def without_gradient_hooks(module: fx.GraphModule) -> Iterator[None]:
    """Disable a traced model's gradient hooks in the block, because a hook may have state."""
    tables: list[Any] = [m._backward_hooks for m in module.modules()]
    tables += [m._backward_pre_hooks for m in module.modules()]
    targets = [node.target for node in module.graph.nodes]
    lists = [target.hooks for target in targets if isinstance(target, GradientHooks)]
    kept = [(table, dict(table)) for table in tables], [(each, list(each)) for each in lists]
    for emptied in (*tables, *lists):
        emptied.clear()
    try:
        yield
    finally:
        for table, entries in kept[0]:
            table.update(entries)
        for each, hooks in kept[1]:
            each.extend(hooks)


def _check_in_place(
    node: fx.Node, changed: fx.Node, has_gradient: Callable[[fx.Node], bool] | None
) -> None:
    """Refuse in-place changes that autograd does not track."""
    if changed.meta.get(IS_DATA):
        owner = changed.args[0]
        raise ConstructError(
            f"forward changes the data of {owner} in place: change a copy (clone) of it"
        )
    if node.meta.get(NO_GRAD) and has_gradient is not None and has_gradient(changed):
        raise ConstructError(
            f"forward changes {changed.name} in place under no_grad, which autograd does not "
            "track: change a copy (clone) of it"
        )


def _insert_hooks(graph: fx.Graph, node: fx.Node, hooks: GradientHooks) -> None:
    with graph.inserting_after(node):
        hooked = graph.call_function(hooks, (node,))
    node.replace_all_uses_with(hooked, delete_user_cb=lambda user: user is not hooked)


def _end_regions(graph: fx.Graph) -> None:
    """Detach values of a no_grad region where operators outside the region read them."""
    for node in list(graph.nodes):
        if not node.meta.get(NO_GRAD):
            continue
        for user in node.users:
            # Detach an element of a tuple (or tensor) instead of the tuple itself.
            if user.target is operator.getitem and user.args[0] is node:
                user.meta[NO_GRAD] = True
        outside = {user for user in node.users if not user.meta.get(NO_GRAD)}
        if outside:
            with graph.inserting_after(node):
                end = graph.call_function(detach, (node,))
            node.replace_all_uses_with(end, delete_user_cb=outside.__contains__)

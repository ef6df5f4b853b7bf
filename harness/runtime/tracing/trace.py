"""Trace a model into a graph with the same outputs and gradients.

torch.fx comes first, because it keeps modules (a convolution, an attention) as single operators.
If it fails, torch.export follows, whose operators are smaller, and also if that finds attentions
that can be cut by heads. If both fail in a module, that module is kept as one operator.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.errors import HarnessError, ModelError, first_line
from harness.runtime.capture.meta_copy import forgotten_stand_ins, meta_copy
from harness.runtime.capture.operators import draws_random
from harness.runtime.capture.sample_dims import values_at
from harness.runtime.devices.random_sources import RandomSources
from harness.runtime.executor.shards.inplace import works_in_place
from harness.runtime.models.mixture import is_single_operator
from harness.runtime.models.own_loss import BatchLoss
from harness.runtime.models.task import choose_logits, named_outputs
from harness.runtime.tracing import patches
from harness.runtime.tracing.attention_finding import join_attentions
from harness.runtime.tracing.attention_region import AttentionRegion
from harness.runtime.tracing.autocast import keep_regions
from harness.runtime.tracing.constants import fold_constants
from harness.runtime.tracing.constructs import (
    CALLS,
    FOLDED,
    HOOKS,
    IS_DATA,
    NO_GRAD,
    WRITTEN,
    ConstructError,
    GradientHooks,
    OpaqueFunction,
    detach,
    function_name,
)
from harness.runtime.tracing.export import export, with_tensors_of
from harness.runtime.tracing.hooks import has_own_hooks
from harness.runtime.tracing.kept_calls import LoopError, with_large_shares
from harness.runtime.tracing.matrix_products import join_projections, keep_dims, keep_heads
from harness.runtime.tracing.module_calls import (
    IN_ATTENTIONS,
    call_modules,
    is_own_norm,
    plain_norm,
)
from harness.runtime.tracing.packing import join_packed
from harness.runtime.tracing.refusals import refusal
from harness.runtime.tracing.tracer import ModelTracer
from harness.runtime.tracing.training_dtype import follow_dtype_reads
from harness.runtime.tracing.tuples import index_fields

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
    _drop_unread(graph, model, modules)
    for node in list(graph.nodes):
        if node.args and isinstance(node.args[0], fx.Node) and works_in_place(node, modules):
            _check_in_place(node, node.args[0], has_gradient)
        if node.name in _RESERVED:
            node._rename(f"{node.name}_")
        if hooks := node.meta.get(HOOKS):
            with graph.inserting_after(node):
                hooked = graph.call_function(GradientHooks(list(hooks.values())), (node,))
            others = {user for user in node.users if user is not hooked}
            node.replace_all_uses_with(hooked, delete_user_cb=others.__contains__)
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


def _drop_unread(graph: fx.Graph, model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Drop functions and modules without state whose results nothing reads, such as a loss's."""
    for node in reversed(list(graph.nodes)):
        if node.users or node.meta.get(HOOKS) or not _is_stateless(node, modules):
            continue
        reads_weights = any(source.op == "get_attr" for source in node.all_input_nodes)
        is_changing = works_in_place(node, modules) or draws_random(node, model)
        if not reads_weights and not is_changing:
            graph.erase_node(node)


def _is_stateless(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node calls a function, or a module of PyTorch's without state and hooks."""
    if node.op == "call_module":
        part = modules[str(node.target)]
        is_plain = type(part).__module__.startswith("torch.nn.") and not has_own_hooks(part)
        return is_plain and not part.state_dict()
    is_function = node.op in ("call_function", "call_method")
    return is_function and not isinstance(node.target, OpaqueFunction) and not node.is_impure()


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


@contextmanager
def no_random_draws() -> Iterator[None]:
    """Refuse random draws in the block, such as those that choose which layers run.

    Raises:
        ConstructError: a number was drawn by PyTorch, NumPy or Python.
    """
    before = RandomSources().digests()
    yield
    now = RandomSources().digests()
    drawn = [name for name in before if now[name] != before[name]]
    if drawn:
        raise ConstructError(
            f"forward draws random numbers ({drawn[0]}) that decide what is computed, such as "
            "which layers run, or whose shape does not depend on the input: a graph would keep one "
            "draw; draw by functions of the input (torch.rand_like, F.dropout)"
        )


_log = logging.getLogger(__name__)


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
            with no_random_draws(), forgotten_stand_ins(model):
                graph = tracer.trace(model)
            if not tracer.states.writes:
                module = _module(model, graph, tracer, states, whole, examples)
                cut = None if whole or states else _with_heads(model, module, examples)
                return cut or module
        except Exception as error:
            reason = error
        if tracer.states.writes:
            states |= {name: _place(model, name, by) for name, by in tracer.states.writes.items()}
            whole |= set(states.values()) - {""}
            continue
        if isinstance(reason, HarnessError) and not isinstance(reason, ConstructError):
            raise reason
        if exported is None and not isinstance(reason, ConstructError):
            try:
                return _exported(model, examples)
            except Exception as error:
                exported = error
        path = tracer.module_path
        if not path or path in whole:
            raise _refusal(model, reason, exported) from reason
        _log.info(
            "module %s is kept whole: torch.fx cannot trace it (%s)", path, first_line(reason)
        )
        whole.add(path)


def _refusal(model: nn.Module, *reasons: Exception | None) -> ModelError:
    refused = refusal(model._get_name(), *filter(None, reasons))
    if isinstance(model, BatchLoss):
        return ModelError(f"{refused}; the model keeps its loss, because {model.reason}")
    return refused


def _exported(model: nn.Module, examples: tuple[Tensor, ...]) -> fx.GraphModule:
    """Trace a model by torch.export; modules that loop over a sequence are one operator each."""
    whole: set[type[nn.Module]] = set()
    is_eager = False
    while True:
        try:
            eager = patches.replaced(torch.compiler, "is_compiling", lambda: False)
            with (
                no_random_draws(),
                forgotten_stand_ins(model),
                eager if is_eager else nullcontext(),
            ):
                module = export(model, examples, whole)
            break
        except LoopError as found:
            _log.info("%s, and is one operator", found)
            whole.add(found.kind)
        except (AttributeError, TypeError) as error:  # of a mask that it makes if not compiled
            if "'NoneType'" not in str(error) or is_eager:
                raise
            is_eager = True
    finish(module.graph, module)
    fold_constants(module, examples)
    join_projections(module)
    keep_dims(module, model)
    keep_heads(module)
    join_attentions(module)
    call_modules(module.graph, model, in_attentions=True)
    module = with_tensors_of(model, module)
    keep_regions(module)
    _values_of(module, examples)
    return module


def _with_heads(
    model: nn.Module, traced: fx.GraphModule, examples: tuple[Tensor, ...]
) -> fx.GraphModule | None:
    """The export of a traced model, if that has attentions that can be cut by heads."""
    apart = nn.RNNBase | nn.MultiheadAttention  # kinds that an export would take apart
    if any(isinstance(part, apart) or is_single_operator(part) for part in model.modules()):
        return None
    if not any(map(_may_be_cut, traced.graph.nodes)):
        return None
    try:
        exported = _exported(model, examples)
    except Exception as error:
        _log.info("attentions are not cut by heads: %s", first_line(error))
        return None
    is_cut = any(isinstance(node.target, AttentionRegion) for node in exported.graph.nodes)
    return exported if is_cut else None


def _may_be_cut(node: fx.Node) -> bool:
    """Whether a traced softmax lies between linear layers, as that of an attention that is cut by
    heads; a function that torch.fx keeps whole may call one."""
    code = getattr(node.target, "__code__", None) if node.op == "call_function" else None
    if code is not None and "softmax" in code.co_names:
        return not str(getattr(node.target, "__module__", "")).startswith("torch.")
    part = _called(node)
    is_softmax = function_name(node.target) in ("softmax", "scaled_dot_product_attention")
    is_softmax = is_softmax if part is None else isinstance(part, nn.Softmax)
    return is_softmax and all(
        _leads_to_linear(node, attribute) for attribute in ("all_input_nodes", "users")
    )


def _called(node: fx.Node) -> nn.Module | None:
    owner = node.graph.owning_module
    return owner.get_submodule(str(node.target)) if owner and node.op == "call_module" else None


def _leads_to_linear(softmax: fx.Node, attribute: str) -> bool:
    """Whether functions, and no other layers, lead from a softmax to a linear layer.

    Args:
        attribute: of a node, with the nodes in the direction of the search.
    """
    seen: set[fx.Node] = set()
    waiting = [softmax]
    while waiting:
        for node in getattr(waiting.pop(), attribute):
            part = _called(node)
            if isinstance(part, nn.Linear) or function_name(node.target) in ("linear", "addmm"):
                return True
            is_passed = part is None or type(part) in (nn.Identity, *IN_ATTENTIONS)
            if is_passed and node not in seen:
                seen.add(node)
                waiting.append(node)
    return False


def _module(
    model: nn.Module,
    graph: fx.Graph,
    tracer: ModelTracer,
    states: Collection[str],
    whole: Collection[str],
    examples: tuple[Tensor, ...],
) -> fx.GraphModule:
    packing = join_packed(graph, model)
    finish(graph, model, tracer.has_gradient)
    module = fx.GraphModule(model, graph, type(model).__name__)
    for path, part in packing.items():
        module.set_submodule(path, part)
    for path, part in list(module.named_modules()):
        if is_own_norm(part) and path not in whole:
            module.set_submodule(path, plain_norm(part))
    module.meta[WRITTEN] = frozenset(states)
    follow_dtype_reads(module, examples)
    index_fields(module, _values_of(module, examples))
    fold_constants(module, examples)
    keep_regions(module)
    module.meta[FOLDED] |= tracer.folded.difference(states)
    return module


def _values_of(module: fx.GraphModule, examples: tuple[Tensor, ...]) -> dict[fx.Node, Any]:
    """Meta values by node; raises the error of a graph that does not run, such as one that reads an
    output's attribute of a class that torch.fx does not know."""
    (output,) = module.graph.find_nodes(op="output")
    if not any(_is_computed(node) for node in output.all_input_nodes):
        raise ModelError(f"{module._get_name()} returns no tensor that its operators computed")
    meta = meta_copy(module)
    with torch.enable_grad(), torch.device("meta"):
        return values_at(module, meta, examples, len(examples[0]))


def _is_computed(node: fx.Node) -> bool:
    return node.op in CALLS or any(map(_is_computed, node.all_input_nodes))


def _place(model: nn.Module, buffer: str, writer: str) -> str:
    """The innermost module that contains a buffer and its writer, to be kept whole; empty if it is
    too large a part of the model, so that the graph passes the buffer's values on."""
    steps = zip(buffer.split(".")[:-1], writer.split("."), strict=False)
    place = ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], steps))
    return "" if model.get_submodule(place) in with_large_shares(model) else place

"""Trace a model by torch.export, the fallback when torch.fx cannot follow its control flow."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.errors import ModelError
from harness.runtime.capture.meta_copy import fake, fake_copy
from harness.runtime.executor.shards.inplace import works_in_place
from harness.runtime.tracing import patches
from harness.runtime.tracing.autocast import AutocastRegion
from harness.runtime.tracing.constructs import (
    AUTOCAST,
    FOLDED,
    NO_GRAD,
    WRITES,
    WRITTEN,
    ConstructError,
    function_name,
    is_view,
)
from harness.runtime.tracing.export_modes import JoinedSamples, KnownValues
from harness.runtime.tracing.hooks import has_backward_hooks
from harness.runtime.tracing.kept_calls import ExportedFunctions, join_vmaps, loops_found
from harness.runtime.tracing.module_calls import (
    call_modules,
    is_own_norm,
    named_tensors,
    plain_norm,
)
from harness.runtime.tracing.tracer import unflatten_output, users_frame
from harness.runtime.tracing.training_dtype import follow_training_dtype, may_follow, under_autocast
from harness.runtime.tracing.writes import read_written

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_AUTOCAST_REGION = "wrap_with_autocast"
_NO_GRAD_REGION = "wrap_with_set_grad_enabled"
_ASSERTIONS = (
    "_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size",
)  # fmt: skip


def export(
    model: nn.Module, examples: tuple[Tensor, ...], whole: Collection[type[nn.Module]] = ()
) -> fx.GraphModule:
    """Export a model for batches of any size; the graph holds the model's own tensors.

    The export runs on fake tensors, so that it takes no memory, and tensors that forward makes on
    the CPU meet weights on the CPU although the model is on the meta device.

    Args:
        whole: kinds of modules that are one operator each.

    Raises:
        ModelError: the export is for one batch size only, or loses a construct.
        LoopError: another kind of module loops over a sequence.
        Exception: any error of torch.export.
    """
    for path, part in model.named_modules():
        if has_backward_hooks(part):
            raise ConstructError(f"module {path!r} has backward hooks, which torch.export drops")
    fixed: list[str | None] = []
    module = _exported(model, examples, whole, fixed)
    if may_follow(module, model, examples):
        narrow = None
        with suppress(Exception), under_autocast():  # which some operators do not know
            narrow = _exported(model, examples, whole, [])
        if narrow is not None:
            follow_training_dtype(module, narrow)
    read_written(module.graph)
    _remove_idle(module)
    _copy_attentions(module.graph)
    _keep_layouts(module.graph)
    _check_batch_is_open(module, fixed)
    unflatten_output(module.graph, module._out_spec)
    module.recompile()
    _use_input_device(module)
    join_vmaps(module)
    call_modules(module.graph, model, in_attentions=False)
    module = with_tensors_of(model, module)
    _mark_writes(module)
    return module


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _exported(
    model: nn.Module,
    examples: tuple[Tensor, ...],
    whole: Collection[type[nn.Module]],
    fixed: list[str | None],
) -> fx.GraphModule:
    """What torch.export makes of a model, with its autograd functions, whole modules and regions of
    contexts.

    Args:
        fixed: takes the lines of user code that fix an open size.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # takes half a second

    sizes = _open_sizes(model, len(examples))
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    functions, copied = ExportedFunctions(), fake_copy(model, mode)
    functions.keep_whole(model, copied, whole)

    def register_hook(tensor: Tensor, hook: Any) -> Any:
        raise ConstructError("torch.export drops hooks on tensors (register_hook)")

    def said(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
        return bool(is_causal)

    with (
        patches.autograd_functions(functions.apply),
        patches.replaced(Tensor, "register_hook", register_hook),
        # torch.export would keep the data of now as a constant.
        patches.replaced(Tensor, "data", property(Tensor.detach, _SET_DATA)),
        torch.set_grad_enabled(torch.is_grad_enabled()),  # which a model may set itself
        # PyTorch's transformer layers would read whether a mask is causal; they apply it as it is.
        patches.replaced(nn.modules.transformer, "_detect_is_causal_mask", said),
        patches.users_code(model),
        _sizes_fixed(ShapeEnv, fixed),
        KnownValues(len(examples[0])),
        JoinedSamples(),
        loops_found(copied, whole),  # last, so as not to count what the others call
    ):
        # torch.export always specializes a size of 1.
        given = tuple(fake(x if len(x) > 1 else torch.cat((x, x)), mode) for x in examples)
        exported = torch.export.export(copied, given, dynamic_shapes=sizes)
    module: fx.GraphModule = exported.module(check_guards=False)
    functions.insert(module.graph)
    _inline_regions(module, any(x.is_meta for x in model.parameters()))
    return module


def _open_sizes(model: nn.Module, n_inputs: int) -> tuple[Any, ...]:
    """An open number of samples for each input, in the structure of forward's parameters."""
    sizes = tuple({0: torch.export.Dim.AUTO} for _ in range(n_inputs))
    kinds = [p.kind for p in inspect.signature(model.forward).parameters.values()]
    at = next((k for k, kind in enumerate(kinds) if kind == kind.VAR_POSITIONAL), n_inputs)
    return sizes if at >= n_inputs else (*sizes[:at], sizes[at:])


def _remove_idle(module: fx.GraphModule) -> None:
    """Remove slices that take everything, concatenations with nothing (an empty cache), and
    assertions with the values that only they read."""
    slices = torch.ops.aten.slice.Tensor
    for node in module.graph.find_nodes(op="call_function", target=slices):
        if node.args[2:] == (0, sys.maxsize):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        parts: Any = node.args[0]
        kept = [part for part in parts if not _is_empty(part)]
        if len(kept) == 1 < len(parts):
            node.replace_all_uses_with(kept[0])
            module.graph.erase_node(node)
    for node in reversed(list(module.graph.nodes)):
        is_assertion = function_name(node.target) in _ASSERTIONS
        is_number = isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
        if not node.users and (is_assertion or is_number):
            module.graph.erase_node(node)


def _is_empty(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(n == 0 for n in value.shape if isinstance(n, int))


def _copy_attentions(graph: fx.Graph) -> None:
    """Let views of an attention's output be reshapes, because its layout depends on the device."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        while isinstance(source, fx.Node) and is_view(source):
            source = source.args[0]
        if isinstance(source, fx.Node) and source.target is _ATTENTION:
            node.target = torch.ops.aten.reshape.default


def strided(x: Tensor, order: Sequence[int], *view: Any) -> Tensor:
    """`as_strided` of a dense tensor whose dims lie in memory in an order."""
    places = [order.index(k) for k in range(len(order))]
    return x.permute(*order).contiguous().permute(*places).as_strided(*view)


def _keep_layouts(graph: fx.Graph) -> None:
    """Let `as_strided` depend on the layout of its input in the model, because that of a value that
    a strategy puts together from parts differs."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        source, *view = node.args
        node.args = (source, _order(source.meta["val"]), *view)
        node.target = strided


def _order(value: Tensor) -> list[int]:
    """The dims of a dense tensor from the largest to the smallest stride."""
    sizes, strides = ([_number(n) for n in each] for each in (value.shape, value.stride()))
    order = sorted(range(len(sizes)), key=lambda k: (-strides[k], sizes[k] == 1))
    dense = 1
    for k in reversed(order):
        if (sizes[k] != 1 and strides[k] != dense) or value.storage_offset() != 0:
            raise ConstructError(
                "forward calls as_strided on a part of a tensor, which reads beyond that part: "
                "call it on the whole tensor, or use unfold"
            )
        dense *= sizes[k]
    return order


def _number(size: Any) -> int:
    """A size, for the number of samples of the examples."""
    return int(size if isinstance(size, int) else size.node.hint)


def with_tensors_of(model: nn.Module, module: fx.GraphModule) -> fx.GraphModule:
    """A graph module whose modules, parameters and buffers are the model's own; constants of the
    export are buffers, as in torch.fx, so that they move with the module."""
    found: dict[str, Any] = {}
    own = named_tensors(model)
    for node in list(module.graph.nodes):
        name = str(node.target)
        if node.op == "call_module":
            part = model.get_submodule(name)
            found[name] = plain_norm(part) if is_own_norm(part) else part
        elif node.op == "get_attr" and not node.users:
            module.graph.erase_node(node)
        elif node.op == "get_attr" and name in own:
            found[name] = own[name]
        elif node.op == "get_attr":
            node.target = name.replace(".", "_")
            found[node.target] = attrgetter(name)(module)
    made = fx.GraphModule(found, module.graph, type(model).__name__)
    made.meta |= {key: module.meta[key] for key in (WRITTEN, FOLDED) if key in module.meta}
    return made


def _mark_writes(module: fx.GraphModule) -> None:
    """Mark the nodes that write buffers. Each gets the buffer itself, because what a write returns
    may be copied for its readers."""
    modules = dict(module.named_modules())
    written: set[str] = set()
    for node in module.graph.nodes:
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source.op == "get_attr":
            if not works_in_place(node, modules):
                continue
            node.meta[WRITES] = True
            written.add(str(source.target))
            for later in list(node.users):
                if later.args[:1] == (node,) and works_in_place(later, modules):
                    later.replace_input_with(node, source)
    module.meta[WRITTEN] = frozenset(written)


def _sizes_fixed(kind: Any, found: list[str | None]) -> AbstractContextManager[None]:
    """Record the lines of user code that fix an open size in the block.

    Args:
        kind: the class that knows the sizes.
    """
    replace = kind._set_replacement

    def replace_and_record(sizes: Any, symbol: Any, value: Any, *args: Any) -> None:
        if value.is_Integer:
            found.append(users_frame())
        replace(sizes, symbol, value, *args)

    return patches.replaced(kind, "_set_replacement", replace_and_record)


def _check_batch_is_open(module: fx.GraphModule, fixed: list[str | None]) -> None:
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # takes half a second

    for node in module.graph.find_nodes(op="placeholder"):
        size = node.meta["val"].shape[0]
        if is_concrete_int(size):
            error = ModelError(
                f"forward takes {size} samples as a fixed number: compute on all samples at once, "
                "without loops over them or sizes written out"
            )
            for line in filter(None, fixed):
                error.add_note(line)
            raise error


def _inline_regions(module: fx.GraphModule, is_of_inputs: bool) -> None:
    """Inline the subgraphs that torch.export makes of autocast and no_grad contexts.

    Args:
        is_of_inputs: contexts of the CPU are those of the device of their inputs.
    """
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)  # true on the device of the examples only
            continue
        marks: dict[str, Any] = {}
        kind = getattr(node.target, "__name__", "")
        if kind == _AUTOCAST_REGION:
            device_type, dtype, is_enabled, _, inner, *given = node.args
            if is_of_inputs and device_type == "cpu":
                device_type = "meta"
            marks[AUTOCAST] = AutocastRegion(device_type, dtype, is_enabled)
        elif kind == _NO_GRAD_REGION:
            is_enabled, inner, *given = node.args
            marks |= {} if is_enabled else {NO_GRAD: True}
        else:
            continue
        region = module.get_submodule(str(inner.target))
        assert isinstance(region, fx.GraphModule)
        _inline_regions(region, is_of_inputs)
        _inline(module.graph, node, region, given, marks)
        if not inner.users:
            module.graph.erase_node(inner)
            module.delete_submodule(str(inner.target))
    module.recompile()


def _inline(
    graph: fx.Graph,
    call: fx.Node,
    region: fx.GraphModule,
    given: list[Any],
    marks: dict[str, Any],
) -> None:
    copies = dict(zip(region.graph.find_nodes(op="placeholder"), given, strict=True))
    results: Any = ()
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "output":
                results = fx.node.map_arg(node.args[0], copies.__getitem__)
            elif node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                inherited = {} if _returns_its_input(node) else marks
                copies[node].meta = {**inherited, **copies[node].meta}  # inner ones take precedence
    for element in list(call.users):
        element.replace_all_uses_with(results[element.args[1]])
        graph.erase_node(element)
    graph.erase_node(call)


def _returns_its_input(node: fx.Node) -> bool:
    """Whether a cast casts nothing, so that readers outside of a no_grad region that read its
    result in the export read the tensor itself in the model, with its gradient."""
    if function_name(node.target) not in ("to", "contiguous") or node.kwargs.get("copy"):
        return False
    one, other = node.meta["val"], node.all_input_nodes[0].meta["val"]
    return (one.dtype, one.device, one.stride()) == (other.dtype, other.device, other.stride())


def _use_input_device(module: fx.GraphModule) -> None:
    """Create and move tensors on the input's device, because an export fixes that of its
    examples."""
    inputs = module.graph.find_nodes(op="placeholder")
    makers = [n for n in module.graph.nodes if any(map(_is_device, (*n.args, *n.kwargs.values())))]
    if not makers:
        return
    with module.graph.inserting_after(inputs[-1]):
        device = module.graph.call_function(getattr, (inputs[0], "device"))
    for node in makers:
        node.args = tuple(device if _is_device(x) else x for x in node.args)
        node.kwargs = {k: device if _is_device(x) else x for k, x in node.kwargs.items()}
    module.recompile()


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device)

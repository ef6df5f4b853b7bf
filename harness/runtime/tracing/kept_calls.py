"""Keep each call of an autograd function, of a module that loops or of torch.vmap as one operator.

An export would trace through it; a module whose forward loops over a sequence (the scan of a state
space model) would be thousands of operators. A call of a function or of such a module becomes a
custom operator during the export, and then one operator of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.capture.saved import tensors_within
from harness.runtime.tracing.constructs import (
    ConstructError,
    CustomFunction,
    OpaqueFunction,
    function_name,
)
from harness.runtime.tracing.export_modes import size_of
from harness.runtime.tracing.patches import original_apply

# Functions of torch that one forward may call, without those of its submodules.
LONGEST = 500
# A module with a larger share of the model's parameters is not kept whole.
LARGEST_SHARE = 0.5


class LoopError(Exception):
    """The forward of a kind of module calls more than LONGEST functions."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__(f"forward of {kind.__name__} calls more than {LONGEST} functions")
        self.kind = kind


class WholeModule(OpaqueFunction):
    """A call of a module, given its tensors and then its weights.

    Args:
        leaves: the values of all arguments, with None at the tensors.
        positions: of the tensors among the leaves.
    """

    def __init__(
        self, module: nn.Module, leaves: list[Any], structure: Any, positions: list[int]
    ) -> None:
        super().__init__(type(module).__name__)
        self._module, self._names = meta_copy(module), list(weights_of(module))
        self._leaves, self._structure, self._positions = leaves, structure, positions

    def __call__(self, *args: Tensor) -> Any:
        found = tensors_within(self.returned(*args))
        return found[0] if len(found) == 1 else tuple(found)

    def returned(self, *args: Tensor) -> Any:
        """What the module returns, tensors or not."""
        given, weights = args[: len(self._positions)], args[len(self._positions) :]
        leaves = list(self._leaves)
        for position, tensor in zip(self._positions, given, strict=True):
            leaves[position] = tensor
        inputs, keywords = pytree.tree_unflatten(leaves, self._structure)
        named = dict(zip(self._names, weights, strict=True))
        # The model makes anew what the module keeps, or the comparison with it fails.
        before = [(vars(part), dict(vars(part))) for part in self._module.modules()]
        try:
            return functional_call(self._module, named, inputs, keywords)
        finally:
            for attributes, kept in before:
                attributes.clear()
                attributes.update(kept)


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def with_large_shares(model: nn.Module) -> list[nn.Module]:
    """Modules with too many of a model's parameters to be kept whole."""
    parts = {part: sum(p.numel() for p in part.parameters()) for part in model.modules()}
    return [part for part, size in parts.items() if size >= LARGEST_SHARE * parts[model]]


class _Counter(TorchFunctionMode):
    """Counts the functions that each running forward calls itself.

    Args:
        allowed: kinds of modules that may call any number.
    """

    def __init__(self, kind_of: Callable[[nn.Module], type[nn.Module]], allowed: Any) -> None:
        super().__init__()
        self._kind_of, self._allowed = kind_of, allowed
        self._running: list[tuple[type[nn.Module], list[None]]] = []

    def enter(self, module: nn.Module, inputs: Any) -> None:
        self._running.append((self._kind_of(module), []))

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and getattr(func, "__name__", "") != "__get__":
            kind, calls = self._running[-1]
            calls.append(None)
            if len(calls) > LONGEST and kind not in self._allowed:
                raise LoopError(kind)
        return func(*args, **(kwargs or {}))


@contextmanager
def loops_found(model: nn.Module, allowed: Collection[type[nn.Module]]) -> Iterator[None]:
    """Raise LoopError in the block if a module of `model` loops, but for kinds that may."""
    # An export gives modules another type, and the same `__dict__`.
    kinds = {id(vars(part)): type(part) for part in model.modules()}
    large = {type(part) for part in with_large_shares(model)}
    counter = _Counter(lambda module: kinds.get(id(vars(module)), type(module)), {*allowed, *large})
    hooks = (
        module_hooks.register_module_forward_pre_hook(counter.enter),
        module_hooks.register_module_forward_hook(counter.leave, always_call=True),
    )
    try:
        with counter:
            yield
    finally:
        for hook in hooks:
            hook.remove()


_NUMBERS = count()  # of exports, because an earlier one's operators may still be there
_SIZES = (2, 3)  # numbers of samples


class ExportedFunctions:
    """The autograd functions and whole modules that one export meets; the library defines their
    operators."""

    def __init__(self) -> None:
        self._namespace = f"harness_export_{next(_NUMBERS)}"
        self._library = torch.library.Library(self._namespace, "FRAGMENT")
        self._made: dict[Any, OpaqueFunction] = {}

    def apply(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Call a function as a custom operator."""
        given = [x for x in args if isinstance(x, Tensor)]
        fixed = {k: x for k, x in enumerate(args) if not isinstance(x, Tensor)}
        if any(
            isinstance(leaf, Tensor | nn.Module | torch.SymInt | torch.SymFloat)
            for leaf in tree_leaves(list(fixed.values()))
        ):
            raise ConstructError(
                f"the autograd function {function.__name__} takes a module, a nested tensor or a "
                "number that depends on the batch, which torch.export drops: give it tensors"
            )
        with disable_proxy_modes_tracing(), torch.no_grad():
            found = original_apply(function, *args)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        if not all(isinstance(x, Tensor) for x in outputs):
            raise ConstructError(
                f"the autograd function {function.__name__} returns other values than tensors, "
                "which torch.export drops"
            )
        return self._define(CustomFunction(function, fixed), len(given), found)(*given)

    def keep_whole(
        self, model: nn.Module, copied: nn.Module, kinds: Collection[type[nn.Module]]
    ) -> None:
        """Let each module of some kinds be one operator.

        Args:
            copied: the copy of the model that is exported.
        """
        twins = dict(copied.named_modules())
        for path, part in model.named_modules():
            if type(part) in kinds:
                twins[path].forward = partial(self._call_module, path, part, twins[path])

    def _call_module(
        self, path: str, module: nn.Module, twin: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        places = [k for k, x in enumerate(leaves) if isinstance(x, Tensor)]
        fixed = [None if k in places else x for k, x in enumerate(leaves)]
        given = [leaves[k] for k in places]
        weights = list(weights_of(twin).values())
        with disable_proxy_modes_tracing():
            call = WholeModule(module, fixed, structure, places)
            outputs, made = _outputs_like(call, given, weights)
        if not all(x is None or isinstance(x, bool | int | float | str) for x in fixed):
            raise ConstructError(
                f"module {path!r} loops over a sequence, so that it is one operator, but takes "
                "other values than tensors and numbers: give it tensors"
            )
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        found = tensors[0] if len(tensors) == 1 else tuple(tensors)
        results = self._define(call, len(given) + len(weights), found)(*given, *weights)
        rest = iter([results] if len(tensors) == 1 else results)
        return tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in outputs], made)

    def _define(self, call: OpaqueFunction, n_inputs: int, found: Any) -> Any:
        name = f"function_{len(self._made)}"
        inputs = ", ".join(f"Tensor x{k}" for k in range(n_inputs))
        outputs = (
            "Tensor" if isinstance(found, Tensor) else f"({', '.join(['Tensor'] * len(found))})"
        )

        def fake(*_: Tensor) -> Any:
            if isinstance(found, Tensor):
                return torch.empty_like(found)
            return tuple(map(torch.empty_like, found))

        self._library.define(f"{name}({inputs}) -> {outputs}")
        torch.library.register_fake(f"{self._namespace}::{name}", fake, lib=self._library)
        operator = getattr(getattr(torch.ops, self._namespace), name).default
        self._made[operator] = call
        return operator

    def insert(self, graph: fx.Graph) -> None:
        """Let the nodes of an exported graph call the functions themselves."""
        for node in graph.nodes:
            if node.target in self._made:
                node.target = self._made[node.target]


def _outputs_like(
    call: WholeModule, given: list[Tensor], weights: list[Tensor]
) -> tuple[list[Any], Any]:
    """Fake outputs of a module for fake inputs, and their structure, from runs on the meta device
    with two numbers of samples, because those with an open number take a hundred times longer."""

    def at(x: Tensor, n: int) -> Tensor:
        return torch.empty([size_of(k, n) for k in x.shape], dtype=x.dtype, device="meta")

    with _disable_current_modes(), torch.no_grad():
        (few, made), (more, _) = (
            tree_flatten(call.returned(*(at(x, n) for x in (*given, *weights)))) for n in _SIZES
        )
    sizes = [size for x in given for size in x.shape]
    n_open = next((k for k in sizes if tuple(size_of(k, n) for n in _SIZES) == _SIZES), None)
    outputs = list(few)
    for position, (one, other) in enumerate(zip(few, more, strict=True)):
        if isinstance(one, Tensor):
            shape = [
                a if a == b or n_open is None else n_open * (a // _SIZES[0])
                for a, b in zip(one.shape, other.shape, strict=True)
            ]
            outputs[position] = given[0].new_empty(shape, dtype=one.dtype)
    return outputs, made


class Vmap(OpaqueFunction):
    """A call of torch.vmap, with those inside it."""

    def __init__(self, constants: dict[str, Any], graph: fx.Graph) -> None:
        super().__init__("vmap")
        self._run = fx.GraphModule(constants, graph)

    def __call__(self, *args: Any) -> Any:
        try:
            return self._run(*args)
        except Exception:  # of any operator, in the middle of the call
            while torch._C._functorch.maybe_current_level():
                torch._C._functorch._vmap_decrement_nesting()
            raise


def join_vmaps(module: fx.GraphModule) -> None:
    """Replace the operators of each outermost call."""
    depth, inside = 0, []
    for node in list(module.graph.nodes):
        name = function_name(node.target)
        depth += name == "_vmap_increment_nesting"
        if depth and node.op == "call_function":
            inside.append(node)
        if name == "_vmap_decrement_nesting":
            depth -= 1
            if depth == 0:
                _join(module, inside)
                inside = []


def _join(module: fx.GraphModule, inside: list[fx.Node]) -> None:
    """Replace nodes that follow one another by one call."""
    graph = module.graph
    given = dict.fromkeys(x for n in inside for x in n.all_input_nodes if x not in inside)
    read = {x: operator.attrgetter(str(x.target))(module) for x in given if x.op == "get_attr"}
    constants = {x: value for x, value in read.items() if not isinstance(value, Tensor)}
    found = [node for node in inside if any(user not in inside for user in node.users)]
    joined = fx.Graph()
    copies = {node: joined.placeholder(node.name) for node in given if node not in constants}
    copies |= {node: joined.node_copy(node) for node in constants}
    for node in inside:
        copies[node] = joined.node_copy(node, copies.__getitem__)
    results = tuple(copies[node] for node in found)
    joined.output(results[0] if len(results) == 1 else results)
    with graph.inserting_after(inside[-1]):
        held = {str(node.target): value for node, value in constants.items()}
        call = graph.call_function(
            Vmap(held, joined), tuple(x for x in given if x not in constants)
        )
    for k, node in enumerate(found):
        result = call
        if len(found) > 1:
            with graph.inserting_after(call):
                result = graph.call_function(operator.getitem, (call, k))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(inside):
        graph.erase_node(node)

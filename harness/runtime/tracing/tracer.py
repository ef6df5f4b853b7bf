"""A torch.fx tracer that keeps grad mode, autograd functions and hooks, or refuses the model."""

from __future__ import annotations

import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.node import base_types
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from harness.runtime.models.mixture import is_single_operator
from harness.runtime.ranks.failures import is_from_user
from harness.runtime.tracing import packing, patches
from harness.runtime.tracing.autocast import Regions
from harness.runtime.tracing.constructs import (
    AUTOCAST,
    CALLS,
    HOOKS,
    IS_DATA,
    NO_GRAD,
    ConstructError,
    CustomFunction,
    GradientHook,
    detach,
)
from harness.runtime.tracing.hooks import has_backward_hooks
from harness.runtime.tracing.module_calls import is_own_norm, norm_as_call
from harness.runtime.tracing.states import States

# Properties that are tensors, and methods and functions whose results are none, but for those.
_TENSORS = ("T", "mT", "H", "mH", "data", "real", "imag")
_FACTS = (
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "get_device", "data_ptr",
    "untyped_storage", "__hash__", "__len__", "__repr__", "__format__", "__reduce_ex__",
    "__deepcopy__", "type", "is_same_size", "result_type", "is_tensor", "__get__", "__set__",
)  # fmt: skip


def _freezing(name: str, value: bool) -> ConstructError:
    return ConstructError(
        f"forward sets requires_grad of {name!r} to {value}: set it where the model is made, or "
        "compute with its detach()"
    )


_SET_REQUIRES_GRAD = Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class ParametersRecorded(TorchFunctionMode):
    """Passes a parameter of the traced model as a node to the operators that read it.

    torch.fx knows only attributes. It would compute `p.square()` once, of the weights of now, as it
    does of buffers.

    Attributes:
        folded: names of the buffers of which it has computed values.
    """

    def __init__(self, tracer: fx.Tracer, root: nn.Module) -> None:
        super().__init__()
        self._tracer = tracer
        self._names = {id(p): name for name, p in root.named_parameters()}
        self._buffers = {id(b): name for name, b in root.named_buffers()}
        self.folded: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        read = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
        leaves = tree_leaves((args, kwargs))
        is_fact = name in _FACTS and read not in _TENSORS
        if not any(id(leaf) in self._names for leaf in leaves):
            if not is_fact and not any(isinstance(leaf, fx.Proxy) for leaf in leaves):
                self.folded |= {self._buffers[id(x)] for x in leaves if id(x) in self._buffers}
            return func(*args, **kwargs)
        if read in _TENSORS:
            return getattr(self._recorded(args[0]), read)
        if name == "requires_grad_" or func == _SET_REQUIRES_GRAD:
            self._check_frozen(*args, *kwargs.values())
            return func(*args, **kwargs)
        if is_fact:
            return func(*args, **kwargs)
        args, kwargs = tree_map(self._recorded, (args, kwargs))
        return fx.Proxy.__torch_function__(func, types, args, kwargs)

    def _check_frozen(self, parameter: Any, value: bool = True) -> None:
        """Refuse to change whether a parameter gets a gradient, which holds for the whole graph."""
        if parameter.requires_grad != value:
            raise _freezing(self._names[id(parameter)], value)

    def _recorded(self, value: Any) -> Any:
        name = self._names.get(id(value))
        return value if name is None else self._tracer.create_proxy("get_attr", name, (), {})


_DIFFERENTIATIONS: dict[tuple[str, Any], str] = {
    ("call_function", torch.autograd.grad): "torch.autograd.grad",
    ("call_function", torch.autograd.backward): "torch.autograd.backward",
    ("call_method", "backward"): "backward()",
}
_WITHOUT_GRADIENT = ("detach", "detach_", "argmax", "argmin", "argsort", "eq", "ne", "gt", "lt")


class _Arguments(tuple[fx.Proxy, ...]):
    """The value of forward's `*args`; torch.fx would unpack a plain tuple."""


class _Keywords(dict[str, Any]):
    """The value of forward's `**kwargs`: empty."""


class ModelProxy(fx.Proxy):
    """A tensor of a traced model."""

    def register_hook(self, hook: GradientHook) -> RemovableHandle:
        """Record a hook on this tensor's gradient."""
        if self.node.op == "get_attr":
            raise ConstructError(
                f"forward calls register_hook on {self.node.target!r}, which adds a hook in every "
                "step: register it once, where the model is made"
            )
        hooks = self.node.meta.setdefault(HOOKS, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def __setitem__(self, index: Any, value: Any) -> None:
        """Record the change in place; the value of a written buffer continues as a copy."""
        arguments = self, index, value
        changed = self.tracer.create_proxy("call_function", operator.setitem, arguments, {})
        if changed.node.target is not operator.setitem:
            self.node = changed.node

    def retain_grad(self) -> None:
        """Do nothing, because a retained gradient could only be read after the step."""

    @property
    def requires_grad(self) -> bool:
        """Whether the traced tensor requires a gradient."""
        tracer: ModelTracer = self.tracer  # type: ignore[assignment]
        return tracer.has_gradient(self.node)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if self.node.op == "get_attr":
            raise _freezing(str(self.node.target), value)
        raise ConstructError(
            "forward sets requires_grad of a tensor: detach() it, or compute on it"
        )

    @property
    def data(self) -> fx.Proxy:
        """The detached tensor."""
        proxy = self.tracer.create_proxy("call_function", detach, (self,), {})
        proxy.node.meta[IS_DATA] = True
        return proxy

    @data.setter
    def data(self, value: Any) -> None:
        raise ConstructError("forward assigns the data of a tensor, which a graph cannot represent")


class ModelTracer(fx.Tracer):
    """Traces a model; PyTorch's modules and `leaves` become single nodes.

    Args:
        leaves: paths of further modules that are kept whole.
        states: names of written buffers whose values the graph passes on.
        n_inputs: number of input tensors; other arguments keep their defaults.
    """

    def __init__(self, leaves: Collection[str], states: Collection[str], n_inputs: int) -> None:
        super().__init__(autowrap_functions=packing.FUNCTIONS)
        self._autowrap_search.append(nn.utils.rnn)
        self._leaves, self._n_inputs, self._n_placeholders = leaves, n_inputs, 0
        self.states = States(self, states)
        self._regions = Regions()
        self.folded: set[str] = set()  # see `ParametersRecorded`

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """As `fx.Tracer.trace`, under the patches."""
        with (
            patches.users_code(root),
            torch.enable_grad(),  # restores what a model may set itself
            patches.autograd_functions(self._apply),
            self._regions.watched(),
            self.states.watched(root),
            ParametersRecorded(self, root) as recorded,
        ):
            graph = super().trace(root, concrete_args)
            if isinstance(graph._codegen, _PyTreeCodeGen):  # a default is a tuple, list or dict
                unflatten_output(graph, graph._codegen.pytree_info.out_spec)
            self.states.write(graph)
            self.folded = recorded.folded
            return graph

    @property
    def module_path(self) -> str:
        """Path of the module whose forward is running, or raised the error."""
        return next(reversed(self.module_stack.values()))[0] if self.module_stack else ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if module_qualified_name in self._leaves or has_backward_hooks(m):
            return True
        if is_single_operator(m):
            return True
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if not is_own_norm(m) or self.path_of_module(m) in self._leaves:
            return super().call_module(m, forward, args, kwargs)
        path = self.path_of_module(m)
        with norm_as_call(m, lambda x: self.create_proxy("call_module", path, (x,), {})):
            return super().call_module(m, forward, args, kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ModelProxy(node, self)

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(kind, *args, **kwargs)
        if frame := users_frame():  # torch.compile joins traces, and None is none
            node.stack_trace = frame
        if getattr(node.target, "__name__", node.target) == "as_strided":
            raise TypeError("torch.fx does not know the layout that as_strided reads")
        if (kind, node.target) in _DIFFERENTIATIONS:
            raise ConstructError(
                f"forward calls {_DIFFERENTIATIONS[kind, node.target]}, which differentiates "
                "across operators: put all that it differentiates into a module of its own"
            )
        if kind in CALLS and not torch.is_grad_enabled():
            node.meta[NO_GRAD] = True
        if kind in CALLS and self._regions.innermost is not None:
            node.meta[AUTOCAST] = self._regions.innermost
        self.states.record(node)
        return node

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        current = self.states.current(attr_val) if isinstance(attr_val, Tensor) else None
        if current is not None:
            return current
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def has_gradient(self, node: fx.Node) -> bool:
        """Whether a node's value requires a gradient, as far as the graph shows."""
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(self.root)
            return isinstance(value, nn.Parameter) and value.requires_grad
        if node.op == "placeholder" or node.meta.get(NO_GRAD):
            return False
        if getattr(node.target, "__name__", node.target) in _WITHOUT_GRADIENT:
            return False
        if node.op == "call_module":
            parameters = self.root.get_submodule(str(node.target)).parameters()
            if any(parameter.requires_grad for parameter in parameters):
                return True
        return any(map(self.has_gradient, node.all_input_nodes))

    def _proxy_placeholder(
        self, name: str, concrete_args: Any, sig: Any, fn_for_analysis: Callable[..., Any]
    ) -> Any:
        if name.startswith("*"):  # forward takes them as a tuple and a dict
            left = range(self._n_placeholders, self._n_inputs)
            inputs = (self.create_proxy("placeholder", f"{name[1:]}_{n}", (), {}) for n in left)
            return _Keywords() if name.startswith("**") else _Arguments(inputs)
        parameter = sig.parameters.get(name)
        default = sig.empty if parameter is None else parameter.default
        is_by_keyword = parameter is not None and parameter.kind is parameter.KEYWORD_ONLY
        if is_by_keyword and default is not sig.empty:
            return default
        self._n_placeholders += 1
        if self._n_placeholders > self._n_inputs and default is not sig.empty:
            return default
        return super()._proxy_placeholder(name, concrete_args, sig, fn_for_analysis)

    def _apply(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Record an autograd function as one node if an argument is traced; else apply it."""
        if not any(isinstance(a, fx.Proxy | nn.Parameter) for a in args):
            return patches.original_apply(function, *args)
        given: list[Any] = []
        fixed: dict[int, Any] = {}
        for position, argument in enumerate(args):
            if any(isinstance(leaf, nn.Module) for leaf in tree_leaves(argument)):
                raise ConstructError(
                    f"the autograd function {function.__name__} is given a module, whose weights "
                    "no operator holds: call the module outside of it"
                )
            if _can_be_argument(argument):
                given.append(argument)
            else:
                fixed[position] = argument
        target = CustomFunction(function, fixed)
        return self.create_proxy("call_function", target, tuple(given), {})


def unflatten_output(graph: fx.Graph, spec: TreeSpec | None) -> None:
    """Return the model's own output structure instead of a flat list."""
    assert spec is not None
    (output,) = graph.find_nodes(op="output")
    output.args = (tree_unflatten(list(output.args[0]), spec),)
    graph.set_codegen(fx.graph.CodeGen())  # the present one would flatten again


def users_frame() -> str | None:
    """The line of user code that runs, as in a traceback."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_from_user(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return None
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def _can_be_argument(argument: Any) -> bool:
    """Whether an fx node can hold a value as an argument."""
    if isinstance(argument, tuple | list):
        return all(map(_can_be_argument, argument))
    return argument is None or isinstance(argument, (fx.Proxy, Tensor, *base_types))

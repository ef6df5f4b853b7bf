"""Run a model on the meta device or on fake tensors, for shapes, FLOPs and gradient flow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from harness.runtime.capture.meta_copy import fake_copy, meta_copy
from harness.runtime.capture.operators import is_opaque
from harness.runtime.capture.saved import SavedTensors, call_saving, tensors_within
from harness.runtime.models.task import Task
from harness.runtime.tracing.constructs import NO_GRAD, GradientHooks
from harness.runtime.tracing.patches import without_values

# Their operands have no weights: an attention's scores and weighted sums.
_OF_ACTIVATIONS = ("bmm", "baddbmm", "scaled_dot_product")


class _Whole(nullcontext[None]):
    """Takes the place of torch's tracker of modules, whose hooks refuse `torch.autograd.grad`."""

    parents = frozenset({"Global"})


def _of_conv_backward(
    grad: list[int], x: list[int], weight: list[int], *rest: Any, out_shape: Any
) -> int:
    """FLOPs of a convolution's gradients: as many as forward for each.

    torch's formula counts the gradient of the weight as if there were one group of channels.
    """
    is_transposed, is_wanted = rest[4], rest[7]
    forward = conv_flop_count(x, weight, grad, transposed=is_transposed)
    return int(forward * sum(is_wanted[:2]))


class StepFlops(NamedTuple):
    """FLOPs, and how many of them multiply activations with each other."""

    total: float
    scores: float


_NO_FLOPS = StepFlops(0.0, 0.0)


class FlopCounts(FlopCounterMode):
    """Counts FLOPs in its block; a multiplication and an addition count as two."""

    def __init__(self) -> None:
        known = {torch.ops.aten.convolution_backward: _of_conv_backward}
        super().__init__(display=False, custom_mapping=known)
        self.mod_tracker: Any = _Whole()

    @property
    def counted(self) -> StepFlops:
        found = self.get_flop_counts().get("Global", {}).items()
        scores = sum(n for of, n in found if any(a in str(of) for a in _OF_ACTIVATIONS))
        return StepFlops(float(self.get_total_flops()), float(scores))


@dataclass
class MetaResult:
    """Value and FLOPs of one node, from a run on the meta device.

    Attributes:
        has_gradient: the loss has a gradient with respect to the value.
        received: the tensors that its readers take: of a tuple, some of the elements.
    """

    value: Any = None
    forward: StepFlops = _NO_FLOPS
    backward: StepFlops = _NO_FLOPS
    saved: SavedTensors | None = None
    has_gradient: bool = False
    received: Sequence[Tensor] = ()


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        fresh = value.detach()
        # A copy of the leaf, because in-place operators refuse leaves.
        return fresh.requires_grad_().clone() if value.requires_grad else fresh
    return value


class _MetaRun(fx.Interpreter):
    """Runs each node by itself on meta tensors and counts its FLOPs; equal calls run once."""

    def __init__(self, module: fx.GraphModule, graph: fx.Graph) -> None:
        super().__init__(module, graph=graph)
        self.measured: dict[fx.Node, MetaResult] = {}
        self._modules = dict(module.named_modules())
        self._known: dict[str, MetaResult] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output", "get_attr"):
            self.measured[n] = MetaResult(super().run_node(n))
            return self.measured[n].value
        given = self.fetch_args_kwargs_from_env(n)
        key = str(n) if is_opaque(n, self._modules) else self._key(n, given)
        if key not in self._known:
            call = partial(getattr(self, n.op), n.target)
            # One copy of each, because an attention computes otherwise if arguments are one tensor.
            own = {x: fx.node.map_aggregate(self.env[x], _detached) for x in n.all_input_nodes}
            copied = fx.node.map_arg((n.args, n.kwargs), own.__getitem__)
            self._known[key] = _measure(n, call, copied, self._weights(n))
        self.measured[n] = self._known[key]
        return self.measured[n].value

    def _weights(self, n: fx.Node) -> list[Tensor]:
        module = self._modules.get(str(n.target)) if n.op == "call_module" else None
        return [] if module is None else [*module.parameters(), *module.buffers()]

    def _key(self, n: fx.Node, given: Any) -> str:
        """Equal for equal calls: the same function or kind of module, of alike arguments."""
        called: Any = n.target
        if n.op == "call_module":
            parts = list(self._modules[str(n.target)].modules())
            weights = [_description(w) for part in parts for w in part.parameters(recurse=False)]
            called = [(type(part), _settings(part)) for part in parts], weights
        described = fx.node.map_aggregate(given, _description)
        order = fx.node.map_arg((n.args, n.kwargs), n.all_input_nodes.index)
        return f"{n.op} {called} {described} {order} {n.meta.get(NO_GRAD)}"


def _settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _description(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return f"{value.shape} {value.stride()} {value.dtype} {value.requires_grad}"


def _measure(n: fx.Node, call: Callable[..., Any], given: Any, weights: list[Tensor]) -> MetaResult:
    run = partial(call, *given)
    saved: SavedTensors | None = None
    try:
        with FlopCounts() as forward:
            value, saved = call_saving(run, given, weights)
    except Exception:  # of hooks; the call raises its own again
        with FlopCounts() as forward:
            value = run()
    has_gradient = not n.meta.get(NO_GRAD) and not isinstance(n.target, GradientHooks)
    outputs = [x for x in tensors_within(value) if x.requires_grad and has_gradient]
    with FlopCounts() as backward:
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    return MetaResult(value, forward.counted, backward.counted, saved)


def run_on_meta(module: fx.GraphModule, examples: tuple[Tensor, ...]) -> dict[fx.Node, MetaResult]:
    """Run every node of a traced model on the meta device and return its value and FLOPs."""
    meta = meta_copy(module)
    for part in meta.modules():  # A user's hooks run in training only.
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
    run = _MetaRun(meta, module.graph)
    run.run(*(example.to("meta") for example in examples))
    return _with_readers(module.graph, run.measured)


def _with_readers(
    graph: fx.Graph, measured: dict[fx.Node, MetaResult]
) -> dict[fx.Node, MetaResult]:
    """Tell what readers take of each value, and which values the loss reads differentiably;
    backward does not run for others."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or (
            not live.isdisjoint(node.users)
            and any(x.requires_grad for x in tensors_within(measured[node].value))
        ):
            live.add(node)
    for node in reversed(measured):
        found = measured[node]
        users = [] if isinstance(found.value, Tensor) else list(node.users)
        is_taken_apart = users and all(user.target is getitem for user in users)
        received = [x for user in users for x in measured[user].received]
        measured[node] = replace(
            found,
            has_gradient=node in live,
            backward=found.backward if node in live else _NO_FLOPS,
            received=received if is_taken_apart else tensors_within(found.value),
        )
    return measured


def parameters_of(node: fx.Node, module: fx.GraphModule) -> dict[str, nn.Parameter]:
    """The parameters of a node, by name in the model."""
    if node.op == "call_module":
        path = str(node.target)
        owned = module.get_submodule(path).named_parameters()
        return {f"{path}.{name}": parameter for name, parameter in owned}
    if node.op == "get_attr":
        value = attrgetter(str(node.target))(module)
        return {str(node.target): value} if isinstance(value, nn.Parameter) else {}
    return {}


def untrained(module: fx.GraphModule, measured: dict[fx.Node, MetaResult]) -> frozenset[str]:
    """Names of used parameters that require a gradient but have no gradient path to the output."""
    used: set[int] = set()
    trained: set[int] = set()
    for node in module.graph.nodes:
        parameters = {id(parameter) for parameter in parameters_of(node, module).values()}
        used |= parameters
        trained |= parameters if measured[node].has_gradient else set()
    return frozenset(
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if id(parameter) in used - trained and parameter.requires_grad
    )


_log = logging.getLogger(__name__)


@contextmanager
def _lstms_as_products() -> Iterator[None]:
    """Keep LSTMs from cuDNN and oneDNN, whose single operators the counter does not know."""
    libraries: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)
    before = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, was_enabled in zip(libraries, before, strict=True):
            library.enabled = was_enabled


def step_flops(task: Task, n_samples: int) -> StepFlops | None:
    """FLOPs of forward, loss and backward over `n_samples`; None if the model needs real values.

    A multiplication and an addition count as two. The gradient of the model's input is not
    computed, so it does not count. Source: torch.utils.flop_counter.

    Fake tensors have shapes only, so neither times nor memory peaks of the run change.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # The counter knows the products of the plain attention on every device.
    math = sdpa_kernel(SDPBackend.MATH)
    try:
        copied = replace(task, model=fake_copy(task.model, mode))
        device = next((p.device for p in copied.model.parameters()), torch.device("cpu"))
        with without_values(), mode, device, math, _lstms_as_products(), FlopCounts() as counter:
            inputs = [torch.empty((n_samples, *x.shape), dtype=x.dtype) for x in task.inputs]
            copied.sum_loss(copied.model(*inputs), task.draw_targets(n_samples)).backward()
    except (RuntimeError, NotImplementedError, ValueError) as error:
        _log.warning("FLOPs are not counted, the model needs real values: %s", error)
        return None
    return StepFlops(*counter.counted)

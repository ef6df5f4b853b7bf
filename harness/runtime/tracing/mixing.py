"""Find operators that mix samples (let one sample's result depend on others) by running them.

The test runs an operator by itself on four random samples, then on one and three of them. If it is
sample-wise, the output and input gradients of the four are the concatenated ones of the two parts,
and weight gradients are their sums. This finds mixing in softmax, roll, cumsum, sort, mean and
matmul over the batch, in values computed from the batch size, and in a user's autograd functions,
hooks and untraced modules. Kinds that are sample-wise by definition (a convolution) are not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from harness.errors import WITHOUT_PLAN
from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.capture.meta_run import parameters_of
from harness.runtime.capture.operators import UNDEFINED, DropoutOff, draws_random, is_opaque
from harness.runtime.capture.sample_dims import (
    Values,
    batch_sizes,
    changing_dims,
    is_uneven,
    placed,
)
from harness.runtime.capture.saved import tensors_within
from harness.runtime.devices.precision import Float32Watch, has_gradients
from harness.runtime.models.attention import GroupedAttention
from harness.runtime.tracing.constructs import (
    ConstructError,
    GradientHooks,
    callable_of,
    function_name,
)
from harness.runtime.tracing.hooks import hooks_of, is_stateless

_log = logging.getLogger(__name__)

_TOLERANCE = 1e-9
_FLOAT32_TOLERANCE = 1e-5  # of user code that computes in float32, whatever its inputs
# Larger operators run with smaller dims (samples excepted), users' code not at all.
_MOST_ELEMENTS = 1 << 24
_LARGEST_KEPT = 16  # size of a dim that is made smaller
# Limits of random integers, of the first argument and of the others. A lookup finds other samples
# only if the values differ, and only small integers are indices of every dim. Real numbers are
# normal at first, and then between 0 and 1, of which roots, logarithms and angles are no NaN.
_LIMITS = ((1 << 10, 2), (1 << 10, 1), (2, 2), (1, 1))
# Kinds that are sample-wise if dim 0 is the batch.
_ROW_WISE = ("linear", "pool", "layer_norm", "embedding")
_BATCHED = ("conv2d", "attention")  # with four dims
_POINTWISE = ("elementwise", "add")
# Modules that draw in evaluation, too; and functions that may drop some of the samples they mix.
_RANDOM = (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)
_ATTENTIONS = (
    "scaled_dot_product_attention", "multi_head_attention_forward", "attention_region",
)  # fmt: skip


class SampleMixing:
    """Finds the operators of one traced model that mix samples.

    Args:
        values: `values_by_batch` of it.
    """

    def __init__(self, module: fx.GraphModule, values: list[Values]) -> None:
        self._module, self._values, self._batches = module, values, batch_sizes(values)
        self._modules = dict(module.named_modules())
        self._known: dict[str, bool | None] = {}

    def is_uneven(self, node: fx.Node) -> bool:
        """Whether a node reads or makes a tensor that holds some samples only."""
        values = ([each.get(one) for each in self._values] for one in (node, *node.all_input_nodes))
        shapes = ([[t.shape for t in tensors_within(v)] for v in found] for found in values)
        return any(is_uneven(found, self._batches) for found in shapes)

    def mixes(self, node: fx.Node, kind: str, *, is_known: bool) -> bool:
        """Whether a sample's result, or a running statistic, depends on other samples or on the
        batch size.

        Args:
            is_known: whether it keeps samples apart if it cannot be run.
        """
        if self._keeps_statistics(node) or self._counts_rows(node):
            return True
        is_opaque_node = is_opaque(node, self._modules)
        found = self._classify_opaque(node) if is_opaque_node else self._classify(node, kind)
        return not is_known if found is None else found

    def _classify(self, node: fx.Node, kind: str) -> bool | None:
        given = self._arguments(node)
        if not self._values or self._is_known_sample_wise(node, kind, given):
            return False
        if kind in _POINTWISE or any(one.is_mixed for one in given):
            return True  # pointwise of a number of the batch, from which random values may be far
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        name, is_fixed = function_name(node.target), not any(one.is_of_batch for one in given)
        is_random = name not in _ATTENTIONS if module is None else isinstance(module, _RANDOM)
        if is_fixed or name in UNDEFINED or (is_random and draws_random(node, self._module)):
            return False
        operator = f"{node.target}" if module is None else f"{type(module)} {module}"
        key = f"{operator} {_described(node, given)}"
        if key not in self._known:
            self._known[key] = self._test(node, given)
        return self._known[key]

    def _classify_opaque(self, node: fx.Node) -> bool | None:
        """Test a user's code that was not traced; hooks that keep state are not run."""
        given = self._arguments(node)
        if any(one.is_mixed for one in given):
            return True
        outputs = [tensors_within(each.get(node)) for each in self._values]
        if not outputs or any(a.shape == b.shape for a, b, *_ in zip(*outputs, strict=True)):
            return True  # the shape of an output does not change with the batch size
        target = self._modules.get(str(node.target)) if node.op == "call_module" else node.target
        modules = target.modules() if isinstance(target, nn.Module) else ()
        hooks = [hook for module in modules for hook in hooks_of(module)]
        if isinstance(target, GradientHooks):
            hooks = target.hooks
        if not all(map(is_stateless, hooks)):
            return None
        weights = parameters_of(node, self._module).values()
        return self._test(node, given, sum(w.numel() for w in weights), is_strict=True)

    def _test(
        self, node: fx.Node, given: Sequence[_Argument], n_weights: int = 0, is_strict: bool = False
    ) -> bool | None:
        drawn = (tensor for one in given for tensor in tensors_within(one.values[:1]))
        is_large = n_weights + sum(tensor.numel() for tensor in drawn) > _MOST_ELEMENTS
        if is_large and is_strict:
            return None
        kept = {s for w in parameters_of(node, self._module).values() for s in w.shape}
        smaller = _smaller(given, kept) if is_large else {}
        is_still = not is_strict and draws_random(node, self._module)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
            torch.manual_seed(0)
            for limits in _LIMITS:
                try:
                    call = callable_of(node, self._modules)
                    call = _on_cpu(call, is_still) if isinstance(call, nn.Module) else call
                    found = _MixingTest(node, call, given, limits, smaller).classify(is_strict)
                except Exception as error:  # user code may raise anything on random values
                    _log.info("operator %s does not run on random samples: %s", node.name, error)
                else:
                    if found is not None:
                        return found
            return None

    def _is_known_sample_wise(self, node: fx.Node, kind: str, given: Sequence[_Argument]) -> bool:
        """Whether an operator's kind implies that it is sample-wise, or the executor handles its
        mixing (batch normalization)."""
        module = self._modules.get(str(node.target)) if node.op == "call_module" else None
        if kind == "batch_norm" or isinstance(module, _BatchNorm) or node.target is placed:
            return True
        if kind in _POINTWISE:
            return all(one.is_tensor or not one.is_of_batch for one in given)
        if not given or not given[0].dims:
            return False
        n_dims, dims = given[0].values[0].dim(), [one.dims for one in given if one.is_of_batch]
        if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            return given[0].dims == (0 if module.batch_first else 1,) and n_dims == 3
        if dims != [(0,)] and (kind != "attention" or {*dims} != {(0,)}):
            return False  # such as a table, keys or a shape to normalize of all samples
        if type(module) is GroupedAttention:  # a test of 4 x 2048 tokens takes 40 s
            return True
        return (kind in _ROW_WISE and n_dims > 1) or (kind in _BATCHED and n_dims == 4)

    def _keeps_statistics(self, node: fx.Node) -> bool:
        """Whether an instance norm averages the statistics of all samples in buffers.

        Raises:
            ConstructError: by a function, whose buffers a graph cannot keep.
        """
        if node.op == "call_module":
            module = self._modules[str(node.target)]
            is_training = isinstance(module, _InstanceNorm) and module.training
            return is_training and bool(module.track_running_stats)
        if function_name(node.target) != "instance_norm":
            return False
        held = {str(n.target) for n in node.all_input_nodes if n.op == "get_attr"}
        if not held.isdisjoint(name for name, _ in self._module.named_buffers()):
            raise ConstructError(
                "forward gives running statistics to the function instance_norm: use a module, "
                f"such as nn.InstanceNorm2d, or {WITHOUT_PLAN}"
            )
        return False

    def _counts_rows(self, node: fx.Node) -> bool:
        """Whether a lookup divides the gradient of a row by how often the batch has it, or shortens
        the rows that the batch has in place."""
        if not function_name(node.target).startswith("embedding") and node.op != "call_module":
            return False
        module = self._modules.get(str(node.target))
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return module.scale_grad_by_freq or module.max_norm is not None
        named = node.normalized_arguments(self._module, normalize_to_only_use_kwargs=True)
        given = {} if named is None or module is not None else named.kwargs
        return bool(given.get("scale_grad_by_freq")) or given.get("max_norm") is not None

    def _arguments(self, node: fx.Node) -> list[_Argument]:
        sources = node.all_input_nodes
        return [_Argument(n, [each.get(n) for each in self._values]) for n in sources]


@dataclass(frozen=True)
class _Argument:
    """A node's meta values, for the whole batch, each part, and the size that is trained."""

    node: fx.Node
    values: list[Any]

    @property
    def is_tensor(self) -> bool:
        return bool(self.values) and isinstance(self.values[0], Tensor)

    @property
    def is_of_batch(self) -> bool:
        """Whether its size or, if it has no tensors, its value changes with the batch size."""
        if tensors_within(self.values):
            return bool(self.dims)
        return any(value != self.values[0] for value in self.values)

    @property
    def is_mixed(self) -> bool:
        """Whether several dims change with the batch size, or it differs at the size that is
        trained alone, which a test does not run."""
        tested = replace(self, values=self.values[:3])
        return len(self.dims) > 1 or (self.is_of_batch and not tested.is_of_batch)

    @property
    def dims(self) -> tuple[int, ...]:
        """Dims whose size changes with the batch size."""
        return changing_dims([x.shape for x in self.values]) if self.is_tensor else ()

    def draw(self, limit: int, smaller: Mapping[int, int], *, is_normal: bool) -> Any:
        """Random values for the whole batch, also for weights: the result must not depend on
        their values. Integers are below the limit; sizes but those of samples may be smaller."""
        like = self.values[0]
        if not self.is_tensor:
            return like
        shape = [s if k in self.dims else smaller.get(s, s) for k, s in enumerate(like.shape)]
        if like.is_complex():
            return torch.randn(shape, dtype=torch.complex128)
        if like.is_floating_point():
            return (torch.randn if is_normal else torch.rand)(shape, dtype=torch.float64)
        if like.dtype == torch.bool:
            return torch.rand(shape) < 0.5
        return torch.randint(min(limit, torch.iinfo(like.dtype).max), shape, dtype=like.dtype)

    def part(self, whole: Any, k: int) -> Any:
        """The whole drawn value (k = 0), or the slice of part k."""
        if not self.is_tensor:
            is_device = isinstance(self.values[k], torch.device)
            return torch.device("cpu") if is_device else self.values[k]
        if k and self.dims:
            dim = self.dims[0]
            n_before = sum(value.shape[dim] for value in self.values[1:k])
            whole = whole.narrow(dim, n_before, self.values[k].shape[dim])
        leaf = whole.detach().clone()
        return leaf.requires_grad_(has_gradients(leaf) and self.values[0].requires_grad)


class _MixingTest:
    def __init__(
        self,
        node: fx.Node,
        call: Callable[..., Any],
        arguments: Sequence[_Argument],
        limits: tuple[int, int],
        smaller: Mapping[int, int],
    ) -> None:
        self._node, self._call, self._arguments = node, call, arguments
        self._smaller = smaller
        self._drawn = {
            a.node: a.draw(limits[k > 0], smaller, is_normal=limits == _LIMITS[0])
            for k, a in enumerate(arguments)
        }
        self._cotangents: list[Tensor] = []
        module = call if isinstance(call, nn.Module) else nn.Module()
        self._module, self._weights = module, [p for p in module.parameters() if p.requires_grad]

    def classify(self, is_strict: bool) -> bool | None:
        """Compare the whole batch with its parts.

        Args:
            is_strict: NaN, which hides its inputs, and a written buffer give None.
        """
        before, watch = self._buffers(), Float32Watch() if is_strict else None
        with watch or DropoutOff():
            whole, *parts = (self._run(k) for k in range(3))
        tolerance = _FLOAT32_TOLERANCE if watch and watch.is_seen else _TOLERANCE
        has_nan = any(bool(x.isnan().any()) for x in (*whole[0], *whole[1]))
        if is_strict and (has_nan or self._buffers() != before):
            return None
        outputs = list(zip(whole[0], *(part[0] for part in parts), strict=True))
        gradients = zip(whole[1], *(part[1] for part in parts), strict=True)
        # A weight's gradient is a sum over samples, unless the output has no batch dim.
        is_fixed = all(a.shape == b.shape for a, b, *_ in outputs)
        is_sample_wise = all(_is_joined(a, b, tolerance) for a, *b in outputs) and all(
            (_is_joined if is_fixed or a.shape != b[0].shape else _is_sum)(a, b, tolerance)
            for a, *b in gradients
        )
        return not is_sample_wise

    def _buffers(self) -> list[tuple[int, int]]:
        return [(id(buffer), buffer._version) for buffer in self._module.buffers()]

    def _run(self, k: int) -> tuple[list[Tensor], list[Tensor]]:
        """Outputs and gradients of the whole batch (k = 0) or of part k."""
        given = {one.node: one.part(self._drawn[one.node], k) for one in self._arguments}
        args, kwargs = fx.node.map_arg((self._node.args, self._node.kwargs), given.__getitem__)
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._prepared)
        outputs = tensors_within(self._call(*args, **kwargs))
        if not k:
            self._cotangents = [torch.randn_like(x, dtype=torch.float64) for x in outputs]
        cotangents = [self._cotangent(j, x, k) for j, x in enumerate(outputs)]
        trained = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if x.requires_grad]
        leaves = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        variables = [*leaves, *self._weights]
        gradients: list[Tensor] = []
        if trained and variables:
            xs, cs = zip(*trained, strict=True)
            found = torch.autograd.grad(xs, variables, cs, allow_unused=True)
            pairs = zip(found, variables, strict=True)
            gradients = [torch.zeros_like(w) if g is None else g for g, w in pairs]
        return [x.detach() for x in outputs], gradients

    def _prepared(self, value: Any) -> Any:
        """A copy, because autograd refuses in-place changes of leaves; of a size the smaller."""
        if isinstance(value, Tensor):
            return value.clone()
        return self._smaller.get(value, value) if type(value) is int else value

    def _cotangent(self, j: int, output: Tensor, k: int) -> Tensor:
        whole = self._cotangents[j]
        for dim, (size, part) in enumerate(zip(whole.shape, output.shape, strict=True)):
            if size != part:
                whole = whole.narrow(dim, 0 if k == 1 else size - part, part)
        return whole.to(output.dtype)


def _smaller(given: Sequence[_Argument], kept: set[int]) -> dict[int, int]:
    """A small size for each large one of dims that are not samples, unlike for unlike sizes."""
    tensors = [(one.dims, one.values[0].shape) for one in given if one.is_tensor]
    sizes = {s for dims, shape in tensors for k, s in enumerate(shape) if k not in dims}
    large = sorted(size for size in sizes - kept if size > _LARGEST_KEPT)
    return {size: small for small, size in enumerate(large, _LARGEST_KEPT + 1)}


def _described(node: fx.Node, given: Sequence[_Argument]) -> str:
    """A key that is equal for calls with the same arguments and shapes."""
    place = {one.node: f"#{k}" for k, one in enumerate(given)}
    args = fx.node.map_arg((node.args, node.kwargs), place.__getitem__)
    shapes = [
        [(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in one.values]
        for one in given
    ]
    return f"{args} {shapes}"


def _is_joined(whole: Tensor, parts: Sequence[Tensor], tolerance: float) -> bool:
    """Whether the whole is the concatenation of its parts; if no dim grows, whether all equal."""
    if any(part.dim() != whole.dim() for part in parts):
        return False
    dims = changing_dims([x.shape for x in (whole, *parts)])
    if not dims:
        return all(_is_near(whole, part, tolerance) for part in parts)
    if len(dims) > 1 or sum(part.shape[dims[0]] for part in parts) != whole.shape[dims[0]]:
        return False
    return _is_near(whole, torch.cat(list(parts), dims[0]), tolerance)


def _is_sum(whole: Tensor, parts: Sequence[Tensor], tolerance: float) -> bool:
    has_one_shape = all(part.shape == whole.shape for part in parts)
    return has_one_shape and _is_near(whole, torch.stack(list(parts)).sum(0), tolerance)


def _is_near(one: Tensor, other: Tensor, tolerance: float) -> bool:
    wide = torch.complex128 if one.is_complex() else torch.float64
    return one.shape == other.shape and torch.allclose(
        one.to(wide), other.to(wide), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def _on_cpu(module: nn.Module, is_still: bool) -> nn.Module:
    """A float64 copy with random weights, which drops nothing if `is_still`."""
    copied = meta_copy(module).to_empty(device="cpu").double()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.normal_(std=0.5)
        for buffer in copied.buffers():
            buffer.fill_(1)
    return copied.eval() if is_still else copied

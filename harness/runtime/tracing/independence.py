"""Whether an operator that runs a user's own code treats each sample by itself, found by a test.

The operator is run on four samples, then on one and on the other three: its output and the
gradients of its inputs must be those of the parts side by side, those of its weights their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from harness.runtime.meta_copy import meta_copy
from harness.runtime.tracing.functions import GradientHooks, OpaqueFunction

_PARTS = ((0, 1), (1, 4))
_N_SAMPLES = 4
_TOLERANCE = 1e-9
# A larger operator is taken to mix samples, which costs speed alone.
_MOST_ELEMENTS = 1 << 24
# What writes beyond a hook's own names: its next call might do something else.
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_SUBSCR", "DELETE_")
_WRITING_CALLS = ("append", "extend", "insert", "pop", "update", "setdefault", "write", "print")


@dataclass(frozen=True)
class Argument:
    """A tensor that an operator is given.

    Attributes:
        rows: of each sample, along `dim`.
        dim: that counts samples; None where none does.
    """

    tensor: Tensor
    dim: int | None = None
    rows: int = 1


def is_stateless(hook: Callable[..., Any]) -> bool:
    """Whether a hook only computes, as far as its code shows: others are not run for a test."""
    import dis

    hook = getattr(hook, "func", hook)
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None:
        return False
    writes = any(one.opname.startswith(_STORES) for one in dis.get_instructions(code))
    calls = any(name in _WRITING_CALLS for name in code.co_names)
    return not writes and not calls


def runs_stateless_hooks(target: Any) -> bool:
    """Whether all hooks of a function or a module may be run for a test."""
    if isinstance(target, GradientHooks):
        return all(map(is_stateless, target.hooks))
    if not isinstance(target, nn.Module):
        return True
    tables = (
        table
        for m in target.modules()
        for table in (
            m._backward_hooks, m._backward_pre_hooks, m._forward_hooks, m._forward_pre_hooks
        )
    )  # fmt: skip
    return all(is_stateless(hook) for table in tables for hook in table.values())


def acts_by_samples(
    target: OpaqueFunction | nn.Module, args: Any, arguments: dict[fx.Node, Argument]
) -> bool:
    """Run an operator on random samples of the shapes of its arguments; equal on every rank.

    Args:
        args: the node's positional and keyword arguments.
        arguments: of all nodes among them.
    """
    sizes = [one.tensor.numel() for one in arguments.values()]
    weights = list(target.parameters()) if isinstance(target, nn.Module) else []
    if sum(sizes) + sum(w.numel() for w in weights) > _MOST_ELEMENTS:
        return False
    if not runs_stateless_hooks(target):
        return False
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
        torch.manual_seed(0)
        try:
            return _Trial(target, args, arguments).is_by_samples()
        except Exception:  # whatever the user's code raises on such inputs
            return False


def _drawn(like: Tensor, shape: Sequence[int]) -> Tensor:
    if like.dtype.is_floating_point:
        return torch.randn(tuple(shape), dtype=torch.float64)
    return torch.zeros(tuple(shape), dtype=like.dtype)


class _Trial:
    def __init__(
        self, target: OpaqueFunction | nn.Module, args: Any, arguments: dict[fx.Node, Argument]
    ) -> None:
        self._args, self._arguments = args, arguments
        self._call: Callable[..., Any] = target
        self._parameters: list[Tensor] = []
        self._buffers: list[Tensor] = []
        if isinstance(target, nn.Module):
            self._call = _on_cpu(target)
            self._parameters = [p for p in self._call.parameters() if p.requires_grad]
            self._buffers = list(self._call.buffers())
        self._given = {node: self._draw(one) for node, one in arguments.items()}

    def _draw(self, one: Argument) -> Tensor:
        shape = list(one.tensor.shape)
        if one.dim is not None:
            shape[one.dim] = one.rows * _N_SAMPLES
        return _drawn(one.tensor, shape)

    def is_by_samples(self) -> bool:
        versions = [buffer._version for buffer in self._buffers]
        whole = self._run(0, _N_SAMPLES, None)
        if versions != [buffer._version for buffer in self._buffers] or self._has_new_buffers():
            return False  # written once a batch
        again = self._run(0, _N_SAMPLES, whole.cotangents)
        parts: list[_Result] = []
        for start, stop in _PARTS:
            parts.append(self._run(start, stop, whole.cotangents))
        return whole.is_equal([again]) and whole.is_equal(parts)

    def _has_new_buffers(self) -> bool:
        now = self._call.buffers() if isinstance(self._call, nn.Module) else ()
        return {id(buffer) for buffer in now} != {id(buffer) for buffer in self._buffers}

    def _run(self, start: int, stop: int, cotangents: list[Tensor] | None) -> _Result:
        leaves = {
            node: self._cut(one, self._given[node], start, stop)
            for node, one in self._arguments.items()
        }
        args, kwargs = fx.node.map_arg(self._args, leaves.__getitem__)
        given = tree_leaves(self._call(*args, **kwargs))
        outputs = [x for x in given if isinstance(x, Tensor)]
        if cotangents is None:
            cotangents = [torch.randn_like(x) for x in outputs]
        own = [
            _fitted(c, x, start, stop) if x.is_floating_point() else c
            for c, x in zip(cotangents, outputs, strict=True)
        ]
        wanted = [x for x in (*leaves.values(), *self._parameters) if x.requires_grad]
        trained = [(x, c) for x, c in zip(outputs, own, strict=True) if x.requires_grad]
        gradients: Iterable[Tensor | None] = [None] * len(wanted)
        if trained and wanted:
            xs, cs = zip(*trained, strict=True)
            gradients = torch.autograd.grad(xs, wanted, cs, allow_unused=True)
        return _Result([x.detach() for x in outputs], list(gradients), cotangents)

    def _cut(self, one: Argument, tensor: Tensor, start: int, stop: int) -> Tensor:
        if one.dim is not None:
            tensor = tensor.narrow(one.dim, start * one.rows, (stop - start) * one.rows)
        leaf = tensor.detach().clone()
        return leaf.requires_grad_(one.tensor.requires_grad and leaf.is_floating_point())


@dataclass(frozen=True)
class _Result:
    outputs: list[Tensor]
    gradients: list[Tensor | None]
    cotangents: list[Tensor]

    def is_equal(self, parts: list[_Result]) -> bool:
        """Whether parts give the same: outputs side by side, gradients so or added up."""
        for k, output in enumerate(self.outputs):
            theirs = [part.outputs[k] for part in parts]
            if not _is_near(output, theirs[0] if len(parts) == 1 else _beside(output, theirs)):
                return False
        for k, gradient in enumerate(self.gradients):
            found = [part.gradients[k] for part in parts]
            there = [g for g in found if g is not None]
            if gradient is None or len(there) < len(found):
                if gradient is not None or there:
                    return False
            elif not _is_near(gradient, _beside(gradient, there)) and not _is_near(
                gradient, _added(there)
            ):
                return False
        return True


def _beside(whole: Tensor, parts: list[Tensor]) -> Tensor | None:
    """Parts joined along the dim in which they are smaller than the whole."""
    if any(part.dim() != whole.dim() for part in parts):
        return None
    sizes = zip(whole.shape, parts[0].shape, strict=True)
    dims = [dim for dim, (a, b) in enumerate(sizes) if a != b]
    return torch.cat(parts, dims[0]) if len(dims) == 1 else None


def _added(parts: list[Tensor]) -> Tensor | None:
    is_alike = all(part.shape == parts[0].shape for part in parts)
    return torch.stack(parts).sum(0) if is_alike else None


def _is_near(whole: Tensor, joined: Tensor | None) -> bool:
    return (
        joined is not None
        and joined.shape == whole.shape
        and torch.allclose(joined.double(), whole.double(), rtol=_TOLERANCE, atol=_TOLERANCE)
    )


def _fitted(cotangent: Tensor, output: Tensor, start: int, stop: int) -> Tensor:
    """The rows of a cotangent that belong to some samples."""
    sizes = zip(cotangent.shape, output.shape, strict=True)
    for dim, (whole, own) in enumerate(sizes):
        if whole != own:
            rows = whole // _N_SAMPLES
            return cotangent.narrow(dim, start * rows, (stop - start) * rows)
    return cotangent


def _on_cpu(module: nn.Module) -> nn.Module:
    """A copy with weights of its own."""
    copied = meta_copy(module).to_empty(device="cpu").double()
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.normal_(std=0.5)
        for buffer in copied.buffers():
            buffer.fill_(1)
    return copied

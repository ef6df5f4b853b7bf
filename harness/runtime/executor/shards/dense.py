"""Shards of linear layers, embeddings and layer normalisation.

Dims are identified by position, not by their names in the graph: the last dim is the features, all
others pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.domain.einsum import equation_of
from harness.domain.partition import Interval
from harness.runtime.executor.shards.base import Given, Held, Shard, ShardSpec, operands_in
from harness.runtime.executor.shards.regions import Region
from harness.runtime.tracing.matrix_products import transposed_linear

# Multiplies an input by weight and bias, as F.linear does.
Linear = Callable[[Tensor, nn.Parameter, nn.Parameter | None], Tensor]


class LinearShard(Shard):
    """Some output features of a linear layer, or a partial sum over some input features.

    Args:
        is_transposed: the weight is (inputs, outputs).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        part: ShardSpec,
        weight: Held,
        bias: Held | None,
        summed: Interval,
        inward: Region,
        *,
        is_transposed: bool,
    ) -> None:
        super().__init__([inward])
        self.is_transposed = is_transposed
        made = part.output[-1]
        self.copy_slice(part, "weight", weight, (summed, made) if is_transposed else (made, summed))
        # Only the first part of a partial sum adds the bias.
        self.copy_slice(part, "bias", bias if summed[0] == 0 else None, (made,))

    def compute(self, x: Tensor, linear: Linear | None = None) -> Tensor:
        linear = linear or (transposed_linear if self.is_transposed else F.linear)
        return linear(x, self.weight, self.bias)


def make_linear(part: ShardSpec) -> LinearShard | None:
    """nn.Linear, F.linear or a product by a transposed weight, cut along any dims."""
    weight, bias = part.held("weight"), part.held("bias")
    if part.module is None:
        named = part.named_arguments("input", "weight", "bias") or {}
        weight, bias = named.get("weight"), named.get("bias")
    is_held = isinstance(weight, Held) and (bias is None or isinstance(bias, Held))
    if not is_held or len(part.wanted) != 1:
        return None
    assert weight is not None
    is_transposed = part.function == transposed_linear.__name__
    n_summed = part.tensor(weight).shape[0 if is_transposed else 1]
    summed = part.partial("contraction") or (0, n_summed)
    inward = part.region((*part.output[:-1], summed))
    return LinearShard(part, weight, bias, summed, inward, is_transposed=is_transposed)


class EmbeddingShard(Shard):
    """Some columns of a table, or a partial sum over some rows: 0 for indices of other rows.

    Args:
        look_up: F.embedding or F.embedding_bag.
        options: keyword arguments of `look_up`.
        indices: constant ones of the model, instead of an input.
    """

    weight: nn.Parameter
    indices: Tensor | None

    def __init__(
        self,
        part: ShardSpec,
        look_up: Callable[..., Tensor],
        options: dict[str, Any],
        inward: list[Region],
        indices: Held | None = None,
    ) -> None:
        super().__init__(inward)
        self._look_up, self._options = look_up, options
        self.copy_slice(part, "indices", indices, part.output[:-1])
        table = part.held("weight")
        assert table is not None
        whole = (0, part.tensor(table).shape[0])
        self._rows = part.partial("contraction") or whole
        self._has_all = self._rows == whole
        self.copy_slice(part, "weight", table, (self._rows, part.output[-1]))

    def compute(self, given: Tensor | None = None) -> Tensor:
        indices = self.indices if given is None else given
        assert indices is not None
        if self._has_all:
            return self._look_up(indices, self.weight, **self._options)
        low, high = self._rows
        is_own = (indices >= low) & (indices < high)
        found = self._look_up((indices - low).where(is_own, 0), self.weight, **self._options)
        return found.where(is_own.unsqueeze(-1), 0)


def make_embedding(part: ShardSpec) -> EmbeddingShard | None:
    """nn.Embedding, or nn.EmbeddingBag over rows of indices, cut along columns."""
    table = part.module
    if not isinstance(table, nn.Embedding | nn.EmbeddingBag) or len(part.wanted) > 1:
        return None
    # These options need whole rows and the whole batch.
    if table.max_norm is not None or table.scale_grad_by_freq:
        return None
    options: dict[str, Any] = {"padding_idx": table.padding_idx}  # and dense gradients
    rows = part.partial("contraction")
    if rows is not None and table.padding_idx is not None:
        is_inside = rows[0] <= table.padding_idx < rows[1]
        options["padding_idx"] = table.padding_idx - rows[0] if is_inside else None
    if not part.wanted:
        (indices,), _ = part.arguments() or ((None,), {})
        is_constant = isinstance(table, nn.Embedding) and isinstance(indices, Held)
        return EmbeddingShard(part, F.embedding, options, [], indices) if is_constant else None
    if isinstance(table, nn.Embedding):
        return EmbeddingShard(part, F.embedding, options, [part.region(part.output[:-1])])
    if len(part.wanted[0].shape) != 2:
        return None
    options |= {"mode": table.mode, "include_last_offset": table.include_last_offset}
    bags = list(part.wanted[0].shape.values())
    inward = part.region((part.output[0], (0, bags[1])))
    return EmbeddingShard(part, F.embedding_bag, options, [inward])


class LayerNormShard(Shard):
    """Layer normalisation, or that by the root mean square, of some rows.

    Args:
        normalise: F.layer_norm with its eps, or F.rms_norm.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        part: ShardSpec,
        weight: Held | None,
        bias: Held | None,
        normalise: Callable[[Tensor, nn.Parameter | None, nn.Parameter | None], Tensor],
        inward: Region,
    ) -> None:
        super().__init__([inward])
        self._normalise = normalise
        self.copy_slice(part, "weight", weight)
        self.copy_slice(part, "bias", bias)

    def compute(self, x: Tensor) -> Tensor:
        return self._normalise(x, self.weight, self.bias)


def make_layer_norm(part: ShardSpec) -> LayerNormShard | None:
    """nn.LayerNorm, nn.RMSNorm or F.layer_norm, cut along dims that are not normalised."""
    module = part.module
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        read: dict[str, Any] = {
            "normalized_shape": module.normalized_shape,
            "weight": part.held("weight"),
            "bias": part.held("bias"),
            "eps": module.eps,
        }
    elif part.function == "layer_norm":
        names = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")
        read = part.named_arguments(*names) or {}
    else:
        return None
    normalized = read.get("normalized_shape")
    if len(part.wanted) != 1 or normalized is None:
        return None
    if any(isinstance(read.get(name), Given) for name in ("weight", "bias")):
        return None
    dims = range(len(part.output) - len(normalized), len(part.output))
    inward = part.region(part.output)
    if not all(part.is_whole(dim) for dim in dims):
        return None
    shape, eps = tuple(normalized), read.get("eps", 1e-5)

    def normalise(x: Tensor, weight: nn.Parameter | None, bias: nn.Parameter | None) -> Tensor:
        if isinstance(module, nn.RMSNorm):
            return F.rms_norm(x, shape, weight, eps)
        return F.layer_norm(x, shape, weight, bias, eps)

    return LayerNormShard(part, read.get("weight"), read.get("bias"), normalise, inward)


class EinsumShard(Shard):
    """An einsum of regions of its inputs and slices of the model's tensors.

    Args:
        operands: inputs and tensors of the model, in order.
        intervals: of the dims that the block cuts, by letter.
    """

    def __init__(
        self,
        part: ShardSpec,
        equation: str,
        operands: dict[Given | Held, str],
        intervals: dict[str, Interval],
        inward: list[Region],
    ) -> None:
        super().__init__(inward)
        self._equation, self._operands = equation, list(operands)
        for k, (operand, letters) in enumerate(operands.items()):
            if isinstance(operand, Held):
                sizes = part.tensor(operand).shape
                cut = [intervals.get(x, (0, n)) for x, n in zip(letters, sizes, strict=True)]
                self.copy_slice(part, f"operand_{k}", operand, cut)

    def compute(self, *inputs: Tensor) -> Tensor:
        operands = [
            getattr(self, f"operand_{k}") if isinstance(operand, Held) else inputs[operand.index]
            for k, operand in enumerate(self._operands)
        ]
        return torch.einsum(self._equation, *operands)


def make_einsum(part: ShardSpec) -> EinsumShard | None:
    """An einsum, or a product by a stack of weights, cut along any dims."""
    equation, read = equation_of(part.operator), part.arguments()
    if equation is None or read is None:
        return None
    found = operands_in(read)
    operands = dict(zip(found, equation.operands, strict=True))
    if len(operands) < len(found):
        return None  # because one weight is two operands
    intervals = dict(zip(equation.result, part.output, strict=True))
    summed = part.partial("contraction")
    if summed is not None:
        intervals[str(part.operator.attrs["summed"])] = summed
    needed = [
        [intervals.get(x, (0, n)) for x, n in zip(letters, wanted.shape.values(), strict=True)]
        for letters, wanted in zip(equation.inputs, part.wanted, strict=True)
    ]
    return EinsumShard(part, equation.plain, operands, intervals, part.regions(needed))

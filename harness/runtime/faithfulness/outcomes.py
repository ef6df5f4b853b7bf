"""Results of training a few batches, and the difference between two of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.runtime.engines.replicas import fingerprint_of

# Rounding of sums in another order; a wrong gradient differs by 1e-3 and more. Differences are
# relative to a tensor's largest element, or to `_FLOOR` times the model's if that is larger.
EXACT = 1e-9
_ROUNDED = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FLOOR = 1e-3


@dataclass(frozen=True)
class TrainedBatch:
    """Results of training on one batch.

    Attributes:
        tensors: by name, in order of comparison.
        random: digests of the random states afterwards, by source.
    """

    loss: float
    tensors: dict[str, Tensor]
    random: dict[str, str]


def bits_of(tensor: Tensor) -> Tensor:
    """A fingerprint of two numbers, equal for equal bits, 0 for zeros of any shape."""
    return fingerprint_of(real_of(tensor)).cpu()


def values_of(tensor: Tensor) -> Tensor:
    """A float64 copy on the host."""
    return real_of(tensor).to("cpu", torch.float64, copy=True)


def real_of(tensor: Tensor) -> Tensor:
    """Convert to a dense tensor, complex to real pairs and booleans to integers."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.to(torch.uint8) if dense.dtype == torch.bool else dense


def rounding_of(model: nn.Module, dtype: str) -> float:
    """The relative rounding tolerance of the narrowest of training dtype and parameter dtypes."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in _ROUNDED}
    dtypes |= {_NARROW[dtype]} if dtype in _NARROW else set()
    return max((_ROUNDED[dtype] for dtype in dtypes), default=EXACT)


def is_equal(found: list[TrainedBatch], expected: list[TrainedBatch]) -> bool:
    """Whether all bits and random states are equal."""
    return all(
        a.random == b.random and all(torch.equal(a.tensors[k], b.tensors[k]) for k in b.tensors)
        for a, b in zip(found, expected, strict=True)
    )


def _differences(
    found: list[TrainedBatch], expected: list[TrainedBatch]
) -> Iterator[tuple[float, int, str]]:
    for k, (a, b) in enumerate(zip(found, expected, strict=True)):
        for kind in ("loss", "gradient", "buffer"):
            names = [name for name in b.tensors if name.startswith(kind)]
            model_wide = max((_largest(b.tensors[name]) for name in names), default=0.0)
            for name in names:
                one, other = a.tensors[name], b.tensors[name]
                scale = max(_largest(other), _FLOOR * model_wide) or 1.0
                yield _distance(one, other) / scale, k, name


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; a missing gradient is one 0, equal to any zeros."""
    if torch.equal(one, other):
        return 0.0
    if one.shape != other.shape and one.any() and other.any():
        return math.inf
    distance = _largest(one - other) if one.any() or other.any() else 0.0
    return math.inf if math.isnan(distance) else distance


def difference_of(found: list[TrainedBatch], expected: list[TrainedBatch]) -> float:
    """The largest relative difference over all tensors."""
    return max(difference for difference, _, _ in _differences(found, expected))


def first_beyond(found: list[TrainedBatch], expected: list[TrainedBatch]) -> tuple[int, str]:
    """Batch and name of the first tensor beyond rounding; else of the one that differs most."""
    differences = list(_differences(found, expected))
    beyond = [one for one in differences if one[0] > _ROUNDED[torch.float32]]
    _, k, name = beyond[0] if beyond else max(differences)
    return k, name


def names_beyond(found: list[TrainedBatch], expected: list[TrainedBatch]) -> set[str]:
    """Names of all tensors that differ beyond rounding."""
    limit = _ROUNDED[torch.float32]
    return {name for distance, _, name in _differences(found, expected) if distance > limit}


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0

"""Which dim of a value counts samples, and whether a part of them can be computed by itself.

Found by running the model once more with twice the batch: a dim that doubles counts samples.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from harness.runtime.capture.meta_copy import meta_copy

_log = logging.getLogger(__name__)

# They keep the order of elements, so samples stay apart only behind dims of the same volume.
_VIEWS = {"view", "reshape", "flatten", "unflatten", "Flatten", "Unflatten", "_unsafe_view"}
_POINTWISE = {"elementwise", "add"}
_NAMES = {
    1: ("sample",),
    2: ("sample", "feature"),
    3: ("sample", "seq", "feature"),
    4: ("sample", "feature", "height", "width"),
    5: ("sample", "feature", "depth", "height", "width"),
}

Shape = Sequence[int]


class _Shapes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        if isinstance(first, Tensor):
            self.found[n] = tuple(first.shape)
        return value


def shapes_at_twice(
    module: fx.GraphModule, examples: Iterable[Tensor]
) -> dict[fx.Node, tuple[int, ...]]:
    """The shape of every tensor (of a tuple, its first) with twice the samples.

    Empty where the model was traced for one batch size only.
    """
    meta = meta_copy(module)
    run = _Shapes(meta)
    doubled = [
        torch.empty(2 * len(x), *x.shape[1:], dtype=x.dtype, device="meta") for x in examples
    ]
    try:
        run.run(*doubled)
    except Exception as error:
        _log.info("the model runs at one batch size only: %s", error)
        return {}
    pairs = zip(module.graph.nodes, meta.graph.nodes, strict=True)
    return {node: run.found[twin] for node, twin in pairs if twin in run.found}


def sample_dims(shape: Shape, at_twice: Shape | None, batch: int) -> tuple[int, ...]:
    """Dims that grow with the batch.

    Args:
        at_twice: the shape with twice the samples; None when unknown, when the first dim counts
            samples if the batch divides it.
    """
    if at_twice is None:
        return (0,) if shape and shape[0] % batch == 0 else ()
    return tuple(k for k, (a, b) in enumerate(zip(shape, at_twice, strict=True)) if b == 2 * a)


def named_shape(shape: Shape, dims: tuple[int, ...]) -> dict[str, int]:
    """Sizes by name: samples where they are, the rest in the usual order; empty if too many.

    Without samples the names are those that the last dims have beside samples.
    """
    if len(dims) != 1:
        names = list(_NAMES.get(len(shape) + 1, ()))[1:]
    else:
        names = list(_NAMES.get(len(shape), ()))[1:]
        names.insert(dims[0], "sample")
    return dict(zip(names, shape, strict=True)) if len(names) == len(shape) else {}


def is_cut_by_samples(
    kind: str,
    function: str,
    output: tuple[Shape, tuple[int, ...]],
    inputs: Iterable[tuple[Shape, tuple[int, ...]]],
) -> bool:
    """Whether some samples of the output need but the same samples of every input.

    Args:
        output: shape and `sample_dims`; likewise of each input.
    """
    shape, dims = output
    if len(dims) != 1:
        return False
    (own,) = dims
    for other, their_dims in inputs:
        if not their_dims:
            continue
        if len(their_dims) > 1:
            return False
        (their,) = their_dims
        if function in _VIEWS:
            fits = math.prod(other[:their]) == math.prod(shape[:own])
        elif kind in _POINTWISE:
            fits = other[their] == shape[own] and len(other) - their == len(shape) - own
        else:
            fits = other[their] == shape[own]
        if not fits:
            return False
    return True

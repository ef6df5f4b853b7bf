"""Find the sample dim of each value, and the operators that can be cut along it.

A dim that doubles in a meta run with twice the batch is a sample dim.
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

# They keep the order of elements, so the dims before the sample dim must keep their volume.
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
        self.shapes: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        first = value[0] if isinstance(value, (tuple, list)) and value else value
        if isinstance(first, Tensor):
            self.shapes[n] = tuple(first.shape)
        return value


def shapes_at_twice(
    module: fx.GraphModule, examples: Iterable[Tensor]
) -> dict[fx.Node, tuple[int, ...]]:
    """The shape of every node's (first) tensor with twice the samples.

    Empty if the model runs at one batch size only.
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
    return {node: run.shapes[twin] for node, twin in pairs if twin in run.shapes}


def sample_dims(shape: Shape, at_twice: Shape | None, batch: int) -> tuple[int, ...]:
    """Dims that grow with the batch.

    Args:
        at_twice: the shape with twice the samples; None: unknown, so that the first dim is a sample
            dim if the batch divides it.
    """
    if at_twice is None:
        return (0,) if shape and shape[0] % batch == 0 else ()
    return tuple(k for k, (a, b) in enumerate(zip(shape, at_twice, strict=True)) if b == 2 * a)


def named_shape(shape: Shape, dims: tuple[int, ...]) -> dict[str, int]:
    """Sizes by dim name: the sample dim in its place, the others in the usual order.

    Empty if there are too many dims. Without a sample dim the names are those after "sample".
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
    """Whether a sample of the output depends only on the same sample of every input.

    Args:
        output: shape and `sample_dims`; each input likewise.
    """
    shape, dims = output
    if len(dims) != 1:
        return False
    (dim,) = dims
    for input_shape, input_dims in inputs:
        if not input_dims:
            continue
        if len(input_dims) > 1:
            return False
        (k,) = input_dims
        if function in _VIEWS:
            fits = math.prod(input_shape[:k]) == math.prod(shape[:dim])
        elif kind in _POINTWISE:
            fits = input_shape[k] == shape[dim] and len(input_shape) - k == len(shape) - dim
        else:
            fits = input_shape[k] == shape[dim]
        if not fits:
            return False
    return True

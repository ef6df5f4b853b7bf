"""Find the sample dim of each value, and the operators that can be cut along it.

A dim whose size is in proportion to that of the batch is a sample dim.

`x[torch.arange(len(x)), index]`, by which models pick positions of each sample, such as the last
token or all keys of a mask, is joined into one operator that keeps samples apart, because by itself
the number of a row depends on the batch. So is a `masked_scatter`, by which models put the features
of images in the places of their tokens, because by itself it gives them to the next places of all
samples.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.capture.saved import tensors_within
from harness.runtime.tracing.constructs import function_name

_log = logging.getLogger(__name__)

# Batch sizes (whole, part, part); the first triple that the model runs with is used, with the size
# that is trained, at which `max(n, 8)` may differ. A model that squeezes changes rank at one
# sample, and one that halves its batch takes even sizes only. The last resort is two batches of the
# size that is trained.
_SIZES = ((4, 1, 3), (5, 2, 3), (10, 4, 6))
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
Values = dict[fx.Node, Any]


def values_by_batch(module: fx.GraphModule, examples: Sequence[Tensor]) -> list[Values]:
    """Meta values by node, for a batch, for two parts of it, and for that of the examples; empty if
    the model runs at one batch size only."""
    meta = meta_copy(module)
    for part in meta.modules():
        if isinstance(part, _BatchNorm):
            part.eval()  # in training it refuses one value per channel
    n = len(examples[0])
    for sizes in (*_SIZES, (2 * n, n, n)):
        wanted = sizes if n in sizes else (*sizes, n)
        try:
            found = [values_at(module, meta, examples, size) for size in wanted]
        except Exception as error:
            _log.info("the model does not run at batch sizes %s: %s", sizes, error)
            continue
        if all(_ranks(each) == _ranks(found[0]) for each in found):
            return found
    return []


def values_at(
    module: fx.GraphModule, meta: fx.GraphModule, examples: Sequence[Tensor], n_samples: int
) -> Values:
    """The values of a module's nodes for inputs like the examples.

    Args:
        meta: its copy on the meta device, which runs.
    """
    run = fx.Interpreter(meta, garbage_collect_values=False, graph=module.graph)
    run.run(*(torch.empty(n_samples, *x.shape[1:], dtype=x.dtype, device="meta") for x in examples))
    return {node: run.env.get(node) for node in module.graph.nodes}


def _ranks(values: Values) -> list[list[int]]:
    return [[tensor.dim() for tensor in tensors_within(value)] for value in values.values()]


def batch_sizes(by_batch: Sequence[Values]) -> list[int]:
    """The numbers of samples of `values_by_batch`."""
    inputs = (next(v for n, v in each.items() if n.op == "placeholder") for each in by_batch)
    return [len(value) for value in inputs]


def sample_dims(
    shape: Shape, by_batch: Sequence[Shape], batches: Sequence[int], batch: int
) -> tuple[int, ...]:
    """Dims that grow with the batch.

    Args:
        by_batch: the shape for several batches; empty: unknown, so that the first dim is a sample
            dim if the batch divides it.
        batches: sizes of those batches.
    """
    if not by_batch:
        return (0,) if shape and shape[0] % batch == 0 else ()
    sizes = enumerate(zip(*by_batch, strict=True))
    return tuple(k for k, found in sizes if found[0] > 0 and _is_proportional(found, batches))


def changing_dims(shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Dims whose size is not the same in all shapes."""
    return tuple(k for k, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1)


def _is_proportional(sizes: Sequence[int], batches: Sequence[int]) -> bool:
    pairs = zip(sizes, batches, strict=True)
    return all(size * batches[0] == sizes[0] * batch for size, batch in pairs)


def is_uneven(by_batch: Sequence[Sequence[Shape]], batches: Sequence[int]) -> bool:
    """Whether a dim of a tensor changes with the batch, but not in proportion, as that of the first
    half of the samples.

    Args:
        by_batch: shapes of the tensors of a value, for each batch.
    """
    if len({len(shapes) for shapes in by_batch}) > 1:
        return True
    dims = (sizes for shapes in zip(*by_batch, strict=True) for sizes in zip(*shapes, strict=True))
    return any(len({*sizes}) > 1 and not _is_proportional(sizes, batches) for sizes in dims)


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


_INDEXING = (operator.getitem, torch.ops.aten.index.Tensor)
_WIDENING = ("unsqueeze", "getitem", "view", "reshape")  # functions that add dims of one element


def picked(x: Tensor, n_dims: int, *indices: Any) -> Tensor:
    """Index each row of x (samples, ...) by its own indices, (samples, ...) or (1, ...), of at most
    `n_dims` dims."""
    rows = torch.arange(len(x), device=x.device).view(-1, *[1] * (n_dims - 1))
    return x[(rows, *indices)]


def placed(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    """`x.masked_scatter(mask, rows)`, where each row goes to the places of its own sample.

    A sample that has more or fewer places than its row has elements becomes NaN, because others
    would take what it leaves. An error instead would wait for the device in every step, and in
    those without communication, where the masks that a rank receives are empty, be wrong.
    """
    is_own = mask.expand_as(x).flatten(1).sum(1) == rows.shape[1]
    return x.masked_scatter(mask, rows).where(is_own.view(-1, *[1] * (x.dim() - 1)), torch.nan)


def _join_scatters(module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
    nodes = [n for n in module.graph.nodes if function_name(n.target) == "masked_scatter"]
    by_batch = values_by_batch(module, examples) if nodes else []
    batches = batch_sizes(by_batch)
    for node in nodes:
        x, mask, source = node.args
        found = [(values[x], values[source]) for values in by_batch]
        sizes = [[tensor.shape[0] for tensor in pair] for pair in found]
        is_led = all(_is_proportional(each, batches) for each in zip(*sizes, strict=True))
        # Of a source as large as x, the first elements are read, whichever samples they belong to.
        is_smaller = found and found[0][1].numel() < found[0][0].numel()
        if is_led and is_smaller and found[0][0].is_floating_point():
            with module.graph.inserting_before(node):
                n_rows = module.graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
                rows = module.graph.call_method("reshape", (source, n_rows, -1))
            node.op, node.target, node.args = "call_function", placed, (x, mask, rows)


def _join_lookups(module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
    found = list(_candidates(module))
    by_batch = values_by_batch(module, examples) if found else []
    for node, source, (rows, *indices) in found:
        shapes = [(values[rows].shape, values[source].shape[:1]) for values in by_batch]
        if shapes and all(a == (*n, *[1] * (len(a) - 1)) for a, n in shapes):
            node.target, node.args = picked, (source, len(shapes[0][0]), *indices)
            while not rows.users and function_name(rows.target) in ("arange", *_WIDENING):
                unread, rows = rows, rows.args[0]
                module.graph.erase_node(unread)


def join_samples(module: fx.GraphModule, examples: Sequence[Tensor]) -> None:
    """Rewrite a traced model in place."""
    _join_scatters(module, examples)
    _join_lookups(module, examples)
    module.recompile()


def _candidates(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node, Sequence[Any]]]:
    """Nodes that index by a range of open size first; what they index, and all indices."""
    for node in module.graph.nodes:
        if node.target in _INDEXING and isinstance(node.args[1], list | tuple):
            source, indices = node.args
            if not indices or not all(isinstance(n, fx.Node) for n in indices):
                continue
            rows = indices[0]
            while function_name(rows.target) in _WIDENING and len(rows.all_input_nodes) == 1:
                rows = rows.args[0]
            end = rows.args[0] if len(rows.args) == 1 else None
            if function_name(rows.target) == "arange" and isinstance(end, fx.Node):
                yield node, source, indices

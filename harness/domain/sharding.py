"""Rules of cutting operators: the dims that can be cut, and the inputs and weights of each block.

The simulator and the executor share these rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from harness.domain.einsum import equation_of
from harness.domain.graph import Operator
from harness.domain.partition import (
    SAMPLE,
    Block,
    Cut,
    Interval,
    blocks,
    input_interval,
    n_parts,
    part_index,
)

CONTRACTION = "contraction"
HEADS = "heads"
# Dims that the output does not have: parts along them are partial sums of the whole output.
PARTIAL_DIMS = (HEADS, CONTRACTION)

_SPATIAL = ("height", "width")
_IMAGE = (SAMPLE, "feature", *_SPATIAL)


class Kind(NamedTuple):
    """How operators of one kind can be cut.

    Attributes:
        cuts: dims along which they can be cut.
        reads: what a block reads of an input: its own place, with dims aligned from the last
            (`pointwise`), or the windows of its rows (`window`); else by `input_block`.
        weights: dims whose cuts also cut the weights (of an einsum they follow from its equation);
            a cut of any other dim copies the weights.
        feature: position of the output's feature dim that the weights belong to.
        has_copies: several devices may compute the same block if it has no weights; false for kinds
            that have some, even without bytes, as in a graph without sizes.
    """

    cuts: tuple[str, ...] = (SAMPLE,)
    reads: Literal["pointwise", "window", ""] = ""
    weights: tuple[str, ...] = ()
    feature: int | None = None
    has_copies: bool = True


_POINTWISE = Kind((SAMPLE, HEADS, "seq", "feature", *_SPATIAL), "pointwise")
_TABLE = ("feature", CONTRACTION)
KINDS = {
    "linear": Kind((SAMPLE, "seq", *_TABLE), "", _TABLE, -1, has_copies=False),
    "embedding": Kind((SAMPLE, "seq", *_TABLE), "", _TABLE, -1, has_copies=False),
    "conv2d": Kind(_IMAGE, "window", ("feature",), 1, has_copies=False),
    "pool": Kind(_IMAGE, "window"),
    "batch_norm": Kind(_IMAGE, "pointwise", ("feature",), 1, has_copies=False),
    "layer_norm": _POINTWISE,
    "elementwise": _POINTWISE,
    "add": _POINTWISE,
    "loss": Kind((SAMPLE, CONTRACTION)),
    "attention": Kind((SAMPLE, HEADS, "seq"), "", (HEADS,)),
    "block": Kind((SAMPLE, HEADS), "", (HEADS,), has_copies=False),
    "einsum": Kind((SAMPLE, "seq", "feature", "depth", *_SPATIAL, CONTRACTION)),
    "lstm": Kind(has_copies=False),
}
_OTHER = Kind()


def _kind(operator: Operator) -> Kind:
    return KINDS.get(operator.kind, _OTHER)


def has_tasks(operator: Operator) -> bool:
    """Whether a strategy places it: not an input, which each device's data loader provides."""
    return operator.kind != "input"


def full_shape(operator: Operator, *, batch: int, graph_batch: int | None) -> dict[str, int]:
    """Sizes of all dims, with samples scaled to `batch`.

    The last are partial dims (`is_partial`), which the output does not have: the heads of a block
    or of an attention with an output projection, and the contraction: input features of a linear
    operator, rows of an embedding, classes of a loss, a summed dim of an einsum.
    An operator of unknown shape has samples only.
    """
    shape = dict(operator.shape)
    if SAMPLE in shape and graph_batch:
        shape[SAMPLE] = max(1, shape[SAMPLE] * batch // graph_batch)
    elif not shape:
        shape = {SAMPLE: batch}
    n_heads = operator.attrs.get("n_heads")
    if HEADS in _kind(operator).weights and HEADS not in shape and isinstance(n_heads, int):
        shape[HEADS] = n_heads
    n_summed = _n_summed(operator)
    if isinstance(n_summed, int):
        shape[CONTRACTION] = n_summed
    return shape


def full_units(operator: Operator, *, batch: int, graph_batch: int | None) -> dict[str, int]:
    """As `full_shape`, but in units of a cut: samples, if each sample has several rows. What no
    sample affects is cut by samples too, though it has none: each part computes all of it."""
    shape = full_shape(operator, batch=batch, graph_batch=graph_batch)
    if not operator.reads_samples:
        return {SAMPLE: batch, **shape}
    if graph_batch and shape.get(SAMPLE, 1) % batch == 0:
        return {dim: batch if dim == SAMPLE else size for dim, size in shape.items()}
    return shape


def full_blocks(
    operator: Operator, cuts: Mapping[str, Cut], *, batch: int, graph_batch: int | None
) -> list[Block]:
    """The blocks of an operator (`partition.blocks`) over its `full_shape`, in whole samples.

    Raises:
        StrategyError: as `partition.blocks`.
    """
    shape = full_shape(operator, batch=batch, graph_batch=graph_batch)
    units = full_units(operator, batch=batch, graph_batch=graph_batch)
    each = {dim: size // units[dim] for dim, size in shape.items()}
    return [
        tuple(
            (start * each[dim], stop * each[dim])
            for dim, (start, stop) in zip(units, block, strict=True)
            if dim in each
        )
        for block in blocks(list(units), list(units.values()), cuts)
    ]


def _n_summed(operator: Operator) -> object:
    """Size of its contraction; None if it has none.

    A linear operator has one if it multiplies one input, whose features are named, by weights that
    it holds; an embedding that looks up one row each; a loss whose last dim is that of the classes;
    an einsum that sums over a dim of the same size for any batch.
    """
    attrs = operator.attrs
    if operator.kind == "loss":
        return attrs.get("n_classes")
    if operator.kind == "einsum":
        return attrs.get("n_summed")
    has_weights = operator.parameter_bytes > 0 and len(operator.inputs) == 1
    if not has_weights or not operator.shape:
        return None
    if operator.kind == "embedding" and attrs.get("function") == "Embedding":
        return attrs.get("n_rows")
    return attrs.get("in_features") if operator.kind == "linear" else None


def is_partial(operator: Operator, dim: str) -> bool:
    """Whether parts along `dim` are partial sums of one output rather than pieces of it."""
    return dim in PARTIAL_DIMS and dim not in operator.shape


def output_sizes(operator: Operator, sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the dims that the output has (`full_shape` includes partial dims)."""
    return {dim: n for dim, n in sizes.items() if not is_partial(operator, dim)}


def cuttable_dims(operator: Operator, shape: dict[str, int]) -> list[str]:
    """Dims of `shape` along which the operator may be cut, in the order of `shape`: none where
    forward writes a buffer, which is on one device."""
    if operator.attrs.get("writes_buffers"):
        return []
    allowed = set(_kind(operator).cuts) - _fixed_dims(operator)
    return [d for d in shape if d in allowed or (d == SAMPLE and not operator.reads_samples)]


def may_have_copies(operator: Operator) -> bool:
    """Whether several devices may compute the same block: only if there are no weights to sync.

    Kinds with weights may not (`Kind.has_copies`), nor an operator that draws random numbers or
    writes a buffer, nor an unknown function, which might.
    """
    is_free = operator.weight_bytes == 0 and has_tasks(operator)
    is_repeatable = operator.attrs.get("is_repeatable") is not False
    is_repeatable = is_repeatable and not operator.attrs.get("writes_buffers")
    return is_free and is_repeatable and _kind(operator).has_copies


def _fixed_dims(operator: Operator) -> set[str]:
    """Dims along which this operator cannot be cut, although its kind can."""
    fixed: set[str] = set()
    dims = list(operator.shape)
    attrs = operator.attrs
    if attrs.get("is_cut_by_samples") is False or (SAMPLE in dims and dims[0] != SAMPLE):
        fixed.add(SAMPLE)
    if not _has_feature_weights(operator):
        fixed.add("feature")
    if _kind(operator).reads == "window" and not _has_windows(operator):
        fixed.update(_SPATIAL)
    has_mask = operator.kind == "attention" and len(operator.inputs) > 3
    if (has_mask and "reads" not in attrs) or attrs.get("is_cut_by_positions") is False:
        fixed.add("seq")
    if operator.kind == "layer_norm":
        n_last = attrs.get("n_normalized")
        fixed.update(dims[-n_last:] if isinstance(n_last, int) and n_last > 0 else dims[1:])
    return fixed


def _has_feature_weights(operator: Operator) -> bool:
    """Whether its weights belong to its dim named feature (true without weights).

    Names follow the positions of dims, so they are wrong for (sample, height, width, channels).
    """
    position = _kind(operator).feature
    dims = list(operator.shape)
    if position is None or "feature" not in dims:
        return True
    return position < len(dims) and dims[position] == "feature"


def _has_windows(operator: Operator) -> bool:
    """Whether an output row depends on a window of input rows; false for an adaptive pool."""
    return "kernel" in operator.attrs and operator.attrs.get("padding_mode", "zeros") == "zeros"


def weight_dims(operator: Operator) -> tuple[str, ...]:
    """The dims whose cuts also cut the weights; empty if every part holds all weights."""
    if equation := equation_of(operator):
        found = _dims_of_letters(operator)
        return tuple(dim for letter, dim in found.items() if letter in equation.weights)
    dims = _kind(operator).weights
    return dims if _has_feature_weights(operator) else tuple(d for d in dims if d != "feature")


def _dims_of_letters(operator: Operator) -> dict[str, str]:
    """The dim of an einsum's `full_shape` by its letter."""
    equation = equation_of(operator)
    if equation is None:
        return {}
    found = dict(zip(equation.result, operator.shape, strict=True))
    summed = operator.attrs.get("summed")
    return {**found, summed: CONTRACTION} if isinstance(summed, str) else found


def weight_cuts(operator: Operator, partition: Mapping[str, Cut]) -> dict[int, Cut]:
    """The cuts of the weight by its own dims, as far as these are cut."""
    dims = weight_dims(operator)
    in_order = reversed(dims) if operator.kind == "embedding" else dims  # (tokens, features)
    cuts = enumerate(partition.get(dim, 1) for dim in in_order)
    return {k: cut for k, cut in cuts if n_parts(cut) > 1}


def weight_part(operator: Operator, dims: list[str], cuts: dict[str, Cut], index: int) -> int:
    """Number of the weight slice that block `index` holds, row-major over `weight_dims`."""
    place = part_index(dims, cuts, index)
    part = 0
    for dim in weight_dims(operator):
        part = part * n_parts(cuts.get(dim, 1)) + place.get(dim, 0)
    return part


def _pair(value: object, position: int, default: int) -> int:
    """One entry of a per-dim attribute that may be a number or a [height, width] list."""
    if isinstance(value, (list, tuple)):
        value = value[position] if position < len(value) else (value[0] if value else default)
    return int(value) if isinstance(value, (int, float)) else default


def scaled(interval: Interval, size: int, to: int) -> Interval:
    """Convert an interval of a dim of `size` to a dim of another size (rows merged or split)."""
    if size == to:
        return interval
    return interval[0] * to // size, -(-interval[1] * to // size)


def _window(operator: Operator, dim: str, interval: Interval, size: int) -> Interval:
    position = 0 if dim == "height" else 1
    if not _has_windows(operator):
        return 0, size
    attrs = operator.attrs
    kernel = _pair(attrs["kernel"], position, 1)
    stride = _pair(attrs.get("stride", kernel if operator.kind == "pool" else 1), position, 1)
    low, high = input_interval(
        interval,
        kernel=kernel,
        stride=stride,
        padding=_pair(attrs.get("padding", 0), position, 0),
        size=size,
        dilation=_pair(attrs.get("dilation", 1), position, 1),
    )
    low = min(low, size - 1)  # a window may lie entirely in the padding
    return low, max(high, low + 1)


def _channels(operator: Operator, interval: Interval, size: int, to: int) -> Interval:
    """Input channels that a convolution's output channels read: all, or those of its groups."""
    n_groups = _pair(operator.attrs.get("groups", 1), 0, 1)
    if n_groups <= 1 or size % n_groups or to % n_groups:
        return 0, to
    out_each, in_each = size // n_groups, to // n_groups
    return interval[0] // out_each * in_each, -(-interval[1] // out_each) * in_each


def input_block(
    operator: Operator,
    shape: dict[str, int],
    block: Block,
    producer_shape: dict[str, int],
    *,
    argument: int = 0,
    has_own_keys: bool = False,
) -> Block:
    """The region of one producer's output that a block of an operator's output reads.

    Args:
        shape: of the operator's output (`full_shape`), in the order of `block`.
        producer_shape: of the producer's output, without partial dims.
        argument: position among the operator's inputs; an attention reads whole sequences of all
            inputs but the first (the query).
        has_own_keys: an attention projects keys and values of its block's positions only
            (`key_forms`).
    """
    intervals = dict(zip(shape, block, strict=True))
    matching = _matching_dims(operator, shape, producer_shape, argument)
    needed: list[Interval] = []
    is_windowed = _kind(operator).reads == "window"
    for dim, size in producer_shape.items():
        name = matching.get(dim)
        if name is None:
            needed.append((0, size))
        elif dim == SAMPLE:
            needed.append(scaled(intervals[SAMPLE], shape[SAMPLE], size))
        elif is_windowed and dim in _SPATIAL:
            needed.append(_window(operator, dim, intervals[name], size))
        elif operator.kind == "conv2d" and dim == "feature":
            needed.append(_channels(operator, intervals[name], shape[name], size))
        elif shape[name] == size and _reads_matching(operator, name, argument, has_own_keys):
            needed.append(intervals[name])
        else:
            needed.append((0, size))
    return tuple(needed)


def _matching_dims(
    operator: Operator, shape: dict[str, int], producer_shape: dict[str, int], argument: int
) -> dict[str, str]:
    """The operator's dim for each of the producer's dims; none for a dim that is read whole.

    Dims match by name, with exceptions: broadcasting aligns last dims, an embedding has one dim
    more than its indices, a contraction runs over the producer's last dim, and an einsum has
    letters.
    """
    if equation := equation_of(operator):
        letters, by_letter = equation.inputs[argument], _dims_of_letters(operator)
        if len(letters) != len(producer_shape):  # of a tuple's first element
            return {SAMPLE: SAMPLE} if SAMPLE in producer_shape and SAMPLE in shape else {}
        pairs = zip(producer_shape, letters, strict=True)
        return {dim: by_letter[x] for dim, x in pairs if x in by_letter}
    found = {dim: dim for dim in producer_shape if dim in shape}
    dims = list(output_sizes(operator, shape))
    producer_dims = list(producer_shape)
    if operator.kind == "embedding":
        # An embedding bag has as many dims as its input, because it sums over the last one.
        matched = dims[:-1] if len(producer_dims) == len(dims) - 1 else [SAMPLE]
        found = {b: a for a, b in zip(matched, producer_dims, strict=False)}
    elif _kind(operator).reads == "pointwise" and operator.shape:
        found = dict(zip(reversed(producer_dims), reversed(dims), strict=False))
    if SAMPLE in producer_dims:
        found.pop(SAMPLE, None)
        if SAMPLE in shape:
            found[SAMPLE] = SAMPLE
    is_product = operator.kind != "embedding"
    if CONTRACTION in shape and is_product and producer_dims and producer_dims[-1] != SAMPLE:
        found[producer_dims[-1]] = CONTRACTION
    return found


def _reads_matching(operator: Operator, dim: str, argument: int, has_own_keys: bool) -> bool:
    """Whether a block reads only its interval along a dim that the input has too."""
    is_pointwise = _kind(operator).reads == "pointwise" or operator.kind == "einsum"
    if is_pointwise or dim == CONTRACTION:
        return True
    if operator.kind == "pool":
        return dim == "feature"
    if operator.kind in ("linear", "embedding"):
        return dim != "feature"
    if operator.kind != "attention":
        return False
    reads = reads_of(operator, argument)
    is_own = reads == "rows" or (reads == "keys" and has_own_keys)
    return dim == HEADS or (dim == "seq" and is_own)


def reads_of(operator: Operator, argument: int) -> str:
    """Which positions of an input an attention that is cut by positions reads: `rows`, its own;
    `keys`, all, or its own if devices give each other keys; `whole`, all."""
    reads = operator.attrs.get("reads")
    if isinstance(reads, list | tuple):
        return str(reads[argument]) if argument < len(reads) else "whole"
    # Only the query is read in part, and only if keys and values are separate inputs.
    return "rows" if argument == 0 and len(operator.inputs) != 1 else "keys"

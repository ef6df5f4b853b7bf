"""What cutting an operator means: which dims it has, what a block reads, which weights it holds.

The simulator prices a strategy by these rules and the executor carries it out by them.
"""

from __future__ import annotations

from harness.domain.graph import Operator
from harness.domain.partition import SAMPLE, Block, Cut, Interval, input_interval, part_index

# Dims along which each kind of operator can be cut; every other kind along samples alone.
_CUTTABLE: dict[str, tuple[str, ...]] = {
    "linear": (SAMPLE, "seq", "feature"),
    "conv2d": (SAMPLE, "feature", "height", "width"),
    "pool": (SAMPLE, "feature", "height", "width"),
    "batch_norm": (SAMPLE, "feature", "height", "width"),
    "layer_norm": (SAMPLE, "seq", "height", "width"),
    "elementwise": (SAMPLE, "heads", "seq", "feature", "height", "width"),
    "add": (SAMPLE, "heads", "seq", "feature", "height", "width"),
    "embedding": (SAMPLE, "seq", "feature"),
    "attention": (SAMPLE, "heads", "seq"),
}
# The dim that cuts the weights too; cutting any other dim copies them.
_WEIGHT_DIM = {
    "linear": "feature",
    "conv2d": "feature",
    "batch_norm": "feature",
    "embedding": "feature",
    "attention": "heads",
}
_WINDOWED = ("conv2d", "pool")
_POINTWISE = ("pool", "batch_norm", "elementwise", "add")


def has_tasks(operator: Operator) -> bool:
    """Whether a strategy places it: inputs come from each device's own data loader."""
    return operator.kind != "input"


def full_shape(operator: Operator, *, batch: int, graph_batch: int | None) -> dict[str, int]:
    """Sizes of the dims that may be cut and of the rest, with samples scaled to `batch`.

    An attention with an output projection is cut by heads although its output has no such dim:
    each part then holds a partial sum of the whole output (`is_partial`). An operator of unknown
    shape has samples only.
    """
    shape = dict(operator.shape)
    if SAMPLE in shape and graph_batch:
        shape[SAMPLE] = max(1, shape[SAMPLE] * batch // graph_batch)
    elif not shape:
        shape = {SAMPLE: batch}
    n_heads = operator.attrs.get("n_heads")
    if operator.kind == "attention" and "heads" not in shape and isinstance(n_heads, int):
        shape["heads"] = n_heads
    return shape


def is_partial(operator: Operator, dim: str) -> bool:
    """Whether parts along `dim` hold partial sums of one output rather than pieces of it."""
    return dim not in (operator.shape or {SAMPLE: 1})


def cuttable_dims(operator: Operator, shape: dict[str, int]) -> list[str]:
    """Dims of `shape` along which the operator may be cut, in storage order."""
    allowed = _CUTTABLE.get(operator.kind, (SAMPLE,))
    return [dim for dim in shape if dim in allowed]


def weight_dim(operator: Operator) -> str | None:
    """The dim whose cuts also cut the weights; None when every part holds all of them."""
    return _WEIGHT_DIM.get(operator.kind)


def weight_part(operator: Operator, dims: list[str], cuts: dict[str, Cut], index: int) -> int:
    """Which slice of the weights block `index` holds; equal slices are copies of one another."""
    dim = weight_dim(operator)
    return part_index(dims, cuts, index).get(dim, 0) if dim is not None else 0


def _pair(value: object, position: int, default: int) -> int:
    """One entry of a per-dim attribute that may be a number or a [height, width] list."""
    if isinstance(value, (list, tuple)):
        value = value[position] if position < len(value) else (value[0] if value else default)
    return int(value) if isinstance(value, (int, float)) else default


def _scaled(interval: Interval, size: int, to: int) -> Interval:
    """An interval of a dim of `size` in terms of a dim of another size (rows merged or split)."""
    if size == to:
        return interval
    return interval[0] * to // size, -(-interval[1] * to // size)


def _window(operator: Operator, dim: str, interval: Interval, size: int) -> Interval:
    position = 0 if dim == "height" else 1
    if "kernel" not in operator.attrs:  # adaptive or global pooling reads everything
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
    return min(low, size - 1), max(high, min(low, size - 1) + 1)


def _channels(operator: Operator, interval: Interval, size: int, to: int) -> Interval:
    """Input channels of a convolution's output channels: all, or those of its groups."""
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
) -> Block:
    """What a block of an operator's output reads of one producer's output.

    Args:
        shape: of the operator's output (`full_shape`), in the order of `block`.
        producer_shape: of the producer's output, partial dims left out.
        argument: position among the operator's inputs; an attention reads whole sequences of
            all but its first (the query).
    """
    own = dict(zip(shape, block, strict=True))
    needed: list[Interval] = []
    for dim, size in producer_shape.items():
        interval = own.get(dim)
        if interval is None:
            needed.append((0, size))
        elif dim == SAMPLE:
            needed.append(_scaled(interval, shape[dim], size))
        elif operator.kind in _WINDOWED and dim in ("height", "width"):
            needed.append(_window(operator, dim, interval, size))
        elif operator.kind == "conv2d" and dim == "feature":
            needed.append(_channels(operator, interval, shape[dim], size))
        elif _reads_own(operator, dim, argument) and shape[dim] == size:
            needed.append(interval)
        else:
            needed.append((0, size))
    return tuple(needed)


def _reads_own(operator: Operator, dim: str, argument: int) -> bool:
    """Whether a block reads only its own interval along a dim that the input has too."""
    if operator.kind in _POINTWISE:
        return True
    if operator.kind in ("linear", "layer_norm", "embedding"):
        return dim != "feature"
    return operator.kind == "attention" and (dim == "heads" or (dim == "seq" and argument == 0))

"""What cutting an operator means: which dims it has, what a block reads, which weights it holds.

The simulator prices a strategy by these rules and the executor carries it out by them.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.domain.graph import Operator
from harness.domain.partition import (
    REPLICA,
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
# Dims that an output does not show: their parts hold partial sums of all of it.
PARTIAL_DIMS = (HEADS, CONTRACTION)

# Gradients that DDP sums together where its user names no size.
BUCKET_BYTES = 25 << 20
# An output's partial sums are added up by one all-reduce from so many devices on. Between two an
# exchange moves as many bytes and has half the latency.
FEWEST_SUMMED = 3

# Dims along which each kind of operator can be cut; every other kind along samples alone.
_CUTTABLE: dict[str, tuple[str, ...]] = {
    "linear": (SAMPLE, "seq", "feature", CONTRACTION),
    "conv2d": (SAMPLE, "feature", "height", "width"),
    "pool": (SAMPLE, "feature", "height", "width"),
    "batch_norm": (SAMPLE, "feature", "height", "width"),
    "layer_norm": (SAMPLE, HEADS, "seq", "feature", "height", "width"),
    "elementwise": (SAMPLE, HEADS, "seq", "feature", "height", "width"),
    "add": (SAMPLE, HEADS, "seq", "feature", "height", "width"),
    "embedding": (SAMPLE, "seq", "feature"),
    "attention": (SAMPLE, HEADS, "seq"),
}
# The dims that cut the weights too; cutting any other dim copies them.
_WEIGHT_DIMS: dict[str, tuple[str, ...]] = {
    "linear": ("feature", CONTRACTION),
    "conv2d": ("feature",),
    "batch_norm": ("feature",),
    "embedding": ("feature",),
    "attention": (HEADS,),
}
_WINDOWED = ("conv2d", "pool")
_SPATIAL = ("height", "width")
_POINTWISE = ("batch_norm", "layer_norm", "elementwise", "add")
_WITH_WEIGHTS = ("linear", "conv2d", "batch_norm", "embedding", "lstm")
# Where among the output's dims the features must stand for the weights to be theirs.
_FEATURE_POSITION = {"linear": -1, "embedding": -1, "conv2d": 1, "batch_norm": 1}


def first_bucket_bytes(bucket_bytes: int) -> int:
    """Of the first bucket of gradients, where buckets are of a size, as DDP has it.

    It is small by default, so that communication starts early; a size that is named holds for all.
    """
    return 1 << 20 if bucket_bytes == BUCKET_BYTES else bucket_bytes


def has_tasks(operator: Operator) -> bool:
    """Whether a strategy places it: inputs come from each device's own data loader."""
    return operator.kind != "input"


def full_shape(operator: Operator, *, batch: int, graph_batch: int | None) -> dict[str, int]:
    """Sizes of the dims that may be cut and of the rest, with samples scaled to `batch`.

    Last come the dims that the output does not have, whose parts each hold a partial sum of all
    of it (`is_partial`): the heads of an attention with an output projection, and the
    contraction of a linear operator, its input features. An operator of unknown shape has
    samples only.
    """
    shape = dict(operator.shape)
    if SAMPLE in shape and graph_batch:
        shape[SAMPLE] = max(1, shape[SAMPLE] * batch // graph_batch)
    elif not shape:
        shape = {SAMPLE: batch}
    n_heads = operator.attrs.get("n_heads")
    if operator.kind == "attention" and HEADS not in shape and isinstance(n_heads, int):
        shape[HEADS] = n_heads
    in_features = operator.attrs.get("in_features")
    if _sums_up(operator) and isinstance(in_features, int):
        shape[CONTRACTION] = in_features
    return shape


def full_units(operator: Operator, *, batch: int, graph_batch: int | None) -> dict[str, int]:
    """As `full_shape`, in what a cut counts: samples, where each has several of the rows."""
    shape = full_shape(operator, batch=batch, graph_batch=graph_batch)
    if graph_batch and shape.get(SAMPLE, 1) % batch == 0:
        return {dim: batch if dim == SAMPLE else size for dim, size in shape.items()}
    return shape


def full_blocks(
    operator: Operator, cuts: Mapping[str, Cut], *, batch: int, graph_batch: int | None
) -> list[Block]:
    """The blocks of an operator (`partition.blocks`) over its `full_shape`, of whole samples.

    Raises:
        StrategyError: as `partition.blocks`.
    """
    shape = full_shape(operator, batch=batch, graph_batch=graph_batch)
    units = full_units(operator, batch=batch, graph_batch=graph_batch)
    each = [size // units[dim] for dim, size in shape.items()]
    return [
        tuple((start * n, stop * n) for (start, stop), n in zip(block, each, strict=True))
        for block in blocks(list(units), list(units.values()), cuts)
    ]


def _sums_up(operator: Operator) -> bool:
    """Whether it is a product with weights of its own of one input that has named features."""
    is_product = operator.kind == "linear" and bool(operator.shape)
    return is_product and operator.parameter_bytes > 0 and len(operator.inputs) == 1


def is_partial(operator: Operator, dim: str) -> bool:
    """Whether parts along `dim` hold partial sums of one output rather than pieces of it."""
    return dim not in (operator.shape or {SAMPLE: 1}) and dim != REPLICA


def output_sizes(operator: Operator, sizes: Mapping[str, int]) -> dict[str, int]:
    """Of sizes by dim, those of the dims that the output has (`full_shape` names others too)."""
    return {dim: n for dim, n in sizes.items() if not is_partial(operator, dim)}


def cuttable_dims(operator: Operator, shape: dict[str, int]) -> list[str]:
    """Dims of `shape` along which the operator may be cut, in the order of `shape`."""
    allowed = set(_CUTTABLE.get(operator.kind, (SAMPLE,))) - _fixed_dims(operator)
    return [dim for dim in shape if dim in allowed]


def may_have_copies(operator: Operator) -> bool:
    """Whether several devices may compute one block of it: where none has weights to keep equal.

    A second user of tied weights has no bytes of its own, so kinds that have weights never may.
    Nor may what draws random numbers of its own on each device, as an unknown function might.
    """
    is_free = operator.parameter_bytes == 0 and has_tasks(operator)
    is_repeatable = operator.attrs.get("is_repeatable") is not False
    return is_free and is_repeatable and operator.kind not in _WITH_WEIGHTS


def _fixed_dims(operator: Operator) -> set[str]:
    """Dims that this very operator cannot be cut along, although its kind can."""
    fixed: set[str] = set()
    dims = list(operator.shape)
    attrs = operator.attrs
    if attrs.get("is_cut_by_samples") is False or (SAMPLE in dims and dims[0] != SAMPLE):
        fixed.add(SAMPLE)
    if not _has_feature_weights(operator):
        fixed.add("feature")
    if operator.kind in _WINDOWED and not _has_windows(operator):
        fixed.update(_SPATIAL)
    if operator.kind == "attention" and len(operator.inputs) > 3:
        fixed.add("seq")  # a mask
    if operator.kind == "layer_norm":
        n_last = attrs.get("n_normalized")
        fixed.update(dims[-n_last:] if isinstance(n_last, int) and n_last > 0 else dims[1:])
    return fixed


def _has_feature_weights(operator: Operator) -> bool:
    """Whether its dim named feature is the one that its weights belong to (true without weights).

    Names follow the positions of dims: those of (sample, height, width, channels) mislead.
    """
    position = _FEATURE_POSITION.get(operator.kind)
    dims = list(operator.shape)
    if position is None or "feature" not in dims:
        return True
    return position < len(dims) and dims[position] == "feature"


def _has_windows(operator: Operator) -> bool:
    """Whether rows of the output depend on a window of rows: not so where a pool is adaptive."""
    return "kernel" in operator.attrs and operator.attrs.get("padding_mode", "zeros") == "zeros"


def weight_dims(operator: Operator) -> tuple[str, ...]:
    """The dims whose cuts also cut the weights; none when every part holds all of them."""
    dims = _WEIGHT_DIMS.get(operator.kind, ())
    return dims if _has_feature_weights(operator) else tuple(d for d in dims if d != "feature")


def weight_dim(operator: Operator) -> str | None:
    """The first of `weight_dims`; None when every part holds all of the weights."""
    return next(iter(weight_dims(operator)), None)


def weight_part(operator: Operator, dims: list[str], cuts: dict[str, Cut], index: int) -> int:
    """Which slice of the weights block `index` holds; equal slices are copies of one another.

    Slices are numbered row-major over `weight_dims`.
    """
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


def _scaled(interval: Interval, size: int, to: int) -> Interval:
    """An interval of a dim of `size` in terms of a dim of another size (rows merged or split)."""
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
    low = min(low, size - 1)  # a window may lie in the padding alone
    return low, max(high, low + 1)


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
    matching = _matching_dims(operator, shape, producer_shape)
    needed: list[Interval] = []
    for dim, size in producer_shape.items():
        name = matching.get(dim)
        if name is None:
            needed.append((0, size))
        elif dim == SAMPLE:
            needed.append(_scaled(own[SAMPLE], shape[SAMPLE], size))
        elif operator.kind in _WINDOWED and dim in _SPATIAL:
            needed.append(_window(operator, dim, own[name], size))
        elif operator.kind == "conv2d" and dim == "feature":
            needed.append(_channels(operator, own[name], shape[name], size))
        elif shape[name] == size and _reads_own(operator, name, argument):
            needed.append(own[name])
        else:
            needed.append((0, size))
    return tuple(needed)


def _matching_dims(
    operator: Operator, shape: dict[str, int], producer_shape: dict[str, int]
) -> dict[str, str]:
    """The operator's dim for each of the producer's; none where the producer's is read whole.

    By name, except that values broadcast from their last dims, that an embedding has one dim
    more than its rows' numbers, and that a contraction runs over the producer's last dim.
    """
    found = {dim: dim for dim in producer_shape if dim in shape}
    dims = list(output_sizes(operator, shape))
    theirs = list(producer_shape)
    if operator.kind == "embedding":
        # A bag has as many dims as its input, and adds over the last.
        matched = dims[:-1] if len(theirs) == len(dims) - 1 else [SAMPLE]
        found = {b: a for a, b in zip(matched, theirs, strict=False)}
    elif operator.kind in _POINTWISE and operator.shape:
        found = dict(zip(reversed(theirs), reversed(dims), strict=False))
    if SAMPLE in theirs:
        found.pop(SAMPLE, None)
        if SAMPLE in shape:
            found[SAMPLE] = SAMPLE
    if CONTRACTION in shape and theirs and theirs[-1] != SAMPLE:
        found[theirs[-1]] = CONTRACTION
    return found


def _reads_own(operator: Operator, dim: str, argument: int) -> bool:
    """Whether a block reads only its own interval along a dim that the input has too."""
    if operator.kind in _POINTWISE or dim == CONTRACTION:
        return True
    if operator.kind == "pool":
        return dim == "feature"
    if operator.kind in ("linear", "embedding"):
        return dim != "feature"
    if operator.kind != "attention":
        return False
    # The query alone is read in part, and only where keys and values come apart from it.
    is_query = argument == 0 and len(operator.inputs) != 1
    return dim == HEADS or (dim == "seq" and is_query)

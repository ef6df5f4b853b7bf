"""Blocks of a tensor with named dims: cuts, intersections of blocks, halos.

A cut is an integer (that many equal parts) or a list of shares (parts in proportion, for devices
of different speeds). Blocks are numbered row-major over the dims of the tensor, so a partition
{"sample": 2, "feature": 2} of (sample, feature) has blocks

      feature ->            0 | 1
      sample                -----
                            2 | 3

`replica` does not cut: its parts are copies that compute the same block. Copies of a block have
consecutive numbers, as if `replica` were the last dim.

Simulator, executor and importers of other formats share these formulas.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

from harness.errors import StrategyError
from harness.inputs import shorten

SAMPLE = "sample"
REPLICA = "replica"

Interval = tuple[int, int]
Block = tuple[Interval, ...]
Cut = int | list[int]


def n_parts(cut: Cut) -> int:
    """Number of parts that a cut makes."""
    return cut if isinstance(cut, int) else len(cut)


def n_replicas(cuts: Mapping[str, Cut]) -> int:
    """Number of copies of each block."""
    return n_parts(cuts.get(REPLICA, 1))


def nearest(copies: tuple[int, ...], device: int) -> int:
    """The copy that serves a device: the device itself if it holds one, else one in rotation."""
    return device if device in copies else copies[device % len(copies)]


def cut_dim(size: int, cut: Cut) -> list[Interval]:
    """Cut [0, size) into consecutive half-open intervals.

    Interval i of shares s ends at floor(size * (s_0 + ... + s_i) / sum(s)); an integer n means n
    equal shares. So cuts into n and 2n parts share their bounds for any size.

    Raises:
        StrategyError: no parts, a share below 1, or more parts than elements.
    """
    if isinstance(cut, int) and cut > size:
        raise _empty_part(size, cut)
    shares = [1] * cut if isinstance(cut, int) else cut
    if not shares or min(shares) < 1:
        raise StrategyError(
            f"a cut into {shorten(cut)} is not possible: give a number or shares above 0"
        )
    total, done, bounds = sum(shares), 0, [0]
    for share in shares:
        done += share
        bounds.append(size * done // total)
    intervals = list(pairwise(bounds))
    if any(start == stop for start, stop in intervals):
        raise _empty_part(size, cut)
    return intervals


def _empty_part(size: int, cut: Cut) -> StrategyError:
    return StrategyError(
        f"a dim of {size} elements cut into {shorten(cut)} leaves an empty part: use fewer parts"
    )


def blocks(dims: Sequence[str], shape: Sequence[int], cuts: Mapping[str, Cut]) -> list[Block]:
    """All blocks of a tensor, row-major over `dims`, with copies; dims without a cut stay whole.

    Raises:
        StrategyError: a cut names an unknown dim, or leaves a part empty.
    """
    n_copies = cuts.get(REPLICA, 1)
    if not isinstance(n_copies, int) or n_copies < 1:
        raise StrategyError(
            f"{n_copies} copies of a block are not possible: give {REPLICA!r} a number above 0"
        )
    unknown = sorted(set(cuts) - set(dims) - {REPLICA})
    if unknown:
        raise StrategyError(
            f"dim {unknown[0]!r} cannot be cut, the output has dims ({', '.join(dims)}): "
            "name one of them"
        )
    each = [cut_dim(size, cuts.get(dim, 1)) for dim, size in zip(dims, shape, strict=True)]
    return [block for block in product(*each) for _ in range(n_copies)]


def count_parts(cuts: Mapping[str, Cut]) -> int:
    """Number of blocks of all cuts together, copies included."""
    return math.prod(map(n_parts, cuts.values()))


def part_index(dims: Sequence[str], cuts: Mapping[str, Cut], index: int) -> dict[str, int]:
    """Position of block `index` along every cut dim."""
    place: dict[str, int] = {}
    index //= n_replicas(cuts)
    for dim in reversed(dims):
        index, place[dim] = divmod(index, n_parts(cuts.get(dim, 1)))
    return {dim: place[dim] for dim in dims}


def intersect(a: Block, b: Block) -> Block | None:
    """The intersection of two blocks of one tensor; None when it is empty."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def samples_of(cuts: Mapping[str, Cut], index: int, samples: int) -> Interval:
    """The samples of block `index`: all, unless they are cut, which only the outermost dim is."""
    cut = cuts.get(SAMPLE, 1)
    return cut_dim(samples, cut)[index * n_parts(cut) // count_parts(cuts)]


def serving(cuts: Mapping[str, Cut], reader: Mapping[str, Cut], index: int, samples: int) -> Block:
    """The samples that the blocks which a reader's block `index` reads serve, where no sample
    affects what they compute: those with its first sample; () if these are not cut."""
    if SAMPLE not in cuts:
        return ()
    first, _ = samples_of(reader, index, samples)
    return (next(own for own in cut_dim(samples, cuts[SAMPLE]) if first < own[1]),)


def volume(block: Block) -> int:
    """Number of elements of a block."""
    return math.prod([stop - start for start, stop in block])


def input_interval(
    output: Interval, *, kernel: int, stride: int, padding: int, size: int, dilation: int = 1
) -> Interval:
    """The rows of an input of `size` that rows `output` of a convolution or pool read.

    Padding is clipped, because it is not part of the input. The halo is the rest of this interval
    beyond the part that the same device produced.
    """
    first = output[0] * stride - padding
    last = (output[1] - 1) * stride - padding + dilation * (kernel - 1)
    return max(0, first), min(size, last + 1)

"""SUMMA's tiling, panels and pieces, its operands, and the check of a product."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.domain.partition import volume
from harness.errors import StrategyError, VerificationError
from harness.workloads.matmul.product import SEED_A, SEED_B, TORCH_DTYPES, block, check_block
from harness.workloads.matmul.summa import cut_panels, pieces_of, split_square

SPEEDS = st.lists(st.floats(0.2, 5.0), min_size=1, max_size=9)


def coverage(blocks, size):
    """How many ranks own each element."""
    counts = np.zeros((size, size), dtype=int)
    for (r0, r1), (c0, c1) in blocks:
        counts[r0:r1, c0:c1] += 1
    return counts


@given(SPEEDS)
@settings(max_examples=60)
def test_blocks_tile_the_square_exactly_once(speeds):
    assert (coverage(split_square(speeds, 120), 120) == 1).all()


@given(SPEEDS)
@settings(max_examples=60)
def test_areas_are_in_proportion_to_speed(speeds):
    size = 3000
    for speed, tile in zip(speeds, split_square(speeds, size), strict=True):
        # Two edges are rounded to whole elements, each by less than one of at most `size`.
        assert volume(tile) == pytest.approx(size**2 * speed / sum(speeds), abs=4 * size)


def half_perimeters(blocks):
    return sum(r1 - r0 + c1 - c0 for (r0, r1), (c0, c1) in blocks)


@pytest.mark.parametrize("speeds", [[1, 1, 1, 1, 1], [1, 2, 3, 4], [5, 1, 1, 1, 1, 1]])
def test_columns_have_the_least_half_perimeters_of_all_column_tilings(speeds):
    """Against every split of the ranks into columns, in areas of a unit square."""
    total = sum(speeds)

    def cost(columns):
        return sum(1 + len(c) * sum(speeds[r] for r in c) / total for c in columns)

    def tilings(ranks):
        if not ranks:
            yield []
            return
        first, rest = ranks[0], ranks[1:]
        for n in range(len(rest) + 1):
            for others in itertools.combinations(rest, n):
                left = [r for r in rest if r not in others]
                for tail in tilings(left):
                    yield [[first, *others], *tail]

    best = min(cost(columns) for columns in tilings(list(range(len(speeds)))))
    size = 10_000
    found = half_perimeters(split_square(speeds, size)) / size
    assert found == pytest.approx(best, abs=1e-2)


def test_a_matrix_smaller_than_the_ranks_is_refused():
    with pytest.raises(StrategyError, match="empty part"):
        split_square([1.0] * 5, 1)


@given(SPEEDS, st.integers(1, 40))
@settings(max_examples=60)
def test_panels_cover_k_once_and_cross_no_border(speeds, width):
    blocks = split_square(speeds, 120)
    panels = cut_panels(blocks, 120, width)
    assert sorted(k for start, stop in panels for k in range(start, stop)) == list(range(120))
    borders = {edge for tile in blocks for side in tile for edge in side}
    for start, stop in panels:
        assert stop - start <= width
        assert not any(start < border < stop for border in borders)


@given(SPEEDS)
@settings(max_examples=30)
def test_pieces_fill_every_ranks_panels_exactly(speeds):
    blocks = split_square(speeds, 60)
    for panel in cut_panels(blocks, 60, 16):
        pieces = list(pieces_of(panel, blocks))
        for rank, (rows, columns) in enumerate(blocks):
            for matrix, needed in ((SEED_A, (rows, panel)), (SEED_B, (panel, columns))):
                parts = [p.part for p in pieces if (p.target, p.matrix) == (rank, matrix)]
                covered = coverage(parts, 60)
                (r0, r1), (c0, c1) = needed
                assert (covered[r0:r1, c0:c1] == 1).all()
                assert covered.sum() == volume(needed)


CPU = torch.device("cpu")


def product_of(size, dtype):
    a, b = (block(s, (0, size), (0, size), CPU).to(TORCH_DTYPES[dtype]) for s in (SEED_A, SEED_B))
    return a @ b


def test_a_block_is_the_same_part_of_the_matrix_for_everyone():
    whole = block(SEED_A, (0, 50), (0, 70), CPU)
    assert torch.equal(block(SEED_A, (10, 20), (30, 70), CPU), whole[10:20, 30:70])


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [8, 100, 300])
def test_a_sound_product_passes(size, dtype):
    check = check_block(product_of(size, dtype), (0, size), (0, size), size, dtype)
    assert 0 < check.error < check.tolerance
    check.require("the product")


def test_an_fp32_product_that_lost_one_term_of_a_thousand_is_found():
    size = 1000
    a, b = (block(s, (0, size), (0, size), CPU) for s in (SEED_A, SEED_B))
    short = a[:, :-1] @ b[:-1]
    with pytest.raises(VerificationError, match="fp32 with k = 1000"):
        check_block(short, (0, size), (0, size), size, "fp32").require("the product")


def test_a_bf16_product_that_lost_a_panel_is_found():
    size, lost = 1024, 32
    a, b = (block(s, (0, size), (0, size), CPU).bfloat16() for s in (SEED_A, SEED_B))
    short = a[:, :-lost] @ b[:-lost]
    with pytest.raises(VerificationError):
        check_block(short, (0, size), (0, size), size, "bf16").require("the product")


def test_tf32_rounding_is_not_passed_off_as_fp32():
    size = 512
    # A product in tf32, as a GPU makes it: operands rounded to 10 explicit significand bits.
    a, b = (block(s, (0, size), (0, size), CPU) for s in (SEED_A, SEED_B))
    rounded = [(m.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32) for m in (a, b)]
    product = rounded[0] @ rounded[1]
    check_block(product, (0, size), (0, size), size, "tf32").require("the product")
    with pytest.raises(VerificationError):
        check_block(product, (0, size), (0, size), size, "fp32").require("the product")


def test_a_block_is_checked_at_its_own_place():
    whole = product_of(64, "fp32")
    check_block(whole[16:48, 8:64], (16, 48), (8, 64), 64, "fp32").require("the block")
    with pytest.raises(VerificationError):
        check_block(whole[16:48, 8:64], (17, 49), (8, 64), 64, "fp32").require("the block")

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.domain.partition import (
    blocks,
    count_parts,
    cut_dim,
    input_interval,
    intersect,
    nearest,
    part_index,
    volume,
)
from harness.errors import StrategyError


def test_a_cut_ends_at_the_floor_of_its_proportion():
    assert cut_dim(10, 3) == [(0, 3), (3, 6), (6, 10)]
    assert cut_dim(300, [2, 1]) == [(0, 200), (200, 300)]  # of unlike devices


@pytest.mark.parametrize(("size", "cut"), [(2, 3), (4, 0), (4, [1, 0]), (4, []), (4, -1)])
def test_cut_that_leaves_a_part_empty_is_refused(size, cut):
    with pytest.raises(StrategyError):
        cut_dim(size, cut)


def test_blocks_are_numbered_row_major_over_the_dims():
    found = blocks(["sample", "feature"], [4, 6], {"feature": 2, "sample": 2})
    assert found == [((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6))]
    place = part_index(["sample", "feature"], {"feature": 2, "sample": 2}, 2)
    assert place == {"sample": 1, "feature": 0}


def test_copies_of_a_block_are_numbered_one_after_another():
    cuts = {"replica": 2, "sample": 2}
    found = blocks(["sample", "feature"], [4, 3], cuts)
    assert found == [((0, 2), (0, 3))] * 2 + [((2, 4), (0, 3))] * 2
    assert count_parts(cuts) == len(found)
    places = [part_index(["sample", "feature"], cuts, k)["sample"] for k in range(4)]
    assert places == [0, 0, 1, 1]


def test_a_reader_takes_its_own_copy_or_one_of_the_others_in_turn():
    assert [nearest((1, 3), device) for device in range(4)] == [1, 1, 1, 3]
    assert nearest((0, 2), 3) == 2


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_what_blocks_of_two_partitions_share_tiles_the_tensor(a, b, c, d):
    dims, shape = ["sample", "feature"], [12, 13]
    left = blocks(dims, shape, {"sample": a, "feature": b})
    right = blocks(dims, shape, {"sample": c, "feature": d})
    shared = [common for x in left for y in right if (common := intersect(x, y))]
    assert sum(map(volume, shared)) == 12 * 13


def test_halo_of_a_3x3_convolution_is_one_row_inside_the_tensor():
    assert input_interval((0, 4), kernel=3, stride=1, padding=1, size=8) == (0, 5)
    assert input_interval((4, 8), kernel=3, stride=1, padding=1, size=8) == (3, 8)
    # A pool whose windows do not overlap has none.
    assert input_interval((2, 4), kernel=2, stride=2, padding=0, size=8) == (4, 8)

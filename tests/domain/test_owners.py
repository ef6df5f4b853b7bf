"""Each slice's optimizer state is on one of its holders, and all of them own about as much."""

from __future__ import annotations

import pytest

from harness.domain.owners import owners_of


@pytest.mark.parametrize(
    ("slices", "owners"),
    [
        ([(4, (0,)), (3, (1, 2))], [0, 1]),
        ([(4, (0, 1)), (3, (0, 1)), (2, (0, 1)), (1, (0, 1))], [0, 1, 1, 0]),
        ([(1, (0, 1)), (1, (0, 1)), (9, (0,))], [1, 1, 0]),  # what one device holds alone counts
        ([], []),
    ],
)
def test_owners(slices: list[tuple[int, tuple[int, ...]]], owners: list[int]) -> None:
    assert owners_of(slices) == owners

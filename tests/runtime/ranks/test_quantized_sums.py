import math

import pytest
import torch

from harness.domain.reduce_dtype import BLOCK, quantized_bytes
from harness.runtime.ranks.quantized_sums import dequantized, quantized


@pytest.mark.parametrize("n", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_numbers_are_rounded_by_half_a_step_of_their_block(n):
    values = torch.randn(n, generator=torch.Generator().manual_seed(n))
    values[: BLOCK // 2] *= 1e-6
    data = quantized(values)
    assert data.nbytes == quantized_bytes(n)
    errors = (dequantized(data, n) - values).abs()
    for own, error in zip(values.split(BLOCK), errors.split(BLOCK), strict=True):
        assert n == 0 or error.max() <= own.abs().max() / 254 * (1 + 1e-4)


def test_zeros_stay_and_a_number_that_is_not_finite_marks_its_block():
    values = torch.zeros(2 * BLOCK)
    assert dequantized(quantized(values), 2 * BLOCK).equal(values)
    for bad in (math.inf, -math.inf, math.nan):
        values[3] = bad
        found = dequantized(quantized(values), 2 * BLOCK)
        assert not found[:BLOCK].isfinite().any()
        assert not found[BLOCK:].any()

"""Operands that any rank can make, and a check that finds wrong products."""

import pytest
import torch

from harness.errors import VerificationError
from harness.workloads.matmul.product import (
    SEED_A,
    SEED_B,
    block,
    check_block,
    torch_dtype,
)

CPU = torch.device("cpu")


def product_of(size, dtype):
    a, b = (block(s, (0, size), (0, size), CPU).to(torch_dtype(dtype)) for s in (SEED_A, SEED_B))
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

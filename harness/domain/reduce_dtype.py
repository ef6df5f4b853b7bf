"""Data types in which gradients are summed over devices."""

from typing import Literal

ReduceDtype = Literal["fp32", "bf16", "int8"]

# Numbers of int8 with one scale, a float32.
BLOCK = 256
SCALE_BYTES = 4

# Bytes that are sent per byte of a float32 gradient.
REDUCED_BYTES = {"fp32": 1.0, "bf16": 0.5, "int8": (BLOCK + SCALE_BYTES) / (4 * BLOCK)}


def quantized_bytes(n: int) -> int:
    """Bytes of some numbers in int8, with their scales."""
    return n + SCALE_BYTES * -(-n // BLOCK)

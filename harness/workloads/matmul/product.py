"""Operands of a matrix product as a function of their indices, and its check against float64.

Element (i, j) of a matrix is a hash of (i, j), uniform in [-1, 1). So a rank can make any block,
for the product or for its check, without communication.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from harness.errors import VerificationError

SEED_A, SEED_B = 1, 2

_MASK = 0xFFFFFFFF
_ROW, _COLUMN, _SEED = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_CHUNK_ELEMENTS = 1 << 24
_N_SAMPLED = 4
# Eight standard deviations of a sum of zero-mean rounding errors, so no false alarms.
_SAFETY = 8.0
# Significand bits: unit roundoff is 2**-bits. tf32 rounds its operands, not its result.
_BITS = {"fp32": 24, "tf32": 11, "bf16": 8, "fp16": 11}
# Storage types; tf32 is fp32 that a GPU rounds when it reads.
TORCH_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def _mix(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finalizer (Appleby, public domain) on int64 tensors of 32-bit values."""
    x ^= x >> 16
    x.mul_(0x85EBCA6B).bitwise_and_(_MASK)
    x ^= x >> 13
    x.mul_(0xC2B2AE35).bitwise_and_(_MASK)
    x ^= x >> 16
    return x


def elements(seed: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Make given rows and columns of matrix `seed`: float32, uniform in [-1, 1), 24 bits.

    Args:
        rows: int64 indices, (n_rows,).
        columns: int64 indices on the same device, (n_columns,).

    Returns:
        (n_rows, n_columns)
    """
    out = torch.empty(len(rows), len(columns), device=rows.device)
    step = max(1, _CHUNK_ELEMENTS // max(1, len(columns)))
    for at in range(0, len(rows), step):
        x = rows[at : at + step, None] * _ROW + (columns * _COLUMN + seed * _SEED)
        out[at : at + step] = (_mix(x.bitwise_and_(_MASK)) >> 8) * 2.0**-23 - 1
    return out


def block(
    seed: int, rows: tuple[int, int], columns: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """Make a contiguous float32 block of matrix `seed`; rows and columns are half-open."""
    return elements(seed, _indices(rows, device), _indices(columns, device))


def _indices(interval: tuple[int, int], device: torch.device) -> torch.Tensor:
    return torch.arange(*interval, dtype=torch.int64, device=device)


def tolerance(dtype: str, k: int, n_accumulations: int = 1) -> float:
    """Largest rounding error of an element of A B, relative to the same element of |A| |B|.

    A sum of k products with roundoff u has an error of order sqrt(k) u (|A| |B|) when errors have
    zero mean (Higham and Mary 2019, SIAM J. Sci. Comput. 41(5), theorem 3.1); accumulation is in
    fp32. Rounding operands and the result to the dtype adds u |C|, and |C| / (|A| |B|) is of order
    1 / sqrt(k) for zero-mean data.

    Args:
        n_accumulations: number of times that a partial sum is rounded to the dtype.
    """
    # Tensor cores truncate instead of rounding, which costs one bit.
    accumulate = 2.0 ** (1 - _BITS["fp32"])
    store = 2.0 ** -_BITS[dtype] * (2 + math.sqrt(n_accumulations))
    return _SAFETY * (math.sqrt(k) * accumulate + store / math.sqrt(k))


@dataclass(frozen=True, kw_only=True)
class ProductDeviation:
    """Error of a product against its float64 reference.

    Attributes:
        error: largest |C - A B| / (|A| |B|) over the sampled elements.
        tolerance: largest error that rounding explains.
    """

    error: float
    tolerance: float
    dtype: str
    k: int

    def require(self, subject: str) -> None:
        """Raise unless the product is right; `subject` names it in the error."""
        if not self.error <= self.tolerance:
            raise VerificationError(
                f"{subject} is wrong: its largest error against float64 is {self.error:.2e} of "
                f"|A||B|, and {self.dtype} with k = {self.k} explains {self.tolerance:.2e}: "
                "check the device (ECC, clocks) and its libraries"
            )


def _sampled(size: int) -> torch.Tensor:
    """Draw up to _N_SAMPLED distinct indices below `size`, with both ends; equal on every rank."""
    if size <= _N_SAMPLED:
        return torch.arange(size)
    generator = torch.Generator().manual_seed(size)
    inner = torch.randperm(size - 2, generator=generator)[: _N_SAMPLED - 2] + 1
    return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([size - 1])])


def check_block(
    product: torch.Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
    k: int,
    dtype: str,
    *,
    n_accumulations: int = 1,
) -> ProductDeviation:
    """Compare _N_SAMPLED rows and columns of a block of C = A B with float64.

    Costs (rows + columns) x k x _N_SAMPLED products instead of rows x columns x k. The operands are
    those of `block` with SEED_A and SEED_B, rounded to the dtype (except tf32, to which the device
    rounds).
    """
    all_rows, all_columns = torch.arange(len(product)), torch.arange(product.shape[1])
    parts = [(_sampled(len(all_rows)), strip) for strip in _strips(all_columns, k)]
    parts += [(strip, _sampled(len(all_columns))) for strip in _strips(all_rows, k)]
    origin = (rows[0], columns[0])
    errors = [_error(product, r, c, origin, k, dtype) for r, c in parts if len(r) and len(c)]
    # max() would drop a NaN, which must fail the check.
    worst = torch.stack(errors).max().item() if errors else 0.0
    return ProductDeviation(
        error=worst, tolerance=tolerance(dtype, k, n_accumulations), dtype=dtype, k=k
    )


def _strips(indices: torch.Tensor, k: int) -> Iterator[torch.Tensor]:
    """Split indices into parts whose operands fit into a bounded buffer."""
    yield from indices.split(max(1, _CHUNK_ELEMENTS // max(1, k)))


def _error(
    product: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    origin: tuple[int, int],
    k: int,
    dtype: str,
) -> torch.Tensor:
    """Largest error in the given rows and columns of a block that begins at `origin`."""
    device, stored = product.device, TORCH_DTYPES[dtype]
    rows, columns, inner = rows.to(device), columns.to(device), torch.arange(k, device=device)
    a = elements(SEED_A, rows + origin[0], inner).to(stored).double()
    b = elements(SEED_B, inner, columns + origin[1]).to(stored).double()
    error = (product[rows][:, columns].double() - a @ b).abs()
    return (error / (a.abs() @ b.abs())).max().cpu()

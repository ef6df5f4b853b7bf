"""Compile kernels once and keep them on disk where that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile at the first call, for the types of that call.

    numba keeps the machine code in `NUMBA_CACHE_DIR`, else beside the module, else in the user's
    cache directory. Where none of them can be written, each process compiles anew.
    """
    try:
        kernel: Function = numba.njit(cache=True)(function)
    except RuntimeError:  # "no locator available": nowhere to write
        kernel = numba.njit(function)
    return kernel

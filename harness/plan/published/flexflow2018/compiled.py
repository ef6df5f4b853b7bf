"""Compile kernels once and keep them on disk.

numba checks a cached kernel against its own source file only, but a kernel contains those that it
calls. So the cache's directory is named for all of this package's sources: a change of any of
them compiles anew.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile at the first call, for the types of that call.

    Where the cache cannot be written, each process compiles anew.
    """
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, str(cache_directory())
    try:
        kernel: Any = numba.njit(cache=True)(function)
    except RuntimeError:  # "no locator available": nowhere to write
        kernel = numba.njit(function)
    finally:
        config.CACHE_DIR = before
    return cast(Function, kernel)


@cache
def cache_directory() -> Path:
    """`$NUMBA_CACHE_DIR`, else the user's cache directory, with a folder for these sources."""
    user = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(user) / "training-harness")
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    return base / f"flexflow2018-{sources.hexdigest()[:12]}"

"""Compile kernels once and keep them on disk; a heap that they share.

numba checks a cached kernel against its own source file only, but a kernel contains those that it
calls. So the cache's directory is named for the sources of all kernels: a change of any of them
compiles anew.
"""

import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

_DECORATORS = (b"@compiled", b"@inlined")


def compiled(function: Function) -> Function:
    """Compile at the first call, for the types of that call.

    Where the cache cannot be written, each process compiles anew.
    """
    return _compile(function, inline="never")


def inlined(function: Function) -> Function:
    """Compile into the kernels that call the function."""
    return _compile(function, inline="always")


def _compile(function: Function, **options: Any) -> Function:
    config: Any = numba.config
    before, config.CACHE_DIR = config.CACHE_DIR, str(cache_directory())
    try:
        kernel: Any = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": nowhere to write
        kernel = numba.njit(**options)(function)
    finally:
        config.CACHE_DIR = before
    return cast(Function, kernel)


@cache
def cache_directory() -> Path:
    """`$NUMBA_CACHE_DIR`, else the user's cache directory, with a folder for these sources."""
    user = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or Path(user) / "training-harness")
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        data = path.read_bytes()
        if any(decorator in data for decorator in _DECORATORS):
            sources.update(data)
    return base / f"kernels-{sources.hexdigest()[:12]}"


@compiled
def push(keys: Any, ids: Any, size: int, key: float, item: int) -> None:
    k = size
    while k > 0:
        parent = (k - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and ids[parent] < item):
            break
        keys[k], ids[k] = keys[parent], ids[parent]
        k = parent
    keys[k], ids[k] = key, item


@compiled
def pop(keys: Any, ids: Any, size: int) -> int:
    """Remove the least entry; the heap has size - 1 entries afterwards."""
    top = ids[0]
    key, item = keys[size - 1], ids[size - 1]
    k, n = 0, size - 1
    while True:
        child = 2 * k + 1
        if child >= n:
            break
        right = child + 1
        if right < n and (
            keys[right] < keys[child] or (keys[right] == keys[child] and ids[right] < ids[child])
        ):
            child = right
        if key < keys[child] or (key == keys[child] and item < ids[child]):
            break
        keys[k], ids[k] = keys[child], ids[child]
        k = child
    keys[k], ids[k] = key, item
    return int(top)

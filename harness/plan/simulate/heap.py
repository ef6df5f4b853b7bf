"""A compiled binary heap of (key, number) in two arrays; least key first, ties by number."""

from __future__ import annotations

from typing import Any

from harness.plan.compiled import compiled


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

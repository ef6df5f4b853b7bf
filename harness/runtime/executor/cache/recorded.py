"""Find the tensors of a device that hold rows of the values at a frozen boundary."""

from __future__ import annotations

from harness.domain.partition import Block
from harness.runtime.executor.cache.boundary import UncachedError, boundary_values
from harness.runtime.executor.geometry.layout import Layout, Want
from harness.runtime.executor.program.program import InputKey, PartKey, Recorded, WantKey


def recorded_keys(layout: Layout, device: int) -> dict[InputKey, Recorded]:
    """The tensors of a device with outputs of the frozen prefix that its trained tasks read.

    Raises:
        UncachedError: a task reads a part of a sample's row.
    """
    captured, found = layout.captured, dict[InputKey, Recorded]()
    if not captured.apart:
        return found
    values = set(boundary_values(captured, captured.apart))
    for name, parts in layout.parts.items():
        if name in captured.apart:
            continue
        for part in (part for part in parts if part.device == device):
            for _, want in layout.reads(part):
                if want.value in values:
                    found |= _keys(layout, want)
    return found


def check_rows(layout: Layout) -> None:
    """Check that every device reads whole rows at the frozen boundary; before groups are made.

    Raises:
        UncachedError: a device does not.
    """
    for device in range(
        max(d for parts in layout.parts.values() for d in (p.device for p in parts)) + 1
    ):
        recorded_keys(layout, device)


def _keys(layout: Layout, want: Want) -> dict[InputKey, Recorded]:
    regions: dict[InputKey, Block] = {WantKey(want.number): want.block}
    if not want.is_exchanged:
        node = layout.node(want.value)
        regions = {
            PartKey.of(want.value, part): layout.region(node, part)
            for part in (piece.part for piece in want.pieces)
        }
    sizes = layout.tensor(want.value).shape[1:]
    found: dict[InputKey, Recorded] = {}
    for key, (samples, *rest) in regions.items():
        is_whole = all(cut == (0, n) for cut, n in zip(rest, sizes, strict=False))
        if not is_whole or (want.is_sum and not want.is_exchanged):
            raise UncachedError(
                f"device {want.device} reads a part of {want.value!r}, the value at the frozen "
                "boundary, and the cache keeps whole rows"
            )
        found[key] = Recorded(want.value, samples)
    return found

"""Partial sums that all who hold them want whole: one all_reduce instead of everyone to everyone.

    forward   part on 0, 1, 2 --all_reduce--> the sum, on 0, 1, 2, for their next tasks
    backward  their gradients --all_reduce--> the gradient of every part

Each starts when the segment ends that gives the last of it, in topological order (backward:
reverse), so all devices of a group start its sums in the same order. Groups are the sums' own,
because gradients of weights are added up whenever backward reaches them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from harness.domain.partition import Block
from harness.runtime.executor.channels import Channels
from harness.runtime.executor.layout import Layout, Want
from harness.runtime.executor.phases import Phases
from harness.runtime.executor.program import PartKey

# Between two devices an exchange moves as many bytes and has half the latency.
_FEWEST_DEVICES = 3

Devices = tuple[int, ...]


class Sums:
    """The sums that this device takes part in; all ranks must make it, since it makes groups.

    Args:
        layouts: by size of microbatch, equal on every rank.
    """

    def __init__(self, layouts: Mapping[int, Layout], channels: Channels, phases: Phases) -> None:
        self._channels, self._phases = channels, phases
        self._devices = {size: shared_sums(layout) for size, layout in layouts.items()}
        channels.make_groups_of_sums(
            {d for found in self._devices.values() for d in found.values()}
        )
        self._of: dict[int, dict[PartKey, Want]] = {
            size: _by_part(layouts[size], found, channels.rank)
            for size, found in self._devices.items()
        }
        self._under_way: dict[tuple[int, int, bool], tuple[Any, Tensor, Devices]] = {}

    def serve(self, samples: int, want: Want) -> bool:
        """Whether a want is served by a sum."""
        return want.number in self._devices[samples]

    def of(self, samples: int, key: PartKey) -> Want | None:
        """The want of this device that is the sum over a part and its likes."""
        return self._of[samples].get(key)

    def start(
        self, tensor: Tensor, samples: int, want: Want, microbatch: int, *, is_backward: bool
    ) -> None:
        """Start adding up in place; the tensor belongs to the sum from now on."""
        devices = self._devices[samples][want.number]
        work = self._channels.add_up(tensor, devices)
        self._under_way[microbatch, want.number, is_backward] = work, tensor, devices

    def take(self, want: Want, microbatch: int, *, is_backward: bool) -> Tensor:
        """Wait for the sum.

        Raises:
            PeerError: another rank died or hangs.
        """
        work, tensor, devices = self._under_way.pop((microbatch, want.number, is_backward))
        what = want.pieces[0].part.operator
        kind = "gradient of " if is_backward else ""
        name = f"sum {kind}{what} #{microbatch} over ranks {list(devices)}"
        n_bytes = tensor.numel() * tensor.element_size()
        self._phases.wait(
            name, lambda: self._channels.wait_for_sum(work, f"{kind}{what}", devices), n_bytes
        )
        return tensor


def shared_sums(layout: Layout) -> dict[int, Devices]:
    """The wants that one all_reduce serves, by number, with the devices that take part."""
    alike: dict[tuple[str, Block], list[Want]] = defaultdict(list)
    for want in layout.wants:
        if want.is_sum:
            alike[want.value, want.block].append(want)
    return {
        want.number: tuple(sorted(w.device for w in wants))
        for wants in alike.values()
        if _is_shared(wants)
        for want in wants
    }


def _is_shared(wants: list[Want]) -> bool:
    """Whether exactly the devices that hold a part each want all of it at the same place."""
    pieces = wants[0].pieces
    holders = sorted(piece.part.device for piece in pieces)
    stages = {want.stage for want in wants} | {piece.part.stage for piece in pieces}
    return (
        len(holders) >= _FEWEST_DEVICES
        and len(set(holders)) == len(holders)
        and sorted(want.device for want in wants) == holders
        and all(piece.region == wants[0].block for piece in pieces)
        and len({want.first_consumer for want in wants}) == len(stages) == 1
    )


def _by_part(layout: Layout, shared: Mapping[int, Devices], device: int) -> dict[PartKey, Want]:
    return {
        PartKey(want.value, piece.part.operator, piece.part.index): want
        for want in layout.wants
        if want.number in shared and want.device == device
        for piece in want.pieces
        if piece.part.device == device
    }

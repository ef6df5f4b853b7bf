"""Partial sums that all who hold them want whole: one all_reduce instead of everyone to everyone.

    forward   part on 0, 1, 2 --all_reduce--> the sum, on 0, 1, 2, for their next tasks
    backward  their gradients --all_reduce--> the gradient of every part

Each starts when the segment ends that gives the last of it, in topological order (backward:
reverse), so all devices of a group start its sums in the same order. Groups are the sums' own,
because gradients of weights are added up whenever backward reaches them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from harness.runtime.executor.channels import Channels
from harness.runtime.executor.messages import Devices
from harness.runtime.executor.moves import Fetch
from harness.runtime.executor.phases import Phases


class Sums:
    """The sums that this device takes part in."""

    def __init__(self, channels: Channels, phases: Phases) -> None:
        self._channels, self._phases = channels, phases
        self._under_way: dict[tuple[int, int, bool], tuple[Any, Tensor, Devices]] = {}

    def start(self, tensor: Tensor, fetch: Fetch, microbatch: int, *, is_backward: bool) -> None:
        """Start adding up in place; the tensor belongs to the sum from now on."""
        work = self._channels.add_up(tensor, fetch.summed_over)
        slot = microbatch, fetch.want.number, is_backward
        self._under_way[slot] = work, tensor, fetch.summed_over

    def take(self, fetch: Fetch, microbatch: int, *, is_backward: bool) -> Tensor:
        """Wait for the sum.

        Raises:
            PeerError: another rank died or hangs.
        """
        slot = microbatch, fetch.want.number, is_backward
        work, tensor, devices = self._under_way.pop(slot)
        what = fetch.want.pieces[0].part.operator
        kind = "gradient of " if is_backward else ""
        name = f"sum {kind}{what} #{microbatch} over ranks {list(devices)}"
        self._phases.wait(
            name,
            lambda: self._channels.wait_for_sum(work, f"{kind}{what}", devices),
            tensor.nbytes,
        )
        return tensor

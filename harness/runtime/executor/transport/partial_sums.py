"""Partial sums that all who hold them want whole: one all_reduce instead of everyone to everyone.

    forward   part on 0, 1, 2 --all_reduce--> the sum, on 0, 1, 2, for their next tasks
    backward  their gradients --all_reduce--> the gradient of every part

Each starts when the segment ends that gives the last of it, in topological order (backward:
reverse), so all devices of a group start its sums in the same order. Groups are the sums' own,
because gradients of weights are added up whenever backward reaches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.executor.transport.moves import Fetch


class _Sum(NamedTuple):
    """A sum that is under way."""

    work: Any
    tensor: Tensor
    what: str


def adding_up_norm(
    channels: Channels, phases: Phases, operator: str, devices: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    """How a batch norm's statistics are summed over the devices that share them: in place."""
    what = f"statistics of {operator}"
    name = f"sum of {what} over ranks {list(devices)}"

    def add_up(x: Tensor) -> Tensor:
        if len(devices) > 1:
            phases.wait(
                lambda: channels.add_up_norm(x, what, devices), name=name, operator=operator
            )
        return x

    return add_up


class Sums:
    """The sums that this device takes part in."""

    def __init__(self, channels: Channels, phases: Phases, n_microbatches: int) -> None:
        self._channels, self._phases, self._n_microbatches = channels, phases, n_microbatches
        self._under_way: dict[tuple[int, int, bool], _Sum] = {}

    def start(self, tensor: Tensor, fetch: Fetch, microbatch: int, *, is_backward: bool) -> None:
        """Start adding up in place; the tensor belongs to the sum from now on.

        Raises:
            PeerError: as for `take`.
        """
        operator = fetch.want.pieces[0].part.operator
        what = f"gradient of {operator}" if is_backward else operator
        work = self._channels.add_up(tensor, what, fetch.summed_over)
        self._under_way[microbatch, fetch.want.number, is_backward] = _Sum(work, tensor, what)

    def take(self, fetch: Fetch, microbatch: int, *, is_backward: bool) -> Tensor:
        """Wait for the sum.

        Raises:
            PeerError: another rank died or hangs.
        """
        devices = fetch.summed_over
        work, tensor, what = self._under_way.pop((microbatch, fetch.want.number, is_backward))
        operator = fetch.want.pieces[0].part.operator
        self._phases.wait(
            lambda: self._channels.wait_for_sum(work, what, devices),
            name=f"sum of {operator} over ranks {list(devices)}",
            n_bytes=tensor.nbytes,
            microbatch=microbatch % self._n_microbatches,
            pass_="backward" if is_backward else "forward",
            operator=operator,
        )
        return tensor

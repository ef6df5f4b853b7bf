"""All-reduce partial sums that all their devices read whole, instead of exchanging messages.

    forward   parts on 0, 1, 2 --all_reduce--> the sum, on 0, 1, 2, for their next tasks
    backward  their gradients  --all_reduce--> the gradient of every part

An all-reduce starts after the segment that computes the last of its input, in topological order
(backward: reverse), so all devices of a group start its sums in the same order. Weight gradients
use other groups, because the time of their all-reduces depends on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.shards.ring import Pass
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.executor.transport.moves import Fetch


def norm_reducer(
    channels: Channels, phases: Phases, operator: str, devices: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    """Make the function that sums a batch norm's statistics over devices, in place."""
    label = f"statistics of {operator}"
    name = f"sum of {label} over ranks {list(devices)}"

    def sum_over_devices(x: Tensor) -> Tensor:
        if len(devices) > 1:
            phases.wait(
                lambda: channels.start_sum(x, label, devices, is_collective=True)(),
                name=name,
                operator=operator,
            )
        return x

    return sum_over_devices


def key_passer(channels: Channels, phases: Phases, operator: str, devices: tuple[int, ...]) -> Pass:
    """Make the function that passes keys and values, or their gradients, on to the next device."""
    label = f"keys of {operator}"

    def pass_on(tensor: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        wait = channels.start_pass(tensor, shape, label, devices)
        name = f"{label} over ranks {list(devices)}"
        n_bytes = math.prod(shape) * tensor.element_size()
        return lambda: phases.wait(wait, name=name, n_bytes=n_bytes, operator=operator)

    return pass_on


class Sums:
    """The all-reduces of partial sums that this device takes part in."""

    def __init__(self, channels: Channels, phases: Phases, n_microbatches: int) -> None:
        self._channels, self._phases, self._n_microbatches = channels, phases, n_microbatches
        self._under_way: dict[tuple[int, int, bool], tuple[Tensor, Callable[[], None]]] = {}

    def start(self, tensor: Tensor, fetch: Fetch, microbatch: int, *, is_backward: bool) -> None:
        """Start an all-reduce in place; the caller must not use the tensor afterwards.

        Raises:
            PeerError: as for `take`.
        """
        operator = fetch.want.pieces[0].part.operator
        label = f"gradient of {operator}" if is_backward else operator
        wait = self._channels.start_sum(tensor, label, fetch.sum.devices)
        self._under_way[microbatch, fetch.want.number, is_backward] = tensor, wait

    def take(self, fetch: Fetch, microbatch: int, *, is_backward: bool) -> Tensor:
        """Wait for an all-reduce and return its result.

        Raises:
            PeerError: another rank died or hangs.
        """
        tensor, wait = self._under_way.pop((microbatch, fetch.want.number, is_backward))
        operator = fetch.want.pieces[0].part.operator
        self._phases.wait(
            wait,
            name=f"sum of {operator} over ranks {list(fetch.sum.devices)}",
            n_bytes=tensor.nbytes,
            microbatch=microbatch % self._n_microbatches,
            pass_="backward" if is_backward else "forward",
            operator=operator,
        )
        return tensor

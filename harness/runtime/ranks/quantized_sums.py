"""Sums over ranks whose terms travel in 8 bits.

    rank 0   parts 0 1 2  --- 1 and 2, in 8 bits ---> ranks 1 and 2    (a reduce-scatter)
             part 0 + those received  --- in 8 bits ---> all ranks     (an all-gather)

256 numbers share a scale, the largest magnitude among them / 127, so a term is rounded by at most
1/254 of it (blocks as in ZeRO++, Wang et al. 2023, section 3.3). Every rank keeps the rounded sum,
its owner too, so that the sums of all ranks are equal bit by bit, also on unlike devices.
"""

from __future__ import annotations

from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from harness.domain.reduce_dtype import BLOCK, quantized_bytes
from harness.runtime.ranks.messages import part_messages, start_messages

# Of messages in torch's default group, apart from those of others.
_TAG = (1 << 31) - 2
_LARGEST = 127
# Thread or stream of the last sum of each group, by its name: a group has one sum after another.
_last: dict[str, Any] = {}


def quantized(values: Tensor) -> Tensor:
    """Round float32 numbers, (n,): the bytes of the scales, then those of the numbers, uint8."""
    n = len(values)
    blocks = _in_blocks(values)
    # aminmax takes ten times as long on a CPU.
    scales = torch.maximum(blocks.amax(1), -blocks.amin(1)) / _LARGEST
    least = torch.finfo(scales.dtype).tiny
    rounded = (blocks / scales.clamp(min=least)[:, None]).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8), rounded.view(-1)[:n].view(torch.uint8)])


def dequantized(data: Tensor, n: int) -> Tensor:
    """The numbers, (n,), of `quantized`; a block with an infinite or undefined number has NaN."""
    at = quantized_bytes(n) - n
    scales = data[:at].clone().view(torch.float32)  # in memory that is aligned for them
    blocks = _in_blocks(data[at:].view(torch.int8).to(torch.float32))
    return blocks.mul_(scales[:, None]).view(-1)[:n]


def _in_blocks(values: Tensor) -> Tensor:
    """A view of numbers in rows of a block, or a copy with zeros behind them."""
    n_lacking = -len(values) % BLOCK
    padded = F.pad(values, (0, n_lacking)) if n_lacking else values
    return padded.view(len(padded) // BLOCK, BLOCK)


def start_all_reduce(tensor: Tensor, reduce_dtype: str, group: Any) -> Any:
    """Start to sum a flat tensor in place over the ranks of a group; returns the work.

    Args:
        reduce_dtype: int8 rounds float32 numbers on their way; others are sent as they are.
    """
    if reduce_dtype == "int8" and tensor.dtype == torch.float32:
        return QuantizedSum(tensor, group)
    return dist.all_reduce(tensor, group=group, async_op=True)


class QuantizedSum:
    """The work of one sum: on a stream of its own under NCCL, else in a thread."""

    def __init__(self, tensor: Tensor, group: Any) -> None:
        self._tensor, device = tensor, tensor.device
        everyone: Any = dist.group.WORLD
        self._group = everyone if group is None else group
        devices: list[Any] = [device] if device.type == "cuda" else []
        self._future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self._is_nccl = dist.get_backend(self._group) == "nccl"
        name: str = self._group.group_name
        self._ready: Any = None
        if device.type == "cuda":
            self._ready = torch.cuda.current_stream(device).record_event()
        if self._is_nccl:
            stream = _last.setdefault(name, torch.cuda.Stream(device, priority=-1))
            self._sum_on(stream)
        else:
            _last[name] = Thread(target=self._sum_after, args=[_last.get(name)], daemon=True)
            _last[name].start()

    def get_future(self) -> torch.futures.Future[Tensor]:
        """Done when the tensor has the sum, or with the error of an exchange."""
        return self._future

    def wait(self) -> None:
        """Wait for the sum: on the host, under NCCL on the current stream."""
        if self._is_nccl:
            torch.cuda.current_stream().wait_event(self._ready)
        else:
            self._future.wait()

    synchronize = wait

    def is_completed(self) -> bool:
        return bool(self._ready.query()) if self._is_nccl else self._future.done()

    def _sum_on(self, stream: Any) -> None:
        with torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            self._sum()
            self._ready = stream.record_event()
            self._future.set_result(self._tensor)

    def _sum_after(self, before: Thread | None) -> None:
        try:
            if before is not None:
                before.join()
            if self._ready is not None:
                self._ready.synchronize()
            self._sum()  # on a GPU, copies to the host wait for its kernels
            if self._ready is not None:
                torch.cuda.current_stream(self._tensor.device).synchronize()
        except RuntimeError as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._tensor)

    @torch.no_grad()
    def _sum(self) -> None:
        n_ranks, here = dist.get_world_size(self._group), dist.get_rank(self._group)
        device = self._tensor.device
        wire = device if self._is_nccl else torch.device("cpu")
        tag = 0 if self._is_nccl else _TAG
        size = -(-len(self._tensor) // (n_ranks * BLOCK)) * BLOCK
        parts = [self._tensor[k * size : (k + 1) * size] for k in range(n_ranks)]

        def exchange(sent: list[Tensor], sizes: list[int]) -> list[Tensor]:
            received = [torch.empty(n, dtype=torch.uint8, device=wire) for n in sizes]
            for work in start_messages(part_messages(received, sent, here, self._group, tag)):
                work.wait()
            return [each.to(device) for each in received]

        sent = [quantized(part).to(wire) for part in parts]
        own, sizes = parts[here], [len(each) for each in sent]
        for k, received in enumerate(exchange(sent, [sizes[here]] * n_ranks)):
            if k != here:
                own += dequantized(received, len(own))
        rounded = quantized(own)
        sums = exchange([rounded.to(wire)] * n_ranks, sizes)
        sums[here] = rounded
        for part, data in zip(parts, sums, strict=True):
            part.copy_(dequantized(data, len(part)))

"""Dropout of a block, by the block of the whole tensor's mask.

Each mask has its own generator, seeded by step, microbatch and operator, so that it depends on no
other random numbers, and recomputation repeats it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harness.domain.partition import Block
from harness.runtime.executor.shards.base import Shard, ShardSpec
from harness.runtime.executor.shards.regions import Region, region


@dataclass
class RandomState:
    """Position in training, shared by all dropouts of a process; the engine advances it."""

    seed: int
    step: int = 0
    microbatch: int = 0

    def generator(self, index: int) -> torch.Generator:
        """A new generator for operator `index`, with the same seed in each call.

        It runs on the host, because random numbers of a GPU depend on its number of processors.
        """
        place = f"{self.seed} {self.step} {self.microbatch} {index}".encode()
        digest = hashlib.blake2b(place, digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


class ExactDropout(Shard):
    """A block of a dropout.

    Args:
        sizes: shape of the whole mask; 1 along dims that are dropped together.
        block: block of that mask.
        index: number of the operator, part of the seed of its masks.
    """

    def __init__(
        self,
        probability: float,
        sizes: Sequence[int],
        block: Block,
        *,
        index: int,
        state: RandomState,
        inward: Region | None = None,
    ) -> None:
        super().__init__()
        self._probability, self._sizes, self._block = probability, tuple(sizes), block
        self._index, self._state, self._inward = index, state, inward or Region()

    def forward(self, *inputs: Tensor) -> Tensor:
        x = self._inward.take(inputs[0])
        if not self.training or self._probability == 0:
            return x
        return x * self._mask(x)

    def _mask(self, x: Tensor) -> Tensor:
        kept = 1.0 - self._probability
        generator = self._state.generator(self._index)
        whole = torch.rand(self._sizes, generator=generator, device="cpu") < kept
        block = whole[tuple(slice(*interval) for interval in self._block)]
        mask = block.to(x.device).to(x.dtype)
        return mask / kept if kept > 0 else mask


def make_dropout(part: ShardSpec, index: int, state: RandomState) -> ExactDropout | None:
    """nn.Dropout, nn.Dropout2d or F.dropout, cut along any dims; None for another function."""
    probability = _probability(part)
    if probability is None or len(part.wanted) != 1:
        return None
    inward = region(part.wanted[0], part.output)
    if inward is None:
        return None
    sizes, block = list(part.sizes), list(part.output)
    if isinstance(part.module, nn.Dropout2d):
        sizes[2:], block[2:] = [1] * len(sizes[2:]), [(0, 1)] * len(sizes[2:])
    return ExactDropout(probability, sizes, tuple(block), index=index, state=state, inward=inward)


def _probability(part: ShardSpec) -> float | None:
    if isinstance(part.module, nn.Dropout | nn.Dropout2d):
        return float(part.module.p)
    if part.module is not None or part.function != "dropout":
        return None
    read = part.named_arguments("input", "p", "training", "inplace")
    if read is None:
        return None
    return float(read.get("p", 0.5)) if read.get("training", True) else 0.0

"""Shards of elementwise functions of tensors that broadcast to the output's shape, and of dropout.

Each mask has its own generator, seeded by step, microbatch and operator, so that it depends on no
other random numbers, and recomputation repeats it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.domain.partition import Block, Interval
from harness.runtime.devices.compiling import uncompiled
from harness.runtime.executor.shards.base import Given, Held, Shard, ShardSpec, operands_in
from harness.runtime.executor.shards.inplace import copying_function
from harness.runtime.executor.shards.regions import Region


class PointwiseShard(Shard):
    """A block of an elementwise function.

    Args:
        args, kwargs: arguments, with `Given` for inputs and `Held` for tensors of the model.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inward: list[Region],
    ) -> None:
        super().__init__(inward)
        self._function, self._args, self._kwargs = function, args, kwargs
        self._names: dict[str, str] = {}

    def copy_operand(self, part: ShardSpec, held: Held, intervals: Block) -> None:
        """Copy a slice of a tensor of the model that is among the arguments."""
        name = self._names.setdefault(held.name, f"operand_{len(self._names)}")
        self.copy_slice(part, name, held, intervals)

    def compute(self, *inputs: Tensor) -> Tensor:
        def fill(argument: Any) -> Any:
            if isinstance(argument, Given):
                return inputs[argument.index]
            if isinstance(argument, Held):
                return getattr(self, self._names[argument.name])
            return argument

        args, kwargs = fx.node.map_aggregate((self._args, self._kwargs), fill)
        result: Tensor = self._function(*args, **kwargs)
        return result


def make_pointwise(part: ShardSpec) -> PointwiseShard | None:
    """Activations, arithmetic and casts, cut along any dims."""
    read = part.arguments()
    function = _function(part)
    if read is None or function is None or not part.dims:
        return None
    args, kwargs = read
    blocks = [_needed(part, tuple(wanted.shape.values())) for wanted in part.wanted]
    known = [block for block in blocks if block is not None]
    if len(known) < len(blocks) or "out" in kwargs:
        return None
    inward = part.regions(known)
    if part.node.op == "call_function":
        args, kwargs = _out_of_place(part.node.target, args, kwargs)
    shard = PointwiseShard(function, args, kwargs, inward)
    for held in dict.fromkeys(operands_in((args, kwargs))):
        if isinstance(held, Given):
            continue
        needed = _needed(part, tuple(part.tensor(held).shape))
        if needed is None:
            return None
        shard.copy_operand(part, held, needed)
    return shard


def _needed(part: ShardSpec, sizes: tuple[int, ...]) -> Block | None:
    """The block of an operand that broadcasts to the output block; None if it does not."""
    missing = len(part.sizes) - len(sizes)
    if missing < 0:
        return None
    needed: list[Interval] = []
    sides = zip(sizes, part.sizes[missing:], part.output[missing:], strict=True)
    for size, of_output, interval in sides:
        if size not in (1, of_output):
            return None
        needed.append(interval if size == of_output else (0, 1))
    return tuple(needed)


def _function(part: ShardSpec) -> Callable[..., Any] | None:
    """The function that computes the node out of place; None if there is none."""
    module, target = part.module, part.node.target
    if module is not None:
        return _module(part, module)
    if isinstance(target, str):
        name = target.removesuffix("_")
        return lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    found: Callable[..., Any] | None = copying_function(target)
    return found


def _module(part: ShardSpec, module: nn.Module) -> Callable[..., Any] | None:
    if any(True for _ in module.parameters()):
        return None
    if isinstance(module, nn.Dropout2d) and not (part.is_whole(2) and part.is_whole(3)):
        return None  # because it drops whole channels
    copied = copy.copy(module)
    if getattr(copied, "inplace", False):
        copied.__dict__["inplace"] = False
    return copied


def _out_of_place(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Clear `inplace` among the arguments of a function that has it."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # builtins have no signature, and no `inplace`
        return args, kwargs
    if "inplace" not in signature.parameters:
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    bound.arguments["inplace"] = False
    return bound.args, bound.kwargs


@dataclass
class RandomState:
    """Position in training, shared by all dropouts of a process; the engine advances it."""

    seed: int
    step: int = 0
    microbatch: int = 0

    def generator(self, operator: str) -> torch.Generator:
        """A new generator for an operator, with the same seed in each call.

        It runs on the host, because random numbers of a GPU depend on its number of processors.
        """
        place = f"{self.seed} {self.step} {self.microbatch} {operator}".encode()
        digest = hashlib.blake2b(place, digest_size=7).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


class ExactDropout(Shard):
    """A block of a dropout.

    Args:
        sizes: shape of the whole mask; 1 along dims that are dropped together.
        operator: its name, part of the seed of its masks, because its place differs with --cache.
    """

    def __init__(
        self,
        probability: float,
        sizes: Sequence[int],
        block: Block,
        *,
        operator: str,
        state: RandomState,
        inward: Region = Region(),  # noqa: B008
    ) -> None:
        super().__init__([inward])
        self._probability, self._sizes, self._block = probability, tuple(sizes), block
        self._operator, self._state = operator, state

    def compute(self, x: Tensor) -> Tensor:
        if not self.training or self._probability == 0:
            return x
        return x * self._mask(x)

    @uncompiled
    def _mask(self, x: Tensor) -> Tensor:
        kept = 1.0 - self._probability
        generator = self._state.generator(self._operator)
        whole = torch.rand(self._sizes, generator=generator, device="cpu") < kept
        block = whole[tuple(slice(*interval) for interval in self._block)]
        mask = block.to(x.device).to(x.dtype)
        return mask / kept if kept > 0 else mask


def make_dropout(part: ShardSpec, state: RandomState) -> ExactDropout | None:
    """nn.Dropout, nn.Dropout2d or F.dropout, cut along any dims; None for another function.

    Args:
        state: random state that all dropouts of this rank share.
    """
    probability = _probability(part)
    if probability is None or len(part.wanted) != 1:
        return None
    inward = part.region(part.output)
    sizes, block = list(part.sizes), list(part.output)
    if isinstance(part.module, nn.Dropout2d):
        sizes[2:], block[2:] = [1] * len(sizes[2:]), [(0, 1)] * len(sizes[2:])
    name, cut = part.operator.name, tuple(block)
    shard = ExactDropout(probability, sizes, cut, operator=name, state=state, inward=inward)
    return part.in_mode(shard)


def _probability(part: ShardSpec) -> float | None:
    if isinstance(part.module, nn.Dropout | nn.Dropout2d):
        return float(part.module.p)
    if part.module is not None or part.function != "dropout":
        return None
    read = part.named_arguments("input", "p", "training", "inplace")
    if read is None:
        return None
    return float(read.get("p", 0.5)) if read.get("training", True) else 0.0

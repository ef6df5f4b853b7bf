"""Shards of elementwise functions of tensors that broadcast to the output's shape."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx, nn

from harness.domain.partition import Block, Interval
from harness.runtime.executor.shards.base import Given, Held, Shard, ShardSpec
from harness.runtime.executor.shards.inplace import copying_function
from harness.runtime.executor.shards.regions import Region, region


class PointwiseShard(Shard):
    """A block of an elementwise function.

    Args:
        args, kwargs: arguments, with `Given` for inputs and `Held` for tensors of the model.
        inward: one region per input.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inward: list[Region],
    ) -> None:
        super().__init__()
        self._function, self._args, self._kwargs, self._inward = function, args, kwargs, inward
        self._names: dict[str, str] = {}

    def copy_operand(self, part: ShardSpec, held: Held, intervals: Block) -> None:
        """Copy a slice of a tensor of the model that is among the arguments."""
        name = self._names.setdefault(held.name, f"operand_{len(self._names)}")
        self.copy_slice(part, name, held, intervals)

    def forward(self, *inputs: Tensor) -> Tensor:
        def fill(argument: Any) -> Any:
            if isinstance(argument, Given):
                return self._inward[argument.index].take(inputs[argument.index])
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
    inward = [_operand_region(part, index) for index in range(len(part.wanted))]
    if any(each is None for each in inward) or "out" in kwargs:
        return None
    regions = [each for each in inward if each is not None]
    if part.node.op == "call_function":
        args, kwargs = _out_of_place(part.node.target, args, kwargs)
    shard = PointwiseShard(function, args, kwargs, regions)
    for held in _held_in((args, kwargs)):
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


def _operand_region(part: ShardSpec, index: int) -> Region | None:
    wanted = part.wanted[index]
    needed = _needed(part, tuple(wanted.shape.values()))
    return None if needed is None else region(wanted, needed)


def _held_in(arguments: Any) -> Iterable[Held]:
    found: dict[str, Held] = {}

    def note(argument: Any) -> Any:
        if isinstance(argument, Held):
            found[argument.name] = argument
        return argument

    fx.node.map_aggregate(arguments, note)
    return found.values()


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

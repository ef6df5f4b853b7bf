"""A shard, what it is made from, and how an operator's arguments are read off its node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from harness.domain.graph import Operator
from harness.domain.partition import Block, Interval
from harness.runtime.capture.operators import function_name
from harness.runtime.executor.geometry.slices import WeightSlice


@dataclass(frozen=True)
class Wanted:
    """What a task is handed of one producer's output.

    Attributes:
        shape: the producer's output dims, full sizes at this microbatch.
        block: of that output, by `domain.sharding.input_block`.
    """

    shape: dict[str, int]
    block: Block


@dataclass(frozen=True)
class Held:
    """An argument that is a tensor of the model, by its name there."""

    name: str


@dataclass(frozen=True)
class Given:
    """An argument that is the output of a producer, by its position among the inputs."""

    index: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One block of one operator: all that a shard is made from.

    Attributes:
        root: the traced model, with its own tensors.
        shape: sizes of the dims of the whole output, then of its partial dims.
        block: intervals of these.
    """

    operator: Operator
    node: fx.Node
    root: nn.Module
    shape: dict[str, int]
    block: Block
    wanted: Sequence[Wanted]

    @property
    def dims(self) -> tuple[str, ...]:
        """Of the output tensor, in storage order."""
        return tuple(self.operator.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.dims)

    @property
    def output(self) -> Block:
        """The output tensor's block, one interval per dim of it."""
        return self.block[: len(self.dims)]

    def is_whole(self, position: int) -> bool:
        """Whether the block has all of a dim of the output tensor."""
        return self.output[position] == (0, self.sizes[position])

    def is_side_whole(self, position: int) -> bool:
        """Whether it has all of a dim, and is handed all: a stride may leave the last rows out."""
        size = list(self.wanted[0].shape.values())[position]
        return self.is_whole(position) and self.wanted[0].block[position] == (0, size)

    def partial(self, dim: str) -> Interval | None:
        """The block's interval of a dim that is summed over; None where it has no such dim."""
        named = dict(zip(self.shape, self.block, strict=True))
        return None if dim in self.dims else named.get(dim)

    @property
    def module(self) -> nn.Module | None:
        """The module that the node calls; None for a function."""
        if self.node.op != "call_module":
            return None
        return self.root.get_submodule(str(self.node.target))

    @property
    def function(self) -> str:
        """The module's type or the function's bare name."""
        module = self.module
        return function_name(self.node.target) if module is None else type(module).__name__

    def held(self, name: str) -> Held | None:
        """A tensor of the node's module; None where the module goes without it."""
        module = self.module
        if module is None:
            return None
        tensor: Any = module
        for step in name.split("."):
            tensor = getattr(tensor, step, None)
        return None if tensor is None else Held(_root_name(self.root, tensor))

    def tensor(self, held: Held) -> Tensor:
        return named_tensor(self.root, held.name)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The node's arguments with its nodes as `Given` and `Held`; None if one is neither."""
        return _read_arguments(self.node, self.root, len(self.operator.inputs))

    def named_arguments(self, *names: str) -> dict[str, Any] | None:
        """The node's arguments by the names of the function's first parameters."""
        read = self.arguments()
        if read is None or len(read[0]) > len(names):
            return None
        return {**dict(zip(names, read[0], strict=False)), **read[1]}


class Shard(nn.Module):
    """Computes one block of one operator from what its device is handed of the inputs.

    Called with the inputs in the order of the operator's, each exactly its wanted block; returns
    exactly the output block, or for a cut along a partial dim a partial sum of it. Parameters may
    be replaced by shared ones, so nothing else may hold on to them.

    Attributes:
        sources: own parameter or buffer name -> the slice of the model's tensor that it copies;
            buffers that are missing here are no part of the model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, WeightSlice] = {}

    def own(
        self, part: Part, name: str, held: Held | None, intervals: Sequence[Interval] | None = None
    ) -> None:
        """Copy a slice of a tensor of the model as own parameter or buffer; all by default."""
        if held is None:
            self.register_parameter(name, None)
            return
        whole = part.tensor(held)
        if intervals is None:
            source = WeightSlice.whole(held.name, whole)
        else:
            source = WeightSlice(held.name, tuple(intervals))
        copied = source.take(whole.detach()).clone(memory_format=torch.contiguous_format)
        if isinstance(whole, nn.Parameter):
            self.register_parameter(name, nn.Parameter(copied, whole.requires_grad))
        else:
            self.register_buffer(name, copied)
        self.sources[name] = source


# Makes the shard of one part; None where there is none.
Make = Callable[[Part], Shard | None]


def named_tensor(root: nn.Module, name: str) -> Tensor:
    """A parameter, buffer or plain tensor of a module by its dotted name."""
    value: Any = root
    for step in name.split("."):
        value = getattr(value, step)
    assert isinstance(value, Tensor)
    return value


def _root_name(root: nn.Module, tensor: Tensor) -> str:
    """The first of a tensor's names in the model: tied weights have several."""
    for names in (root.named_parameters(), root.named_buffers()):
        for name, known in names:
            if known is tensor:
                return name
    return ""


def has_plain_weights(module: nn.Module) -> bool:
    """Whether its tensors are what it computes with: no hooks, no parametrizations."""
    hooked = any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    return not hooked and not any(parametrize.is_parametrized(m) for m in module.modules())


def _read_arguments(
    node: fx.Node, root: nn.Module, n_inputs: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    n_given = 0

    def read(argument: fx.Node) -> Any:
        nonlocal n_given
        if argument.op == "get_attr":
            tensor = named_tensor(root, str(argument.target))
            return Held(_root_name(root, tensor) or str(argument.target))
        n_given += 1
        return Given(n_given - 1)

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
    # A node that computes a number is no operator, so that it is missing among the inputs.
    return (tuple(args), dict(kwargs)) if n_given == n_inputs else None

"""The interface of a shard, its specification, and the arguments of an operator's node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from harness.domain.graph import Operator
from harness.domain.partition import Block, Interval
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.shards.regions import LackingError, Region
from harness.runtime.tracing.constructs import function_name

ShardT = TypeVar("ShardT", bound=nn.Module)


@dataclass(frozen=True)
class Wanted:
    """The block of one producer's output that a task receives.

    Attributes:
        shape: full sizes of the producer's output dims, at this microbatch size.
        block: the block, by `domain.sharding.input_block`.
    """

    shape: dict[str, int]
    block: Block

    def region(self, needed: Sequence[Interval], fill: float = 0.0) -> Region:
        """The padding and crops to a region that is needed.

        Raises:
            LackingError: the block lacks a part of it.
        """
        if len(needed) != len(self.block):
            raise LackingError
        pads: list[int] = []
        crops: list[tuple[int, int, int]] = []
        sides = zip(self.shape.values(), self.block, needed, strict=True)
        for dim, (size, (low, high), (start, stop)) in enumerate(sides):
            real = max(0, start), min(size, stop)
            if real[0] < real[1] and not low <= real[0] < real[1] <= high:
                raise LackingError
            before, after = max(0, low - start), max(0, stop - high)
            pads = [before, after, *pads]
            skipped = start - (low - before)
            if skipped or stop - start < before + (high - low) + after:
                crops.append((dim, skipped, stop - start))
        return Region(tuple(pads) if any(pads) else (), tuple(crops), fill)


@dataclass(frozen=True)
class Held:
    """An argument that is a tensor of the model, by its name."""

    name: str


@dataclass(frozen=True)
class Given:
    """An argument that is the output of a producer, by its index among the inputs."""

    index: int


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """One block of one operator: the specification of a shard.

    Attributes:
        root: the traced model.
        shape: sizes by `domain.sharding.full_shape` at the microbatch size: of the dims of the
            whole output, then of its partial dims.
        block: one interval for each of these dims.
        wanted: one for each input of the operator.
        has_own_keys: an attention projects keys and values of its block's positions only.
    """

    operator: Operator
    node: fx.Node
    root: nn.Module
    shape: dict[str, int]
    block: Block
    wanted: Sequence[Wanted]
    has_own_keys: bool = False

    @property
    def dims(self) -> tuple[str, ...]:
        """Dims of the output tensor, in storage order."""
        return tuple(self.operator.shape)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.dims)

    @property
    def output(self) -> Block:
        """The block without partial dims."""
        return self.block[: len(self.dims)]

    def is_whole(self, position: int) -> bool:
        """Whether the block covers a dim of the output tensor."""
        return self.output[position] == (0, self.sizes[position])

    def is_side_whole(self, position: int) -> bool:
        """Whether block and input cover a dim; with a stride, the input may lack the last rows."""
        size = list(self.wanted[0].shape.values())[position]
        return self.is_whole(position) and self.wanted[0].block[position] == (0, size)

    def partial(self, dim: str) -> Interval | None:
        """The block's interval of a partial dim; None if it has no such dim."""
        named = dict(zip(self.shape, self.block, strict=True))
        return None if dim in self.dims else named.get(dim)

    @property
    def module(self) -> nn.Module | None:
        """The module that the node calls; None for a function."""
        return called_module(self.node, self.root)

    @property
    def function(self) -> str:
        """The name of the module's type or of the function."""
        module = self.module
        return function_name(self.node.target) if module is None else type(module).__name__

    def region(self, needed: Sequence[Interval], fill: float = 0.0) -> Region:
        """That of the only input; raises as `Wanted.region`."""
        return self.wanted[0].region(needed, fill)

    def regions(self, needed: Sequence[Sequence[Interval]]) -> list[Region]:
        """Those of all inputs."""
        return [wanted.region(own) for wanted, own in zip(self.wanted, needed, strict=True)]

    def in_mode(self, shard: ShardT) -> ShardT:
        """Set a shard to training or evaluation, as the node's module is."""
        return shard if self.module is None else shard.train(self.module.training)

    def held(self, name: str) -> Held | None:
        """A tensor of the node's module; None if the module does not have it."""
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
        """The node's arguments, nodes as `Given` or `Held`; None if a node is neither."""
        n_given = 0

        def read(argument: fx.Node) -> Any:
            nonlocal n_given
            if argument.op == "get_attr":
                tensor = named_tensor(self.root, str(argument.target))
                return Held(_root_name(self.root, tensor) or str(argument.target))
            n_given += 1
            return Given(n_given - 1)

        args, kwargs = fx.node.map_arg((self.node.args, self.node.kwargs), read)
        # A node that computes a number is no operator, so the operator's inputs do not contain it.
        return (tuple(args), dict(kwargs)) if n_given == len(self.operator.inputs) else None

    def named_arguments(self, *names: str) -> dict[str, Any] | None:
        """The node's arguments by name, given the names of the function's first parameters."""
        read = self.arguments()
        if read is None or len(read[0]) > len(names):
            return None
        return {**dict(zip(names, read[0], strict=False)), **read[1]}


class Shard(nn.Module):
    """Computes one block of one operator from blocks of its inputs.

    Called with the wanted block of each input, in the order of the operator's inputs; returns the
    output block, or a partial sum of it for a cut along a partial dim. `Weights.share` may replace
    parameters, so no other object may refer to them.

    Args:
        inward: gives `compute` what it needs of each wanted block.

    Attributes:
        compute: computes the block, by a method of the subclass.
        sources: name of a parameter or buffer -> the slice of the model's tensor that it copies;
            buffers without an entry are not part of the model.
    """

    compute: Callable[..., Tensor]

    def __init__(self, inward: Sequence[Region]) -> None:
        super().__init__()
        self._inward = inward
        self.sources: dict[str, WeightSlice] = {}

    def taken(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What `compute` needs of the inputs."""
        return [region.take(x) for region, x in zip(self._inward, inputs, strict=True)]

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.compute(*self.taken(inputs))

    def copy_slice(
        self, part: ShardSpec, name: str, held: Held | None, intervals: Sequence[Interval] = ()
    ) -> None:
        """Copy a slice of a tensor of the model as a parameter or buffer.

        Args:
            intervals: of the first dims; the others are whole.
        """
        if held is None:
            self.register_parameter(name, None)
            return
        whole = part.tensor(held)
        others = ((0, size) for size in whole.shape[len(intervals) :])
        source = WeightSlice(held.name, (*intervals, *others))
        copied = source.take(whole.detach()).clone(memory_format=torch.contiguous_format)
        if isinstance(whole, nn.Parameter):
            self.register_parameter(name, nn.Parameter(copied, whole.requires_grad))
        else:
            self.register_buffer(name, copied)
        self.sources[name] = source


# Makes the shard of one part; None, or a LackingError, if the cut has none.
Make = Callable[[ShardSpec], Shard | None]


def called_module(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that a node calls; None for a function."""
    return root.get_submodule(str(node.target)) if node.op == "call_module" else None


def named_tensor(root: nn.Module, name: str) -> Tensor:
    """A parameter, buffer or plain tensor of a module by its dotted name."""
    value = attrgetter(name)(root)
    assert isinstance(value, Tensor)
    return value


def _root_name(root: nn.Module, tensor: Tensor) -> str:
    """The first name of a tensor in the model, because tied weights have several."""
    for names in (root.named_parameters(), root.named_buffers()):
        for name, known in names:
            if known is tensor:
                return name
    return ""


def has_plain_weights(module: nn.Module) -> bool:
    """Whether a module has neither forward hooks nor parametrizations."""
    hooked = any(m._forward_pre_hooks or m._forward_hooks for m in module.modules())
    return not hooked and not any(parametrize.is_parametrized(m) for m in module.modules())


def operands_in(arguments: Any) -> list[Held | Given]:
    """The tensors of the model and the producers' outputs among arguments, in order."""
    found: list[Held | Given] = []

    def note(argument: Any) -> Any:
        if isinstance(argument, Held | Given):
            found.append(argument)
        return argument

    fx.node.map_aggregate(arguments, note)
    return found

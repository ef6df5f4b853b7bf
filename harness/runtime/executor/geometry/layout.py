"""The blocks that devices compute, the regions that they read, and the transfers that result.

    want    a region of a value that a device needs, for one or several of its tasks
    piece   the region that one part contributes to a want

Values are nodes of the captured graph; an operator may give several (the elements of a tuple).
The pieces of a want tile it, or are added if the operator's parts hold partial sums. Every rank
computes the layout of all ranks, so that sender and receiver need not exchange it.

Wants of readers with copies are separate from other wants of the same region, because their
gradients take other routes (see `domain.routes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import fx

from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, Block, Interval, samples_of, serving
from harness.domain.routes import Flags, Parts, find_pieces
from harness.domain.sharding import (
    full_blocks,
    full_shape,
    has_tasks,
    input_block,
    is_partial,
    output_sizes,
    scaled,
)
from harness.domain.strategy import OperatorPlan, Strategy, copies_of
from harness.errors import ModelError, StrategyError
from harness.runtime.capture.builder import argument_nodes
from harness.runtime.capture.capture import Captured
from harness.runtime.executor.geometry.values import MetaModel, TensorMeta, Values


@dataclass(frozen=True)
class Part:
    """One block of an operator.

    Attributes:
        block: over all dims that may be cut, partial ones included.
        copies: all devices that compute this block, ascending; empty if this is the only one.
    """

    operator: str
    index: int
    device: int
    stage: int
    block: Block
    copies: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A region of a value that one part holds, complete or as a partial sum."""

    part: Part
    region: Block


class WantedRegion(NamedTuple):
    """What tells wants apart; see `Want`."""

    value: str
    device: int
    block: Block
    copies: tuple[int, ...]
    served: Block


@dataclass(frozen=True)
class Want:
    """A region of a value that a device needs.

    Attributes:
        number: unique over all devices; equal on every rank.
        value: the node's name.
        copies: the devices of its readers, if these are copies of each other.
        pieces: the regions that it consists of, in the order of the parts.
        returns: the parts that receive its gradient.
        served: of several parts that each compute all of an operator, the samples of those that it
            takes.
        is_sum: the pieces overlap and must be added.
        first_consumer: position of the first operator on this device that reads it.
    """

    number: int
    value: str
    device: int
    block: Block
    copies: tuple[int, ...]
    served: Block
    pieces: tuple[Piece, ...] = field(compare=False)
    returns: tuple[Piece, ...] = field(compare=False)
    is_sum: bool = field(compare=False)
    first_consumer: int = field(compare=False)
    stage: int = field(compare=False)

    @cached_property
    def is_exchanged(self) -> bool:
        """Whether another device sends a piece or receives its gradient."""
        pieces = (*self.pieces, *self.returns)
        return any(piece.part.device != self.device for piece in pieces)


class Layout:
    """The geometry of a strategy for microbatches of `samples`.

    Args:
        gathered: operators that the executor cannot cut as the strategy demands, so that each task
            computes the whole operator for its samples and keeps its block.
        whole: gathered operators whose tasks compute all samples.
    """

    def __init__(
        self,
        captured: Captured,
        meta: MetaModel,
        strategy: Strategy,
        samples: int,
        gathered: frozenset[str] = frozenset(),
        whole: frozenset[str] = frozenset(),
    ) -> None:
        self.captured, self.strategy, self.samples = captured, strategy, samples
        self.values: Values = meta.at(samples)
        self._at_twice = meta.at_twice(samples)
        self.gathered, self.whole = gathered, whole
        self.graph: Graph = captured.graph
        self.position = self.graph.index()
        self.operators = {op.name: op for op in self.graph.operators}
        self.owner, self._made_of_weights = owners(captured), self.graph.made_of_weights()
        self._nodes = {node.name: node for node in self.owner}
        self.differentiable = frozenset(
            node.name for node, meta in self.values.tensors.items() if meta.is_differentiable
        )
        self.shapes = {
            op.name: full_shape(op, batch=samples, graph_batch=self.graph.batch)
            for op in self.graph.operators
        }
        self.parts = {name: self._parts_of(name) for name in strategy.operators}
        self._held: dict[fx.Node, Parts] = {}
        self.wants: list[Want] = []
        self._numbers: dict[WantedRegion, int] = {}
        for operator in self.graph.operators:
            if has_tasks(operator):
                self._add_wants(operator)

    @cached_property
    def unread(self) -> frozenset[tuple[str, int]]:
        """Operators and indices of parts that nobody reads, such as rows beyond a pool's windows,
        though other parts are read. Their backward runs too, because other devices sum gradients of
        the same weights."""
        read = {
            (p.part.operator, p.part.index) for w in self.wants for p in (*w.pieces, *w.returns)
        }
        parts = (part for name in {name for name, _ in read} for part in self.parts[name])
        alone = {(part.operator, part.index) for part in parts if not part.copies}
        return frozenset(alone - read)

    def exchanges(self) -> set[tuple[int, int]]:
        """The devices of each activation that is sent."""
        return {(p.part.device, w.device) for w in self.wants for p in (*w.pieces, *w.returns)}

    def plan(self, operator: str) -> OperatorPlan:
        return self.strategy.operators[operator]

    def sizes_of(self, value: str, region: Block) -> tuple[int, ...]:
        """The shape of a region of a value; dims beyond the region's are whole."""
        sizes = tuple(stop - start for start, stop in region)
        return (*sizes, *self.tensor(value).shape[len(sizes) :])

    def node(self, value: str) -> fx.Node:
        return self._nodes[value]

    def is_made_of_weights(self, value: str) -> bool:
        """Whether autocast may round a value on its way to another device."""
        return self.owner[self._nodes[value]] in self._made_of_weights

    def tensor(self, value: str) -> TensorMeta:
        """Metadata of the whole value."""
        return self.values.tensors[self._nodes[value]]

    def _parts_of(self, name: str) -> list[Part]:
        operator, plan = self.operators[name], self.plan(name)
        blocks = full_blocks(
            operator, plan.partition, batch=self.samples, graph_batch=self.graph.batch
        )
        return [
            Part(name, k, device, plan.stage, block, copies_of(plan, k))
            for k, (block, device) in enumerate(zip(blocks, plan.devices, strict=True))
        ]

    def arguments(self, operator: str) -> list[fx.Node]:
        """The tensor nodes that an operator reads, in the order of its `inputs`."""
        if operator not in self.captured.nodes:
            (output,) = self.captured.module.graph.find_nodes(op="output")
            return [next(n for n in output.all_input_nodes if n in self.owner)]
        return [n for n in argument_nodes(self.captured.nodes[operator]) if n in self.owner]

    def value_shape(self, node: fx.Node) -> dict[str, int]:
        """Named sizes of a value, without partial dims.

        Elements of a tuple with the shape and the dim of samples of the first have its names. Other
        values, such as products over samples, have a name for samples only.
        """
        operator = self.operators[self.owner[node]]
        shown = output_sizes(operator, self.shapes[operator.name])
        sizes = self.values.tensors[node].shape
        twice = sizes if self._at_twice is None else self._at_twice.tensors[node].shape
        growing = [k for k, (a, b) in enumerate(zip(sizes, twice, strict=True)) if b > a]
        known = [k for k, dim in enumerate(shown) if dim == SAMPLE]
        # Parts of a batch, such as its thirds, grow with it in a dim that is not of samples.
        is_alike = not growing or not known or growing == known
        if is_alike and sizes == tuple(shown.values()):
            return shown
        return {SAMPLE if growing == [k] else f"dim{k}": size for k, size in enumerate(sizes)}

    def region(self, node: fx.Node, part: Part) -> Block:
        """The region of a value that a part holds; a tuple's elements are cut like its first."""
        held = dict(zip(self.shapes[part.operator], part.block, strict=True))
        sizes = self.shapes[part.operator]
        return tuple(
            scaled(held[dim], sizes[dim], size)
            if dim in held and (dim == SAMPLE or sizes[dim] == size)
            else (0, size)
            for dim, size in self.value_shape(node).items()
        )

    def wanted(self, part: Part, argument: int, node: fx.Node) -> Block:
        """The region of a value that a task reads."""
        return input_block(
            self.operators[part.operator],
            self.shapes[part.operator],
            self.computed(part),
            self.value_shape(node),
            argument=argument,
            has_own_keys=self.plan(part.operator).keys != "input",
        )

    def computed(self, part: Part) -> Block:
        """The block that a task computes; larger than its own if the operator is gathered."""
        if part.operator in self.whole:
            return tuple((0, size) for size in self.shapes[part.operator].values())
        if part.operator not in self.gathered:
            return part.block
        return tuple(
            interval if dim == SAMPLE else (0, size)
            for (dim, size), interval in zip(
                self.shapes[part.operator].items(), part.block, strict=True
            )
        )

    def _add_wants(self, operator: Operator) -> None:
        for argument, node in enumerate(self.arguments(operator.name)):
            for part in self.parts[operator.name]:
                region = self._wanted_region(node, part, argument)
                if region not in self._numbers:
                    self._numbers[region] = len(self.wants)
                    self.wants.append(self._want(node, part, region, operator))

    def _wanted_region(self, node: fx.Node, part: Part, argument: int) -> WantedRegion:
        """What a task reads as an argument."""
        served: Block = ()
        if not self.operators[owner := self.owner[node]].reads_samples:
            cuts, reader = self.plan(owner).partition, self.plan(part.operator).partition
            served = serving(cuts, reader, part.index, self.samples)
        block = self.wanted(part, argument, node)
        return WantedRegion(node.name, part.device, block, part.copies, served)

    def _want(self, node: fx.Node, part: Part, region: WantedRegion, consumer: Operator) -> Want:
        owner = self.operators[self.owner[node]]
        pieces, returns = self._pieces(node, part, region) if has_tasks(owner) else ((), ())
        return Want(
            number=len(self.wants),
            **region._asdict(),
            pieces=pieces,
            returns=returns,
            is_sum=len(pieces) > 1
            and any(is_partial(owner, dim) for dim in self.plan(owner.name).partition),
            first_consumer=self.position[consumer.name],
            stage=part.stage,
        )

    def _pieces(
        self, node: fx.Node, part: Part, wanted: WantedRegion
    ) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        """The pieces that a reader takes, and those whose gradients it returns."""
        producers = self.parts[self.owner[node]]
        if node not in self._held:
            bounds = np.array([self.region(node, p) + self._served(p) for p in producers])
            devices = np.array([producer.device for producer in producers])
            copies = [producer.copies for producer in producers if producer.copies]
            self._held[node] = Parts(bounds.reshape(len(producers), -1, 2), devices, copies)
        region = np.array(wanted.block + wanted.served, dtype=np.int64).reshape(-1, 2)
        shared = find_pieces(self._held[node], region, part.device, part.copies)
        bounds = np.stack([shared.low, shared.high], axis=-1).tolist()

        def chosen(flags: Flags) -> tuple[Piece, ...]:
            return tuple(
                Piece(
                    producers[k],
                    tuple((start, stop) for start, stop in bounds[k][: len(wanted.block)]),
                )
                for k in np.flatnonzero(flags).tolist()
            )

        return chosen(shared.goes), chosen(shared.returns)

    def _served(self, part: Part) -> Block:
        """The samples whose readers a part serves, where several compute all of an operator."""
        cuts = self.plan(part.operator).partition
        if self.operators[part.operator].reads_samples or SAMPLE not in cuts:
            return ()
        return (samples_of(cuts, part.index, self.samples),)

    def reads(self, part: Part) -> list[tuple[fx.Node, Want]]:
        """The nodes that a task reads, argument by argument, with the wants that serve them."""
        pairs: list[tuple[fx.Node, Want]] = []
        for argument, node in enumerate(self.arguments(part.operator)):
            pairs.append(
                (node, self.wants[self._numbers[self._wanted_region(node, part, argument)]])
            )
        return pairs

    def sample_interval(self, part: Part) -> Interval:
        """The samples of the microbatch that a task computes."""
        shape = self.shapes[part.operator]
        block = dict(zip(shape, self.computed(part), strict=True))
        if SAMPLE not in block or not self.operators[part.operator].reads_samples:
            return 0, self.samples
        (start, stop), size = block[SAMPLE], shape[SAMPLE]
        if start * self.samples % size or stop * self.samples % size:
            raise StrategyError(
                f"operator {part.operator!r} has {size} rows for {self.samples} samples, and its "
                f"block {start} to {stop} splits a sample: cut it into whole samples"
            )
        return start * self.samples // size, stop * self.samples // size

    def tasks(self, device: int, stage: int) -> Iterator[Part]:
        """A device's tasks of a stage, in topological order."""
        for operator in self.graph.operators:
            if has_tasks(operator) and self.plan(operator.name).stage == stage:
                yield from (p for p in self.parts[operator.name] if p.device == device)


def owners(captured: Captured) -> dict[fx.Node, str]:
    """The operator that computes each tensor node."""
    names = {node: name for name, node in captured.nodes.items()}
    known = set(captured.graph.index())
    owner: dict[fx.Node, str] = {}
    for node in captured.module.graph.nodes:
        if node in names:
            owner[node] = names[node]
        elif node.op == "placeholder" and node.name in known:
            owner[node] = node.name
        elif node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            if source in owner and getattr(node.target, "__name__", "") == "getitem":
                owner[node] = owner[source]
    return owner


def check_samples(layout: Layout, meta: MetaModel) -> None:
    """Check that outputs of operators that are cut by samples grow with the batch."""
    more = meta.at_twice(layout.samples)
    for node, name in layout.owner.items():
        if name not in layout.strategy.operators or node not in layout.values.tensors:
            continue
        is_cut = SAMPLE in layout.plan(name).partition and len(layout.parts[name]) > 1
        if not (is_cut and layout.operators[name].reads_samples):
            continue
        if more is None:
            raise ModelError(
                f"operator {name!r} is cut by samples, but the model takes batches of "
                f"{layout.samples} samples alone: read the batch size from the input (-1, "
                "x.shape[0]) where it is written out, or give every device the whole batch"
            )
        shape, doubled = layout.values.tensors[node].shape, more.tensors[node].shape
        names = list(layout.value_shape(node))
        at = names.index(SAMPLE) if SAMPLE in names else None
        if at is None or doubled[at] != 2 * shape[at]:
            raise ModelError(
                f"operator {name!r} is cut by samples, but its output {shape} does not grow with "
                f"them (twice as many give {doubled}): leave it whole, on one device"
            )

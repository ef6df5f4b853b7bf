"""Emit the tasks of one segment into a torch.fx graph."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.domain.partition import SAMPLE
from harness.domain.sharding import CONTRACTION
from harness.runtime.executor.geometry.layout import Layout, Part, Want
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.gradients.deferred import WeightGradients
from harness.runtime.executor.program.program import (
    DataKey,
    InputKey,
    PartKey,
    Route,
    TargetKey,
    WantKey,
    WeightKey,
)
from harness.runtime.executor.program.untraced import KeepsBuffers, KeepsGradients
from harness.runtime.executor.shards.attention import MixingShard
from harness.runtime.executor.shards.base import named_tensor
from harness.runtime.executor.shards.batch_norm import BatchNormShard, Reduce, make_batch_norm
from harness.runtime.executor.shards.forms import (
    Forms,
    collective_devices,
    key_blocks,
    node_sources,
    spec_of,
)
from harness.runtime.executor.shards.inplace import COPIES, out_of_place
from harness.runtime.executor.shards.kinds import make_shard
from harness.runtime.executor.shards.loss import CutCrossEntropy, LossPart, MetricSums
from harness.runtime.executor.shards.pointwise import RandomState, make_dropout
from harness.runtime.executor.shards.regions import Crop, Region, assembled
from harness.runtime.executor.shards.ring import KeyRing, Pass, make_mix
from harness.runtime.executor.state.weights import Weights, move
from harness.runtime.models.task import Task
from harness.runtime.tracing.hooks import has_own_hooks

# Kinds of operators whose gradient of a weight may be a view of that of their output.
_VIEWING = ("other", "elementwise", "add", "flatten", "cat")
# Position of the argument that asks for sparse gradients; buckets are dense.
_SPARSE: dict[Any, int] = {
    F.embedding: 6,
    F.embedding_bag: 7,
    torch.ops.aten.embedding.default: 4,
    torch.ops.aten.embedding_bag.default: 5,
    torch.ops.aten.embedding_bag.padding_idx: 5,
}


def own_gradients(tensors: Iterable[torch.Tensor]) -> None:
    """Give gradients memory of their own. Autograd lets those of views of several parameters share
    memory, to which it would add the gradients of each microbatch several times."""
    for tensor in tensors:
        if tensor.requires_grad and not tensor._backward_hooks:
            tensor.register_hook(torch.clone)


@dataclass(frozen=True, kw_only=True)
class DeviceTasks:
    """The inputs to lowering the tasks of one device at one microbatch size.

    Attributes:
        weights: weights of this device, shared by its programs.
        reduce_over: makes an operator's sum over devices, for global batch norm.
        pass_over: makes the function by which devices pass on an attention's keys.
        random: source of exact dropout.
        gradients: computes gradients of weights outside of autograd where that pays.
        metrics: of evaluations.
    """

    task: Task
    forms: Forms
    meta: MetaModel
    device: int
    weights: Weights
    reduce_over: Callable[[str, tuple[int, ...]], Reduce]
    pass_over: Callable[[str, tuple[int, ...]], Pass]
    random: RandomState
    gradients: WeightGradients
    metrics: MetricSums

    @property
    def layout(self) -> Layout:
        return self.forms.layout

    @property
    def root(self) -> fx.GraphModule:
        """The captured model."""
        return self.layout.captured.module


class SegmentBuilder:
    """Builds the graph of one segment, task by task."""

    def __init__(self, device: DeviceTasks, needed: set[PartKey]) -> None:
        self._device, self._needed = device, needed
        self._layout, self._forms = device.layout, device.forms
        self._graph = fx.Graph()
        self._owned: dict[str, Any] = {}
        self.inputs: dict[InputKey, fx.Node] = {}
        self._regions: dict[int, fx.Node] = {}
        # Operator, and path for `WeightGradients.joins`, by the path of its module in the segment.
        self._operator_of: dict[str, tuple[str, str]] = {}
        self.values: dict[PartKey, fx.Node] = {}

    def add(self, part: Part) -> None:
        wants = self._layout.reads(part)
        form = self._forms.of[part.operator]
        if part.operator not in self._layout.captured.nodes:
            self._add_loss(part, self._region(wants[0][1]), form)
            return
        if form in ("native", "gathered"):
            untrimmed = {node: self._untrimmed(node, want) for node, want in wants}
            self._add_native(part, untrimmed, is_gathered=form == "gathered")
            return
        # A task may read two regions of one value, such as an attention's queries and keys.
        in_order = [self._region(want) for _, want in wants]
        shard = self._shard(part, form)
        if isinstance(shard, BatchNormShard):
            self._count_once(part, shard)
        self._device.weights.share(shard, shard.sources)
        node = self._layout.captured.nodes[part.operator]
        path = f"{part.operator}.{part.index}"
        emitted = self._call(path, shard, tuple(in_order))
        self._operator_of[str(emitted.target)] = part.operator, path
        self.values[self._first_key(part, node)] = emitted

    def _first_key(self, part: Part, node: fx.Node) -> PartKey:
        """The key of a shard's output: the node's tensor, or the first element of its tuple."""
        if node in self._layout.values.tensors:
            return PartKey.of(node.name, part)
        first = next(user for user in node.users if user.args[1:] == (0,))
        return PartKey.of(first.name, part)

    def _shard(self, part: Part, form: str) -> Any:
        device, layout = self._device, self._layout
        spec = spec_of(layout, part, layout.captured.nodes[part.operator], device.root)
        if form == "dropout":
            return make_dropout(spec, device.random)
        if form == "shard":
            return make_shard(spec)
        devices = collective_devices(layout, part)
        if not spec.has_own_keys:
            return make_batch_norm(spec, device.reduce_over(part.operator, devices))
        shard, keys = make_shard(spec), layout.plan(part.operator).keys
        assert isinstance(shard, MixingShard), "forms.py has made it before"
        start = device.pass_over(part.operator, devices)
        shard.mix = make_mix(
            keys, KeyRing(key_blocks(layout, part), devices.index(part.device), start)
        )
        return shard

    def _earlier(self, part: Part) -> list[Part]:
        """Earlier tasks of the same operator on this device."""
        parts = self._layout.parts[part.operator]
        return [p for p in parts if p.device == part.device and p.index < part.index]

    def _count_once(self, part: Part, shard: BatchNormShard) -> None:
        """Update shared running statistics, and their counter, once per batch, not per task."""
        earlier = self._earlier(part)
        at = list(self._layout.shapes[part.operator]).index("feature")
        shard.is_counting = not earlier
        shard.track_running_stats = all(p.block[at] != part.block[at] for p in earlier)

    def _own(self, name: str, owned: Any) -> str:
        """A path of the segment for a module or a tensor, which no other one has."""
        path = name.replace(".", "_")
        while self._owned.setdefault(path, owned) is not owned:
            path += "_"
        return path

    def _call(self, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> fx.Node:
        return self._graph.call_module(self._own(name, module), arguments)

    def _add_loss(self, part: Part, outputs: fx.Node, form: str) -> None:
        targets = self._input(TargetKey(self._layout.sample_interval(part)))
        name, blocks = part.operator, self._layout.parts[part.operator]
        classes = dict(zip(self._layout.shapes[name], part.block, strict=True)).get(CONTRACTION)
        loss: nn.Module
        if form == "collective":
            assert classes is not None
            at = list(self._layout.shapes[name]).index(SAMPLE)
            same = [p.index for p in blocks if p.block[at] == part.block[at]]
            reduce = self._device.reduce_over(name, collective_devices(self._layout, part))
            index, n_classes = same.index(part.index), self._layout.shapes[name][CONTRACTION]
            metrics = self._device.metrics
            loss = CutCrossEntropy(classes, index, len(same), reduce, metrics, n_classes)
        else:
            is_zero = form == "gathered" and classes is not None and classes[0] > 0
            is_first = not part.copies or part.device == part.copies[0]
            metrics_of = self._device.metrics if is_first else None
            loss = LossPart(self._device.task, metrics_of, is_zero=is_zero)
        arguments = outputs, targets, self._input(WeightKey())
        self.values[PartKey.of("loss", part)] = self._call(f"loss.{part.index}", loss, arguments)

    def _add_native(
        self, part: Part, arguments: dict[fx.Node, fx.Node], *, is_gathered: bool
    ) -> None:
        node = self._layout.captured.nodes[part.operator]
        start, stop = self._layout.sample_interval(part)
        sources = node_sources(node, self._device.root)
        is_viewed = self._layout.operators[part.operator].kind in _VIEWING

        def mapped(argument: fx.Node) -> Any:
            if argument in arguments:
                return arguments[argument]
            if argument.op == "get_attr":
                target = str(argument.target)
                return self._tensor(target, sources[target], is_viewed=is_viewed)
            # Only where one is read, because some operator may refuse so few samples.
            return self._device.meta.at(stop - start).constants[argument]

        emitted = self._graph.node_copy(node, mapped)
        if node.op == "call_module":
            path = str(node.target)
            emitted.target = self._own(path, self._native_module(part, path, sources))
            self._operator_of[emitted.target] = part.operator, path
        elif node.target in _SPARSE:
            place = _SPARSE[node.target]
            if len(emitted.args) > place:
                emitted.update_arg(place, False)
            elif "sparse" in emitted.kwargs:
                emitted.update_kwarg("sparse", False)
        if self._must_copy(part, node, arguments):
            emitted = out_of_place(emitted, self._owned)
        self._register(part, node, emitted, is_gathered=is_gathered)

    def _native_module(
        self, part: Part, path: str, sources: Mapping[str, WeightSlice]
    ) -> nn.Module:
        """The model's module, with dense gradients; the first task alone tracks statistics."""
        operator = self._layout.operators[part.operator]
        module, prefix = self._device.root.get_submodule(path), f"{path}."
        own = {n.removeprefix(prefix): x for n, x in sources.items() if n.startswith(prefix)}
        self._device.weights.share(module, own)
        is_untraced = operator.kind in _VIEWING and operator.attrs.get("is_repeatable") is False
        if is_untraced:
            own_gradients(module.parameters())
        if isinstance(module, _BatchNorm) and self._earlier(part):
            module = copy.copy(module)
            module.track_running_stats = False
        if getattr(module, "sparse", False):
            module = copy.copy(module)
            module.sparse = False  # type: ignore[assignment]
        if operator.attrs.get("writes_buffers") or any(map(has_own_hooks, module.modules())):
            module = KeepsBuffers(module)
        return KeepsGradients(module) if is_untraced else module

    def _tensor(self, name: str, piece: WeightSlice, *, is_viewed: bool) -> fx.Node:
        """A node for a parameter or constant of the model."""
        held = self._device.weights.hold(piece, named_tensor(self._device.root, name))
        if is_viewed:
            own_gradients([held])
        return self._graph.get_attr(self._own(name, held))

    def _must_copy(self, part: Part, node: fx.Node, arguments: dict[fx.Node, fx.Node]) -> bool:
        """Whether an operator that works in place would change a value with other readers.

        Regions of one value are views, which several tasks of the operator may receive.
        """
        source = node.args[0] if node.args else node.kwargs.get("input")
        if not isinstance(source, fx.Node) or source not in arguments:
            return False
        if node.meta.get(COPIES):
            return True
        given = arguments[source]
        keys = [key for key, value in self.values.items() if value is given]
        is_read = not keys or any(key in self._needed for key in keys)
        n_tasks = sum(p.device == part.device for p in self._layout.parts[part.operator])
        return is_read or len(given.users) > 1 or n_tasks > 1

    def _register(self, part: Part, node: fx.Node, emitted: fx.Node, *, is_gathered: bool) -> None:
        """Register the values of a task; of a tuple, the elements that have readers."""
        if node in self._layout.values.tensors:
            self._name(part, node, emitted, is_gathered=is_gathered)
            return
        copies = {node: emitted}
        for user in self._layout.captured.module.graph.nodes:
            if user.op == "call_function" and user.args and user.args[0] in copies:
                if self._layout.owner.get(user) != part.operator or user in copies:
                    continue
                copies[user] = self._graph.node_copy(user, lambda a: copies[a])
                if user in self._layout.values.tensors:
                    self._name(part, user, copies[user], is_gathered=is_gathered)

    def _name(self, part: Part, node: fx.Node, emitted: fx.Node, *, is_gathered: bool) -> None:
        if is_gathered:
            emitted = self._cropped(part, node, emitted)
        self.values[PartKey.of(node.name, part)] = emitted

    def _cropped(self, part: Part, node: fx.Node, emitted: fx.Node) -> fx.Node:
        """Crop a gathered task's output to its block; of a partial sum, all but the first are 0."""
        layout = self._layout
        computed = Part(part.operator, part.index, part.device, part.stage, layout.computed(part))
        shape = layout.shapes[part.operator]
        shown = layout.value_shape(node)
        is_first = all(
            start == 0
            for dim, (start, _) in zip(shape, part.block, strict=True)
            if dim not in shown
        )
        region = layout.region(node, part)
        crop = Crop(Region.of(region, layout.region(node, computed)), is_zero=not is_first)
        return self._call(f"{part.operator}.crop", crop, (emitted,))

    def _region(self, want: Want) -> fx.Node:
        if want.number not in self._regions:
            self._regions[want.number] = self._make_region(want)
        return self._regions[want.number]

    def _untrimmed(self, node: fx.Node, want: Want) -> fx.Node:
        """The node for a want of a native operator: the whole local value if there is one.

        The operator's windows may ignore the last rows. Cropping these would cost a copy, and
        another memory layout rounds differently.
        """
        shape = self._layout.value_shape(node).items()
        whole = tuple(
            interval if dim == SAMPLE else (0, size)
            for (dim, size), interval in zip(shape, want.block, strict=True)
        )
        if not want.pieces:
            return self._input(DataKey(want.value, whole))
        part = want.pieces[0].part
        if len(want.pieces) > 1 or want.is_exchanged or self._layout.region(node, part) != whole:
            return self._region(want)
        return self._value(PartKey.of(want.value, part))

    def _make_region(self, want: Want) -> fx.Node:
        if want.is_exchanged:
            return self._input(WantKey(want.number))
        if not want.pieces:
            return self._input(DataKey(want.value, want.block))
        routes = [Route.of(self._layout, want, piece) for piece in want.pieces]
        nodes = tuple(self._value(route.source) for route in routes)
        if len(nodes) == 1 and routes[0].held.is_all:
            return nodes[0]
        module = assembled(
            [route.held for route in routes], [route.in_want for route in routes], want.block,
            is_sum=want.is_sum,
        )  # fmt: skip
        return self._call(f"want_{want.number}", module, nodes)

    def _value(self, key: PartKey) -> fx.Node:
        return self.values.get(key) or self._input(key)

    def _input(self, key: InputKey) -> fx.Node:
        if key not in self.inputs:
            self.inputs[key] = self._graph.placeholder(f"x{len(self.inputs)}")
        return self.inputs[key]

    def finish(self, outputs: list[PartKey], stage: int) -> fx.GraphModule:
        self._graph.output(tuple(self.values[key] for key in outputs))
        for path, module in self._owned.items():
            if isinstance(module, nn.Module):
                operator, of_model = self._operator_of.get(path, (None, path))
                self._owned[path] = self._device.gradients.wrap(module, stage, operator, of_model)
        segment = fx.GraphModule(self._owned, self._graph, class_name="Segment")
        for tensor in segment.buffers():  # such as counts in a shard of average pooling
            move(tensor, self._device.meta.device)
        for module in segment.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()  # cuDNN wants them in one block of a GPU's memory
        return segment

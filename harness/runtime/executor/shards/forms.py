"""Choose how each operator's tasks are computed, by the strategy only, so equally on every rank.

native      the model's node: the operator is whole, or cut along samples only
shard       a module made for the block
collective  devices communicate within it: batch norm with global statistics, a loss that is cut by
            classes, an attention whose devices give each other keys and values
dropout     dropout by the block of the whole tensor's mask
gathered    the whole operator for the task's samples, cropped to the block (logs a warning)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from harness.domain.checkpoints import recomputed_segments
from harness.domain.key_forms import POSITIONS
from harness.domain.partition import SAMPLE, Interval, count_parts, n_parts, n_replicas
from harness.domain.routes import BUCKET_BYTES
from harness.domain.sharding import CONTRACTION, has_tasks
from harness.domain.weight_units import Unit
from harness.errors import ModelError, StrategyError
from harness.runtime.capture.capture import Captured
from harness.runtime.capture.operators import draws_random, is_dropout, is_frozen_norm
from harness.runtime.executor.geometry.layout import Layout, Part, check_samples
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.base import (
    Shard,
    ShardSpec,
    Wanted,
    called_module,
    named_tensor,
)
from harness.runtime.executor.shards.batch_norm import check_writers, make_batch_norm
from harness.runtime.executor.shards.kinds import make_shard
from harness.runtime.executor.state.weights import Holders, Use, canonical_names
from harness.runtime.tracing.constructs import function_name

_log = logging.getLogger(__name__)

Form = Literal["native", "shard", "collective", "dropout", "gathered"]


@dataclass(frozen=True)
class Forms:
    """The form of every operator, the resulting layout, and the holders of weights.

    Attributes:
        is_compiled: segments are compiled.
        recomputed: the number of the segment of each operator of a stage that recomputes.
        units: numbers of the units of freed weights that an operator's tasks on a device use.
    """

    layout: Layout
    of: dict[str, Form]
    holders: Holders
    is_compiled: bool
    recomputed: dict[str, int]
    units: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)

    @property
    def recomputed_at(self) -> dict[int, int]:
        """`recomputed` by the operators' positions."""
        return {self.layout.position[name]: number for name, number in self.recomputed.items()}

    def find_units(self, units: Sequence[Unit]) -> None:
        """Set `units`, and those that are `freed`."""
        self.freed.update(number for number, unit in enumerate(units) if unit.is_freed)
        names = {self.layout.position[name]: name for name in self.of}
        for number, unit in enumerate(units):
            for op in unit.operators if unit.is_alike else ():
                for key in ((names[op], device) for device in unit.devices):
                    self.units[key] = self.units.get(key, frozenset()) | {number}

    def segment_bytes(self) -> float:
        """Bytes of weights with which a segment ends. A compiled segment has all gradients at its
        end only, so those that are summed over devices need an earlier one."""
        is_cut = self.is_compiled and self.holders.groups()
        return BUCKET_BYTES if is_cut else math.inf

    def collective_groups(self) -> set[tuple[int, ...]]:
        """The sets of devices that communicate within a task, ascending."""
        return {
            tuple(sorted(collective_devices(self.layout, part)))
            for name, form in self.of.items()
            if form == "collective"
            for part in self.layout.parts[name]
        }


def collective_devices(layout: Layout, part: Part) -> tuple[int, ...]:
    """The devices that normalise the same features as a task of a batch norm, or that have the
    same samples of a loss, ascending; or the other positions of an attention, in their order."""
    if layout.plan(part.operator).keys != "input":
        return tuple(each.device for each in _along_positions(layout, part))
    dims = list(layout.shapes[part.operator])
    at = dims.index("feature" if part.operator in layout.captured.nodes else SAMPLE)
    same = [p for p in layout.parts[part.operator] if p.block[at] == part.block[at]]
    return tuple(sorted(p.device for p in same))


def key_blocks(layout: Layout, part: Part) -> tuple[Interval, ...]:
    """The positions of each of an attention's `collective_devices`."""
    at = list(layout.shapes[part.operator]).index(POSITIONS)
    return tuple(each.block[at] for each in _along_positions(layout, part))


def _along_positions(layout: Layout, part: Part) -> list[Part]:
    """The parts of an attention that differ from one in their positions alone, in their order."""
    at = list(layout.shapes[part.operator]).index(POSITIONS)
    same = [
        each
        for each in layout.parts[part.operator]
        if (*each.block[:at], *each.block[at + 1 :]) == (*part.block[:at], *part.block[at + 1 :])
    ]
    return sorted(same, key=lambda each: each.block[at])


def choose_forms(
    captured: Captured, meta: MetaModel, plan: ExecutorPlan, sizes: Sequence[int]
) -> dict[int, Forms]:
    """Choose forms by microbatch size.

    An operator that is gathered at one size is gathered at all, so that weight slices are equal.

    Raises:
        ModelError, StrategyError: the executor cannot compute a cut.
    """
    check_writers(captured, meta, plan.strategy)
    gathered: set[str] = set()
    while True:
        choosers = [_Chooser(captured, meta, plan, size, gathered) for size in sizes]
        chosen = {size: chooser.choose() for size, chooser in zip(sizes, choosers, strict=True)}
        known, gathered = gathered, set()
        for forms in chosen.values():
            gathered |= {name for name, form in forms.of.items() if form == "gathered"}
        if gathered == known or len(chosen) == 1:
            return chosen


class _Chooser:
    def __init__(
        self,
        captured: Captured,
        meta: MetaModel,
        plan: ExecutorPlan,
        samples: int,
        gathered: Collection[str],
    ) -> None:
        self._gathered = gathered
        self._captured, self._meta, self._plan, self._samples = captured, meta, plan, samples
        self._strategy = plan.strategy
        nodes = captured.module.graph.nodes
        self._twin = dict(zip(nodes, meta.module.graph.nodes, strict=True))

    def choose(self) -> Forms:
        forms: dict[str, Form] = {
            op.name: "gathered" if op.name in self._gathered else self._first_choice(op.name)
            for op in self._captured.graph.operators
            if has_tasks(op)
        }
        while True:
            gathered = frozenset(name for name, form in forms.items() if form == "gathered")
            norms = frozenset(filter(self._needs_global_statistics, gathered))
            given = self._captured, self._meta, self._strategy, self._samples
            layout = Layout(*given, gathered, norms)
            made = {name: self._shards(layout, name, form) for name, form in forms.items()}
            unable = {name for name, shards in made.items() if None in shards}
            holders = self._holders(layout, made, unable)
            for name in holders.conflicts():
                unable |= self._users(name, forms)
            unable = {name for name in unable if forms[name] not in ("gathered", "native")}
            if not unable:
                check_samples(layout, self._meta)
                recomputed = recomputed_segments(self._captured.graph, self._strategy)
                return Forms(layout, forms, holders, self._plan.is_compiled, recomputed)
            forms |= dict.fromkeys(unable, "gathered")

    def _first_choice(self, name: str) -> Form:
        node = self._captured.nodes.get(name)
        plan = self._strategy.operators[name]
        partition = plan.partition
        # Two tasks on one device would deadlock in the same all-reduce.
        is_apart = len(set(plan.devices)) == len(plan.devices)
        if node is None:
            if n_parts(partition.get(CONTRACTION, 1)) == 1:
                return "native"
            return "collective" if is_apart and n_replicas(partition) == 1 else "gathered"
        _check_is_not_synchronised(name, node, self._captured.module)
        has_copies = n_replicas(partition) > 1
        if has_copies:
            _check_has_no_weights(name, node, self._captured.module)
        if self._plan.dropout == "exact" or has_copies:  # copies need equal masks
            if is_dropout(node, self._captured.module):
                return "dropout"
            _check_is_deterministic(name, node, self._captured.module)
        if self._needs_global_statistics(name):
            return "collective" if is_apart else "gathered"
        if plan.keys != "input":
            return "collective"
        n_by_samples = n_parts(partition.get(SAMPLE, 1)) * n_replicas(partition)
        is_by_samples = count_parts(partition) == n_by_samples
        return "native" if is_by_samples else "shard"

    def _needs_global_statistics(self, name: str) -> bool:
        node, graph = self._captured.nodes.get(name), self._captured.graph
        if self._plan.batch_norm != "global" or node is None:
            return False
        cuts = self._strategy.operators[name].partition
        if not any(n_parts(cut) > 1 for dim, cut in cuts.items() if dim != "feature"):
            return False
        is_norm = graph.operators[graph.index()[name]].kind == "batch_norm"
        return is_norm and _is_training_norm(name, node, self._captured.module)

    def _shards(self, layout: Layout, name: str, form: Form) -> Sequence[Shard | None]:
        """The shards of an operator's tasks, on the meta device; empty if they have none."""
        if name not in self._captured.nodes or form not in ("shard", "collective"):
            return ()
        node = self._twin[self._captured.nodes[name]]
        specs = [spec_of(layout, part, node, self._meta.module) for part in layout.parts[name]]
        if form == "collective" and layout.plan(name).keys == "input":
            return [make_batch_norm(spec, lambda x: x) for spec in specs]
        return list(map(make_shard, specs))

    def _holders(
        self, layout: Layout, made: dict[str, Sequence[Shard | None]], unable: set[str]
    ) -> Holders:
        """The devices that hold each slice; those of operators without shards hold all of it."""
        holders = Holders(self._captured.module)  # with the names of tied weights
        for name, shards in made.items():
            if name not in self._captured.nodes:
                continue
            whole = list(node_sources(layout.captured.nodes[name], self._meta.module).values())
            for k, part in enumerate(layout.parts[name]):
                shard = shards[k] if shards and name not in unable else None
                use = Use(part.device, part.stage, layout.position[name])
                holders.add(whole if shard is None else shard.sources.values(), use)
        return holders

    def _users(self, tensor: str, forms: dict[str, Form]) -> set[str]:
        """Operators that use a tensor, by any of its names."""
        names = canonical_names(self._captured.module)
        return {
            name
            for name, node in self._captured.nodes.items()
            if name in forms
            and any(names.get(source) == tensor for source in node_sources(node, self._meta.module))
        }


def warn_of_gathered(chosen: Forms) -> None:
    """Log a warning for each gathered operator."""
    layout, operators = chosen.layout, chosen.layout.captured.graph.operators
    ties = [[operators[k].name for k in users] for users in layout.captured.graph.ties()]
    for name, form in chosen.of.items():
        if form != "gathered":
            continue
        operator, plan = layout.operators[name], layout.plan(name)
        n = count_parts(plan.partition)
        others = [user for users in ties if name in users for user in users if user != name]
        why = f" beside {', '.join(others)}, which it shares a weight with" if others else ""
        flops = n / n_parts(plan.partition.get(SAMPLE, 1)) * operator.forward_flops
        cost = f", {flops:.3g} FLOPs instead of {operator.forward_flops:.3g}" if flops else ""
        _log.warning(
            "operator %s (%s) cannot be cut as %s%s: each of its %d tasks computes all of it for "
            "its samples and keeps its block%s, which predictions do not know: cut it by samples",
            name, operator.kind, plan.partition, why, n, cost,
        )  # fmt: skip


def _check_is_deterministic(name: str, node: fx.Node, root: nn.Module) -> None:
    """Refuse other random operators than dropout, because blocks cannot repeat their numbers."""
    if draws_random(node, root):
        module = called_module(node, root)
        function = function_name(node.target) if module is None else type(module).__name__
        raise ModelError(
            f"operator {name!r} ({function}) draws random numbers, which exact dropout and copies "
            "can repeat block by block for Dropout, Dropout2d and F.dropout alone: replace it by "
            "one of these, set its probability to 0, or use local dropout without copies"
        )


def _check_has_no_weights(name: str, node: fx.Node, root: nn.Module) -> None:
    """Refuse copies of an operator with weights, because each would add the same gradient."""
    tensors = {piece.name for piece in node_sources(node, root).values()}
    weights = tensors & {name for name, _ in root.named_parameters(remove_duplicate=False)}
    if weights:
        raise StrategyError(
            f"operator {name!r} has copies, but uses the weights {min(weights)}: cut it by samples"
        )


def _check_is_not_synchronised(name: str, node: fx.Node, root: nn.Module) -> None:
    """Refuse a batch norm that communicates with all ranks, not only with its devices."""
    if isinstance(called_module(node, root), nn.SyncBatchNorm):
        raise ModelError(
            f"operator {name!r} (SyncBatchNorm) sums over all ranks, but a strategy may use fewer: "
            "make it a BatchNorm1d, 2d or 3d, and use global batch norm"
        )


def _is_training_norm(name: str, node: fx.Node, root: nn.Module) -> bool:
    """Whether a batch norm uses statistics of its input; refuses one that is a function."""
    module = called_module(node, root)
    is_training = not is_frozen_norm(node, module)
    if is_training and not isinstance(module, _BatchNorm):
        raise ModelError(
            f"operator {name!r} is a batch norm by a function ({function_name(node.target)}), "
            "whose statistics are of each block alone, but global ones are asked for: make it an "
            "nn.BatchNorm module, or use local batch norm"
        )
    return is_training


def spec_of(layout: Layout, part: Part, node: fx.Node, root: nn.Module) -> ShardSpec:
    """The specification of one task's shard."""
    return ShardSpec(
        operator=layout.operators[part.operator],
        node=node,
        root=root,
        shape=layout.shapes[part.operator],
        block=part.block,
        wanted=[
            Wanted(layout.value_shape(node), layout.wanted(part, argument, node))
            for argument, node in enumerate(layout.arguments(part.operator))
        ],
        has_own_keys=layout.plan(part.operator).keys != "input",
    )


def node_sources(node: fx.Node, root: nn.Module) -> dict[str, WeightSlice]:
    """All tensors that a node uses, by their names in the model."""
    sources: dict[str, WeightSlice] = {}
    if node.op == "call_module":
        path = str(node.target)
        module = root.get_submodule(path)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            sources[f"{path}.{name}"] = WeightSlice.whole(f"{path}.{name}", tensor)
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            name = str(source.target)
            sources[name] = WeightSlice.whole(name, named_tensor(root, name))
    return sources

"""Costs of one operator's plan: seconds, bytes and weights on each of its devices.

Each value depends on the plan of one operator (`OperatorCosts`), or on those of a producer and its
consumers (`Wants`, `Edges`), and is cached, so after a change of a plan only the values that depend
on it are computed again.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.domain.cluster import Cluster
from harness.domain.graph import INNER, INNER_HALF, KEPT, KEPT_HALF, Graph, Operator
from harness.domain.key_forms import (
    POSITIONS,
    KeyForm,
    flops_ratio,
    foreign_key_elements,
    kept_elements,
    key_features,
)
from harness.domain.partition import SAMPLE, Block, Interval, samples_of, serving, volume
from harness.domain.profile import Profile
from harness.domain.sharding import (
    CONTRACTION,
    full_blocks,
    full_shape,
    full_units,
    input_block,
    is_partial,
    output_sizes,
    weight_dims,
    weight_part,
)
from harness.domain.strategy import OperatorPlan, copies_of
from harness.errors import PlanError
from harness.plan.simulate.block_times import BlockTimes
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.transfers import (
    Edges,
    Floats,
    PricedPieces,
    Reader,
    Shared,
    Sum,
    Wants,
    collective,
    key_sums,
    make_transfers,
    shared_sums,
)

PlanKey = tuple[tuple[tuple[str, int | tuple[int, ...]], ...], tuple[int, ...], KeyForm]


class OperatorCosts(NamedTuple):
    """Arrays by device position (n_devices,), and weights as slices.

    Attributes:
        saved_bytes: bytes that forward keeps for backward beside the output; below 0 where the
            output does not stay, or stays in 16 bits.
        inner_bytes: bytes that backward allocates at once beside gradients that leave it.
        weight_bytes, frozen_bytes: bytes of trained and of frozen weights.
        shared_bytes: bytes of trained weights that other devices hold too.
        active: whether the device has a block.
        slices: (bytes, ascending devices) of each distinct slice of the trained weights.
    """

    forward_s: Floats
    backward_s: Floats
    output_bytes: Floats
    saved_bytes: Floats
    inner_bytes: Floats
    weight_bytes: Floats
    frozen_bytes: Floats
    shared_bytes: Floats
    active: npt.NDArray[np.bool_]
    slices: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def amounts(self) -> tuple[Floats, ...]:
        """All but `active` and `slices`."""
        return self[:-2]


class Costs:
    """Prices plans of one graph on one cluster at one size of microbatch.

    Args:
        samples: samples of the microbatch to which all shapes are scaled.

    Attributes:
        shapes: shapes of the operators for a microbatch.
        wire_share: (n_ops,) bytes sent per byte of an operator's output.
        times: seconds of their blocks.
        knows_saved: whether the graph says what autograd saves.

    Raises:
        PlanError: the profile lacks an operator or a kind of device.
    """

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        cluster: Cluster,
        samples: int,
        options: SimulatorOptions,
    ) -> None:
        self.graph, self.samples, self._frozen = graph, samples, options.frozen
        self.segments: dict[tuple[tuple[int, ...], int], list[int]] = {}  # of stages
        made = graph.made_of_weights()
        is_rounded = np.array([o.dtype == "float32" and o.name in made for o in graph.operators])
        is_sent = np.array([op.name not in options.skipped for op in graph.operators])
        share = options.wire_bytes_per_fp32_byte
        self._is_half = share < 1.0
        self.knows_saved = any(KEPT in op.attrs for op in graph.operators)
        self.wire_share: Floats = np.where(is_rounded, share, 1.0) * is_sent
        self.n_devices = cluster.n_devices
        self.shapes = [
            full_shape(op, batch=samples, graph_batch=graph.batch) for op in graph.operators
        ]
        self.times = BlockTimes(graph, profile, cluster.devices, samples, self.shapes, options)
        self._operators: dict[object, OperatorCosts] = {}
        self._wants: dict[object, Wants] = {}
        self._transfers: dict[object, Edges] = {}
        self._regions: dict[int, dict[tuple[Block, tuple[int, ...]], int]] = {}
        self._blocks: dict[object, list[Block]] = {}
        self._keys: dict[int, tuple[OperatorPlan, PlanKey]] = {}

    def _key(self, plan: OperatorPlan) -> PlanKey:
        """A plan as a hashable value; cached by identity, because a search repeats its plans."""
        known = self._keys.get(id(plan))
        if known is None:
            cuts = tuple(
                (dim, tuple(cut) if isinstance(cut, list) else cut)
                for dim, cut in plan.partition.items()
            )
            # The plan is kept too, so that its id is not reused.
            known = self._keys[id(plan)] = plan, (cuts, tuple(plan.devices), plan.keys)
        return known[1]

    def blocks(self, op: int, plan: OperatorPlan) -> list[Block]:
        """The blocks of an operator's output, in the order of its devices."""
        key, operator, batch = (op, self._key(plan)[0]), self.graph.operators[op], self.graph.batch
        if key not in self._blocks:
            self._blocks[key] = full_blocks(
                operator, plan.partition, batch=self.samples, graph_batch=batch
            )
        return self._blocks[key]

    def units(self, op: int) -> dict[str, int]:
        """Maximum number of parts of each dim."""
        operator, batch = self.graph.operators[op], self.graph.batch
        return full_units(operator, batch=self.samples, graph_batch=batch)

    def bytes_per_element(self, op: int) -> float:
        """Bytes per output element, from the total bytes, so that unknown shapes and lists work."""
        operator = self.graph.operators[op]
        elements = operator.n_elements if operator.shape else (self.graph.batch or self.samples)
        return operator.activation_bytes / elements

    def wire_bytes_per_element(self, op: int) -> float:
        return self.bytes_per_element(op) * float(self.wire_share[op])

    def wire_bytes(self, op: int) -> float:
        """Bytes sent of the whole output."""
        sizes = output_sizes(self.graph.operators[op], self.shapes[op])
        return self.wire_bytes_per_element(op) * math.prod(sizes.values())

    def operator(self, op: int, plan: OperatorPlan) -> OperatorCosts:
        key = (op, self._key(plan))
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = self._price_operator(op, plan)
        return found

    def _price_operator(self, op: int, plan: OperatorPlan) -> OperatorCosts:
        n, operator = self.n_devices, self.graph.operators[op]
        forward, backward, output, saved, inner = np.zeros((5, n))
        saved_per_element, inner_per_element = self._backward_bytes_per_element(op)
        active = np.zeros(n, dtype=np.bool_)
        per_element = self.bytes_per_element(op)
        output_dims, shape = self._output_dims(op), self.shapes[op]
        for block, device in zip(self.blocks(op, plan), plan.devices, strict=True):
            seconds = self.times.block_s(op, block, device)
            ratio = 1.0
            if key_features(operator):
                intervals = dict(zip(shape, block, strict=True))
                ratio = flops_ratio(operator, plan.keys, shape, intervals[POSITIONS])
                if KEPT in operator.attrs:  # which counts those of the block's own positions
                    kept = foreign_key_elements(plan.keys, shape, intervals)
                else:
                    kept = kept_elements(operator, plan.keys, shape, intervals)
                saved[device] += self.wire_bytes_per_element(op) * kept
            forward[device] += ratio * seconds.forward_s
            backward[device] += ratio * seconds.backward_s
            output[device] += per_element * volume(tuple(block[k] for k in output_dims))
            saved[device] += saved_per_element * volume(block)
            inner[device] += inner_per_element * volume(block)
            active[device] = True
        slices = self._slices(operator, op, plan)
        weight, shared = np.zeros(n), np.zeros(n)
        for n_bytes, devices in slices:
            weight[list(devices)] += n_bytes
            if len(devices) > 1:
                shared[list(devices)] += n_bytes
        trained = 0.0 if operator.name in self._frozen else operator.trained_share
        return OperatorCosts(
            forward_s=forward,
            backward_s=backward,
            output_bytes=output,
            saved_bytes=saved,
            inner_bytes=inner,
            weight_bytes=trained * weight,
            frozen_bytes=(1 - trained) * weight,
            shared_bytes=trained * shared,
            active=active,
            slices=tuple((round(trained * size), at) for size, at in slices) if trained else (),
        )

    def _backward_bytes_per_element(self, op: int) -> tuple[float, ...]:
        """Bytes kept beside the output, and allocated inside backward, by element of all dims."""
        operator = self.graph.operators[op]
        n_bytes = operator.attrs.get("saved_bytes", 0)
        kept = operator.attrs.get(KEPT_HALF if self._is_half else KEPT)
        if isinstance(kept, int):
            n_bytes = kept - operator.activation_bytes
        share = self.samples / (self.graph.batch or self.samples)
        share /= float(np.prod(list(self.shapes[op].values())))
        found = n_bytes, operator.attrs.get(INNER_HALF if self._is_half else INNER)
        return tuple(n * share if isinstance(n, int) else 0.0 for n in found)

    def _output_dims(self, op: int) -> list[int]:
        """Positions of the dims that the output has (not partial dims)."""
        operator = self.graph.operators[op]
        return [k for k, dim in enumerate(self.shapes[op]) if not is_partial(operator, dim)]

    def _slices(
        self, operator: Operator, op: int, plan: OperatorPlan
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        if not operator.weight_bytes:
            return ()
        shape = self.shapes[op]
        dims, weights = list(shape), [dim for dim in weight_dims(operator) if dim in shape]
        holders: dict[int, set[int]] = {}
        shares: dict[int, float] = {}
        for k, (block, device) in enumerate(zip(self.blocks(op, plan), plan.devices, strict=True)):
            part = weight_part(operator, dims, plan.partition, k)
            holders.setdefault(part, set()).add(device)
            own = dict(zip(dims, block, strict=True))
            shares[part] = math.prod((b - a) / shape[d] for d in weights for a, b in (own[d],))
        return tuple(
            (round(operator.weight_bytes * shares[part]), tuple(sorted(holders[part])))
            for part in sorted(holders)
        )

    def wants(self, producer: int, consumer: int, a: OperatorPlan, b: OperatorPlan) -> Wants:
        """The regions of a producer's output that a consumer's blocks read."""
        key = (producer, consumer, self._key(a), self._key(b))
        if key not in self._wants:
            self._wants[key] = self._find_wants(producer, consumer, a, b)
        return self._wants[key]

    def _find_wants(self, producer: int, consumer: int, a: OperatorPlan, b: OperatorPlan) -> Wants:
        output_dims = self._output_dims(producer)
        held = [[block[k] for k in output_dims] for block in self.blocks(producer, a)]
        operator, maker = self.graph.operators[consumer], self.graph.operators[producer]
        shape = output_sizes(maker, self.shapes[producer])
        is_repeated = SAMPLE in a.partition and not maker.reads_samples
        for k, bounds in enumerate(held if is_repeated else ()):
            bounds.append(samples_of(a.partition, k, self.samples))
        pieces = PricedPieces(
            a,
            np.array(held),
            self.wire_bytes_per_element(producer),
            is_summed=any(is_partial(maker, dim) for dim in a.partition),
        )
        regions = self._regions.setdefault(producer, {})
        found: dict[tuple[int, int], int] = {}
        shared: dict[int, Shared] = {}
        for argument, source in enumerate(operator.inputs):
            if source != maker.name:
                continue
            for k, (block, device) in enumerate(
                zip(self.blocks(consumer, b), b.devices, strict=True)
            ):
                wanted = input_block(
                    operator, self.shapes[consumer], block, shape,
                    argument=argument, has_own_keys=b.keys != "input",
                )  # fmt: skip
                if is_repeated:
                    ((first, _),) = serving(a.partition, b.partition, k, self.samples)
                    wanted += ((first, first + 1),)
                region = regions.setdefault((wanted, copies := copies_of(b, k)), len(regions))
                if (region, device) in found:
                    continue
                number = found[region, device] = len(found)
                one = pieces.add(number, np.array(wanted), device, copies)
                if one is not None:
                    shared[region] = one
        wants = np.array(list(found), dtype=np.int64).reshape(-1, 2)
        columns = pieces.columns()
        return Wants(
            n_devices=self.n_devices,
            region=np.ascontiguousarray(wants[:, 0]),
            device=np.ascontiguousarray(wants[:, 1]),
            want=columns[0].astype(np.int64),
            source=columns[1].astype(np.int64),
            n_bytes=columns[2],
            n_streamed=columns[3],
            n_held=columns[4],
            goes=columns[5] > 0,
            returns=columns[6] > 0,
            shared=shared,
        )

    def transfers(
        self,
        producer: int,
        plan: OperatorPlan,
        readers: Sequence[tuple[int, OperatorPlan]],
        *,
        syncs_norms: bool,
    ) -> Edges:
        """Transfers and all-reduces of one operator's output.

        Args:
            readers: (operator, plan) of its consumers, in the order in which they run.
            syncs_norms: batch norms use the statistics of the whole microbatch.
        """
        order = tuple((op, self._key(b)) for op, b in readers)
        key = (producer, self._key(plan), order, syncs_norms)
        found = self._transfers.get(key)
        if found is None:
            wanting = [Reader(op, self.wants(producer, op, plan, b)) for op, b in readers]
            sums = self._sums(producer, plan, wanting, syncs_norms=syncs_norms)
            found = self._transfers[key] = make_transfers(producer, wanting, sums)
        return found

    def _sums(
        self, op: int, plan: OperatorPlan, readers: Sequence[Reader], *, syncs_norms: bool
    ) -> tuple[Sum, ...]:
        operator = self.graph.operators[op]
        if operator.kind == "loss" and CONTRACTION in plan.partition:
            return self._loss_sums(op, plan)
        is_frozen = operator.name in self._frozen or operator.attrs.get("statistics") == "frozen"
        if syncs_norms and operator.kind == "batch_norm" and not is_frozen:
            # In double: forward, sums and then squares; backward, the gradients of both.
            return tuple(
                collective(op, self.n_devices, group, (8 * (b - a), 16 * (b - a)), (2, 1))
                for (a, b), group in self._sharing(op, plan, [*self.shapes[op], "feature"][1])
            )
        summed = shared_sums(op, self.n_devices, readers)
        if plan.keys == "input" or not self.wire_share[op]:
            return summed
        priced = self.operator(op, plan)
        return summed + key_sums(
            operator, op, plan, self.shapes[op], self.blocks(op, plan),
            (priced.forward_s, priced.backward_s), self.wire_bytes_per_element(op),
        )  # fmt: skip

    def _loss_sums(self, op: int, plan: OperatorPlan) -> tuple[Sum, ...]:
        """The all-reduces of a loss that is cut by classes: numbers in FP32, for each target one
        for each device and one more; forward only."""
        shape = self.shapes[op]
        producer = self.graph.index()[self.graph.operators[op].inputs[0]]
        logits = output_sizes(self.graph.operators[producer], self.shapes[producer])
        per_sample = math.prod(logits.values()) / shape[SAMPLE] / shape[CONTRACTION]
        found = []
        for (start, stop), group in self._sharing(op, plan, SAMPLE):
            n_bytes = 4 * round(per_sample * (stop - start)) * (len(group) + 1)
            found.append(collective(op, self.n_devices, group, (n_bytes, 1), (1, 0)))
        return tuple(found)

    def _sharing(
        self, op: int, plan: OperatorPlan, dim: str
    ) -> Iterator[tuple[Interval, list[int]]]:
        """Intervals of a dim of which several devices hold blocks, and these devices; the whole
        operator counts as 0 to 1 of a dim that it lacks."""
        dims = list(self.shapes[op])
        holders: dict[Interval, set[int]] = {}
        for block, device in zip(self.blocks(op, plan), plan.devices, strict=True):
            interval = block[dims.index(dim)] if dim in dims else (0, 1)
            holders.setdefault(interval, set()).add(device)
        return ((held, sorted(own)) for held, own in holders.items() if len(own) > 1)


def check_profile(graph: Graph, profile: Profile) -> None:
    """Refuse a profile that was measured for another graph."""
    if profile.graph_hash and profile.graph_hash != graph.content_hash():
        raise PlanError(
            f"the profile of {profile.model!r} was measured for graph {profile.graph_hash}, this "
            f"is {graph.name!r} {graph.content_hash()}: profile this model"
        )

"""One operator's plan in numbers: seconds, bytes and weights on each device it uses.

Everything here depends on one operator's plan (`OperatorCosts`) or on those of a producer and a
consumer (`EdgeCosts`) and is kept, so that changing one operator's plan computes only what it
touches: that is the simulator's delta.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.partition import Block, blocks, volume
from harness.domain.profile import Profile
from harness.domain.sharding import (
    full_shape,
    input_block,
    is_partial,
    weight_dims,
    weight_part,
)
from harness.domain.strategy import OperatorPlan
from harness.errors import PlanError
from harness.plan.fit import OperatorTimes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
PlanKey = tuple[tuple[tuple[str, int | tuple[int, ...]], ...], tuple[int, ...]]


@dataclass(frozen=True)
class OperatorCosts:
    """Arrays by device position (n_devices,); weights as slices with the devices that hold them.

    Attributes:
        slices: (bytes, ascending devices) of each distinct slice of the weights.
    """

    active: npt.NDArray[np.bool_]
    forward_s: Floats
    backward_s: Floats
    output_bytes: Floats
    weight_bytes: Floats
    slices: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class EdgeCosts:
    """What one consumer fetches of one producer: parallel arrays of (source, target, bytes)."""

    sources: Ints
    targets: Ints
    n_bytes: Floats


class Costs:
    """Prices plans of one graph on one cluster at one size of microbatch.

    Args:
        samples: of the microbatch that every shape is scaled to.

    Raises:
        PlanError: the profile lacks an operator or a kind of device.
    """

    def __init__(self, graph: Graph, profile: Profile, cluster: Cluster, samples: int) -> None:
        self.graph, self.samples = graph, samples
        self.n_devices = cluster.n_devices
        self._devices = cluster.devices
        self._times = OperatorTimes(profile)
        dtypes = {point.dtype for point in profile.measurements}
        self._only_dtype = dtypes.pop() if len(dtypes) == 1 else None
        self.shapes = [
            full_shape(op, batch=samples, graph_batch=graph.batch) for op in graph.operators
        ]
        self._operators: dict[object, OperatorCosts] = {}
        self._edges: dict[object, EdgeCosts] = {}
        self._blocks: dict[object, list[Block]] = {}
        self._seconds: dict[object, tuple[float, float]] = {}
        self._keys: dict[int, tuple[OperatorPlan, PlanKey]] = {}

    def _key(self, plan: OperatorPlan) -> PlanKey:
        """A plan as a hashable value; kept by identity, since a search repeats its plans."""
        known = self._keys.get(id(plan))
        if known is None:
            cuts = tuple(
                (dim, tuple(cut) if isinstance(cut, list) else cut)
                for dim, cut in plan.partition.items()
            )
            # The plan is kept too: its id must not be given to another one.
            known = self._keys[id(plan)] = plan, (cuts, tuple(plan.devices))
        return known[1]

    def blocks(self, op: int, plan: OperatorPlan) -> list[Block]:
        """The blocks of an operator's output, in the order of its devices."""
        key = (op, self._key(plan)[0])
        if key not in self._blocks:
            shape = self.shapes[op]
            self._blocks[key] = blocks(list(shape), list(shape.values()), plan.partition)
        return self._blocks[key]

    def block_s(self, op: int, block: Block, device: int) -> tuple[float, float]:
        """Forward and backward seconds of one block on one device."""
        key = (op, device, tuple(stop - start for start, stop in block))
        if key not in self._seconds:
            operator = self.graph.operators[op]
            sizes = dict(zip(self.shapes[op], key[2], strict=True))
            kind, speed = self._devices[device].kind, self._devices[device].speed
            shown = {dim: n for dim, n in sizes.items() if not is_partial(operator, dim)}
            is_whole = all(sizes[dim] == self.shapes[op][dim] for dim in sizes if dim not in shown)
            if operator.shape and is_whole:
                time = self._times.lookup(operator, kind, shape=shown, dtype=self._only_dtype)
                share = 1.0
            elif self._times.is_measured(operator, kind, sizes, self._only_dtype):
                time = self._times.lookup(operator, kind, shape=sizes, dtype=self._only_dtype)
                share = 1.0
            else:
                # An unknown shape, or parts that its output does not show: in proportion.
                time = self._times.lookup(operator, kind, dtype=self._only_dtype)
                share = volume(block) / self._full_volume(op)
            self._seconds[key] = (time.forward_s * share / speed, time.backward_s * share / speed)
        return self._seconds[key]

    def _full_volume(self, op: int) -> float:
        """Elements of the output at the graph's own batch, with partial dims."""
        batch = self.graph.batch or self.samples
        full = full_shape(self.graph.operators[op], batch=batch, graph_batch=self.graph.batch)
        return float(np.prod(list(full.values())))

    def bytes_per_element(self, op: int) -> float:
        """Of the output; from the bytes of the whole, so that unknown shapes and lists work too."""
        operator = self.graph.operators[op]
        elements = operator.n_elements if operator.shape else (self.graph.batch or self.samples)
        return operator.activation_bytes / elements

    def operator(self, op: int, plan: OperatorPlan) -> OperatorCosts:
        """Price one operator's plan."""
        key = (op, self._key(plan))
        found = self._operators.get(key)
        if found is None:
            found = self._operators[key] = self._price_operator(op, plan)
        return found

    def _price_operator(self, op: int, plan: OperatorPlan) -> OperatorCosts:
        n, operator = self.n_devices, self.graph.operators[op]
        forward, backward, output = np.zeros(n), np.zeros(n), np.zeros(n)
        active = np.zeros(n, dtype=np.bool_)
        per_element = self.bytes_per_element(op)
        shown = self._shown(op)
        for block, device in zip(self.blocks(op, plan), plan.devices, strict=True):
            seconds = self.block_s(op, block, device)
            forward[device] += seconds[0]
            backward[device] += seconds[1]
            output[device] += per_element * volume(tuple(block[k] for k in shown))
            active[device] = True
        slices = self._slices(operator, op, plan)
        weight = np.zeros(n)
        for n_bytes, devices in slices:
            weight[list(devices)] += n_bytes
        return OperatorCosts(active, forward, backward, output, weight, slices)

    def _shown(self, op: int) -> list[int]:
        """Positions of the dims that the output really has."""
        operator = self.graph.operators[op]
        return [k for k, dim in enumerate(self.shapes[op]) if not is_partial(operator, dim)]

    def _slices(
        self, operator: Operator, op: int, plan: OperatorPlan
    ) -> tuple[tuple[int, tuple[int, ...]], ...]:
        if not operator.parameter_bytes:
            return ()
        shape = self.shapes[op]
        dims, weights = list(shape), [dim for dim in weight_dims(operator) if dim in shape]
        holders: dict[int, set[int]] = {}
        shares: dict[int, float] = {}
        for k, (block, device) in enumerate(zip(self.blocks(op, plan), plan.devices, strict=True)):
            part = weight_part(operator, dims, plan.partition, k)
            holders.setdefault(part, set()).add(device)
            own = dict(zip(dims, block, strict=True))
            shares[part] = float(
                np.prod([(b - a) / shape[d] for d in weights for a, b in (own[d],)])
            )
        return tuple(
            (round(operator.parameter_bytes * shares[part]), tuple(sorted(holders[part])))
            for part in sorted(holders)
        )

    def edge(self, producer: int, consumer: int, a: OperatorPlan, b: OperatorPlan) -> EdgeCosts:
        """Price the transfers from one operator to one that reads it."""
        key = (producer, consumer, self._key(a), self._key(b))
        found = self._edges.get(key)
        if found is None:
            found = self._edges[key] = self._price_edge(producer, consumer, a, b)
        return found

    def _price_edge(
        self, producer: int, consumer: int, a: OperatorPlan, b: OperatorPlan
    ) -> EdgeCosts:
        """Bytes between every pair of devices: a device fetches a common block only once."""
        shown = self._shown(producer)
        held = np.array([[block[k] for k in shown] for block in self.blocks(producer, a)])
        dims = list(self.shapes[producer])
        shape = {dims[k]: self.shapes[producer][dims[k]] for k in shown}
        operator = self.graph.operators[consumer]
        name = self.graph.operators[producer].name
        amounts = np.zeros((self.n_devices, self.n_devices))
        fetched: set[tuple[object, ...]] = set()
        repeats = len(set(b.devices)) < len(b.devices)
        for argument, source in enumerate(operator.inputs):
            if source != name:
                continue
            for block, target in zip(self.blocks(consumer, b), b.devices, strict=True):
                wanted = np.array(
                    input_block(operator, self.shapes[consumer], block, shape, argument=argument)
                )
                low = np.maximum(held[:, :, 0], wanted[:, 0])
                high = np.minimum(held[:, :, 1], wanted[:, 1])
                elements = np.maximum(high - low, 0).prod(axis=1)
                for part in np.flatnonzero(elements):
                    once = (int(part), target, low[part].tobytes(), high[part].tobytes())
                    if (repeats or argument) and once in fetched:
                        continue
                    fetched.add(once)
                    amounts[a.devices[part], target] += elements[part]
        np.fill_diagonal(amounts, 0.0)
        sources, targets = np.nonzero(amounts)
        return EdgeCosts(
            sources, targets, amounts[sources, targets] * self.bytes_per_element(producer)
        )


def check_profile(graph: Graph, profile: Profile) -> None:
    """Refuse a profile that was measured for another graph.

    Raises:
        PlanError: names both.
    """
    if profile.graph_hash and profile.graph_hash != graph.content_hash():
        raise PlanError(
            f"the profile of {profile.model!r} was measured for graph {profile.graph_hash}, "
            "this is "
            f"{graph.name!r} {graph.content_hash()}: profile this model"
        )

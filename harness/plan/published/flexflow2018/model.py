"""AlexNet and the analytic costs of the repaired FlexFlow simulator of 2018. Times are in ms.

A layer is cut into `n_samples x n_features` parts. Convolutions, pools and flatten cut only their
samples, into a power of two of parts; a linear layer always has as many parts as there are
devices, and part `i * n_features + j` computes sample block i of feature block j.

Legend of the formulas: b samples, ci and co channels in and out, ho and wo the output's height and
width, k the kernel's side, i and o the inputs and outputs of a linear part.

The cost model in plain Python, task by task: slow and short; the kernels must equal it.

Every part is a task on its device, and every intersection of a producer's block with a consumer's
input block that crosses devices is a task on the channel (producer part, consumer part). Channels
are keyed by the parts' indices alone, so that transfers between different pairs of layers share
them. Each device and channel serves its tasks in the order in which they become ready; ties go to
the earlier layer, compute before transfers into the next layer, then the lower consumer and
producer part.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.errors import PlanError

CONV, POOL, FLATTEN, LINEAR = "conv", "pool", "flat", "linear"

FLOPS_PER_MS = 6.4e9
MEMORY_BYTES_PER_MS = 5e8
LAUNCH_MS = 0.01
INSIDE_BYTES_PER_MS = 4 * 2.0**20
BETWEEN_BYTES_PER_MS = 2.0**20
GIVE_BACK_MS = 0.0001
SAMPLES_PER_DEVICE = 64
ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One operator with its sizes for one sample.

    Attributes:
        kind: CONV, POOL, FLATTEN or LINEAR.
        n_in: elements that one sample brings in.
        n_out: elements that one sample puts out; the features of a linear layer.
        n_weights: elements of the filter or matrix; 0 for a layer without weights.
        macs: multiply-adds of one sample, all features.
        has_softmax: a linear layer that ends in a softmax.
    """

    name: str
    kind: str
    n_in: int
    n_out: int
    n_weights: int = 0
    macs: int = 0
    has_softmax: bool = False


def roof_ms(flops: float, n_bytes: float) -> float:
    """Time of a kernel that is bound by arithmetic or by memory, and costs a launch."""
    return max(flops / FLOPS_PER_MS, n_bytes / MEMORY_BYTES_PER_MS) + LAUNCH_MS


def part_ms(layer: Layer, n_samples: int, n_features: int) -> float:
    """Forward and backward milliseconds of one part of `n_samples` x `n_features`."""
    b = n_samples
    if layer.kind == CONV:
        moved = b * layer.n_in + b * layer.n_out + layer.n_weights
        return 3 * roof_ms(2 * b * layer.macs, ELEMENT_BYTES * moved)
    if layer.kind == POOL:
        moved = ELEMENT_BYTES * b * (layer.n_in + layer.n_out)
        return roof_ms(0, moved) + roof_ms(0, 2 * moved)
    if layer.kind == FLATTEN:
        return 0.0
    i, o = layer.n_in, n_features
    linear = 3 * roof_ms(2 * b * i * o, ELEMENT_BYTES * (i * o + b * i + b * o))
    return linear + (2 * roof_ms(0, 2 * ELEMENT_BYTES * b * o) if layer.has_softmax else 0.0)


# Kind, channels or features out, kernel, stride, padding; None keeps the channels.
_ALEXNET: list[tuple[str, int | None, int, int, int]] = [
    (CONV, 64, 11, 4, 2),
    (POOL, None, 3, 2, 0),
    (CONV, 192, 5, 1, 2),
    (POOL, None, 3, 2, 0),
    (CONV, 384, 3, 1, 1),
    (CONV, 256, 3, 1, 1),
    (CONV, 256, 3, 1, 1),
    (POOL, None, 3, 2, 0),
    (FLATTEN, None, 1, 1, 0),
    (LINEAR, 4096, 1, 1, 0),
    (LINEAR, 4096, 1, 1, 0),
    (LINEAR, 1000, 1, 1, 0),
]


def alexnet() -> list[Layer]:
    """The twelve layers of the comparison; the input is 3 x 224 x 224, the end a softmax.

    Layers are numbered as FlexFlow named them, the flatten without a number.
    """
    layers: list[Layer] = []
    channels, side, number = 3, 224, 0
    for kind, n_out, kernel, stride, padding in _ALEXNET:
        n_in = channels * side**2
        n_weights = 0 if n_out is None else n_out * channels * kernel**2
        if kind == LINEAR:
            n_weights, side = (n_out or 0) * n_in, 1
        elif kind != FLATTEN:
            side = 1 + (side + 2 * padding - kernel) // stride
        channels = n_out or channels
        number += kind != FLATTEN
        layers.append(
            Layer(
                name=kind if kind == FLATTEN else f"{kind}{number}",
                kind=kind,
                n_in=n_in,
                n_out=channels * side**2,
                n_weights=n_weights,
                macs=n_weights * side**2,
                has_softmax=len(layers) == len(_ALEXNET) - 1,
            )
        )
    return layers


@dataclass(frozen=True)
class Machine:
    """Equal nodes of equal devices; device d stands in node d // devices_per_node.

    Raises:
        PlanError: the number of devices is not a power of two.
    """

    n_nodes: int
    devices_per_node: int

    def __post_init__(self) -> None:
        n = self.n_nodes * self.devices_per_node
        if n < 1 or n & (n - 1):
            raise PlanError(
                f"flexflow2018 cuts layers into powers of two, {self.n_nodes} nodes of "
                f"{self.devices_per_node} devices make {n}: use 1, 2, 4, 8, ... devices"
            )

    @property
    def n_devices(self) -> int:
        return self.n_nodes * self.devices_per_node

    @property
    def batch(self) -> int:
        return SAMPLES_PER_DEVICE * self.n_devices

    def node(self, device: int) -> int:
        return device // self.devices_per_node


@dataclass(frozen=True)
class LayerCut:
    """How one layer is cut and where each part runs; a device may hold several parts."""

    n_samples: int
    n_features: int
    devices: tuple[int, ...]


Plan = tuple[LayerCut, ...]


@dataclass(frozen=True)
class LayerProblem:
    """Layers on a machine."""

    machine: Machine
    layers: Sequence[Layer] = field(default_factory=alexnet)

    def choices(self, layer: Layer) -> list[tuple[int, int]]:
        """Every (sample blocks, feature blocks) that the layer may be cut into."""
        n = self.machine.n_devices
        powers = [1 << s for s in range(n.bit_length())]
        return [(p, n // p if layer.kind == LINEAR else 1) for p in powers]

    def part_ms(self, layer: Layer, n_samples: int, n_features: int) -> float:
        """Time of one part of the layer when it is cut so; a block's size is rounded down."""
        return part_ms(layer, self.machine.batch // n_samples, layer.n_out // n_features)

    def data_parallel(self) -> Plan:
        """Every layer cut over the samples, part i on device i."""
        n = self.machine.n_devices
        return tuple(LayerCut(n, 1, tuple(range(n))) for _ in self.layers)

    def linear_by_feature(self) -> Plan:
        """Convolutions cut over the samples, linear layers over the features (Krizhevsky 2014)."""
        n = self.machine.n_devices
        devices = tuple(range(n))
        return tuple(
            LayerCut(1, n, devices) if layer.kind == LINEAR else LayerCut(n, 1, devices)
            for layer in self.layers
        )

    def single_device(self) -> Plan:
        """Every part on device 0, in as few parts as the model allows."""
        plan = []
        for layer in self.layers:
            n_samples, n_features = min(
                self.choices(layer), key=lambda c: c[0] * c[1] * self.part_ms(layer, *c)
            )
            plan.append(LayerCut(n_samples, n_features, (0,) * (n_samples * n_features)))
        return tuple(plan)


Resource = int | tuple[int, int]  # a device, or a channel between part indices
Span = tuple[int, int]


@dataclass(eq=False)
class TimedTask:
    """A part's computation or a transfer. `order` breaks ties; `n_waits` counts producers left."""

    order: tuple[int, ...]
    resource: Resource
    duration_ms: float
    layer: int
    ready_ms: float = 0.0
    start_ms: float = 0.0
    n_waits: int = 0
    followers: list[TimedTask] = field(default_factory=list)

    @property
    def finish_ms(self) -> float:
        return self.start_ms + self.duration_ms

    def then(self, follower: TimedTask) -> None:
        self.followers.append(follower)
        follower.n_waits += 1


def step_ms(problem: LayerProblem, plan: Plan) -> float:
    """Predicted milliseconds of a training step: the last task, then all synchronisation."""
    end_ms = max(task.finish_ms for task in simulate(problem, plan))
    transfer_ms, squared_parts = synchronise(problem, plan)
    return end_ms + transfer_ms - GIVE_BACK_MS * squared_parts


def simulate(problem: LayerProblem, plan: Plan) -> list[TimedTask]:
    """All tasks with their times, in the order in which they became ready."""
    tasks = build_tasks(problem, plan)
    ready = [(task.ready_ms, task.order, task) for task in tasks if task.n_waits == 0]
    heapq.heapify(ready)
    free_ms: dict[Resource, float] = {}
    done: list[TimedTask] = []
    while ready:
        _, _, task = heapq.heappop(ready)
        task.start_ms = max(free_ms.get(task.resource, 0.0), task.ready_ms)
        free_ms[task.resource] = task.finish_ms
        done.append(task)
        for follower in task.followers:
            follower.ready_ms = max(follower.ready_ms, task.finish_ms)
            follower.n_waits -= 1
            if follower.n_waits == 0:
                heapq.heappush(ready, (follower.ready_ms, follower.order, follower))
    return done


def build_tasks(problem: LayerProblem, plan: Plan) -> list[TimedTask]:
    """One task per part and per transfer, wired producer to consumer."""
    tasks: list[TimedTask] = []
    before: list[TimedTask] = []
    for index, (layer, cut) in enumerate(zip(problem.layers, plan, strict=True)):
        duration_ms = problem.part_ms(layer, cut.n_samples, cut.n_features)
        parts = [
            TimedTask((index, 0, part), device, duration_ms, index)
            for part, device in enumerate(cut.devices)
        ]
        tasks += parts
        if index > 0:
            tasks += _connect(problem, index, plan[index - 1], cut, before, parts)
        before = parts
    return tasks


def _connect(
    problem: LayerProblem,
    index: int,
    source: LayerCut,
    target: LayerCut,
    before: list[TimedTask],
    parts: list[TimedTask],
) -> list[TimedTask]:
    transfers: list[TimedTask] = []
    for to, consumer in enumerate(parts):
        wanted = _sample_span(problem, target, to)
        for producer_index, producer in enumerate(before):
            held = _sample_span(problem, source, producer_index)
            n_common = min(wanted[1], held[1]) - max(wanted[0], held[0])
            if n_common <= 0:
                continue
            a, b = source.devices[producer_index], target.devices[to]
            if a == b:
                producer.then(consumer)
                continue
            features = problem.layers[index - 1].n_out // source.n_features
            same_node = problem.machine.node(a) == problem.machine.node(b)
            bytes_per_ms = INSIDE_BYTES_PER_MS if same_node else BETWEEN_BYTES_PER_MS
            duration_ms = ELEMENT_BYTES * n_common * features / bytes_per_ms
            transfer = TimedTask(
                (index, 1, to, producer_index), (producer_index, to), duration_ms, index
            )
            producer.then(transfer)
            transfer.then(consumer)
            transfers.append(transfer)
    return transfers


def _sample_span(problem: LayerProblem, cut: LayerCut, part: int) -> Span:
    size = problem.machine.batch // cut.n_samples
    block = part // cut.n_features
    return block * size, (block + 1) * size


def synchronise(problem: LayerProblem, plan: Plan) -> tuple[float, int]:
    """Milliseconds of summing all weight gradients over their holders, slice by slice; and the
    squared parts, for each of which the model gives back GIVE_BACK_MS."""
    transfer_ms, squared_parts = 0.0, 0
    for layer, cut in zip(problem.layers, plan, strict=True):
        if layer.kind == CONV:
            n_bytes = float(ELEMENT_BYTES * layer.n_weights)
            transfer_ms += n_bytes * _ms_per_byte(problem, set(cut.devices))
        for slice_ in range(problem.machine.n_devices) if layer.kind == LINEAR else ():
            block = slice_ // cut.n_samples
            holders = cut.devices[block :: cut.n_features]
            n_bytes = ELEMENT_BYTES * layer.n_in * layer.n_out / problem.machine.n_devices
            transfer_ms += n_bytes * _ms_per_byte(problem, set(holders))
            squared_parts += sum(holders.count(device) ** 2 for device in set(holders))
    return transfer_ms, squared_parts


def _ms_per_byte(problem: LayerProblem, devices: set[int]) -> float:
    nodes = [problem.machine.node(device) for device in devices]
    most_in_a_node = max(nodes.count(node) for node in nodes)
    return (most_in_a_node - 1) / INSIDE_BYTES_PER_MS + (len(set(nodes)) - 1) / BETWEEN_BYTES_PER_MS

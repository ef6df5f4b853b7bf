"""AlexNet, its plans and their analytic costs by the repaired simulator of 2018; times in ms.

A layer is cut into `n_samples x n_features` parts. Convolutions, pools and flatten cut only their
samples, into a power of two of parts; a linear layer always has as many parts as there are
devices, and part `i * n_features + j` computes sample block i of feature block j.

Legend of the formulas: b samples, ci and co channels in and out, ho and wo the output's height and
width, k the kernel's side, i and o the inputs and outputs of a linear part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.domain.fingerprint import MadeFor
from harness.domain.strategy import OperatorPlan, Strategy
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


@dataclass(frozen=True)
class LayerCut:
    """How one layer is cut and where each part runs; a device may hold several parts."""

    n_samples: int
    n_features: int
    devices: tuple[int, ...]


Plan = tuple[LayerCut, ...]


@dataclass(frozen=True)
class LayerProblem:
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


def memory_bytes(problem: LayerProblem, plan: Plan) -> list[int]:
    """Weights, their gradients, and the outputs that are kept for the backward pass, per device.

    FlexFlow's model of 2018 has no memory; this is the least that the plan needs.
    """
    needed = [0] * problem.machine.n_devices
    for layer, cut in zip(problem.layers, plan, strict=True):
        block_bytes = ELEMENT_BYTES * problem.machine.batch * layer.n_out // len(cut.devices)
        for device in cut.devices:
            needed[device] += block_bytes
        held = {(device, part % cut.n_features) for part, device in enumerate(cut.devices)}
        for device in set(cut.devices):
            n_blocks = sum(holder == device for holder, _ in held)
            needed[device] += 2 * ELEMENT_BYTES * layer.n_weights * n_blocks // cut.n_features
    return needed


def format_plan(problem: LayerProblem, plan: Plan) -> list[str]:
    """One line per layer in FlexFlow's notation of 2018.

    dims are samples first, then features; later versions print them the other way round.
    """
    lines = []
    for index, (layer, cut) in enumerate(zip(problem.layers, plan, strict=True)):
        dims = (cut.n_samples, cut.n_features) if layer.kind == LINEAR else (cut.n_samples,)
        dim_text, gpu_text = ("".join(f"{n} " for n in each) for each in (dims, cut.devices))
        lines.append(f"op[{index}] {layer.name}:\tdim({dim_text}) gpu({gpu_text})")
    return lines


def to_strategy(problem: LayerProblem, plan: Plan) -> Strategy:
    operators = {}
    for layer, cut in zip(problem.layers, plan, strict=True):
        parts = {"sample": cut.n_samples, "feature": cut.n_features}
        operators[layer.name] = OperatorPlan(
            partition={dim: n for dim, n in parts.items() if n > 1}, devices=list(cut.devices)
        )
    return Strategy(
        name="flexflow2018",
        batch=problem.machine.batch,
        operators=operators,
        made_for=MadeFor(model="alexnet of flexflow2018"),
    )

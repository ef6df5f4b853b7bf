"""Operator times without measuring: a roofline, or FLOPs over a measured rate.

seconds = max(FLOPs / peak, bytes / memory bandwidth) + launch (the roofline of Williams et al.,
2009, with a fixed cost per kernel), for likely shapes of shards. A stand-in until `./entry.sh
profile` has run there.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE
from harness.domain.profile import Measurement, Profile
from harness.domain.sharding import (
    CONTRACTION,
    PARTIAL_DIMS,
    cuttable_dims,
    full_shape,
    has_tasks,
    is_partial,
    output_sizes,
    weight_dims,
)
from harness.errors import PlanError

_ALL_PARTS_UP_TO = 8
# Sources of these profiles, as their provenance names them.
ROOFLINE, FROM_FLOPS = "roofline", "estimated from FLOPs"


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of a kind of device, from its data sheet or measured.

    Attributes:
        launch_s: fixed cost of an operator.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float = 10e-6

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.memory_bytes_per_s > 0 and self.launch_s >= 0):
            raise PlanError(
                f"rates of {self.flops_per_s} FLOP/s, {self.memory_bytes_per_s} B/s and a "
                "launch of "
                f"{self.launch_s} s: the first two must be above 0, the last not below"
            )

    def seconds(self, flops: float, n_bytes: float) -> float:
        return max(flops / self.flops_per_s, n_bytes / self.memory_bytes_per_s) + self.launch_s


def operator_seconds(
    operator: Operator, input_bytes: float, shape: Mapping[str, int], rates: DeviceRates
) -> tuple[float, float]:
    """Forward and backward seconds of a shard of an operator.

    Args:
        input_bytes: of all the operator's inputs, whole.
        shape: of the shard's output.
    """
    full = _whole(operator)
    part = {dim: shape[dim] / full[dim] for dim in shape}
    share, samples = math.prod(part.values()), part.get(SAMPLE, 1.0)
    weights = operator.parameter_bytes * math.prod(part.get(d, 1.0) for d in weight_dims(operator))
    partial = math.prod(part.get(dim, 1.0) for dim in PARTIAL_DIMS if is_partial(operator, dim))
    output = operator.activation_bytes * share / partial
    if operator.kind == "embedding":
        # Forward reads the rows that it looks up; backward fills a dense gradient of the table.
        forward_bytes, backward_bytes = 2 * output, weights + 2 * output
    else:
        is_product = operator.kind in ("linear", "conv2d")
        read = input_bytes * (samples * part.get(CONTRACTION, 1.0) if is_product else share)
        forward_bytes = read + weights + output
        backward_bytes = 2 * read + 2 * weights + output
    return (
        rates.seconds(operator.forward_flops * share, forward_bytes),
        rates.seconds(operator.backward_flops * share, backward_bytes),
    )


def likely_parts(n_devices: int) -> list[int]:
    """Numbers of parts that get times of their own: all where they are few, else divisors of the
    number of devices and powers of two. Sizes between them are fitted (`harness.plan.fit`)."""
    return [
        n
        for n in range(1, n_devices + 1)
        if n <= _ALL_PARTS_UP_TO or n_devices % n == 0 or n.bit_count() == 1
    ]


def roofline_profile(
    graph: Graph,
    rates: Mapping[str, DeviceRates],
    *,
    n_parts: Iterable[int],
    n_microbatches: Iterable[int] = (1,),
    source: str = ROOFLINE,
) -> Profile:
    """A profile of every operator on every kind of device.

    Args:
        rates: by kind of device.
        n_parts: numbers of parts that a dim may be cut into.
        n_microbatches: that the batch may be cut into before.
    """
    sizes = {op.name: float(op.activation_bytes) for op in graph.operators}
    points: dict[object, Measurement] = {}
    parts, microbatches = sorted(set(n_parts) | {1}), list(n_microbatches)
    for kind, own in rates.items():
        for operator in filter(has_tasks, graph.operators):
            input_bytes = sum(sizes[name] for name in operator.inputs)
            for shape in _shapes(operator, parts, microbatches):
                key = (kind, operator.profile_key, operator.dtype, tuple(shape.items()))
                if key in points:
                    continue
                forward, backward = operator_seconds(operator, input_bytes, shape, own)
                points[key] = Measurement(
                    device_kind=kind,
                    operator=operator.profile_key,
                    shape=shape,
                    dtype=operator.dtype,
                    forward_s=forward,
                    backward_s=backward,
                )
    measurements = list(points.values())
    return Profile(model=graph.name, measurements=measurements, provenance={"source": source})


def _whole(operator: Operator) -> dict[str, int]:
    samples = operator.shape.get(SAMPLE, 1)
    return full_shape(operator, batch=samples, graph_batch=samples)


def _shapes(
    operator: Operator, parts: list[int], microbatches: list[int]
) -> Iterator[dict[str, int]]:
    """Shards along one dim or along samples and one other."""
    full = _whole(operator)
    shown = output_sizes(operator, full)
    dims = cuttable_dims(operator, full)
    for m in microbatches:
        for a in parts:
            samples = full.get(SAMPLE, 1) // (m * a)
            if samples < 1:
                continue
            base = {SAMPLE: samples} if SAMPLE in full else {}
            yield {**shown, **base}
            for dim in dims:
                whole = {**(full if is_partial(operator, dim) else shown), **base}
                if dim != SAMPLE:
                    yield from ({**whole, dim: full[dim] // b} for b in parts if full[dim] >= b)


def estimate_profile(graph: Graph, cluster: Cluster) -> Profile:
    """FLOPs over the matmul rate, for every operator on every kind of device of the cluster.

    Raises:
        PlanError: a kind of device has no matmul rate.
    """
    rates: dict[str, float] = {}
    for device in cluster.devices:
        rate = device.flops_per_s.get("float32") or max(device.flops_per_s.values(), default=0.0)
        if rate <= 0:
            raise PlanError(
                f"nothing says how fast {device.kind!r} runs {graph.name!r}: give --profile "
                f"(`./entry.sh profile --model {graph.name}` writes one), --rates, or write "
                f"flops_per_s of device {device.name} into the cluster file"
            )
        rates.setdefault(device.kind, rate)
    own = {
        kind: DeviceRates(flops_per_s=rate, memory_bytes_per_s=math.inf, launch_s=0.0)
        for kind, rate in rates.items()
    }
    return roofline_profile(graph, own, n_parts=(), source=FROM_FLOPS)

"""Operator times without measuring, and the graph of a DLRM by its sizes, without the model.

seconds = max(FLOPs / peak, bytes / memory bandwidth) + launch (the roofline of Williams et al.,
2009, with a fixed cost per kernel), for likely shapes of shards; or FLOPs over a measured rate. A
stand-in until `./entry.sh profile` has run there.

A DLRM is as FlexFlow's example builds it: the bottom MLP's output and one row of each table are
concatenated (no pairwise interaction); a ReLU follows every layer but the last, which has a
sigmoid.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from harness.domain.cluster import Cluster
from harness.domain.graph import Attribute, Graph, Operator
from harness.domain.partition import SAMPLE
from harness.domain.profile import OPTIMIZER_STEPS, Measurement, OptimizerTime, Profile
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
from harness.errors import ConfigError, GraphError, PlanError
from harness.inputs import find_ints, shorten
from harness.plan.simulate.block_times import needs_gradient
from harness.units import parse_bandwidth

_ALL_PARTS_UP_TO = 8
# Sources of these profiles, as their provenance names them.
ROOFLINE, FROM_FLOPS = "roofline", "estimated from FLOPs"


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates of a kind of device, from its data sheet or measured, and a kernel's fixed cost."""

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float = 10e-6

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.memory_bytes_per_s > 0 and self.launch_s >= 0):
            raise PlanError(
                f"rates of {self.flops_per_s} FLOP/s, {self.memory_bytes_per_s} B/s and a launch "
                f"of {self.launch_s} s: the first two must be above 0, the last not below"
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
        forward_bytes, backward_bytes = 2 * output, operator.trained_share * weights + 2 * output
    else:
        is_product = operator.kind in ("linear", "conv2d")
        read = input_bytes * (samples * part.get(CONTRACTION, 1.0) if is_product else share)
        forward_bytes = read + weights + output
        backward_bytes = 2 * read + (1 + operator.trained_share) * weights + output
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

    Operators without trained weights before them have no backward, unless the graph's weights are
    unknown.

    Args:
        rates: by kind of device.
        n_parts: numbers of parts that a dim may be cut into.
        n_microbatches: that the batch may be cut into before.
    """
    sizes = {op.name: float(op.activation_bytes) for op in graph.operators}
    points: dict[object, Measurement] = {}
    parts, microbatches = sorted(set(n_parts) | {1}), list(n_microbatches)
    needs = needs_gradient(graph) | (graph.parameter_bytes == 0)
    returns = {op.profile_key for op, need in zip(graph.operators, needs, strict=True) if need}
    for kind, own in rates.items():
        for operator in filter(has_tasks, graph.operators):
            input_bytes = sum(sizes[name] for name in operator.inputs)
            for shape in _shapes(operator, parts, microbatches):
                key = (kind, operator.profile_key, operator.dtype, tuple(shape.items()))
                if key in points:
                    continue
                forward, backward = operator_seconds(operator, input_bytes, shape, own)
                backward *= operator.profile_key in returns
                points[key] = Measurement(
                    device_kind=kind,
                    operator=operator.profile_key,
                    shape=shape,
                    dtype=operator.dtype,
                    forward_s=forward,
                    backward_s=backward,
                )
    return Profile(
        model=graph.name,
        measurements=list(points.values()),
        optimizers=[
            time
            for kind, own in rates.items()
            for time in optimizer_times(kind, own.memory_bytes_per_s)
        ],
        provenance={"source": source},
    )


def optimizer_times(device_kind: str, memory_bytes_per_s: float) -> list[OptimizerTime]:
    """Times of all optimizers by a kind of device's memory traffic in one kernel; none where the
    rate is infinite, which means unknown."""
    if math.isinf(memory_bytes_per_s):
        return []
    return [
        OptimizerTime(
            device_kind=device_kind, optimizer=name, s_per_byte=step.n_fused / memory_bytes_per_s
        )
        for name, step in OPTIMIZER_STEPS.items()
    ]


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


def rated_profile(rates: str, graph: Graph, cluster: Cluster) -> Profile:
    """A roofline of all the cluster's devices at likely shards, by `--rates FLOPS,BYTES`.

    Raises:
        ConfigError: not of that form.
    """
    parts: list[float] = []
    with contextlib.suppress(ConfigError):
        parts = [parse_bandwidth(part) for part in rates.split(",")]
    if len(parts) != 2:
        raise ConfigError(
            f"--rates {shorten(rates)} is not FLOPS,BYTES: write it like 9.3e12,549e9"
        )
    own = DeviceRates(flops_per_s=parts[0], memory_bytes_per_s=parts[1])
    return roofline_profile(
        graph,
        {device.kind: own for device in cluster.devices},
        n_parts=likely_parts(cluster.n_devices),
        n_microbatches=(1, 2, 4, 8, 16),
    )


def estimate_profile(graph: Graph, cluster: Cluster, dtype: str = "fp32") -> Profile:
    """FLOPs over the matmul rate, for every operator on every kind of device of the cluster.

    Args:
        dtype: of the rate, as a cluster file names it.

    Raises:
        PlanError: a kind of device has no matmul rate of the dtype.
    """
    rates: dict[str, DeviceRates] = {}
    for device in cluster.devices:
        rate = device.flops_per_s.get(dtype, 0.0)
        if rate <= 0:
            known = " and ".join(device.flops_per_s) or "no dtype"
            raise PlanError(
                f"nothing says how fast {device.kind!r} runs {graph.name!r} in {dtype}: "
                f"flops_per_s of device {device.name} in the cluster file has {known}; give "
                f"--profile (`./entry.sh profile --model {graph.name}` writes one), --rates, "
                f"another --dtype, or write the {dtype} rate into the cluster file"
            )
        own = DeviceRates(flops_per_s=rate, memory_bytes_per_s=math.inf, launch_s=0.0)
        rates.setdefault(device.kind, own)
    return roofline_profile(graph, rates, n_parts=(), source=FROM_FLOPS)


FLOAT_BYTES = 4
_MOST_TABLES = 10_000


@dataclass(frozen=True, kw_only=True)
class DlrmSizes:
    """Sizes of the model.

    Attributes:
        rows: of each table.
        dim: columns of every table.
        bottom, top: widths of the MLPs, input first.
        batch: samples per step.
    """

    n_tables: int = 8
    rows: int = 1_000_000
    dim: int = 64
    bottom: tuple[int, ...] = (64, 512, 512, 64)
    top: tuple[int, ...] = (576, 1024, 1024, 1024, 1)
    batch: int = 1024

    def __post_init__(self) -> None:
        if min(self.n_tables, self.rows, self.dim, self.batch, *self.bottom, *self.top) < 1:
            raise GraphError(f"every size of a DLRM must be >= 1, got {self}")
        if len(self.bottom) < 2 or len(self.top) < 2:
            raise GraphError(
                f"MLPs need an input and an output width, got {self.bottom}, {self.top}"
            )
        width = self.bottom[-1] + self.n_tables * self.dim
        if self.top[0] != width:
            raise GraphError(
                f"the top MLP takes {self.top[0]} features, but the bottom MLP's {self.bottom[-1]} "
                f"and {self.n_tables} tables of {self.dim} make {width}: change one"
            )


def _whole_numbers(text: str, separator: str, flag: str, example: str) -> tuple[int, ...]:
    numbers = find_ints(text.split(separator))
    if numbers is None:
        raise ConfigError(f"{flag} {shorten(text)} is not of the form {example}")
    return numbers


def parse_dlrm(tables: str, bottom: str, top: str, batch: int) -> DlrmSizes:
    """Read sizes as DLRM's own command line writes them, the tables as NUMBERxROWSxCOLUMNS.

    Raises:
        ConfigError: not of that form.
        GraphError: sizes that do not fit one another.
    """
    form = "8x1000000x64"
    sizes = _whole_numbers(tables.lower(), "x", "--dlrm-tables", form)
    if len(sizes) != 3:
        raise ConfigError(
            f"--dlrm-tables {shorten(tables)} is not NUMBERxROWSxCOLUMNS, such as {form}"
        )
    n_tables, rows, dim = sizes
    if n_tables > _MOST_TABLES:
        raise ConfigError(f"--dlrm-tables {tables!r} names more than {_MOST_TABLES} tables")
    return DlrmSizes(
        n_tables=n_tables,
        rows=rows,
        dim=dim,
        bottom=_whole_numbers(bottom, "-", "--dlrm-bottom-mlp", "64-512-512-64"),
        top=_whole_numbers(top, "-", "--dlrm-top-mlp", "576-1024-1024-1024-1"),
        batch=batch,
    )


def dlrm_graph(flags: DlrmSizes) -> Graph:
    """The operators, with FLOPs and bytes of the whole batch."""
    made = _Operators(flags.batch)
    made.add("dense", "input", [], flags.bottom[0])
    dense = made.add_mlp("bottom", "dense", flags.bottom, last="relu")
    tables = []
    for k in range(flags.n_tables):
        made.add(f"indices{k}", "input", [], 1)
        tables.append(f"table{k}")
        made.add(
            f"table{k}",
            "embedding",
            [f"indices{k}"],
            flags.dim,
            parameters=flags.rows * flags.dim,
            signature=f"embedding {flags.rows}x{flags.dim}",
            attrs={"n_rows": flags.rows},
        )
    made.add("concat", "cat", [dense, *tables], flags.top[0])
    logit = made.add_mlp("top", "concat", flags.top, last="sigmoid")
    made.add("loss", "loss", [logit], 1)
    return Graph(name="dlrm", operators=made.found, batch=flags.batch)


class _Operators:
    """Operators in order, of equal numbers of samples."""

    def __init__(self, batch: int) -> None:
        self.batch, self.found = batch, list[Operator]()

    def add(
        self,
        name: str,
        kind: str,
        inputs: list[str],
        features: int,
        *,
        parameters: int = 0,
        flops: float | None = None,
        signature: str = "",
        attrs: dict[str, Attribute] | None = None,
    ) -> None:
        """Add one; without FLOPs it has as many as elements, each way, and inputs have none."""
        elements = self.batch * features
        forward, backward = (elements, elements) if flops is None else (flops, 2 * flops)
        computes = kind != "input"
        self.found.append(
            Operator(
                name=name,
                kind=kind,
                inputs=inputs,
                shape={"sample": self.batch, "feature": features},
                forward_flops=float(forward * computes),
                backward_flops=float(backward * computes),
                parameter_bytes=FLOAT_BYTES * parameters,
                activation_bytes=FLOAT_BYTES * elements,
                signature=signature,
                attrs=attrs or {},
            )
        )

    def add_mlp(self, name: str, source: str, widths: tuple[int, ...], *, last: str) -> str:
        """Add linear layers, each followed by its activation; returns the last one's name."""
        for k, (i, o) in enumerate(pairwise(widths)):
            linear, function = f"{name}{k}", last if k == len(widths) - 2 else "relu"
            self.add(
                linear,
                "linear",
                [source],
                o,
                parameters=(i + 1) * o,
                flops=2.0 * self.batch * i * o,
                attrs={"in_features": i, "out_features": o},
            )
            source = f"{linear}.{function}"
            self.add(source, "elementwise", [linear], o, attrs={"function": function})
        return source

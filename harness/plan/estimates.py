"""Models and operator times without measuring: a roofline, and the graph of a DLRM.

seconds = max(FLOPs / peak, bytes / memory bandwidth) + launch (the roofline of Williams et al.,
2009, with a fixed cost per kernel), for likely shapes of shards. A stand-in until `./entry.sh
profile` has run there.

The DLRM is as FlexFlow's example builds it: the bottom MLP's output and one row of each table are
concatenated (no pairwise interaction); a ReLU follows every layer but the last, which has a
sigmoid.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from harness.domain.cluster import Cluster
from harness.domain.graph import Attribute, Graph, Operator
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
from harness.errors import ConfigError, GraphError, PlanError
from harness.inputs import find_int, shorten

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
                f"(`./entry.sh profile --model {graph.name}` writes one), or write flops_per_s of "
                f"device {device.name} into the cluster file"
            )
        rates.setdefault(device.kind, rate)
    own = {
        kind: DeviceRates(flops_per_s=rate, memory_bytes_per_s=math.inf, launch_s=0.0)
        for kind, rate in rates.items()
    }
    return roofline_profile(graph, own, n_parts=(), source=FROM_FLOPS)


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
                f"the top MLP takes {self.top[0]} features, but the bottom MLP's "
                f"{self.bottom[-1]} and "
                f"{self.n_tables} tables of {self.dim} make {width}: change one"
            )


def _whole_numbers(text: str, separator: str, flag: str, example: str) -> tuple[int, ...]:
    parts = text.split(separator)
    numbers = tuple(number for part in parts if (number := find_int(part)) is not None)
    if len(numbers) != len(parts):
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
    operators = [_tensor("dense", "input", [], flags.bottom[0], flags.batch)]
    operators += _mlp("bottom", "dense", flags.bottom, flags.batch, last="relu")
    tables = []
    for k in range(flags.n_tables):
        operators.append(_tensor(f"indices{k}", "input", [], 1, flags.batch))
        tables.append(f"table{k}")
        operators.append(
            _tensor(
                f"table{k}",
                "embedding",
                [f"indices{k}"],
                flags.dim,
                flags.batch,
                parameters=flags.rows * flags.dim,
                signature=f"embedding {flags.rows}x{flags.dim}",
                attrs={"n_rows": flags.rows},
            )
        )
    operators.append(
        _tensor(
            "concat",
            "cat",
            [_last_name(operators, "bottom"), *tables],
            flags.top[0],
            flags.batch,
        )
    )
    operators += _mlp("top", "concat", flags.top, flags.batch, last="sigmoid")
    operators.append(_tensor("loss", "loss", [operators[-1].name], 1, flags.batch))
    return Graph(name="dlrm", operators=operators, batch=flags.batch)


def _last_name(operators: list[Operator], prefix: str) -> str:
    """Name of the last operator whose name begins so."""
    return next(op.name for op in reversed(operators) if op.name.startswith(prefix))


def _tensor(
    name: str,
    kind: str,
    inputs: list[str],
    features: int,
    batch: int,
    *,
    parameters: int = 0,
    flops: float | None = None,
    signature: str = "",
    attrs: dict[str, Attribute] | None = None,
) -> Operator:
    elements = batch * features
    forward = float(elements) if flops is None else flops
    return Operator(
        name=name,
        kind=kind,
        inputs=inputs,
        shape={"sample": batch, "feature": features},
        forward_flops=0.0 if kind == "input" else forward,
        backward_flops=0.0 if kind == "input" else (forward if flops is None else 2 * flops),
        parameter_bytes=FLOAT_BYTES * parameters,
        activation_bytes=FLOAT_BYTES * elements,
        signature=signature,
        attrs=attrs or {},
    )


def _mlp(
    name: str, source: str, widths: tuple[int, ...], batch: int, *, last: str
) -> list[Operator]:
    """Linear layers, each followed by its activation."""
    operators: list[Operator] = []
    for k, (i, o) in enumerate(pairwise(widths)):
        before = operators[-1].name if operators else source
        function = last if k == len(widths) - 2 else "relu"
        operators.append(
            _tensor(
                f"{name}{k}",
                "linear",
                [before],
                o,
                batch,
                parameters=(i + 1) * o,
                flops=2.0 * batch * i * o,
                attrs={"in_features": i, "out_features": o},
            )
        )
        operators.append(
            _tensor(
                f"{name}{k}.{function}",
                "elementwise",
                [f"{name}{k}"],
                o,
                batch,
                attrs={"function": function},
            )
        )
    return operators

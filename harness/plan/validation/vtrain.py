"""vTrain: iterations of GPT-like models by (TP, DP, PP, microbatch), trained by Megatron-LM.

Pure layouts (data parallel on 2 devices, tensor parallel on any number) give the time of a layer;
all others are predicted. All-reduces follow the curves in `trace/`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Annotated, NamedTuple

import msgspec

from harness.domain.checkpoints import with_recomputation
from harness.domain.cluster import Cluster
from harness.errors import DataError
from harness.plan.importing.curves import bandwidth_of, read_curve, thinned
from harness.plan.importing.tables import Row, read_tables
from harness.plan.importing.times import LayerTime, PlannedLayer, TimeKey
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator
from harness.plan.validation import points

_GPUS, _TIME = "# GPUs", "iteration time (ms)"
_DEGREES = ("tensor parallelism", "data parallelism", "pipeline parallelism")
_COUNTS = ("global batch", "micro batch", "hidden size", "attention heads")
_LAYERS = "# layers"
_COLUMNS = (_GPUS, *_COUNTS, _LAYERS, "sequence length", *_DEGREES, _TIME)

# Megatron-LM's padded vocabulary of GPT-2, and FP16 weights and gradients.
_VOCABULARY, _BYTES = 51200, 2
# Forward, twice that backward, and forward again for recomputation.
_PASSES = 4
_LATENCY_S = 1e-5
# Of vTrain's own predictions of these iterations, as it publishes it.
_THEIRS = 0.084


class _VTrainRun(NamedTuple):
    """One measured iteration."""

    batch: int
    microbatch: int
    hidden: int
    heads: int
    n_layers: int
    sequence: int
    layout: ParallelLayout
    measured_s: float

    @property
    def n_microbatches(self) -> int:
        return self.batch // (self.microbatch * self.layout.dp)

    @property
    def model(self) -> tuple[int, int, int, int]:
        """The key of a layer's time, beside the degree of tensor parallelism."""
        return self.hidden, self.heads, self.sequence, self.microbatch

    def parameters(self) -> float:
        return 12.0 * self.hidden**2 * self.n_layers + _VOCABULARY * self.hidden

    def head_over_layer(self) -> float:
        """FLOPs of the head, which is not recomputed, over those of a layer."""
        layer = 24 * self.hidden**2 + 4 * self.sequence * self.hidden
        return 2 * self.hidden * _VOCABULARY / layer * (_PASSES - 1) / _PASSES

    def is_pure(self) -> bool:
        tp, dp, pp = self.layout.tp, self.layout.dp, self.layout.pp
        return pp == 1 and ((tp > 1 and dp == 1) or (tp == 1 and dp <= 2))


class _Times(NamedTuple):
    """Fitted to pure layouts.

    Attributes:
        layer_s, ends_s: of one microbatch, all passes; `ends_s` of embedding and head.
        update_s_per_byte: of what follows the last microbatch.
    """

    layer_s: float
    ends_s: float
    update_s_per_byte: float


_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class _Config(msgspec.Struct):
    """The fields of vTrain's configuration that are read; bandwidths in GB/s and Gbit/s."""

    gpu_name: Annotated[str, msgspec.Meta(pattern="^[^/\0]{1,100}$")] = "A100"
    node_size: Annotated[int, msgspec.Meta(ge=1, le=points.MOST_DEVICES)] = 8
    intra_node_bandwidth: _Rate = 150.0
    inter_node_bandwidth: _Rate = 800.0


class _VTrainRuns:
    """Runs with the curves and times that explain them."""

    def __init__(self, runs: Sequence[_VTrainRun], folder: Path) -> None:
        configs = sorted(folder.glob("config*.json"))
        self._config = _Config()
        if configs:
            self._config = points.load_json(configs[0], _Config)
        self._curves_in = folder / "trace" / self._config.gpu_name.lower()
        files = sorted(self._curves_in.glob("AR_GPU*"))
        self.curves = [p for path in files for p in thinned(read_curve(path))]
        self.cluster = cache(self._make_cluster)
        self._simulators: dict[tuple[object, ...], Simulator] = {}
        self._times = self._fit(runs)

    def notes(self) -> list[str]:
        """What stands in for a missing file."""
        if self.curves:
            return []
        rate = self._config.intra_node_bandwidth
        return [f"assumed: {rate:g} GB/s within a node, as {self._curves_in} has no AR_GPU* curve"]

    def _make_cluster(self, n_devices: int) -> Cluster:
        """Full nodes, or one that holds so many devices."""
        size = min(n_devices, self._config.node_size)
        if n_devices % size:
            raise points.NotExpressedError(f"{n_devices} devices in nodes of {size}")
        inside = self._config.intra_node_bandwidth * 1e9
        if self.curves:
            inside = bandwidth_of([p for p in self.curves if p.n_ranks == 2] or self.curves)
        uniform = Cluster.uniform(
            n_devices // size,
            size,
            inside_bytes_per_s=inside,
            between_bytes_per_s=self._config.inter_node_bandwidth * 1e9 / 8,
            memory_bytes=2**50,
            kind=self._config.gpu_name,
            latency_s=_LATENCY_S,
        )
        measured = self.curves if n_devices == size else []
        return msgspec.structs.replace(uniform, collectives=measured)

    def _fit(self, runs: Sequence[_VTrainRun]) -> Mapping[tuple[object, int], _Times]:
        """Times of a layer by model, microbatch and degree of tensor parallelism."""
        pure: dict[tuple[object, int], list[_VTrainRun]] = defaultdict(list)
        for run in runs:
            if run.is_pure():
                pure[run.model, run.layout.tp].append(run)
        # Runs of one number of microbatches cannot tell a step's fixed part from a microbatch's.
        several = {
            key: own for key, own in pure.items() if len({r.n_microbatches for r in own}) > 1
        }
        found = {key: self._fit_one(own) for key, own in several.items()}
        rates: dict[int, list[float]] = defaultdict(list)
        for (_, tp), times in found.items():
            rates[tp].append(times.update_s_per_byte)
        for key, own in pure.items():
            if key not in found:
                found[key] = self._fit_one(own, median(rates[key[1]]) if rates[key[1]] else 0.0)
        return found

    def _fit_one(self, runs: Sequence[_VTrainRun], rate: float | None = None) -> _Times:
        """Fit one model, microbatch and degree; with a given rate of updates, only the others.

        Runs of one number of layers cannot tell them from the head: then FLOPs do.
        """
        are_many = len({run.n_layers for run in runs}) > 1
        head = runs[0].head_over_layer()
        rows, values = [], []
        for run in runs:
            n, each = run.n_microbatches, run.parameters() * _BYTES / run.layout.tp
            compute = [n * run.n_layers, n] if are_many else [n * (run.n_layers + head)]
            rows.append(compute + ([each] if rate is None else []))
            fixed_s = self._all_reduce_s(run) + each * (rate or 0.0)
            values.append(max(1e-9, run.measured_s - fixed_s))
        found = points.fit_amounts(rows, values)
        ends_s = found[1] if are_many else head * found[0]
        return _Times(found[0], ends_s, found[-1] if rate is None else rate)

    def _all_reduce_s(self, run: _VTrainRun) -> float:
        if run.layout.dp == 1:
            return 0.0
        network = Network(self.cluster(run.layout.n_devices))
        group = tuple(range(run.layout.dp))
        return network.all_reduce(group, round(run.parameters() * _BYTES)).duration_s

    def case(self, run: _VTrainRun) -> points.SimulatedRun:
        """The simulator's input."""
        times = self._times.get((run.model, run.layout.tp))
        if times is None:
            raise points.NotExpressedError("no pure layout gives its layers' times")
        points.check_whole_microbatches(run.batch, run.microbatch, run.layout.dp)
        if run.n_layers % run.layout.pp:
            raise points.NotExpressedError("its layers do not divide evenly over its stages")
        each = run.n_layers // run.layout.pp
        key = run.model, run.n_layers, run.layout.tp, run.layout.n_devices
        if key not in self._simulators:
            self._simulators[key] = self._make_simulator(run, times)
        layout = replace(run.layout, cuts=tuple(1 + each * k for k in range(1, run.layout.pp)))
        n = run.n_microbatches
        case = points.laid_out(self._simulators[key], layout, run.batch, n_microbatches=n)
        return case._replace(strategy=with_recomputation(case.strategy, case.simulator.graph, 1))

    def _make_simulator(self, run: _VTrainRun, times: _Times) -> Simulator:
        return points.chain_simulator(
            "gpt",
            _layers(run),
            {TimeKey(self._config.gpu_name, run.microbatch, run.layout.tp): _rows(run, times)},
            self.cluster(run.layout.n_devices),
            SimulatorOptions(
                overlap=False,
                recomputes_ahead=False,
                bucket_bytes=2**50,
                optimizer_s_per_byte=times.update_s_per_byte,
            ),
            n_parts=run.heads,
            takes_off=True,
            recomputes=True,
        )


def _layers(run: _VTrainRun) -> list[PlannedLayer]:
    ends = _VOCABULARY * run.hidden * _BYTES
    output = run.sequence * run.hidden * _BYTES
    return [
        PlannedLayer("embedding", ends, output),
        *(
            PlannedLayer(f"layer{k}", 12 * run.hidden**2 * _BYTES, output)
            for k in range(run.n_layers)
        ),
        PlannedLayer("head", ends, 4, tied_to="embedding"),
    ]


def _rows(run: _VTrainRun, times: _Times) -> list[LayerTime]:
    layer = LayerTime(times.layer_s / _PASSES, 2 * times.layer_s / _PASSES)
    head = LayerTime(times.ends_s / _PASSES, 2 * times.ends_s / _PASSES)
    return [LayerTime(0.0, 0.0), *([layer] * run.n_layers), head]


def _parse(row: Row) -> _VTrainRun:
    tp, dp, pp = (row.count(name) for name in _DEGREES)
    layout = ParallelLayout(tp=tp, dp=dp, pp=pp)
    if layout.n_devices != row.count(_GPUS, 1, points.MOST_DEVICES):
        raise DataError(
            f"{row.where}: {layout.name} needs {layout.n_devices} devices, the row has "
            f"{row.count(_GPUS)}"
        )
    batch, microbatch, hidden, heads = (row.count(name) for name in _COUNTS)
    return _VTrainRun(
        batch=batch,
        microbatch=microbatch,
        hidden=hidden,
        heads=heads,
        n_layers=row.count(_LAYERS, 1, points.MOST_LAYERS),
        sequence=row.count("sequence length"),
        layout=layout,
        measured_s=row.seconds(_TIME) / 1e3,
    )


def read(folder: Path) -> points.Published:
    runs = [_parse(row) for row in read_tables(folder, _COLUMNS)]
    given = _VTrainRuns(runs, folder)
    steps = [
        points.MeasuredStep(
            name=f"{run.layout.name} batch {run.batch} microbatch {run.microbatch}",
            cell=f"h {run.hidden}, {run.n_layers} layers, sequence {run.sequence}, batch "
            f"{run.batch}, {run.layout.n_devices} devices",
            samples=run.batch,
            measured_s=run.measured_s,
            build=partial(given.case, run),
            calibrates="its layer times are those of this layout" if run.is_pure() else "",
        )
        for run in runs
    ]
    notes = [
        "calibrated on pure layouts (one or two replicas, or one tensor-parallel group): a layer's "
        "time by hidden size, microbatch and tp",
        *given.notes(),
        f"assumed: vocabulary {_VOCABULARY}, FP16 gradients in one all-reduce after backward, "
        "recomputation of all layers, equal numbers of layers in all stages, and layer times that "
        "pipelines and replicas do not change",
    ]
    return points.Published(steps, notes, source_median_error=_THEIRS)


READER = points.SetReader.of_tables("a CSV with '# GPUs' and 'iteration time (ms)'", _COLUMNS, read)

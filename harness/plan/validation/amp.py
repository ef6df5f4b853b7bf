"""AMP: GPT-2 and TransGAN on 16 GPUs in nodes of 4, by (TP, DP, PP), microbatch and layer cuts.

Forward times of one sample are known layer by layer. One layout of each experiment gives what they
leave out: the part of a layer's time that does not grow with the microbatch, and the bandwidth
within a node. So a layer of fixed time f and time t of one sample takes

    f + samples (t - f) / tp, and two all-reduces within the group forward and two backward.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import numpy as np

from harness.domain.cluster import Cluster
from harness.errors import DataError
from harness.inputs import find_ints, find_number, read_file, shorten
from harness.plan.importing.tables import Row, read_tables
from harness.plan.importing.times import LayerTime, PlannedLayer, TimeKey
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator
from harness.plan.validation import points

_COLUMNS = ("experiment", "tp", "dp", "pp", "microbatch", "partition", "predicted_s", "measured_s")
_MOST_LAYERS, _MOST_PARTS = 10_000, 64
_Float = np.dtype[np.float64]
_MIB = 2**20
# AMP's convention: backward takes twice as long as forward.
_BACKWARD = 2.0
_N_NODES, _N_EACH = 4, 4


@dataclass(frozen=True, kw_only=True)
class _Experiment:
    """Model and hardware of an experiment, from AMP's paper.

    Attributes:
        gpu: as the files of times name it.
        memory_bytes: of the GPU, as its driver says.
        memory_bytes_per_s: of the GPU's data sheet.
        heavy_parameters: of each layer that takes a quarter of the longest, or more; 0 where nobody
            says.
        ends_parameters: of the first and the last layer, which share them; 0 if they have none.
        output_bytes: of a half of one such layer and one sample.
        copied_bytes, divided_bytes: that it keeps beside its outputs: on each device of a
            tensor-parallel group, and divided among them.
        logits_bytes: that the last layer keeps for one sample.
    """

    model: str
    gpu: str
    batch: int
    between_bytes_per_s: float
    inside_bytes_per_s: float
    memory_bytes: int
    memory_bytes_per_s: float
    heavy_parameters: int
    ends_parameters: int
    output_bytes: int
    copied_bytes: int
    divided_bytes: int
    logits_bytes: int

    def saved_bytes(self, tp: int) -> int:
        """Of a layer that a group of devices divides: what all of them keep."""
        return tp * self.copied_bytes + self.divided_bytes


_GBIT = 1e9 / 8
_TOKENS, _HIDDEN, _HEADS, _VOCABULARY = 1024, 1024, 16, 51200
# Korthikanti et al. (2022), equation 2: s h (10 + 24 / t) + 5 a s^2 / t bytes of a layer in FP16,
# of which 4 s h are its outputs.
_COPIED = 6 * _TOKENS * _HIDDEN
_DIVIDED = 24 * _TOKENS * _HIDDEN + 5 * _HEADS * _TOKENS**2
_EXPERIMENTS = {
    "homogeneous": _Experiment(
        model="gpt2",
        gpu="G4",
        batch=32,
        between_bytes_per_s=50 * _GBIT,
        inside_bytes_per_s=50 * _GBIT,
        memory_bytes=15109 * _MIB,
        memory_bytes_per_s=320e9,
        heavy_parameters=12 * _HIDDEN**2,
        ends_parameters=_VOCABULARY * _HIDDEN,
        output_bytes=2 * _TOKENS * _HIDDEN,
        copied_bytes=_COPIED,
        divided_bytes=_DIVIDED,
        logits_bytes=10 * _TOKENS * _VOCABULARY,
    ),
    "het_model": _Experiment(
        model="transgan",
        gpu="P3",
        batch=64,
        between_bytes_per_s=10 * _GBIT,
        inside_bytes_per_s=170 * _GBIT,
        memory_bytes=16160 * _MIB,
        memory_bytes_per_s=900e9,
        heavy_parameters=0,
        ends_parameters=0,
        output_bytes=2 * _TOKENS * _HIDDEN,
        copied_bytes=2 * _COPIED,
        divided_bytes=2 * _DIVIDED,
        logits_bytes=0,
    ),
}
# Mixed precision: FP16 weights, and gradients as wide; FP32 master weights and Adam's two moments.
_BYTES, _N_STATES = 2, 6
# Bytes that Adam reads (gradient, master weight, moments) and writes per byte of weights.
_UPDATE_TRAFFIC = 14
_RESERVED_BYTES = 768 * _MIB
_LATENCY_S = 20e-6
# Amounts at which the calibrating layout is tried.
_FAST_BYTES_PER_S, _TRIED_BYTES_PER_S, _TRIED_S, _TRIED_PARAMETERS = 1e15, 1e9, 1e-4, 1e7


@dataclass(frozen=True)
class _AmpTrial:
    layout: ParallelLayout
    n_layers: int
    microbatch: int
    predicted_s: float | None
    measured_s: float | None


class _Fit(NamedTuple):
    """Calibrated on one layout.

    Attributes:
        fixed_s: of forward and backward of a layer, however many samples.
        parameters: of a heavy layer.
    """

    fixed_s: float
    inside_bytes_per_s: float
    parameters: float


class _AmpExperiment:
    """One experiment's trials, with the times of its layers."""

    def __init__(self, name: str, trials: Sequence[_AmpTrial], folder: Path) -> None:
        self.known = _EXPERIMENTS[name]
        self._times = _layer_seconds(folder, self.known)
        self._is_heavy = self._times >= self._times.max() / 4
        self._simulator = cache(self._make_simulator)
        self.calibrating = _calibrating(trials)
        self.fit = _Fit(0.0, self.known.inside_bytes_per_s, self.known.heavy_parameters)
        self.fit = self._fitted()

    def _fitted(self) -> _Fit:
        """From the calibrating layout, whose step is linear in both amounts: the fixed time, and
        the reciprocal bandwidth within a node, or the parameters where nobody says how many."""
        known = self.known
        is_size_known = known.heavy_parameters > 0
        inside = _FAST_BYTES_PER_S if is_size_known else known.inside_bytes_per_s
        none = _Fit(0.0, inside, known.heavy_parameters)
        other = none._replace(parameters=_TRIED_PARAMETERS)
        if is_size_known:
            other = none._replace(inside_bytes_per_s=_TRIED_BYTES_PER_S)
        step_s = cache(lambda trial, fit: self.case(trial, fit).step_s())  # repeats are equal
        terms, rest = [], []
        for trial in self.calibrating:
            asked = replace(trial, predicted_s=None, measured_s=None)
            base = step_s(asked, none)
            fixed = step_s(asked, none._replace(fixed_s=_TRIED_S)) - base
            terms.append([fixed / _TRIED_S, step_s(asked, other) - base])
            rest.append(max(1e-6, (trial.measured_s or 0.0) - base))
        if not terms:
            return self.fit
        fixed_s, share = points.fit_amounts(terms, rest)
        if not is_size_known:
            return none._replace(fixed_s=fixed_s, parameters=share * _TRIED_PARAMETERS)
        inside = _TRIED_BYTES_PER_S / share if share else _FAST_BYTES_PER_S
        return none._replace(fixed_s=fixed_s, inside_bytes_per_s=inside)

    def _layers(self, parameters_each: float, tp: int) -> list[PlannedLayer]:
        """Each layer as two blocks, because it has two all-reduces each way."""
        known, ends = self.known, self.known.ends_parameters * _BYTES
        n, layers = len(self._times), []
        for k in range(n):
            heavy = bool(self._is_heavy[k])
            parameters = round(heavy * parameters_each * _BYTES)
            saved = heavy * known.saved_bytes(tp)
            layers += [
                PlannedLayer(f"layer{k}.{half}", parameters // 2, known.output_bytes, saved // 2)
                for half in range(2)
            ]
        if ends:
            # The layer before the loss multiplies by the embedding.
            layers[0] = PlannedLayer(layers[0].name, ends, known.output_bytes)
            layers[-4] = PlannedLayer(
                layers[-4].name, ends, known.output_bytes, known.logits_bytes, layers[0].name
            )
        layers[-1] = PlannedLayer(layers[-1].name, 0, 4)
        return layers

    def case(self, trial: _AmpTrial, fit: _Fit | None = None) -> points.SimulatedRun:
        """At some amounts, or at the calibrated ones."""
        layout, known, fit = trial.layout, self.known, fit or self.fit
        if layout.n_devices != _N_NODES * _N_EACH:
            raise points.NotExpressedError(f"{layout.n_devices} devices, the experiment has 16")
        if trial.n_layers != len(self._times):
            raise points.NotExpressedError(
                f"its partition is of {trial.n_layers} layers, {known.model} has {len(self._times)}"
            )
        points.check_whole_microbatches(known.batch, trial.microbatch, layout.dp)
        return points.laid_out(
            self._simulator(layout.tp, trial.microbatch, fit),
            replace(layout, cuts=tuple(2 * cut for cut in layout.cuts or ())),
            known.batch,
            n_microbatches=known.batch // (trial.microbatch * layout.dp),
        )

    def _make_simulator(self, tp: int, samples: int, fit: _Fit) -> Simulator:
        row = []
        for t in self._times.tolist():
            passes = (1 + _BACKWARD) * t
            fixed = min(fit.fixed_s, passes)
            forward = (fixed + samples * (passes - fixed) / tp) / (1 + _BACKWARD) / 2
            row += 2 * [LayerTime(forward, _BACKWARD * forward)]
        known = self.known
        cluster = Cluster.uniform(
            _N_NODES,
            _N_EACH,
            inside_bytes_per_s=fit.inside_bytes_per_s,
            between_bytes_per_s=known.between_bytes_per_s,
            memory_bytes=known.memory_bytes,
            kind=known.gpu,
            latency_s=_LATENCY_S,
        )
        options = SimulatorOptions(
            overlap=False,
            bucket_bytes=2**50,
            n_optimizer_states=_N_STATES,
            optimizer_s_per_byte=_UPDATE_TRAFFIC / known.memory_bytes_per_s,
            reserved_bytes=_RESERVED_BYTES,
        )
        layers, times = self._layers(fit.parameters, tp), {TimeKey(known.gpu, samples, tp): row}
        return points.chain_simulator(
            known.model, layers, times, cluster, options, n_parts=_MOST_PARTS
        )


def _calibrating(trials: Sequence[_AmpTrial]) -> list[_AmpTrial]:
    """Of the layouts without a pipeline that ran, the one with most microbatches."""
    flat: dict[str, list[_AmpTrial]] = {}
    for trial in trials:
        if trial.layout.pp == 1 and trial.measured_s is not None:
            flat.setdefault(trial.layout.name, []).append(trial)
    return max(flat.values(), key=len, default=[])


def _layer_seconds(folder: Path, known: _Experiment) -> np.ndarray[tuple[int], _Float]:
    """Forward seconds of one sample on one device."""
    path = folder / f"known_cost/{known.model}_{known.gpu}_1.npy"
    try:
        file = io.BytesIO(read_file(path, "times of layers", DataError))
        row = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, MemoryError, SyntaxError, TokenError) as error:
        raise DataError(f"{path} is no array of numpy ({error}): copy it again") from None
    if row.ndim != 1 or row.dtype.kind != "f" or not 4 < len(row) < _MOST_LAYERS:
        raise DataError(f"{path} has shape {row.shape} of {row.dtype}: it needs one row of s")
    if not (np.isfinite(row).all() and (row >= 0).all() and 0 < row.max() < 1e6):
        raise DataError(f"{path} has a time that is no time: all must be >= 0, in seconds")
    return row.astype(np.float64)


def _parse(row: Row) -> _AmpTrial:
    bounds, pp = find_ints(row.text("partition").split(",")), row.count("pp")
    if (
        bounds is None
        or len(bounds) != pp + 1
        or bounds[0]
        or any(a >= b for a, b in pairwise(bounds))
    ):
        raise DataError(
            f"{row.where}: partition {shorten(row.text('partition'))} does not cut {pp} stages: "
            "write the first layer of each, from 0, and the number of layers"
        )
    layout = ParallelLayout(tp=row.count("tp"), dp=row.count("dp"), pp=pp, cuts=bounds[1:-1])
    theirs = find_number(row.text("predicted_s"))
    has_failed = row.text("measured_s").lower() in ("inf", "nan", "oom", "")
    return _AmpTrial(
        layout=layout,
        n_layers=bounds[-1],
        microbatch=row.count("microbatch"),
        predicted_s=None if theirs is None else row.number("predicted_s"),
        measured_s=None if has_failed else row.seconds("measured_s"),
    )


def _unknown(name: str) -> points.SimulatedRun:
    raise points.NotExpressedError(f"experiment {shorten(name)} has no known model and cluster")


def read(folder: Path) -> points.Published:
    groups: dict[str, list[_AmpTrial]] = {}
    for row in read_tables(folder, _COLUMNS):
        groups.setdefault(row.text("experiment"), []).append(_parse(row))
    steps: list[points.MeasuredStep] = []
    notes: list[str] = []
    for name, trials in groups.items():
        given = _AmpExperiment(name, trials, folder) if name in _EXPERIMENTS else None
        why = "the fixed part of a layer and the bandwidth within a node are from this layout"
        steps += [
            points.MeasuredStep(
                name=f"{trial.layout.name} microbatch {trial.microbatch}",
                cell=name,
                samples=given.known.batch if given else 1,
                measured_s=trial.measured_s,
                build=partial(given.case, trial) if given else partial(_unknown, name),
                source_s=trial.predicted_s,
                calibrates=why if given and trial in given.calibrating else "",
                part=name,
                group=f"of {name} with {trial.layout.name}",
            )
            for trial in trials
        ]
        if given is None:
            continue
        source = "assumed, because no layout without a pipeline ran:"
        if given.calibrating:
            source = f"{given.calibrating[0].layout.name} gives"
        notes.append(
            f"{name}: {source} {given.fit.fixed_s * 1e3:.3g} ms of a layer's time that does "
            f"not grow with the microbatch, and {given.fit.inside_bytes_per_s / 1e9:.3g} GB/s "
            f"within a node, {given.fit.parameters / 1e6:.3g} million parameters in a layer"
        )
    notes.append(
        "assumed: FP16 gradients in one ring after backward, Adam in mixed precision, "
        "s h (10 + 24 / tp) + 5 a s^2 / tp bytes kept of a layer, no recomputation"
    )
    return points.Published(
        steps, notes, lacks="collectives of a layout unlike the calibrating one"
    )


READER = points.SetReader.of_tables("a CSV of trials with tp, dp, pp, partition", _COLUMNS, read)

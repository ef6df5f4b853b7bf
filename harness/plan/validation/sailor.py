"""Sailor: plans of OPT-350M and others on nodes of 4 GPUs, with profiles by (microbatch, TP).

Times of layers include the collectives of tensor parallelism. A run on one node gives a factor on
the times of its microbatch, and what memory a process needs beside tensors. Where the profile of a
model's GPU is of another model, as GPT-Neo's on GH200 is, another GPU's gives the proportions of
the layers, and the smallest run of each microbatch the factor.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.files import Count, Number
from harness.errors import DataError
from harness.inputs import find_int, find_ints, shorten
from harness.plan.importing.tables import Row, read_tables
from harness.plan.importing.times import LayerTime, PlannedLayer, TimeKey
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator
from harness.plan.validation import points

_COLUMNS = (
    "file",
    "stages",
    "layers_per_stage",
    "stage_replicas(gpu,x,tp)",
    "dp",
    "microbatch",
    "global_batch",
    "measured_s",
    "gradient_sync_s",
    "max_memory_bytes",
    "nodes",
)
# Names of models in the plans' paths, and in profiles.
_MODELS = {"GPT-NEO": "GPT-Neo-2.7"}
_REPLICA = re.compile(r"(?P<kind>.+)x(?P<tp>[0-9]+)")
_N_EACH, _LATENCY_S, _MOST_DEGREE = 4, 20e-6, 4096
# FP32 weights and gradients, and Adam's two moments.
_N_STATES = 2
_NO_LIMIT_BYTES = 2**50
# Of Sailor's own simulator on OPT-350M, and of layers' times plus the measured synchronisation.
_THEIRS, _TRIVIAL = 0.145, 0.12


class _Shape(msgspec.Struct):
    """Bytes of one layer for one sample."""

    params_bytes: Count
    act_output_bytes: Count
    act_mem_bytes: Count


# Model, kind of device, degree of tensor parallelism and microbatch.
_Key = tuple[str, str, int, int]


class _Plan(NamedTuple):
    name: str
    model: str
    stages: tuple[int, ...]
    kind: str
    tp: int
    dp: int
    microbatch: int
    batch: int
    measured_s: float
    sync_s: float
    memory_bytes: float
    unlike: str

    @property
    def key(self) -> _Key:
        return self.model, self.kind, self.tp, self.microbatch

    @property
    def n_devices(self) -> int:
        return self.tp * self.dp * len(self.stages)

    @property
    def size(self) -> tuple[object, ...]:
        """The order in which plans are taken for calibration, however their rows are ordered."""
        return self.n_devices, self.n_microbatches, self.stages, self.measured_s, self.name

    @property
    def is_additive(self) -> bool:
        """Whether computing and synchronising can add up to its step."""
        return 2 * self.sync_s <= self.measured_s

    @property
    def n_microbatches(self) -> int:
        return self.batch // (self.microbatch * self.dp)


_LayerTimes = dict[str, tuple[Number, Number, Number]]
_Times = dict[str, dict[str, _LayerTimes]]
_Info = dict[str, dict[str, dict[str, _Shape]]]
# By kind of device and number of devices: coefficients, and the largest bandwidth.
_Fits = dict[str, dict[str, tuple[list[Number], Number]]]


class _SailorPlans:
    """Plans with the files that explain them."""

    def __init__(self, plans: Sequence[_Plan], folder: Path) -> None:
        self._info = points.load_json(folder / "llm_info.json", _Info)
        between = points.load_json(
            folder / "providers/network_coeffs_all_homo.json", dict[str, _Fits]
        )
        self._between = between.get("inter", {})
        self._inside = points.load_json(folder / "providers/intra_node_bandwidths.json", _Fits)
        # By model and kind of device.
        files = sorted(folder.glob("profiles/*/*/profile.json"))
        self._files = {(path.parts[-3], path.parts[-2]): path for path in files}
        self._profiles: dict[tuple[str, str], _Times] = {}
        self.calibrating: dict[_Key, _Plan] = {}
        for plan in sorted(plans, key=lambda plan: plan.size):
            is_one_node = plan.dp == 1 and len(plan.stages) == 1
            is_other = self._kind_of_times(plan) != plan.kind
            if plan.is_additive and not plan.unlike and (is_one_node or is_other):
                self.calibrating.setdefault(plan.key, plan)
        self._factors: dict[_Key, float] = {}
        self._reserved: dict[tuple[str, str, int], int] = {}
        for key, plan in self.calibrating.items():
            self._calibrate(key, plan)

    def _calibrate(self, key: _Key, plan: _Plan) -> None:
        try:
            case = self.case(plan)
        except points.NotExpressedError:
            return
        found = case.simulator.simulate(case.strategy)
        self._factors[key] = plan.measured_s / found.step_s
        beside = plan.memory_bytes - max(found.memory_bytes.values())
        self._reserved.setdefault(key[:3], max(0, round(beside)))

    def notes(self) -> list[str]:
        """The calibrated numbers."""
        factors = []
        for key, factor in self._factors.items():
            model, kind, tp, samples = key
            source = self._kind_of_times(self.calibrating[key])
            on = "" if source == kind else f" on the times of {source}"
            factors.append(
                f"{model} on {kind}, tp {tp}, microbatch {samples}: factor {factor:.2f}{on}"
            )
        return factors + [
            f"{model} on {kind}, tp {tp}: {n_bytes / 1e9:.2f} GB beside tensors"
            for (model, kind, tp), n_bytes in self._reserved.items()
        ]

    def case(self, plan: _Plan) -> points.SimulatedRun:
        """The simulator's input."""
        if plan.unlike:
            raise points.NotExpressedError(plan.unlike)
        if not plan.is_additive:
            raise points.NotExpressedError("its gradient_sync_s is above half of its step")
        simulator = self._simulator(plan)
        n_layers = len(simulator.graph.operators)
        if sum(plan.stages) != n_layers:
            raise points.NotExpressedError(
                f"the plan has {sum(plan.stages)} layers, the profile of {plan.model} on "
                f"{plan.kind} {n_layers}"
            )
        points.check_whole_microbatches(plan.batch, plan.microbatch, plan.dp)
        cuts = tuple(accumulate(plan.stages[:-1]))
        layout = ParallelLayout(tp=plan.tp, dp=plan.dp, pp=len(plan.stages), cuts=cuts)
        return points.laid_out(simulator, layout, plan.batch, n_microbatches=plan.n_microbatches)

    def _simulator(self, plan: _Plan) -> Simulator:
        times = self._times(plan)
        layers, cluster = self._layers(plan, len(times)), self._cluster(plan)
        factor = self._factors.get(plan.key, 1.0)
        row = [LayerTime(factor * forward, factor * back) for forward, back, _ in times]
        update_s = factor * sum(update for _, _, update in times)
        n_bytes = sum(layer.parameter_bytes for layer in layers)
        options = SimulatorOptions(
            overlap=False,
            bucket_bytes=2**50,
            n_optimizer_states=_N_STATES,
            optimizer_s_per_byte=update_s / (n_bytes / plan.tp),
            activation_share=1 / plan.tp,
            reserved_bytes=self._reserved.get(plan.key[:3], 0),
        )
        key = TimeKey(plan.kind, plan.microbatch, plan.tp)
        return points.chain_simulator(
            plan.model, layers, {key: row}, cluster, options, n_parts=64, takes_off=True
        )

    def _times(self, plan: _Plan) -> list[tuple[float, float, float]]:
        """(forward, backward, update) seconds of each layer."""
        found = self._profiled(plan, self._kind_of_times(plan))
        if not found:
            raise points.NotExpressedError(
                f"no times of microbatch {plan.microbatch} at tp {plan.tp} of {plan.model} on "
                f"{plan.kind}"
            )
        if any(min(times) < 0 for times in found.values()):
            raise DataError(f"the profile of {plan.model} on {plan.kind} has a negative time")
        return list(found.values())

    def _kind_of_times(self, plan: _Plan) -> str:
        """The plan's kind of device, or the first other one, whose profile has all its layers."""
        others = [kind for model, kind in self._files if model == plan.model]
        n, kinds = sum(plan.stages), (plan.kind, *others)
        return next((kind for kind in kinds if len(self._profiled(plan, kind)) == n), plan.kind)

    def _profiled(self, plan: _Plan, kind: str) -> _LayerTimes:
        """Times by layer in a profile; none where it lacks the plan's microbatch or degree."""
        key = plan.model, kind
        if key not in self._profiles:
            path = self._files.get(key)
            self._profiles[key] = points.load_json(path, _Times) if path is not None else {}
        return self._profiles[key].get(str(plan.microbatch), {}).get(str(plan.tp), {})

    def _layers(self, plan: _Plan, n_layers: int) -> list[PlannedLayer]:
        info = self._info.get(plan.model, {}).get("1")
        if not info:
            raise points.NotExpressedError(f"llm_info.json has no {plan.model} with one sample")
        if len(info) != n_layers:
            raise points.NotExpressedError(
                f"{plan.model} has {len(info)} layers, its profile on {plan.kind} {n_layers}"
            )
        return [
            PlannedLayer(
                f"layer{k}",
                shape.params_bytes,
                shape.act_output_bytes,
                max(0, shape.act_mem_bytes - shape.act_output_bytes),
            )
            for k, shape in enumerate(info.values())
        ]

    def _cluster(self, plan: _Plan) -> Cluster:
        pairs = self._between.get(plan.kind, {})
        between, all_pairs = pairs.get("1"), pairs.get(str(_N_EACH))
        inside = self._inside.get(plan.kind, {}).get("2")
        if between is None or inside is None or min(between[1], inside[1]) <= 0:
            raise points.NotExpressedError(f"no bandwidth of {plan.kind} is known")
        n = plan.n_devices
        if n % _N_EACH and n > _N_EACH:
            raise points.NotExpressedError(f"{n} devices do not fill nodes of {_N_EACH}")
        cluster = Cluster.uniform(
            max(1, n // _N_EACH),
            min(n, _N_EACH),
            inside_bytes_per_s=inside[1],
            between_bytes_per_s=between[1],
            memory_bytes=_NO_LIMIT_BYTES,
            kind=plan.kind,
            latency_s=_LATENCY_S,
        )
        # Pairs of GPUs that send at once reach more than one pair does.
        nic = max(between[1], between[1] if all_pairs is None else all_pairs[1])
        nodes = [msgspec.structs.replace(node, nic_bytes_per_s=nic) for node in cluster.nodes]
        return msgspec.structs.replace(cluster, nodes=nodes)


def _parse(row: Row) -> _Plan:
    parts = row.text("file").split("/")
    name = parts[1] if len(parts) > 2 else ""
    layers = find_ints(row.text("layers_per_stage").split("-"), 1, _MOST_DEGREE)
    if layers is None or len(layers) != row.count("stages"):
        raise DataError(
            f"{row.where}: layers_per_stage {shorten(row.text('layers_per_stage'))} does not name "
            f"{row.count('stages')} stages: write them as 7-9-9-9"
        )
    kind, tp, dp, unlike = _replicas(row.text("stage_replicas(gpu,x,tp)"))
    return _Plan(
        name=row.text("file"),
        model=_MODELS.get(name, name),
        stages=layers,
        kind=kind,
        tp=tp,
        dp=dp,
        microbatch=row.count("microbatch"),
        batch=row.count("global_batch"),
        measured_s=row.seconds("measured_s"),
        sync_s=row.number("gradient_sync_s"),
        memory_bytes=row.number("max_memory_bytes"),
        unlike=unlike,
    )


def _replicas(text: str) -> tuple[str, int, int, str]:
    """Kind, TP and number of a stage's replicas; why a strategy cannot hold them, or nothing."""
    replicas = text.removesuffix("(all)").strip().split("+")
    found = _REPLICA.fullmatch(replicas[0])
    if not text.endswith("(all)") or len(set(replicas)) > 1 or found is None:
        return "", 1, 1, "its stages or replicas have unlike devices or degrees of TP"
    tp = find_int(found["tp"], 1, _MOST_DEGREE)
    return found["kind"], tp or 1, len(replicas), "" if tp else "its degree of TP is no number"


def read(folder: Path) -> points.Published:
    plans = [_parse(row) for row in read_tables(folder, _COLUMNS)]
    given = _SailorPlans(plans, folder)
    used = list(given.calibrating.values())
    steps = [
        points.MeasuredStep(
            name=plan.name,
            cell=plan.model,
            samples=plan.batch,
            measured_s=plan.measured_s,
            build=partial(given.case, plan),
            memory_bytes=plan.memory_bytes or None,
            calibrates="its microbatch's factor and memory are from it" if plan in used else "",
            part=plan.model,
            group=f"of {plan.model} in {len(plan.stages)} stages",
        )
        for plan in plans
    ]
    notes = [
        "calibrated on runs of one node, or the smallest where another GPU's profile stands in: a "
        "factor on the times of their microbatch, and the memory that a process needs beside "
        "tensors",
        "assumed: FP32 gradients in one ring after backward at the largest bandwidth of one pair; "
        "each device of a tensor-parallel group sends its part of an activation (DeepSpeed)",
        *given.notes(),
        "the source's median error and the trivial one are of OPT-350M, as published",
    ]
    return points.Published(
        steps,
        notes,
        source_median_error=_THEIRS,
        trivial_median_error=_TRIVIAL,
        lacks="the cost of a hand-over between stages beside its bytes",
    )


READER = points.SetReader.of_tables("a CSV with stage_replicas and gradient_sync_s", _COLUMNS, read)

"""The tables that rank 0 prints after profile: sums, heaviest operators, skipped points."""

import math
import shlex
from collections.abc import Collection, Mapping
from operator import itemgetter
from pathlib import Path

from harness.domain.graph import Graph
from harness.domain.profile import DTYPE_NAMES, Profile, WholeStep
from harness.domain.sharding import has_tasks
from harness.errors import GraphError
from harness.measure.derive.spans import samples_of
from harness.measure.store import Run
from harness.measure.text import columns, for_each_run
from harness.plan.fit import OperatorTime, OperatorTimes
from harness.units import format_bytes, format_count, format_duration
from harness.workloads.profile.store import fit_errors

_N_HEAVIEST = 12
# Calibrations outside this range get a warning; docs/profile.md lists likely causes.
_FAITHFUL = (0.8, 1.25)
_TENSOR_CORE_DTYPES = (DTYPE_NAMES["bf16"], DTYPE_NAMES["fp16"])
_MOST_OF_STEP = 0.5
_LOOSE = 0.5  # error of a fit above which planning is a guess
_N_WORST = 3


@for_each_run
def profile_text(run: Run) -> list[str]:
    """Three tables for a run that wrote a profile; a line if its files are missing."""
    try:
        profile = Profile.load(_file_of(run, "profile"))
        graph = Graph.load(_file_of(run, "graph"))
    except GraphError as error:
        return [f"{run.header.config.get('model')}: {error}"]
    if not profile.measurements:
        return [_skipped(run)]
    kinds = {info.device_kind for info in run.header.ranks}
    return [
        _sums(profile, graph, kinds),
        "" if run.header.config.get("channels_last") else _order_advice(profile, graph),
        _heaviest(profile, graph),
        _skipped(run),
        _files(run, graph),
    ]


def _file_of(run: Run, key: str) -> Path:
    """The path in the run's summary, or the file of that name in the results if they have moved."""
    path = Path(str(run.header.summary.get(key, "")))
    moved = run.path.parent / path.name
    return moved if moved.exists() and not path.exists() else path


def _dtype(profile: Profile) -> str:
    return profile.measurements[0].dtype


def _times(profile: Profile, graph: Graph, kind: str) -> list[tuple[str, OperatorTime]]:
    """Each measured operator's time at the graph's batch."""
    times, dtype = OperatorTimes(profile), _dtype(profile)
    return [
        (op.name, times.lookup(op, kind, dtype=dtype))
        for op in filter(has_tasks, graph.operators)
        if times.is_measured(op, kind, op.shape, dtype)
    ]


def _sums(profile: Profile, graph: Graph, kinds: Collection[str]) -> str:
    """A row for each kind of device of the run, and for others that have measured the graph."""
    graph_hash = graph.content_hash()
    known = [s for s in profile.whole_steps if s.graph_hash == graph_hash]
    steps = {s.device_kind: s for s in known if s.batch == graph.batch}
    rows, warnings = [], []
    for kind in profile.device_kinds:
        found = [time for _, time in _times(profile, graph, kind)]
        if not found and kind not in kinds:
            continue  # of other runs, with other shapes of the operators
        fits = fit_errors(profile, graph, kind, _dtype(profile))
        warnings += _loose_fits(kind, fits, graph)
        errors = sorted(fits.values())
        step = steps.get(kind)
        rows.append(
            [
                kind,
                f"{len(found)} of {sum(map(has_tasks, graph.operators))}",
                format_duration(sum(time.forward_s for time in found)),
                format_duration(sum(time.backward_s for time in found)),
                "-" if step is None else format_duration(step.operators_s),
                "-" if step is None else format_duration(step.step_s),
                _by_samples([s for s in known if s.device_kind == kind], graph),
                f"{errors[len(errors) // 2]:.0%}, at most {errors[-1]:.0%}" if errors else "-",
            ]
        )
        if step is None:
            continue
        dtype = _dtype(profile)
        if host_s := profile.calibration_of(graph_hash, kind, step.batch, dtype).host_s:
            warnings.append(
                f"{kind}: its host queues a step in {format_duration(host_s)}, so any batch below "
                f"about {math.ceil(step.batch * host_s / step.step_s)} samples takes as long: use "
                "larger microbatches"
            )
        elif not _FAITHFUL[0] <= step.calibration <= _FAITHFUL[1]:
            warnings.append(
                f"{kind}: the whole step takes {step.calibration:.2f} of the sum of its operators; "
                "docs/profile.md lists likely causes"
            )
    heads = ["device", "operators", "forward", "backward", "sum", "whole step", "calibration",
             "error of fits"]  # fmt: skip
    return "\n".join([columns(heads, rows), *warnings])


def _loose_fits(kind: str, fits: Mapping[str, float], graph: Graph) -> list[str]:
    """A line if operators' times do not follow from those at other shapes; names the worst."""
    loose = {key: error for key, error in fits.items() if error > _LOOSE}
    if not loose:
        return []
    names = {operator.profile_key: operator.name for operator in reversed(graph.operators)}
    worst = sorted(loose.items(), key=itemgetter(1), reverse=True)[:_N_WORST]
    named = ", ".join(f"{names[key]} {error:.0%}" for key, error in worst)
    return [
        f"warning: {kind}: the fits of {len(loose)} of {len(fits)} operators err by over "
        f"{_LOOSE:.0%} (most: {named}): delete the profile, and run it again on idle devices with "
        "more --min-samples or --rounds"
    ]


def _order_advice(profile: Profile, graph: Graph) -> str:
    """A line for each kind of GPU that spends most of its time on images, in bf16 or fp16."""
    lines = []
    if _dtype(profile) in _TENSOR_CORE_DTYPES:
        shapes = {op.name: op.shape for op in graph.operators}
        for kind in sorted({step.device_kind for step in profile.whole_steps if step.is_queued}):
            found = _times(profile, graph, kind)
            images_s = sum(t.total_s for name, t in found if {"height", "width"} <= {*shapes[name]})
            share = images_s / (sum(t.total_s for _, t in found) or 1.0)
            if share > _MOST_OF_STEP:
                lines.append(
                    f"{kind}: {share:.0%} of the time is in operators of images: try "
                    "--channels-last (ResNet-50 in bf16 was 1.7 times as fast by it on an H100)"
                )
    return "\n".join(lines)


def _by_samples(steps: list[WholeStep], graph: Graph) -> str:
    """Format the calibrations of the graph's batch, and of other sizes with their size."""
    found = [
        ("" if step.batch == graph.batch else f"{format_count(step.batch, 'sample')}: ")
        + f"{step.calibration:.2f}"
        for step in sorted(steps, key=lambda step: -step.batch)
    ]
    return ", ".join(found) or "-"


def _heaviest(profile: Profile, graph: Graph) -> str:
    saved = {
        (point.device_kind, point.operator, tuple(point.shape.items())): point.saved_bytes
        for point in profile.measurements
    }
    by_name = {op.name: op for op in graph.operators}
    rows = []
    for kind in profile.device_kinds:
        found = _times(profile, graph, kind)
        total_s = sum(time.total_s for _, time in found) or 1.0
        for name, time in sorted(found, key=lambda row: -row[1].total_s)[:_N_HEAVIEST]:
            op = by_name[name]
            kept = saved.get((kind, op.profile_key, tuple(op.shape.items()))) or 0
            rows.append(
                [
                    kind,
                    name,
                    "x".join(str(size) for size in op.shape.values()),
                    format_duration(time.forward_s),
                    format_duration(time.backward_s),
                    f"{time.total_s / total_s:.0%}",
                    format_bytes(op.parameter_bytes),
                    format_bytes(kept),
                ]
            )
    heads = ["device", "heaviest operators", "output", "forward", "backward", "share",
             "parameters", "kept for backward"]  # fmt: skip
    return columns(heads, rows)


def _skipped(run: Run) -> str:
    rows = []
    for rank, records in sorted(run.ranks.items()):
        for record in samples_of(records, "operator_skipped"):
            labels = record.labels
            rows.append([str(rank), *(str(labels[k]) for k in ("operator", "shape", "reason"))])
    return columns(["rank", "not measured", "shape", "reason"], rows)


def _files(run: Run, graph: Graph) -> str:
    path = _file_of(run, "profile")
    n_measured, n_known = (run.header.summary.get(n, "?") for n in ("n_measured", "n_known"))
    return (
        f"{n_measured} measured, {n_known} taken from {path}\n"
        f"plan with: python -m harness.plan search --profile {shlex.quote(str(path))} "
        f"--cluster FILE --batch-size {graph.batch}"
    )

"""Strong and weak scaling efficiency against the number of devices."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.inputs import by_number
from harness.measure.derive.scaling import EfficiencyRow, ScalingPoint, scaling_table
from harness.measure.derive.settings import (
    BETWEEN_STEPS,
    own_settings,
    rest_of_config,
    telling_settings,
    told_within,
)
from harness.measure.statistics import Summary
from harness.plot.catalog import (
    Catalog,
    RepeatGroup,
    TrainingCase,
    merged,
    short_kind,
    speed_class,
    telling_variables,
)
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.style import (
    LEGEND_ROW_IN,
    MUTED,
    WIDTH_IN,
    colour_of,
    joint_legend,
    move_clear,
    note_failures,
    series_style,
    shorten,
    spread_caption,
)
from harness.units import format_number

if TYPE_CHECKING:
    from matplotlib.text import Annotation
    from matplotlib.transforms import BboxBase

LABEL_PT = 8
HIGHEST_PT = 3 * LABEL_PT  # of a label above its point; farther away it names no point
# Properties in the name of every series; others are in it where they differ.
NAMED = ("strategy", "model", "dtype", "devices")
# Settings that may differ between a series and its baseline, or that are properties anyway.
FREE = frozenset({
    "model", "dtype", "data", "dataset", "batch", "global_batch", "batch_per_device", "scaling",
    "samples_per_epoch", "source", "warm_up", "seed", "n_samples", "bucket_mib", "balance",
    "memory",
})  # fmt: skip


def _properties(case: TrainingCase) -> dict[str, str]:
    """The properties that are equal within a series, in words; empty where unknown."""
    first, header = case.first, case.case.header
    devices = Counter((short_kind(r.device_kind), round(r.n_cores, 2)) for r in header.ranks)
    kinds = sorted(devices.items())
    names = [kind if len(kinds) == 1 else f"{n} × {kind}" for (kind, _), n in kinds]
    # A name may say the cores.
    cores = [f"{n:g}" for (kind, n), _ in kinds if n and not kind.endswith(f" x {n:g}")]
    return {
        "strategy": first.strategy,
        "model": first.model,
        "dtype": first.dtype,
        "devices": " + ".join(names),
        "cores": f"{' + '.join(cores)} core{'' if cores == ['1'] else 's'}" if cores else "",
        "network": _network_words(case.case),
        "data": str(header.config.get("dataset") or header.config.get("data") or ""),
    }


def _network_words(case: RepeatGroup) -> str:
    """The network between the devices; empty for one device."""
    if case.n_devices == 1:
        return ""
    if len(case.header.cluster.nodes) == 1:
        return "one node"
    speed = speed_class(case.runs[0].network_bytes_per_s)
    return "unknown network" if speed is None else f"about {format_number(10**speed, 2)} Gbit/s"


def _problem(case: TrainingCase) -> dict[str, Any]:
    """The other settings in which a series and its baseline agree."""
    return rest_of_config(case.case.runs[0], FREE)


def _training_points(cases: Sequence[TrainingCase]) -> list[ScalingPoint]:
    properties = [_properties(case) for case in cases]
    values = {
        name: {own[name] for own in properties} - {""} for name in ("cores", "network", "data")
    }
    shown = [*NAMED, *(name for name, found in values.items() if len(found) > 1)]
    variables = telling_variables(run for case in cases for run in case.case.runs)
    points = []
    for _, of_model in groupby(zip(cases, properties, strict=True), lambda pair: pair[1]["model"]):
        own = list(of_model)
        told = telling_settings([_problem(case) for case, _ in own])
        strategies = [case.first.strategy for case, _ in own]
        configs = [own_settings(case.case.runs[0], BETWEEN_STEPS) for case, _ in own]
        of_strategy = told_within(strategies, configs)
        for (case, words), settings, flags in zip(own, told, of_strategy, strict=True):
            named = [words[name] for name in shown]
            named += [flags, settings, _variables_words(case, variables)]
            series = f"{' · '.join(filter(None, named))}, by {case.first.unit}"
            points += _training_point(case, series, words["data"])
    return points


def _variables_words(case: TrainingCase, names: Iterable[str]) -> str:
    """Environment variables of the first rank."""
    own = case.case.header.ranks[0].settings if case.case.header.ranks else {}
    return ", ".join(f"{name}={shorten(own[name], 40)}" for name in names if name in own)


def _training_point(case: TrainingCase, series: str, data: str) -> list[ScalingPoint]:
    """One, if the case has a time."""
    first, ranks = case.first, case.case.header.ranks
    durations = [s.duration for s in case.summaries if s.duration is not None]
    if not case.case.is_ok or not durations or not first.n_samples:
        return []
    # Of the first rank, which the run on one device used.
    device = [f"{short_kind(r.device_kind)}/{format_number(r.n_cores, 2)}" for r in ranks[:1]]
    family = [first.model, first.dtype, data, first.unit, *device, _problem(case)]
    return [
        ScalingPoint(
            family=json.dumps(family, sort_keys=True),
            series=series,
            strategy=first.strategy,
            n_devices=first.n_devices,
            work=first.n_samples,
            time=merged(durations),
            is_baseline=case.case.n_devices == 1,
        )
    ]


def _summa_points(catalog: Catalog) -> list[ScalingPoint]:
    """A point per cluster, product and number of ranks; repeats brought together."""
    points: list[ScalingPoint] = []
    for case in filter(lambda case: case.is_ok, catalog.cases("matmul")):
        groups: dict[tuple[str, str, int, float], list[Summary]] = defaultdict(list)
        for run in case.runs:
            for row in catalog.distributed(run):
                flops = 2.0 * row.m * row.n * row.k
                groups[row.scaling, row.dtype, row.n_ranks, flops].append(row.time)
        for (scaling, dtype, n_ranks, flops), times in groups.items():
            points.append(
                ScalingPoint(
                    family=f"summa {scaling} {dtype} {case.cluster}",
                    series=f"summa · {dtype} · {case.cluster}",
                    strategy="summa",
                    n_devices=n_ranks,
                    work=flops,
                    time=merged(times),
                    unit="FLOPs",
                )
            )
    return points


def _lines(results: Iterable[EfficiencyRow]) -> Iterator[tuple[EfficiencyRow, str]]:
    """Each result with the name of its line: the series, and its problem if it has several."""
    known = list(results)
    problems: dict[tuple[str, str], set[float]] = defaultdict(set)
    for result in known:
        problems[result.scaling, result.point.series].add(result.problem)
    for result in known:
        series, unit = result.point.series, result.point.unit
        if len(problems[result.scaling, series]) > 1:
            each = " per device" if result.scaling == "weak" else ""
            series += f", {format_number(result.problem)} {unit}{each}"
        yield result, series


def _row(result: EfficiencyRow, line: str) -> dict[str, Any]:
    point = result.point
    return {
        "scaling": result.scaling,
        "label": line,
        "strategy": point.strategy,
        "n_devices": point.n_devices,
        "status": "ok",
        "reason": "",
        "work": point.work,
        "time_s": point.time.median,
        "speedup": result.speedup,
        "efficiency": result.efficiency,
        "low": result.low,
        "high": result.high,
        "baseline_devices": result.baseline.n_devices,
    }


def rows(catalog: Catalog) -> Rows:
    """A row per line, kind of scaling and number of devices; then rows that are not ok."""
    points = [*_training_points(catalog.training), *_summa_points(catalog)]
    results = [*scaling_table(points, "strong"), *scaling_table(points, "weak")]
    # Series that share a baseline have its row in common.
    distinct = {(r.scaling, r.point): r for r in results}.values()
    found = [_row(result, line) for result, line in _lines(distinct)]
    # By label first, so that the lines that are drawn of many are of both kinds.
    found.sort(key=lambda row: (by_number(row["label"]), row["scaling"], row["n_devices"]))
    failed = [
        {
            **case.case.identity,
            "label": case.label,
            "strategy": case.first.strategy,
            "scaling": "",
            "n_devices": case.case.n_devices,
        }
        for case in catalog.training
        if not case.case.is_ok
    ]
    return found and found + failed


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Two panels, strong and weak; the grey line is perfect scaling."""
    canvas.set_size_inches(WIDTH_IN, 4.0 + LEGEND_ROW_IN * table["label"].nunique())
    left, right = canvas.subplots(1, 2, sharey=True)
    markers = series_style(table["label"])
    notes = [
        _draw_panel(axes, scaling, table[table["scaling"] == scaling], markers)
        for axes, scaling in ((left, "strong"), (right, "weak"))
    ]
    left.set_ylabel("efficiency (%)")
    top = 100 * max(1.0, float(table["high"].max()))
    left.set_ylim(0, top * 1.08)
    joint_legend(canvas, (left, right), n_columns=2)
    note_failures(canvas, table)
    canvas.draw_without_rendering()  # gives the panels their final size
    taken: list[BboxBase] = []
    for note in sorted(chain(*notes), key=lambda note: note.xy[1]):
        move_clear(note, taken, LABEL_PT)
        if note.xyann[1] > HIGHEST_PT:
            note.remove()
            taken.pop()


def _draw_panel(
    axes: Axes, scaling: str, rows: pd.DataFrame, markers: dict[str, tuple[str, str]]
) -> list[Annotation]:
    """Draw a panel; returns its labels."""
    held = "same problem in all" if scaling == "strong" else "same problem per device"
    axes.set_title(f"{scaling.capitalize()} scaling: {held}")
    axes.set_xlabel("number of devices")
    axes.axhline(100, color=MUTED, linestyle="--", linewidth=1)
    if rows.empty:
        axes.annotate(
            "no two runs to compare", (0.5, 0.5), xycoords="axes fraction", ha="center", color=MUTED
        )
        axes.set_xticks([])
        return []
    notes: list[Annotation] = []
    for label, points in rows.groupby("label", sort=False):
        values = points["efficiency"] * 100
        colour = colour_of(points["strategy"].iloc[0])
        # A series starts at its baseline, which may be another strategy's run on one device.
        start = points["baseline_devices"].iloc[0]
        line = dict(zip([start, *points["n_devices"]], [100, *values], strict=True))
        for (n, value), (more, after) in pairwise(sorted(line.items())):
            style = "-" if more in (n + 1, 2 * n) else "--"
            axes.plot([n, more], [value, after], color=colour, linewidth=1.4, linestyle=style)
        axes.errorbar(
            points["n_devices"],
            values,
            yerr=[values - points["low"] * 100, points["high"] * 100 - values],
            color=colour,
            linestyle="none",
            elinewidth=1,
            marker=markers[str(label)][1],
            capsize=3,
            label=str(label),
        )
        for n, value in zip(points["n_devices"], values, strict=True):
            if n == start:
                continue
            note = axes.annotate(
                f"{value:.0f} %", (n, value), xytext=(5, 6), textcoords="offset points",
                fontsize=LABEL_PT,
            )  # fmt: skip
            notes.append(note)
    axes.set_xticks(sorted({*rows["n_devices"], *rows["baseline_devices"]}))
    axes.margins(x=0.12)
    return notes


FIGURE = Figure(
    caption=(
        "How much of the ideal speed-up remains with more devices. Strong scaling divides a fixed "
        "problem: t(1) / (n t(n)). Weak scaling gives each device a fixed problem: t(1) / t(n). "
        "The problem is a global batch, the samples of an epoch or the FLOPs of a product. 100 % "
        "(grey) is ideal. Points of a line agree in problem, settings and environment variables. "
        "It starts at its run on the fewest devices, and is dashed between points that are more "
        "than a doubling apart. If a run has unlike devices, its "
        "series starts at the first rank's device, so 100 % is not the ideal. "
        f"{spread_caption('Whiskers')}"
    ),
    better="higher is better",
    needs="runs of one problem on two numbers of devices: ./entry.sh train or matmul",
    rows=rows,
    draw=draw,
    most=24,
)

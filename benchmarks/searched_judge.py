"""Judge a cell of `searched.py`: steps against predictions, and equality of trainings."""

from __future__ import annotations

import itertools
import math
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
from comparison import machine
from searched_cells import Cell

from harness.domain.fingerprint import MadeFor
from harness.domain.prediction import STRATEGY_FILE
from harness.domain.strategy import Strategy
from harness.measure.derive.prediction import (
    RankedStrategy,
    cell_summary,
    predicted_run,
    read_prediction,
)
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import step_times
from harness.measure.derive.training import training_summary
from harness.measure.statistics import paired_ratio
from harness.measure.store import Run, read_header, read_run

# The order of sums changes the losses of ten steps in fp32 by at most 1e-5 for all models, whereas
# a lost gradient changes them by percents.
_LOSS_TOLERANCE = 1e-3
_DOUBLE_TOLERANCE = 1e-9


class Measured(msgspec.Struct, frozen=True):
    """Measurements of a finished cell, as stored.

    Attributes:
        runs: directories of its runs by strategy, including failed ones.
        steps_s: seconds of a step, measured in turn, by strategy and round.
        double: largest difference from one device in float64, by strategy, for those on which fp32
            is inconclusive.
        stolen_share: share of processor time that a hypervisor gave to other guests.
    """

    runs: dict[str, str]
    steps_s: dict[str, list[float]]
    double: dict[str, float] = {}
    stolen_share: float | None = None


def strategies_of(directories: Iterable[Path]) -> dict[str, Path]:
    """The training runs among new run directories, by strategy.

    Of hand-chosen runs with equal plans only one is kept, that with microbatches by the simulator,
    so that no plan is compared with itself.
    """
    found: dict[str, Path] = {}
    plans: list[Strategy] = []
    headers = [(read_header(path), path) for path in directories if (path / "run.json").exists()]
    for header, path in sorted(headers, key=lambda h: bool(h[0].config.get("microbatches"))):
        if header.workload != "train":
            continue
        name = training_summary(_read_run(path)).strategy
        plan = plan_of(path)
        if name != "searched" and plan is not None:
            if plan in plans:
                continue
            plans.append(plan)
        found[name] = path
    return found


def plan_of(directory: Path) -> Strategy | None:
    """The plan of a run without its name; None if it has none."""
    path = directory / STRATEGY_FILE
    if not path.exists():
        return None
    return msgspec.structs.replace(Strategy.load(path), name="", made_for=MadeFor())


def same_as_searched(runs: dict[str, Path]) -> set[str]:
    """Hand-chosen strategies that equal the searched plan and use the same engine.

    Such a plan is measured in turn once, and ranked once.
    """
    plan = plan_of(runs["searched"]) if "searched" in runs else None
    return {
        name
        for name, path in runs.items()
        if name != "searched" and plan is not None and plan_of(path) == plan
        if read_header(path).config["engine"] == "executor"
    }


def _read_run(directory: Path) -> Run:
    return read_run(directory, read_header(directory))[0]


def losses(run: Run) -> list[float]:
    """The global loss of every measured step."""
    return [r.value for r in samples_of(run.ranks.get(0, []), "loss")]


def largest(differences: Iterable[float]) -> float:
    """The largest value; NaN if any value is, which `max` may miss."""
    return float(np.max(list(differences)))


def loss_differences(runs: dict[str, Run]) -> dict[str, float]:
    """The largest relative difference of a step's loss from that of one device, by strategy."""
    reference = losses(runs["single"])
    return {
        name: largest(
            abs(value - expected) / abs(expected)
            for value, expected in zip(losses(run), reference, strict=True)
        )
        for name, run in runs.items()
        if run.header.status == "ok"
    }


def left_open(found: Measured) -> list[str]:
    """The executor's strategies whose losses in fp32 differ from those of one device."""
    runs = {name: _read_run(Path(path)) for name, path in found.runs.items()}
    if "single" not in found.steps_s:
        return []
    return [
        name
        for name, difference in loss_differences(runs).items()
        if not difference <= _LOSS_TOLERANCE and (runs[name].path / STRATEGY_FILE).exists()
    ]


def trains_the_same(differences: dict[str, float], double: dict[str, float]) -> bool:
    """Whether all strategies' losses equal those of one device, in float64 if not in fp32."""
    return all(
        difference <= _LOSS_TOLERANCE or double.get(name, math.inf) <= _DOUBLE_TOLERANCE
        for name, difference in differences.items()
    )


def judge_strategy(run: Run, steps_s: list[float], searched_s: list[float]) -> dict[str, Any]:
    """Predicted and measured step of one strategy.

    Args:
        steps_s: by round; a slow strategy has only the first rounds.
        searched_s: steps of the searched plan, by round.
    """
    if run.header.status != "ok":
        return {"status": run.header.status, "reason": run.header.reason.splitlines()[0]}
    prediction = read_prediction(run.path)
    assert prediction is not None, "every run is told to predict"
    predicted = predicted_run(run, prediction)
    # A disturbance affects all strategies of a round, so ratios are more reliable than seconds.
    ratio = paired_ratio(steps_s, searched_s[: len(steps_s)])
    measured_s = median(searched_s) * ratio.median
    return {
        "status": "ok",
        "plan": prediction.strategy,
        "predicted_s": prediction.step_s,
        "measured_s": measured_s,
        "over_searched": [ratio.median, ratio.low, ratio.high],
        "n_rounds": len(steps_s),
        "run_s": median(step_times(run).values()),
        "error": prediction.step_s / measured_s - 1,
        "predicted_parts": predicted.predicted_parts,
        "measured_parts": predicted.measured_parts,
    }


def distinct_pairs(steps_s: dict[str, list[float]]) -> list[tuple[str, str]]:
    """(faster, slower) of each pair of strategies whose ratio's interval over rounds excludes 1."""
    found: list[tuple[str, str]] = []
    for a, b in itertools.combinations(steps_s, 2):
        rounds = list(zip(steps_s[a], steps_s[b], strict=False))  # the slow have fewer rounds
        ratio = paired_ratio([x for x, _ in rounds], [y for _, y in rounds])
        if ratio.high < 1:
            found.append((a, b))
        elif ratio.low > 1:
            found.append((b, a))
    return found


def judge_order(
    strategies: dict[str, dict[str, Any]], apart: list[tuple[str, str]]
) -> dict[str, Any]:
    """Rank correlation of predicted and measured steps, and regret of the predicted choice.

    Args:
        apart: (faster, slower) pairs from `distinct_pairs`.
    """
    judged = [
        RankedStrategy(name=name, predicted_s=s["predicted_s"], measured_s=s["measured_s"])
        for name, s in strategies.items()
    ]
    summary = cell_summary(judged)
    predicted_s = {name: s["predicted_s"] for name, s in strategies.items()}
    return {
        "rank_correlation": summary.rank_correlation,
        "pairs_in_order": sum(predicted_s[a] < predicted_s[b] for a, b in apart),
        "regret": summary.regret,
        "chosen": summary.chosen,
        "median_absolute_error": summary.median_error,
    }


def judge(cell: Cell, measured: Measured) -> dict[str, Any]:
    """The result of a finished cell.

    Raises:
        SystemExit: single or searched failed, with which all others are compared.
    """
    found = strategies_of(map(Path, measured.runs.values()))
    runs = {name: _read_run(path) for name, path in found.items()}
    for name in ("single", "searched"):
        if name not in measured.steps_s:
            header = runs[name].header if name in runs else None
            reason = "has no run" if header is None else f"{header.status}: {header.reason}"
            raise SystemExit(
                f"{cell.name}: {name} {reason}: all strategies are compared with it, so mend that "
                "and measure the cell again with --again"
            )
    searched_s = measured.steps_s["searched"]
    strategies = {
        name: judge_strategy(run, measured.steps_s.get(name, []), searched_s)
        for name, run in runs.items()
    }
    ok = {name: s for name, s in strategies.items() if s["status"] == "ok"}
    ratios = {name: s["over_searched"][0] for name, s in ok.items() if name != "searched"}
    best = min(ratios, key=lambda name: ratios[name])
    low, high = ok[best]["over_searched"][1:]
    twice = same_as_searched(found)
    ok = {name: s for name, s in ok.items() if name not in twice}
    differences = loss_differences(runs)
    apart = distinct_pairs({name: measured.steps_s[name] for name in ok})
    return {
        "cell": cell.name,
        "gain": ratios[best],
        "gain_low": low,
        "gain_high": high,
        "best_hand_chosen": best,
        "over_ddp": ratios.get("ddp"),
        "must_beat_ddp": cell.must_beat_ddp,
        "pairs_apart": len(apart),
        **judge_order(ok, apart),
        "loss_difference": max(differences.values()),
        "double_difference": max(measured.double.values(), default=None),
        "is_same": trains_the_same(differences, measured.double),
        "same_as_searched": sorted(twice),
        "strategies": strategies,
        "command": shlex.join(sys.argv),
        "machine": machine(),
        "load": os.getloadavg()[1],
        "stolen_share": measured.stolen_share,
        "commit": runs["searched"].header.commit,
    }


def judge_all(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all cells: the number that meet each bar, and the median error."""
    ok = [
        s
        for line in lines
        for name, s in line["strategies"].items()
        if s["status"] == "ok" and name not in line["same_as_searched"]
    ]
    ordered = [line for line in lines if line["rank_correlation"] is not None]
    slow = [line for line in lines if line["must_beat_ddp"] and line["over_ddp"] is not None]
    return {
        "cells": len(lines),
        "gain_at_least_0.98": sum(line["gain"] >= 0.98 for line in lines),
        "least_gain": min(line["gain"] for line in lines),
        "cells_that_must_beat_ddp": len(slow),
        "over_ddp_at_least_1.5": sum(line["over_ddp"] >= 1.5 for line in slow),
        "median_absolute_error": median(abs(s["error"]) for s in ok),
        "predictions": len(ok),
        "misses_over_20_percent": sum(abs(s["error"]) > 0.2 for s in ok),
        "pairs_apart": sum(line["pairs_apart"] for line in lines),
        "pairs_in_order": sum(line["pairs_in_order"] for line in lines),
        "order_at_least_0.95": sum(line["rank_correlation"] >= 0.95 for line in ordered),
        "regret_at_most_3_percent": sum(line["regret"] <= 0.03 for line in lines),
        "same": sum(line["is_same"] for line in lines),
    }


def text(line: dict[str, Any]) -> str:
    """A cell's result as a line of text."""
    over = "-" if line["over_ddp"] is None else f"{line['over_ddp']:.2f}"
    order = "-" if line["rank_correlation"] is None else f"{line['rank_correlation']:.2f}"
    head = (
        f"{line['cell']}: gain {line['gain']:.3f} over {line['best_hand_chosen']}, "
        f"over ddp {over}, order {order} "
        f"({line['pairs_in_order']} of {line['pairs_apart']} pairs), regret {line['regret']:.1%}, "
        f"losses within {line['loss_difference']:.1g}"
    )
    rows = [
        f"    {name:9} predicted {s['predicted_s']:7.3f} s  measured {s['measured_s']:7.3f} s  "
        f"{s['error']:+7.1%}  {s['plan']}"
        if s["status"] == "ok"
        else f"    {name:9} {s['status']}: {s['reason']}"
        for name, s in line["strategies"].items()
    ]
    return "\n".join([head, *rows])

"""Is what the search finds worth it, and are its predictions true? Cells on the virtual cluster.

    python benchmarks/searched.py --work WORK                  all cells; as root
    python benchmarks/searched.py --work WORK --cells alexnet-3x100mbit
    python benchmarks/searched.py --work WORK --summary        of the cells that are done

A cell is a model on a virtual cluster (searched_cells.py). Links and operators are measured, then
the train workload trains the model as single, ddp (torch's own), pipelines (1F1B and interleaved,
with the microbatches that are predicted to be fastest and with four for each rank), tensor, hybrid
and searched, each beside its prediction: that they train the same is judged by these runs. Then
their engines train in turn in the same processes (searched_steps.py): a step is the median over
those rounds, and a ratio of steps that of their ratios, round by round. Per cell:

    gain        best hand-chosen step / searched step; at least 0.98
    over ddp    ddp step / searched step; at least 1.5 with slow links and many parameters
    error       predicted / measured step - 1, by strategy; median of all |error| at most 10 %
    order       Spearman's correlation of predicted and measured steps; at least 0.95
    regret      measured step of what is predicted to be fastest / fastest measured - 1; at most 3 %
    same        the loss of every step is that of single, to a relative 1e-3; where rounding keeps
                fp32 from it, the strategy trains in float64 too (searched_double.py), and losses
                and gradients are those of one device to 1e-9

WORK keeps everything that was measured; a finished cell is only
judged again. Profiles are shared by the cells.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import numpy as np
import tyro
from comparison import machine
from searched_cells import CELLS, QUICK, Cell

from harness.domain.fingerprint import MadeFor
from harness.domain.prediction import STRATEGY_FILE
from harness.domain.record import Sample
from harness.domain.strategy import Strategy
from harness.measure.derive import training_summary
from harness.measure.derive_choice import Judged, cell_summary
from harness.measure.derive_prediction import predicted_run, read_prediction
from harness.measure.derive_training import step_times
from harness.measure.statistics import paired_ratio
from harness.measure.store import Run, read_header, read_results, write_atomically

_ROOT = Path(__file__).resolve().parents[1]
_CLUSTER = "searched"
_STRATEGIES = ("single", "ddp", "pipeline", "tensor", "hybrid", "searched")
# Sums in another order: over ten steps of fp32 the losses of all models agree to 1e-5 or better,
# while a lost gradient changes them by percents.
_LOSS_TOLERANCE = 1e-3
_DOUBLE_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Options:
    work: Path = Path("/tmp/searched")
    """Where everything measured is kept; a second call goes on there."""
    cells: tuple[str, ...] = ()
    """Names of cells; all when not given."""
    steps: int = 4
    """Steps of a run."""
    seconds: float = 70.0
    """How long runs are trained in turn."""
    quick: bool = False
    """Two cells only."""
    again: bool = False
    """Measure cells that are done once more."""
    summary: bool = False
    """Measure nothing, judge what is there."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object per cell and one for all."""


def call(*command: str) -> str:
    """Run a command from the root of the project.

    Raises:
        SystemExit: it failed; with what it printed.
    """
    done = subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-6000:]}")
    return done.stdout


class Cluster:
    """The virtual cluster of the cell that is measured; another cell's place replaces it."""

    def __init__(self) -> None:
        self._cell: Cell | None = None

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell is not None:
            call("bash", "setup/virtual_cluster.sh", "down", "--name", _CLUSTER)

    def build(self, cell: Cell) -> None:
        """Make the nodes and links of a cell's place, unless they stand."""
        place = cell.place
        if self._cell is None or self._cell.place != place:
            self._cell = cell
            call(
                "bash", "setup/virtual_cluster.sh", "up", "--replace", "--name", _CLUSTER,
                "--nodes", str(len(place.cpu)), "--bandwidth", place.bandwidth,
                "--cpu", ",".join(map(str, place.cpu)),
            )  # fmt: skip

    def run(self, cell: Cell, results: Path, *flags: str) -> None:
        """Run a workload on all nodes."""
        self.start(cell, "./entry.sh", *flags, "--results", str(results))

    def start(self, cell: Cell, *command: str) -> str:
        """Start a program's ranks, one on each node; what they print."""
        return call(
            "bash", "setup/virtual_cluster.sh", "run", "--name", _CLUSTER, "--",
            "mpirun", "-np", str(len(cell.place.cpu)),
            "--hostfile", f"hosts/virtual-{_CLUSTER}.txt", *command,
        )  # fmt: skip


class Measured(msgspec.Struct, frozen=True):
    """A finished cell, as kept.

    Attributes:
        runs: directories of its runs, by strategy, those that failed included.
        steps_s: seconds of a step in turn with the others, by strategy and round.
        double: largest difference from one device in float64, by strategy, of those that fp32
            leaves open.
    """

    runs: dict[str, str]
    steps_s: dict[str, list[float]]
    double: dict[str, float] = {}


def train(cell: Cell, cluster: Cluster, options: Options) -> dict[str, Path]:
    """Measure links and operators where that is missing, then train by every strategy."""
    results = (options.work / cell.place.name).resolve()
    results.mkdir(parents=True, exist_ok=True)
    if not (results / "cluster.json").exists():
        cluster.run(cell, results, "links", "--transport", "torch", "--operations", "all_reduce")
    _profile(cell, cluster, results, options.work)
    known = set(results.iterdir())
    cluster.run(
        cell, results, "train", *cell.model.workload_flags, "--strategy", *_STRATEGIES,
        "--schedule", "1f1b", "interleaved",
        "--microbatches", "0", str(4 * len(cell.place.cpu)),
        "--predict", "--batch-norm", "frozen", "--warm-up", "1", "--no-sync-steps", "0",
        "--steps", str(options.steps), "--search-seconds", "60",
    )  # fmt: skip
    return strategies_of(set(results.iterdir()) - known)


def train_in_turn(cell: Cell, cluster: Cluster, found: Measured, options: Options) -> Measured:
    """Take turns of each run that ended ok."""
    runs = {name: Path(path) for name, path in found.runs.items()}
    ok = {name: path for name, path in runs.items() if read_header(path).status == "ok"}
    told = cluster.start(
        cell, ".venv/bin/python", "-m", "benchmarks.searched_steps",
        "--seconds", str(options.seconds), *map(str, ok.values()),
    )  # fmt: skip
    lines = [json.loads(line) for line in told.splitlines() if line.startswith('{"run"')]
    steps = {line["run"]: line["steps_s"] for line in lines}
    return msgspec.structs.replace(
        found, steps_s={name: steps[path.name] for name, path in ok.items()}
    )


def train_in_double(cell: Cell, cluster: Cluster, found: Measured, names: list[str]) -> Measured:
    """Train some strategies in float64, and what one device does."""
    paths = {name: Path(found.runs[name]) for name in ("single", *names)}
    told = cluster.start(
        cell, ".venv/bin/python", "-m", "benchmarks.searched_double", *map(str, paths.values())
    )
    lines = [json.loads(line) for line in told.splitlines() if line.startswith('{"run"')]
    differences = ("loss_difference", "gradient_difference")
    worst = {line["run"]: _worst(line[name] for name in differences) for line in lines}
    return msgspec.structs.replace(found, double={name: worst[paths[name].name] for name in names})


def measure(cell: Cell, cluster: Cluster, options: Options) -> Measured:
    """Measure a cell, or what an earlier call has not measured of it; keeps what it has."""
    kept = options.work / f"measured-{cell.name}.json"
    found = Measured(runs={}, steps_s={})
    if kept.exists() and not options.again:
        found = msgspec.json.decode(kept.read_bytes(), type=Measured)
    if options.summary:
        return found
    if not found.runs:
        cluster.build(cell)
        runs = train(cell, cluster, options)
        found = Measured(runs={name: str(path) for name, path in runs.items()}, steps_s={})
        write_atomically(kept, msgspec.json.encode(found))
    if not found.steps_s:
        cluster.build(cell)
        found = train_in_turn(cell, cluster, found, options)
        write_atomically(kept, msgspec.json.encode(found))
    names = left_open(found)
    if names and not found.double:
        cluster.build(cell)
        found = train_in_double(cell, cluster, found, names)
        write_atomically(kept, msgspec.json.encode(found))
    return found


def left_open(found: Measured) -> list[str]:
    """The executor's strategies whose losses in fp32 are not those of one device."""
    runs = {name: _read_run(Path(path)) for name, path in found.runs.items()}
    if "single" not in found.steps_s:
        return []
    return [
        name
        for name, difference in loss_differences(runs).items()
        if not difference <= _LOSS_TOLERANCE and (runs[name].path / STRATEGY_FILE).exists()
    ]


def _profile(cell: Cell, cluster: Cluster, results: Path, work: Path) -> None:
    """Measure what no cell has measured before: a profile holds for a kind of device."""
    for path in work.glob(f"profile-*{cell.model.name}*.json"):
        shutil.copy(path, results)
    flags = ("--min-samples", "6", "--rounds", "6", "--time-budget-s", "0.2", "--warm-up", "1")
    cluster.run(cell, results, "profile", *cell.model.workload_flags, *flags)
    for path in results.glob(f"profile-*{cell.model.name}*.json"):
        shutil.copy(path, work)


def strategies_of(directories: Iterable[Path]) -> dict[str, Path]:
    """The training runs among new directories of results, by strategy.

    Flags that made the same plan by hand count as one strategy, so that none is compared with
    itself: the one whose microbatches were left to the simulator.
    """
    found: dict[str, Path] = {}
    plans: list[Strategy] = []
    headers = [(read_header(path), path) for path in directories if (path / "run.json").exists()]
    for header, path in sorted(headers, key=lambda h: bool(h[0].config.get("microbatches"))):
        if header.workload != "train":
            continue
        name = training_summary(_read_run(path)).strategy
        plan = path / STRATEGY_FILE
        if name != "searched" and plan.exists():
            strategy = msgspec.structs.replace(Strategy.load(plan), made_for=MadeFor())
            if strategy in plans:
                continue
            plans.append(strategy)
        found[name] = path
    return found


def _read_run(directory: Path) -> Run:
    return read_results(directory).runs[0]


def judge_strategy(run: Run, steps_s: list[float], searched_s: list[float]) -> dict[str, Any]:
    """Predicted and measured step of one strategy.

    Args:
        steps_s: by round, the first rounds only where it is slow.
        searched_s: of what the search found, by round.
    """
    if run.header.status != "ok":
        return {"status": run.header.status, "reason": run.header.reason.splitlines()[0]}
    prediction = read_prediction(run.path)
    assert prediction is not None, "every run is told to predict"
    predicted = predicted_run(run, prediction)
    # Rounds are disturbed alike: what a strategy takes is told by its ratio to another.
    ratio = paired_ratio(steps_s, searched_s[: len(steps_s)])
    measured_s = median(searched_s) * ratio.ratio
    return {
        "status": "ok",
        "plan": prediction.strategy,
        "predicted_s": prediction.step_s,
        "measured_s": measured_s,
        "over_searched": [ratio.ratio, ratio.low, ratio.high],
        "n_rounds": len(steps_s),
        "run_s": median(step_times(run).values()),
        "error": prediction.step_s / measured_s - 1,
        "predicted_parts": predicted.predicted_parts,
        "measured_parts": predicted.measured_parts,
    }


def losses(run: Run) -> list[float]:
    """The global loss of every measured step."""
    records = run.ranks.get(0, [])
    return [r.value for r in records if isinstance(r, Sample) and r.metric == "loss"]


def _worst(differences: Iterable[float]) -> float:
    """The largest; NaN if any is, which `max` may pass over."""
    return float(np.max(list(differences)))


def loss_differences(runs: dict[str, Run]) -> dict[str, float]:
    """By strategy, the largest relative difference of a step's loss from that of one device."""
    reference = losses(runs["single"])
    return {
        name: _worst(
            abs(value - expected) / abs(expected)
            for value, expected in zip(losses(run), reference, strict=True)
        )
        for name, run in runs.items()
        if run.header.status == "ok"
    }


def trains_the_same(differences: dict[str, float], double: dict[str, float]) -> bool:
    """Whether every strategy's losses are those of one device, in float64 where fp32 says no."""
    return all(
        difference <= _LOSS_TOLERANCE or double.get(name, math.inf) <= _DOUBLE_TOLERANCE
        for name, difference in differences.items()
    )


def judge(cell: Cell, measured: Measured) -> dict[str, Any]:
    """A finished cell's line.

    Raises:
        SystemExit: single or searched did not end ok, to which all others are compared.
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
    judged = [
        Judged(name=name, predicted_s=s["predicted_s"], measured_s=s["measured_s"])
        for name, s in ok.items()
    ]
    summary = cell_summary(judged)
    ratios = {name: s["over_searched"][0] for name, s in ok.items() if name != "searched"}
    best = min(ratios, key=lambda name: ratios[name])
    differences = loss_differences(runs)
    return {
        "cell": cell.name,
        "gain": ratios[best],
        "gain_low": ok[best]["over_searched"][1],
        "gain_high": ok[best]["over_searched"][2],
        "best_hand_chosen": best,
        "over_ddp": ratios.get("ddp"),
        "must_beat_ddp": cell.must_beat_ddp,
        "rank_correlation": summary.rank_correlation,
        "regret": summary.regret,
        "chosen": summary.chosen,
        "loss_difference": max(differences.values()),
        "double_difference": max(measured.double.values(), default=None),
        "is_same": trains_the_same(differences, measured.double),
        "strategies": strategies,
        "command": shlex.join(sys.argv),
        "machine": machine(),
        "load": os.getloadavg()[1],
        "commit": runs["searched"].header.commit,
    }


def judge_all(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Over all cells: how many meet each bar, and the median error."""
    ok = [s for line in lines for s in line["strategies"].values() if s["status"] == "ok"]
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
        "order_at_least_0.95": sum(line["rank_correlation"] >= 0.95 for line in ordered),
        "regret_at_most_3_percent": sum(line["regret"] <= 0.03 for line in lines),
        "same": sum(line["is_same"] for line in lines),
    }


def text(line: dict[str, Any]) -> str:
    """A cell's line for reading."""
    over = "-" if line["over_ddp"] is None else f"{line['over_ddp']:.2f}"
    order = "-" if line["rank_correlation"] is None else f"{line['rank_correlation']:.2f}"
    head = (
        f"{line['cell']}: gain {line['gain']:.3f} over {line['best_hand_chosen']}, "
        f"over ddp {over}, order {order}, regret {line['regret']:.1%}, "
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


def main(options: Options) -> int:
    options.work.mkdir(parents=True, exist_ok=True)
    names = options.cells or (QUICK if options.quick else tuple(CELLS))
    unknown = [name for name in names if name not in CELLS]
    if unknown:
        raise SystemExit(f"there is no cell {unknown[0]}: choose from {', '.join(CELLS)}")
    done: list[dict[str, Any]] = []
    with Cluster() as cluster:
        for name in names:
            measured = measure(CELLS[name], cluster, options)
            if not measured.steps_s:
                continue
            line = judge(CELLS[name], measured)
            done.append(line)
            print(json.dumps(line) if options.as_json else text(line), flush=True)
    print(json.dumps(judge_all(done)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

"""Is what the search finds worth it, and are its predictions true? Cells on the virtual cluster.

    python benchmarks/searched.py --work WORK                  all cells; as root
    python benchmarks/searched.py --work WORK --cells alexnet-3x100mbit
    python benchmarks/searched.py --work WORK --summary        of the cells that are done

A cell is a model on a virtual cluster (searched_cells.py). Links and operators are measured, then
the train workload trains the model as single, ddp (torch's own), pipelines (1F1B and interleaved,
with the microbatches that are predicted to be fastest and with four for each rank), tensor, hybrid
and searched, in random order, each in processes of its own and beside its prediction. Per cell:

    gain        best hand-chosen step / searched step; at least 0.98
    over ddp    ddp step / searched step; at least 1.5 with slow links and many parameters
    error       predicted / measured step - 1, by strategy; median of all |error| at most 10 %
    order       Spearman's correlation of predicted and measured steps; at least 0.95
    regret      measured step of what is predicted to be fastest / fastest measured - 1; at most 3 %
    same        the loss of every step is that of single, to a relative 1e-3

Steps are medians over all repeats. WORK keeps everything that was measured, and cells.jsonl one
object per finished cell, which is skipped from then on; profiles are shared by the cells.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro
from comparison import machine
from searched_cells import CELLS, QUICK, Cell

from harness.domain.prediction import STRATEGY_FILE
from harness.domain.record import Sample
from harness.measure.derive import training_summary
from harness.measure.derive_choice import Judged, cell_summary
from harness.measure.derive_prediction import predicted_run, read_prediction
from harness.measure.derive_training import step_times
from harness.measure.store import Run, read_results
from harness.runtime.host import code_commit

_ROOT = Path(__file__).resolve().parents[1]
_CLUSTER = "searched"
_STRATEGIES = ("single", "pipeline", "tensor", "hybrid", "searched")
# Sums in another order: over ten steps of fp32 the losses of all models agree to 1e-5 or better,
# while a lost gradient changes them by percents.
_LOSS_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Options:
    work: Path = Path("/tmp/searched")
    """Where everything measured is kept; a second call goes on there."""
    cells: tuple[str, ...] = ()
    """Names of cells; all when not given."""
    steps: int = 12
    """Steps of a run (of ddp fewer where its step takes long)."""
    repeats: int = 1
    """Runs of each strategy."""
    quick: bool = False
    """Two cells only."""
    again: bool = False
    """Measure cells that are done once more; what was measured before counts too."""
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
        call(
            "bash", "setup/virtual_cluster.sh", "run", "--name", _CLUSTER, "--",
            "mpirun", "-np", str(len(cell.place.cpu)),
            "--hostfile", f"hosts/virtual-{_CLUSTER}.txt", "./entry.sh", *flags,
            "--results", str(results),
        )  # fmt: skip


def measure(cell: Cell, cluster: Cluster, options: Options) -> Path:
    """Measure links and operators where that is missing, then train; returns the results."""
    results = (options.work / cell.place.name).resolve()
    results.mkdir(parents=True, exist_ok=True)
    cluster.build(cell)
    if not (results / "cluster.json").exists():
        cluster.run(cell, results, "links", "--transport", "torch", "--operations", "all_reduce")
    _profile(cell, cluster, results, options.work)
    shared = ("train", *cell.model.workload_flags, "--predict", "--batch-norm", "frozen",
              "--warm-up", "2", "--no-sync-steps", "0",
              "--repeats", str(options.repeats))  # fmt: skip
    steps = cell.ddp_steps(options.steps)
    flows = ("--schedule", "1f1b", "interleaved",
             "--microbatches", "0", str(4 * len(cell.place.cpu)))  # fmt: skip
    launches = [
        (*shared, "--strategy", "ddp", "--steps", str(steps)),
        (*shared, "--strategy", *_STRATEGIES, *flows, "--steps", str(options.steps)),
    ]
    for flags in random.sample(launches, len(launches)):
        cluster.run(cell, results, *flags)
    return results


def _profile(cell: Cell, cluster: Cluster, results: Path, work: Path) -> None:
    """Measure what no cell has measured before: a profile holds for a kind of device."""
    for path in work.glob(f"profile-*{cell.model.name}*.json"):
        shutil.copy(path, results)
    flags = ("--min-samples", "3", "--time-budget-s", "0.1", "--warm-up", "1")
    cluster.run(cell, results, "profile", *cell.model.workload_flags, *flags)
    for path in results.glob(f"profile-*{cell.model.name}*.json"):
        shutil.copy(path, work)


def runs_of(cell: Cell, results: Path) -> dict[str, list[Run]]:
    """The runs that trained a cell's model, by strategy; flags that made the same plan of hand
    count as one strategy, so that nothing is compared with itself."""
    model = cell.model.workload_flags[1]
    found: dict[str, list[Run]] = {}
    names: dict[bytes, str] = {}
    for run in sorted(read_results(results).runs, key=_flags_given):
        if run.header.workload != "train" or run.header.config["model"] != model:
            continue
        name = training_summary(run).strategy
        plan = run.path / STRATEGY_FILE
        if name != "searched" and plan.exists():
            name = names.setdefault(plan.read_bytes(), name)
        found.setdefault(name, []).append(run)
    return found


def _flags_given(run: Run) -> tuple[bool, str]:
    """Pipelines whose microbatches were left to the simulator give their plan its name."""
    return bool(run.header.config.get("microbatches")), run.header.run_id


def judge_strategy(runs: list[Run]) -> dict[str, Any]:
    """Predicted and measured step over the repeats of one strategy; the newest's prediction."""
    ok = [run for run in runs if run.header.status == "ok"]
    if not ok:
        last = runs[-1].header
        return {"status": last.status, "reason": last.reason.splitlines()[0]}
    newest = max(ok, key=lambda run: run.header.start_utc)
    prediction = read_prediction(newest.path)
    assert prediction is not None, "every run is told to predict"
    steps = [s for run in ok for s in step_times(run).values()]
    predicted = predicted_run(newest, prediction)
    return {
        "status": "ok",
        "plan": prediction.strategy,
        "predicted_s": prediction.step_s,
        "measured_s": median(steps),
        "runs_s": [median(step_times(run).values()) for run in ok],
        "error": prediction.step_s / median(steps) - 1,
        "predicted_parts": predicted.predicted_parts,
        "measured_parts": predicted.measured_parts,
    }


def losses(run: Run) -> list[float]:
    """The global loss of every measured step."""
    records = run.ranks.get(0, [])
    return [r.value for r in records if isinstance(r, Sample) and r.metric == "loss"]


def trains_the_same(found: dict[str, list[Run]]) -> float:
    """Largest relative difference of a step's loss from that of training on one device."""
    reference = losses(next(run for run in found["single"] if run.header.status == "ok"))
    return max(
        abs(value - expected) / abs(expected)
        for runs in found.values()
        for run in runs
        if run.header.status == "ok"
        for value, expected in zip(losses(run), reference, strict=False)
    )


def judge(cell: Cell, results: Path) -> dict[str, Any]:
    """A finished cell's line."""
    found = runs_of(cell, results)
    strategies = {name: judge_strategy(runs) for name, runs in found.items()}
    ok = {name: s for name, s in strategies.items() if s["status"] == "ok"}
    judged = [
        Judged(name=name, predicted_s=s["predicted_s"], measured_s=s["measured_s"])
        for name, s in ok.items()
    ]
    summary = cell_summary(judged)
    steps = {name: s["measured_s"] for name, s in ok.items()}
    searched = steps.pop("searched", float("inf"))
    difference = trains_the_same(found)
    return {
        "cell": cell.name,
        "gain": min(steps.values()) / searched,
        "best_hand_chosen": min(steps, key=lambda name: steps[name]),
        "over_ddp": steps["ddp"] / searched if "ddp" in steps else None,
        "must_beat_ddp": cell.must_beat_ddp,
        "rank_correlation": summary.rank_correlation,
        "regret": summary.regret,
        "chosen": summary.chosen,
        "loss_difference": difference,
        "is_same": difference <= _LOSS_TOLERANCE,
        "strategies": strategies,
        "command": shlex.join(sys.argv),
        "machine": machine(),
        "load": os.getloadavg()[1],
        "commit": code_commit(),
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


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Finished cells by name; the newest line of each."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {line["cell"]: line for line in map(json.loads, lines)}


def main(options: Options) -> int:
    options.work.mkdir(parents=True, exist_ok=True)
    names = options.cells or (QUICK if options.quick else tuple(CELLS))
    unknown = [name for name in names if name not in CELLS]
    if unknown:
        raise SystemExit(f"there is no cell {unknown[0]}: choose from {', '.join(CELLS)}")
    path = options.work / "cells.jsonl"
    done = read_lines(path)
    with Cluster() as cluster:
        for name in names:
            if options.summary:
                results = options.work / CELLS[name].place.name
                line = judge(CELLS[name], results) if name in done else None
            elif name in done and not options.again:
                line = done[name]
            else:
                line = judge(CELLS[name], measure(CELLS[name], cluster, options))
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            if line is not None:
                done[name] = line
                print(json.dumps(line) if options.as_json else text(line), flush=True)
    print(json.dumps(judge_all([done[name] for name in names if name in done])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

"""Compare searched plans with strategies chosen by hand, and predictions with measurements.

    python benchmarks/searched.py --work WORK                  all cells; as root
    python benchmarks/searched.py --work WORK --cells alexnet-3x100mbit
    python benchmarks/searched.py --work WORK --summary        of finished cells

A cell is a model on a virtual cluster (searched_cells.py). After measuring links and operators, the
train workload trains the model as single, ddp (torch's), pipelines (1F1B and interleaved, with the
number of microbatches predicted to be fastest, and with four per rank or fewer if the batch is
small), tensor, hybrid and searched, each with its prediction. These runs show whether all train the
same. Then their engines train in turn in the same processes (searched_steps.py): a step is the
median over these rounds, and a ratio of steps is the median of the ratios of the rounds. A
hand-chosen plan that equals the searched one trains once. Results of a cell:

    gain        best hand-chosen step / searched step; at least 0.98
    over ddp    ddp step / searched step; at least 1.5 with slow links and many parameters
    error       predicted / measured step - 1, by strategy; median of all |error| at most 10 %
    order       Spearman's correlation of predicted and measured steps; at least 0.95; also the
                pairs in order, among those whose ratio over rounds has an interval without 1
    regret      measured step of the predicted fastest / fastest measured - 1; at most 3 %
    same        the loss of every step equals that of single, to a relative 1e-3; if rounding in
                fp32 prevents this, the strategy also trains in float64 (searched_double.py), where
                losses and gradients must equal those of one device to 1e-9

WORK keeps all measurements, so that a finished cell is only judged again. Cells share profiles.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro
from searched_cells import CELLS, QUICK, Cell
from searched_judge import (
    Measured,
    judge,
    judge_all,
    largest,
    left_open,
    same_as_searched,
    strategies_of,
    text,
)

from harness.measure.store import read_header, write_atomically
from harness.runtime.ranks.host import processor_seconds

_ROOT = Path(__file__).resolve().parents[1]
_STRATEGIES = ("single", "ddp", "pipeline", "tensor", "hybrid", "searched")


@dataclass(frozen=True, kw_only=True)
class Options:
    work: Path = Path("/tmp/searched")
    """Directory of all measurements; a second call resumes."""
    cells: tuple[str, ...] = ()
    """Names of cells; default: all."""
    steps: int = 4
    """Steps of a run."""
    seconds: float = 120.0
    """Time for rounds of the strategies near the fastest, after three rounds of all."""
    quick: bool = False
    """Measure two cells only."""
    again: bool = False
    """Measure finished cells again, including their links."""
    summary: bool = False
    """Judge finished cells, without measuring."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON object per cell and one for all."""


def call(*command: str) -> str:
    """Run a command from the root of the project.

    Raises:
        SystemExit: the command failed; has its output.
    """
    done = subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-6000:]}")
    return done.stdout


class Cluster:
    """The virtual cluster of the current cell, with its name; rebuilt for a cell on another one."""

    def __init__(self, name: str = "searched") -> None:
        self._cell: Cell | None = None
        self._name = name

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell is not None:
            call("bash", "setup/virtual_cluster.sh", "down", "--name", self._name)

    def build(self, cell: Cell) -> None:
        """Build a cell's virtual cluster unless it exists."""
        place = cell.place
        if self._cell is None or self._cell.place != place:
            self._cell = cell
            call(
                "bash", "setup/virtual_cluster.sh", "up", "--replace", "--name", self._name,
                "--nodes", str(len(place.cpu)), "--bandwidth", place.bandwidth,
                "--cpu", ",".join(map(str, place.cpu)),
            )  # fmt: skip

    def run(self, cell: Cell, results: Path, *flags: str) -> None:
        """Run a workload on all nodes."""
        self.start(cell, "./entry.sh", *flags, "--results", str(results))

    def start(self, cell: Cell, *command: str) -> str:
        """Run a program on the ranks of all nodes; returns its output."""
        place = cell.place
        return call(
            "bash", "setup/virtual_cluster.sh", "run", "--name", self._name, "--",
            "mpirun", "-np", str(place.n_ranks), "--map-by", f"ppr:{place.n_each}:node",
            "--oversubscribe", "--hostfile", f"hosts/virtual-{self._name}.txt", *command,
        )  # fmt: skip

    def lines_of(self, cell: Cell, module: str, *words: str) -> list[dict[str, Any]]:
        """The objects that a module of benchmarks/ prints, one for each run."""
        output = self.start(cell, ".venv/bin/python", "-m", module, *words)
        return [json.loads(line) for line in output.splitlines() if line.startswith('{"run"')]

    def steps_in_turn(
        self, cell: Cell, runs: Iterable[Path], seconds: float
    ) -> dict[str, list[float]]:
        """Train the engines of runs in turn; returns the seconds of a step by run and round."""
        words = ("--seconds", str(seconds), *map(str, runs))
        lines = self.lines_of(cell, "benchmarks.searched_steps", *words)
        return {line["run"]: line["steps_s"] for line in lines}


def train(cell: Cell, cluster: Cluster, options: Options) -> dict[str, Path]:
    """Measure links and operators if missing, then train by every strategy."""
    results = (options.work / cell.place.name).resolve()
    results.mkdir(parents=True, exist_ok=True)
    if options.again or not (results / "cluster.json").exists():
        cluster.run(cell, results, "links", "--transport", "torch", "--operations", "all_reduce")
    _profile(cell, cluster, results, options.work)
    known = set(results.iterdir())
    cluster.run(
        cell, results, "train", *cell.model.workload_flags, "--strategy", *_STRATEGIES,
        "--schedule", "1f1b", "interleaved",
        "--microbatches", "auto", str(cell.most_microbatches),
        "--predict", "--warm-up", "1", "--no-sync-steps", "2",
        "--steps", str(options.steps), "--search-seconds", "60",
    )  # fmt: skip
    return strategies_of(set(results.iterdir()) - known)


def train_in_turn(cell: Cell, cluster: Cluster, found: Measured, options: Options) -> Measured:
    """Train the successful runs' engines in turn; returns `found` with their steps."""
    runs = {name: Path(path) for name, path in found.runs.items()}
    twice = same_as_searched(runs)
    ok = {
        name: path
        for name, path in runs.items()
        if read_header(path).status == "ok" and name not in twice
    }
    stolen_before_s, before_s = processor_seconds()
    steps = cluster.steps_in_turn(cell, ok.values(), options.seconds)
    stolen_s, all_s = processor_seconds()
    measured = {name: steps[path.name] for name, path in ok.items()}
    measured |= {name: measured["searched"] for name in twice if "searched" in measured}
    return msgspec.structs.replace(
        found,
        steps_s=measured,
        stolen_share=(stolen_s - stolen_before_s) / (all_s - before_s),
    )


def train_in_double(cell: Cell, cluster: Cluster, found: Measured, names: list[str]) -> Measured:
    """Train these strategies and one device in float64; returns `found` with differences."""
    paths = {name: Path(found.runs[name]) for name in ("single", *names)}
    lines = cluster.lines_of(cell, "benchmarks.searched_double", *map(str, paths.values()))
    differences = ("loss_difference", "gradient_difference")
    worst = {line["run"]: largest(line[name] for name in differences) for line in lines}
    return msgspec.structs.replace(found, double={name: worst[paths[name].name] for name in names})


def measure(cell: Cell, cluster: Cluster, options: Options) -> Measured:
    """Measure a cell, except for measurements that an earlier call has kept."""
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


def _profile(cell: Cell, cluster: Cluster, results: Path, work: Path) -> None:
    """Profile a model unless another cell has: profiles hold for a kind of device."""
    for path in work.glob(f"profile-*{cell.model.name}*.json"):
        shutil.copy(path, results)
    flags = ("--min-samples", "6", "--rounds", "6", "--time-budget-s", "0.2", "--warm-up", "1")
    cluster.run(cell, results, "profile", *cell.model.workload_flags, *flags)
    for path in results.glob(f"profile-*{cell.model.name}*.json"):
        shutil.copy(path, work)


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
    if not done:
        raise SystemExit(
            f"no cell of {', '.join(names)} is measured in {options.work}: measure one"
        )
    print(json.dumps(judge_all(done)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

"""Hold predictions of sharded data parallel to measured steps and memory.

    python benchmarks/sharded.py --work WORK --json        as root

A GPT trains by ddp, on the executor, with nothing sharded, then optimizer state, gradients and
parameters too: on three virtual nodes, or, with `--two-each`, on two with two ranks each and slow
links, where each state is sharded over all ranks and within nodes. Links and operators are measured
first. The ratio is that of the predicted and the measured step: the engines of the runs train in
turn in the same processes (searched_steps.py), and the interval is that of the rounds. Memory is
compared by how far a rank's peak is below that of the run without sharding, because a process has
memory that no plan changes. These runs return freed memory to the system: what malloc keeps for
later is no plan's.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from comparison import compare
from searched import Cluster
from searched_cells import Cell, Model, Place

from harness.domain.shard_state import SHARD_STATES, ShardState, shards_in_nodes
from harness.measure.derive.prediction import PredictedRun, predicted_run, read_prediction
from harness.measure.store import read_header, read_run

# So that links and operators are measured within minutes.
_LINKS = ("--transport", "torch", "--operations", "all_reduce")
# glibc gives each tensor memory of its own, and returns it.
_RETURNS_MEMORY = ("env", "MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_TRIM_THRESHOLD_=131072")
_PROFILE = ("--min-samples", "6", "--rounds", "6", "--time-budget-s", "0.2", "--warm-up", "1")


def _gpt(batch: int, **sizes: int) -> Model:
    words = [w for name, n in sizes.items() for w in (f"--{name.replace('_', '-')}", str(n))]
    return Model(name="gpt2", batch=batch, flags=(*words, "--optimizer", "adamw"))


_CELL = Cell(
    model=_gpt(12, width=384, n_layers=6, n_heads=6, sequence_length=64, vocabulary_size=4096),
    place=Place(cpu=(0.3, 0.3, 0.3), bandwidth="1gbit"),
)
_TWO_EACH = Cell(
    model=_gpt(16, width=240, n_layers=4, n_heads=4, sequence_length=64, vocabulary_size=1000),
    place=Place(cpu=(0.9, 0.9), bandwidth="100mbit", n_each=2),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    work: Path = Path("/tmp/sharded")
    """Directory of all measurements; a second call resumes."""
    steps: int = 4
    """Steps of a run."""
    seconds: float = 60.0
    """Time for rounds of the runs in turn."""
    two_each: bool = False
    """Train on two nodes with two ranks each, at 100 Mbit/s."""
    json: bool = False
    """Print one JSON object per comparison."""

    @property
    def cell(self) -> Cell:
        return _TWO_EACH if self.two_each else _CELL

    @property
    def states(self) -> tuple[ShardState, ...]:
        return tuple(s for s in SHARD_STATES if self.two_each or not shards_in_nodes(s))


def train(cluster: Cluster, options: Options) -> dict[ShardState, Path]:
    """Train with each state whose run is missing; returns the directories of the runs."""
    cell = options.cell
    if not (options.work / "profile-gpt2.json").exists():
        cluster.run(cell, options.work, "links", *_LINKS)
        cluster.run(cell, options.work, "profile", *cell.model.workload_flags, *_PROFILE)
    for state in options.states:
        if state not in finished(options.work):
            cluster.start(
                cell, *_RETURNS_MEMORY, "./entry.sh", "train", "--results", str(options.work),
                *cell.model.workload_flags, "--strategy", "ddp", "--engine", "executor",
                "--shard-state", state, "--predict", "--warm-up", "1", "--no-sync-steps", "0",
                "--steps", str(options.steps),
            )  # fmt: skip
    return finished(options.work)


def finished(results: Path) -> dict[ShardState, Path]:
    """The last successful run with each state."""
    headers = [(read_header(path.parent), path.parent) for path in results.glob("*/run.json")]
    return {
        header.config["shard_state"]: path
        for header, path in sorted(headers, key=lambda item: item[1].name)
        if header.workload == "train" and header.status == "ok"
    }


def read(path: Path) -> PredictedRun:
    """A run with its prediction."""
    prediction = read_prediction(path)
    assert prediction is not None, "every run is told to predict"
    return predicted_run(read_run(path, read_header(path))[0], prediction)


def peak_bytes(run: PredictedRun) -> tuple[float, float]:
    """Predicted and measured peak, the median over ranks, because rank 0 plans too."""
    predicted = median(one.predicted_bytes or 0 for one in run.memory)
    return float(predicted), median(one.measured_bytes["rss"] for one in run.memory)


def main(options: Options) -> int:
    options.work.mkdir(parents=True, exist_ok=True)
    with Cluster("sharded") as cluster:
        cluster.build(options.cell)
        paths = train(cluster, options)
        steps = cluster.steps_in_turn(options.cell, paths.values(), options.seconds)
    whole = peak_bytes(read(paths["none"]))
    place = options.cell.place
    where = f"{len(place.cpu)} virtual nodes of {place.cpu[0]} cores at {place.bandwidth}"
    where += f", {place.n_each} ranks each" if place.n_each > 1 else ""
    kind = "ddp" if place.n_each == 1 else f"ddp of {place.n_each} ranks a node"
    for state in options.states:
        path = paths[state]
        run, own_s = read(path), steps[path.name]
        found = compare(
            f"{kind}, sharded {state}: predicted over measured step",
            [run.predicted_s] * len(own_s), own_s, place=where,
        )  # fmt: skip
        found |= saved_bytes(whole, peak_bytes(run)) | {
            "step_s": median(own_s),
            "load": os.getloadavg()[0],
        }
        print(json.dumps(found) if options.json else text(found), flush=True)
    return 0


def saved_bytes(whole: tuple[float, float], peak: tuple[float, float]) -> dict[str, float]:
    """By how much the peak is below that without sharding, predicted and measured."""
    return {
        "predicted_saved_bytes": whole[0] - peak[0],
        "measured_saved_bytes": whole[1] - peak[1],
    }


def text(found: dict[str, Any]) -> str:
    mib = [found[f"{how}_saved_bytes"] / 2**20 for how in ("predicted", "measured")]
    return (
        f"{found['name']} {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f}), saves "
        f"{mib[1]:.0f} MiB, predicted {mib[0]:.0f}"
    )


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

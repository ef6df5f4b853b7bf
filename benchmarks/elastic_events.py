"""Measure what elastic training does at events, on a virtual cluster of five nodes; as root.

    python benchmarks/elastic_events.py --json >>benchmarks/figures/elastic_events.jsonl
    python benchmarks/elastic_events.py --cases slowed --minutes 10

change_1gbit   a pipeline of 50 MB of weights (and as much momentum) moves every layer to the next
               rank, over and over: seconds standing still over their bound, 1.5 times the bytes of
               the busiest interface at 1 Gbit/s, plus 0.5 s; at most 1
slowed         a node gets a third of its CPU quota while training (--drift): the step after the
               change over that of the plan searched for the slowed cluster; at most 1.1. Also the
               steps until then
undisturbed    changes of strategy (--drift) in --minutes of training without any event; 0
killed         a rank's process is killed (--survive): steps and seconds that are lost, and the
               largest relative difference of a later loss from training on one device; below 1e-3
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from comparison import compare, machine, provenance
from faults_cluster import ROOT, Cluster, end

from harness.measure.derive.changes import change_rows
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import step_times
from harness.measure.store import Run, find_runs, read_run
from harness.plan import builders
from harness.workloads.planning.inputs import capture_graph
from harness.workloads.train.config import TrainCase
from harness.workloads.train.plan import search_config_of

N_NODES = 5
SLOW_NODE = 3
LINK_BYTES_PER_S = 125e6
CPU = 0.36
_STEP = b'"kind":"step"'
# Steps of a median.
N_MEDIAN = 30


@dataclass(frozen=True, kw_only=True)
class Options:
    cases: tuple[str, ...] = ("change_1gbit", "slowed", "undisturbed", "killed")
    """Which to measure."""
    minutes: float = 10.0
    """Length of the undisturbed training."""
    work: Path | None = None
    """Keeps all results in this directory. Default: a temporary one."""
    json: bool = False
    """Print one JSON object a case."""


class Bench:
    """Trainings on one virtual cluster."""

    def __init__(self, cluster: Cluster, work: Path) -> None:
        self.cluster, self.work = cluster, work

    @contextmanager
    def training(self, results: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """A training that runs meanwhile."""
        results.mkdir(parents=True, exist_ok=True)
        flags = ["train", "--results", str(results), "--no-sync-steps", "0", *words]
        process = self.cluster.start(flags, results / "log.txt", {})
        try:
            yield process
        finally:
            end(process)

    def train(self, results: Path, *words: str) -> list[Run]:
        """Train to the end; the training runs, in order."""
        with self.training(results, *words) as process:
            process.wait()
        return training_runs(results)


def training_runs(results: Path) -> list[Run]:
    """Finished trainings of a results directory, in order."""
    found, _ = find_runs(results)
    return [read_run(path, header)[0] for path, header in found if header.workload == "train"]


class Progress:
    """The newest training of a results directory that has begun since this was made."""

    def __init__(self, results: Path) -> None:
        self._results = results
        self._before = set(results.glob("*-train-*"))

    def directory(self) -> Path | None:
        new = set(self._results.glob("*-train-*")) - self._before
        return max(new, default=None)

    def n_steps(self) -> int:
        """Steps that its rank 0 has recorded; 0 before."""
        directory = self.directory()
        records = directory and directory / "rank0.jsonl"
        return records.read_bytes().count(_STEP) if records and records.exists() else 0

    def has(self, pattern: str) -> bool:
        """Whether the training has written such a file."""
        directory = self.directory()
        return directory is not None and any(directory.glob(pattern))


def wait_for(
    process: subprocess.Popen[bytes], is_there: Callable[[], bool], what: str, timeout_s: float
) -> None:
    """Wait until something is there.

    Raises:
        RuntimeError: the training has ended before, or the time is over.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_there():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"no {what}: the training ended or took too long")
        time.sleep(0.05)


def fact(name: str, **values: Any) -> dict[str, Any]:
    """A finding that is no ratio."""
    return {"name": name, **values, **provenance()}


# Cases


def rotated_pipelines(directory: Path, case: TrainCase) -> list[Path]:
    """Two pipelines of five stages; the second has each stage on the next rank."""
    graph = capture_graph(search_config_of(case))
    names = [op.name for op in graph.operators if op.kind != "input"]
    bounds = [round(k * len(names) / N_NODES) for k in range(N_NODES + 1)]
    stages = [names[a:b] for a, b in pairwise(bounds)]
    paths = []
    for shift in (0, 1):
        devices = [[(k + shift) % N_NODES] for k in range(N_NODES)]
        plan = builders.pipeline(graph, case.batch, stages, devices, n_microbatches=5)
        paths.append(directory / f"rotated{shift}.json")
        paths[-1].write_bytes(plan.to_json())
    return paths


def busiest_bytes(pairs: dict[tuple[int, int], int]) -> int:
    """The most bytes that one interface sends or receives."""
    sent, received = [0] * N_NODES, [0] * N_NODES
    for (source, target), n in pairs.items():
        sent[source] += n
        received[target] += n
    return max(*sent, *received)


def change_1gbit(bench: Bench, options: Options) -> list[dict[str, Any]]:
    case = TrainCase(
        model="benchmarks.searched_models:wide", batch=40, image_size=16, n_classes=10,
        engine="executor", n_ranks=N_NODES,
    )  # fmt: skip
    results = bench.work / "change"
    results.mkdir(parents=True, exist_ok=True)
    first, second = rotated_pipelines(results, case)
    steps = range(5, 50, 5)
    plans = [second if k % 2 == 0 else first for k in range(len(steps))]
    changes = [f"{step}:{plan}" for step, plan in zip(steps, plans, strict=True)]
    (run,) = bench.train(
        results, "--model", case.model, "--image-size", "16", "--n-classes", "10",
        "--batch-size", "40", "--strategy", str(first), "--steps", "50", "--change", *changes,
    )  # fmt: skip
    rows = change_rows(run)
    bounds = [1.5 * busiest_bytes(row.moved_bytes) / LINK_BYTES_PER_S + 0.5 for row in rows]
    found = compare("change_1gbit", [row.still_s for row in rows], bounds, place=machine())
    still_s = [round(row.still_s, 3) for row in rows]
    return [{**found, "still_s": still_s, "moved_bytes": sum(rows[0].moved_bytes.values())}]


DEEP = (
    "--model", "benchmarks.searched_models:deep", "--image-size", "16", "--n-classes", "10",
    "--batch-size", "60",
)  # fmt: skip


def after(run: Run, step: int) -> list[float]:
    """Steps from one on, without the first three."""
    return [duration_s for at, duration_s in step_times(run).items() if at >= step + 3]


def slowed(bench: Bench, options: Options) -> list[dict[str, Any]]:
    results, slow_from = bench.work / "deep", 100
    progress = Progress(results)
    searched = [*DEEP, "--strategy", "searched", "--search-seconds", "30"]  # as beside training
    words = [*searched, "--drift", "--steps", "100000"]
    with bench.training(results, *words) as process:
        wait_for(process, lambda: progress.n_steps() >= slow_from, "steps", 1800)
        bench.cluster.fault(SLOW_NODE, "slow")
        slowed_at, start_s = progress.n_steps(), time.monotonic()
        try:
            wait_for(process, lambda: progress.has("strategy-*.json"), "change", 900)
            change_s = time.monotonic() - start_s
            until = progress.n_steps() + N_MEDIAN + 10
            wait_for(process, lambda: progress.n_steps() >= until, "steps", 600)
            end(process)
            run = training_runs(results)[-1]
            words = [*searched, "--steps", str(N_MEDIAN + 10)]
            wanted_s = after(bench.train(results, *words)[-1], 0)[:N_MEDIAN]
        finally:
            bench.cluster.fault(SLOW_NODE, "heal")
    (row, *_) = change_rows(run)
    times = step_times(run)
    slow_s = [times[at] for at in range(slowed_at + 10, row.step) if at in times]
    now_s = after(run, row.step)[:N_MEDIAN]
    n = min(len(now_s), len(wanted_s))
    return [
        {
            **compare("slowed", now_s[:n], wanted_s[:n], place=machine()),
            "steps_until": row.step - slowed_at,
            "seconds_until": round(change_s, 1),
            "step_before_s": round(median(times[at] for at in range(10, slow_from)), 4),
            "step_slowed_s": round(median(slow_s), 4) if slow_s else None,
            "step_after_s": round(median(now_s), 4),
            "still_s": round(row.still_s, 3),
            "predicted_s": [row.predicted_before_s, row.predicted_after_s],
            "speeds": [one.value for one in samples_of(run.ranks[0], "drift_speed")],
        }
    ]


def undisturbed(bench: Bench, options: Options) -> list[dict[str, Any]]:
    results = bench.work / "deep"
    progress = Progress(results)
    words = [*DEEP, "--strategy", "searched", "--drift", "--steps", "1000000"]
    with bench.training(results, *words) as process:
        wait_for(process, lambda: progress.n_steps() > 0, "step", 1800)
        deadline_s = time.monotonic() + 60 * options.minutes
        while process.poll() is None and time.monotonic() < deadline_s:
            time.sleep(1)
        n_trained = progress.n_steps()
    run = training_runs(results)[-1]
    n_searches = len(samples_of(run.ranks[0], "drift_speed")) // N_NODES
    return [
        fact(
            "undisturbed", minutes=options.minutes, n_steps=n_trained, n_searches=n_searches,
            n_changes=len(change_rows(run)),
        )
    ]  # fmt: skip


def killed(bench: Bench, options: Options) -> list[dict[str, Any]]:
    results, n_all, killed_at = bench.work / "deep", 150, 60
    progress = Progress(results)
    words = [*DEEP, "--strategy", "searched", "--survive", "--save-every", "10"]
    with bench.training(results, *words, "--steps", str(n_all)) as process:
        wait_for(process, lambda: progress.n_steps() >= killed_at, "step", 1800)
        then = Progress(results)
        os.kill(bench.cluster.training_process(SLOW_NODE), signal.SIGKILL)
        start_s = time.monotonic()
        wait_for(process, lambda: then.n_steps() > 0, "step after the death", 600)
        lost_s = time.monotonic() - start_s
        process.wait()
    lost, left = training_runs(results)[-2:]
    (one,) = on_one_device(bench.work / "one", n_all)
    first = int(left.header.config["first_step"])
    return [
        fact(
            "killed", seconds_lost=round(lost_s, 2),
            steps_lost=max(step_times(lost), default=-1) + 1 - first,
            state=Path(left.header.config["load_state"] or "none").name,
            was_planned=Path(left.header.config["strategy"]).name.startswith("without-"),
            status=left.header.status,
            step_before_s=round(median(step_times(lost).values()), 4),
            step_after_s=round(median(step_times(left).values()), 4),
            largest_loss_difference=largest_difference(left, one),
        )
    ]  # fmt: skip


def on_one_device(results: Path, n_all: int) -> list[Run]:
    """The same training on this machine, by one device."""
    words = ["./entry.sh", "train", "--results", str(results), *DEEP, "--strategy", "single"]
    words += ["--engine", "executor", "--steps", str(n_all), "--no-sync-steps", "0"]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    return training_runs(results)


def largest_difference(run: Run, other: Run) -> float:
    """The largest relative difference of losses of equal steps."""
    losses = [{one.step: one.value for one in samples_of(r.ranks[0], "loss")} for r in (run, other)]
    return max(abs(value / losses[1][step] - 1) for step, value in losses[0].items())


CASES = {
    "change_1gbit": change_1gbit,
    "slowed": slowed,
    "undisturbed": undisturbed,
    "killed": killed,
}


def main(options: Options) -> int:
    """Measure the cases on a new cluster, and remove it."""
    with tempfile.TemporaryDirectory(prefix="elastic-events-") as temporary:
        work = (options.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        cluster = Cluster("elastic", work, N_NODES)
        cluster.up("--bandwidth", "1gbit", "--cpu", str(CPU))
        try:
            for name in options.cases:
                for found in CASES[name](Bench(cluster, work), options):
                    print(json.dumps(found) if options.json else text(found), flush=True)
        finally:
            cluster.down()
    return 0


def text(found: dict[str, Any]) -> str:
    """One finding in one line."""
    left = {k: v for k, v in found.items() if k not in ("name", "command", "machine", "commit")}
    return f"{found['name']}: " + ", ".join(f"{key} {value}" for key, value in left.items())


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

"""Measure time and memory for the figures and the report of many runs.

    python benchmarks/plot_scale.py --json
    python benchmarks/plot_scale.py --runs 50 --profile plot.prof

Writes runs like the committed samples (half by ddp, half by a planned pipeline, in cases of ten
repeats; per rank and step a `step` span and spans of data, forward, backward, communication and
optimizer), draws them by `python -m harness.plot` in a separate process, and prints its wall time,
processor time, peak of memory including workers, and the time of each part.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import tyro
from comparison import provenance

REPEATS = 10
SAMPLES = Path(__file__).parents[1] / "results"
OF_STRATEGY = {"ddp": "sample-train-ddp-r0", "pipeline": "sample-train-pipeline-r0"}
PLAN_FILES = ("strategy.json", "prediction.json")


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: int = 1000
    """Number of runs."""
    steps: int = 200
    """Steps per run."""
    ranks: int = 5
    """Ranks per run, at most five."""
    seed: int = 0
    """Seed of the durations."""
    directory: str = ""
    """Directory of the runs; empty: a temporary directory."""
    profile: str = ""
    """File for cProfile's statistics."""
    json: bool = False
    """Print one object."""


def spans_of_step(strategy: str, rank: int, s: int, at: float, part: list[float]) -> list[str]:
    """Record lines of one step of one rank; `part` has the seconds of its five phases."""
    of_pass, transfer = "", ',"name":"bucket0"'
    if strategy == "pipeline":
        of_pass = f',"stage":{rank},"microbatch":0'
        transfer = ',"microbatch":0,"pass":"backward","operator":"tables.2"'
        transfer += f',"peer":{(rank + 1) % 5},"is_wait":true'
    lines, begin = [], at
    kinds = (
        *(("data", ""), ("forward", of_pass), ("communication", transfer)),
        *(("backward", of_pass), ("optimizer", "")),
    )
    for (kind, fields), length in zip(kinds, part, strict=True):
        # A bucket is all-reduced during backward, half of it hidden.
        whole = length * (1.5 if "bucket0" in fields else 1.0)
        lines.append(
            f'{{"type":"span","kind":"{kind}","start_s":{at:.9f},"duration_s":{whole:.9f}'
            f',"step":{s}{fields}}}'
        )
        at += length
    step = f'{{"type":"span","kind":"step","start_s":{begin:.9f},"duration_s":{at - begin:.9f}'
    return [f'{step},"step":{s}}}', *lines]


def write_run(root: Path, number: int, options: Options, source: random.Random) -> int:
    """Write one run; returns its number of records."""
    case, repeat = divmod(number, REPEATS)
    strategy = list(OF_STRATEGY)[case % 2]
    sample = SAMPLES / OF_STRATEGY[strategy]
    header: dict[str, Any] = json.loads((sample / "run.json").read_text())
    run_dir = root / f"run{number:05}"
    run_dir.mkdir(parents=True, exist_ok=True)
    header |= {"run_id": run_dir.name, "key": f"case{case}", "repeat": repeat}
    header["config"]["batch"] = 64 * (1 + case // 2)
    header["ranks"] = header["ranks"][: options.ranks]
    header["start_utc"] = f"2026-01-01T{number // 3600:02}:{number // 60 % 60:02}:{number % 60:02}Z"
    (run_dir / "run.json").write_text(json.dumps(header))
    if strategy == "pipeline":
        for name in PLAN_FILES:
            shutil.copy(sample / name, run_dir / name)
    n_records = 0
    pace = 1 + case / 100 + source.random() / 50
    for rank in range(options.ranks):
        at, lines = 10.0 + source.random(), []
        for s in range(options.steps):
            noise = pace * (1 + source.random() / 20)
            part = [seconds * noise for seconds in (2e-4, 3e-2, 5e-2, 6e-2, 8e-3)]
            lines += spans_of_step(strategy, rank, s, at, part)
            at += sum(part) + 1e-4
        (run_dir / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
        n_records += len(lines)
    return n_records


def watch(process: psutil.Popen) -> int:
    """Wait for a process; returns its peak of memory with workers, shared pages counted once."""
    peak_bytes = 0
    while process.poll() is None:
        try:
            every = [process, *process.children(recursive=True)]
            peak_bytes = max(peak_bytes, sum(one.memory_full_info().pss for one in every))
        except psutil.Error:  # a worker has just ended
            continue
        time.sleep(0.2)
    return peak_bytes


def draw(root: Path, options: Options) -> dict[str, Any]:
    """Draw all runs in a separate process; returns its time and memory."""
    profiled = ["-m", "cProfile", "-o", options.profile] if options.profile else []
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *profiled, "-m", "harness.plot", str(root), "--output", out]
        start_s = time.perf_counter()
        with (Path(out) / "stderr").open("w+") as errors:
            command.append("--timings")
            process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
            peak_bytes = watch(process)
            wall_s = time.perf_counter() - start_s
            errors.seek(0)
            stderr = errors.read()
        n_figures = len(list(Path(out).glob("*.png")))
    if process.wait():
        raise SystemExit(stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    stages = dict(re.findall(r"^(.+): ([0-9.]+) s$", stderr, re.MULTILINE))
    return {
        "wall_s": round(wall_s, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_bytes": peak_bytes,
        "n_figures": n_figures,
        "stages_s": {name: float(seconds) for name, seconds in stages.items()},
    }


def main(options: Options) -> None:
    """Write the runs, draw them, and print time and memory."""
    source = random.Random(options.seed)
    temporary = None if options.directory else tempfile.TemporaryDirectory()
    root = Path(options.directory or (temporary.name if temporary else ""))
    n_records = sum(write_run(root, n, options, source) for n in range(options.runs))
    load_before = os.getloadavg()[0]
    found = {"name": "plot_scale", "n_runs": options.runs, "n_records": n_records}
    found |= draw(root, options) | {"load_before": load_before, "load_after": os.getloadavg()[0]}
    found |= provenance()
    if temporary:
        temporary.cleanup()
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

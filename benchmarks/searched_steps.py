"""Time steps of several training runs in turn in the same processes; started by `searched.py`.

    mpirun -np 3 ... python -m benchmarks.searched_steps RUN_DIRECTORY ...

Runs in sequence are hard to compare on a machine whose speed drifts by 15 % within seconds. This
program therefore builds the runs' engines side by side (torch's for single and ddp, else the
executor with the run's strategy.json), and repeatedly trains a block of steps of each, in random
order. Each block begins with a step that is not timed, because in a run, too, ranks begin a step
before others have ended the previous one. Rank 0 prints `{run, steps_s}` for each run: seconds of a
step on the slowest rank, by round. Runs that take at least twice as long as the fastest are
measured only in the first rounds, which do not count towards the given time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import torch.distributed as dist
import tyro

from benchmarks.comparison import joined
from harness.domain.prediction import STRATEGY_FILE
from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.measure.store import read_header
from harness.runtime.devices.memory import keep_freed_memory
from harness.runtime.devices.sampling import clock_for
from harness.runtime.engines.engine import Share
from harness.runtime.ranks.gather import maximum_over_ranks, wait_for_all
from harness.runtime.ranks.world import World
from harness.workloads.train.config import TrainCase
from harness.workloads.train.plan import Planned
from harness.workloads.train.setup import Training, prepare

_STEPS_A_BLOCK = 2
_LEAST_ROUNDS, _FIRST_ROUNDS = 5, 3
_SLOW = 2.0


@dataclass(frozen=True, kw_only=True)
class Options:
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of training runs."""
    seconds: float = 100.0
    """Time after the first three rounds until which rounds begin; at least five rounds run."""


def read_case(run_dir: Path) -> TrainCase:
    """The case of a training run."""
    config = read_header(run_dir).config
    return msgspec.convert(config, TrainCase, dec_hook=lambda kind, value: kind(value))


def leave() -> NoReturn:
    """End the process without the interpreter's clean-up, during which a gloo thread that still
    releases a tensor aborts."""
    from mpi4py import MPI

    sys.stdout.flush()
    MPI.Finalize()
    os._exit(0)


class Stepper:
    """One run's engine on this rank; all ranks must call it in the same order."""

    def __init__(self, run_dir: Path, world: World) -> None:
        case = read_case(run_dir)
        self._recorder = Recorder(clock_for(world.device))
        planned = None
        if case.engine == "executor":
            strategy = Strategy.load(run_dir / STRATEGY_FILE)
            planned = Planned(strategy=strategy, predicted_step_s=0.0, flops=(0.0,) * world.size)
        is_single = case.strategy == "single"
        self._training: Training | None = None
        if world.is_first or not is_single:  # other ranks idle for `single`
            own = replace(world, size=1) if is_single else world
            self._training = prepare(case, own, self._recorder, planned)
            plan = self._training.plan
            self._share = Share(n_local=plan.n_fed(world.rank), n_global=plan.global_batch)
        wait_for_all(world)  # because build times differ
        self._world = world

    def block(self, n_steps: int) -> float:
        """Time steps after a barrier and an untimed step; returns the slowest rank's seconds."""
        dist.barrier()
        self._train(1)
        start_s = time.perf_counter()
        self._train(n_steps)
        seconds = (time.perf_counter() - start_s) / n_steps
        return maximum_over_ranks([seconds], self._world)[0]

    def _train(self, n_steps: int) -> None:
        training = self._training
        if training is None:
            return
        for _ in range(n_steps):
            training.engine.step(lambda: next(training.batches), self._share)
        self._recorder.discard()


def measure(steppers: list[Stepper], options: Options, world: World) -> list[list[float]]:
    """Measure all runs in turn; returns seconds of a step by run and round. All ranks call it."""
    steps: list[list[float]] = [[] for _ in steppers]
    for stepper in steppers:
        stepper.block(1)  # warms up
    order = list(range(len(steppers)))
    shuffle = random.Random(0).shuffle  # equal on every rank
    start_s, n_rounds = 0.0, 0
    while n_rounds < _LEAST_ROUNDS or _elapsed(start_s, world) < options.seconds:
        if n_rounds <= _FIRST_ROUNDS:
            start_s = time.monotonic()
        shuffle(order)
        fastest = min((statistics.median(own) for own in steps if own), default=0.0)
        for k in order:
            if n_rounds < _FIRST_ROUNDS or statistics.median(steps[k]) < _SLOW * fastest:
                steps[k].append(steppers[k].block(_STEPS_A_BLOCK))
        n_rounds += 1
    return steps


def _elapsed(start_s: float, world: World) -> float:
    return maximum_over_ranks([time.monotonic() - start_s], world)[0]


def main(options: Options) -> None:
    with joined("steps") as meeting:
        world = meeting.world
        keep_freed_memory(world.device)
        steppers = [Stepper(run_dir, world) for run_dir in options.runs]
        steps = measure(steppers, options, world)
        if world.is_first:
            for run_dir, own in zip(options.runs, steps, strict=True):
                print(json.dumps({"run": run_dir.name, "steps_s": own}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
    leave()

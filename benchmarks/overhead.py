"""Measure the overhead of recording: instrumented and bare training steps in turn.

    python benchmarks/overhead.py --model resnet18 --image-size 64 --json
    mpirun -np 2 python benchmarks/overhead.py --model lenet --batch 512

Both train the same model on the same batches in the same processes, in alternating blocks of steps.
The instrumented loop is the train workload's, with its marks, bucket hook, counters, device
readings and files; the bare one is hand-written. Each pair of blocks gives two ratios: of wall
time, and of processor time of the process with all its threads, which other programs on the machine
hardly affect. Both are the maximum over ranks.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from comparison import compare, joined, show

from harness.measure.recorder import Recorder
from harness.measure.store import RecordWriter
from harness.runtime.devices.precision import Precision
from harness.runtime.devices.sampling import clock_for, settle
from harness.runtime.devices.telemetry import watched_device
from harness.runtime.engines.optimizers import make_optimizer
from harness.runtime.ranks.gather import maximum_over_ranks
from harness.runtime.ranks.world import Context, Progress, World
from harness.workloads.train.config import TrainCase
from harness.workloads.train.setup import Training, make_task, prepare
from harness.workloads.train.workload import TrainLoop


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = "resnet18"
    """Model of the train workload."""
    image_size: int = 64
    """Side of the images; 0 means the model's default."""
    batch: int = 32
    """Samples per rank and step."""
    dtype: str = "fp32"
    """fp32, tf32, bf16 or fp16."""
    pairs: int = 400
    """Blocks of each kind. Many short ones give a narrower interval than few long ones, because a
    disturbance then affects both blocks of a pair."""
    block_s: float = 0.3
    """Approximate duration of a block, at least one step; each block has its own device reading."""
    json: bool = False
    """Print one JSON object."""


class BareLoop:
    """A hand-written training loop over the same samples."""

    def __init__(self, case: TrainCase, training: Training, world: World) -> None:
        self._task = make_task(case)
        self._task.model.to(world.device)
        self._model: Any = self._task.model
        if world.size > 1:
            device_ids = [world.device] if world.device.type == "cuda" else None
            self._model = torch.nn.parallel.DistributedDataParallel(
                self._model, device_ids=device_ids, gradient_as_bucket_view=True
            )
        self._optimizer = make_optimizer(
            self._task.model.named_parameters(), case.optimizer_options(), world.device
        )
        self._precision = Precision(case.dtype, world.device)
        self._batches = training.batches
        self._scale = world.size / case.batch
        self._device = world.device
        self.losses: list[torch.Tensor] = []

    def run(self, n_steps: int) -> None:
        for _ in range(n_steps):
            batch = next(self._batches).to(self._device)
            with self._precision.autocast():
                outputs = self._model(*batch.inputs)
                loss = self._task.sum_loss(outputs, batch.targets) * self._scale
            self._precision.scaler.scale(loss).backward()
            self._precision.scaler.step(self._optimizer)
            self._precision.scaler.update()
            self._optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())


@dataclass(frozen=True)
class Cost:
    """Time per step of a block, as the maximum over ranks."""

    wall_s: float
    cpu_s: float


def cost_of(run: Callable[[int], None], n_steps: int, world: World) -> Cost:
    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run(n_steps)
    settle(world.device)
    spent = [time.perf_counter() - wall_s, time.process_time() - cpu_s]
    return Cost(*(one / n_steps for one in maximum_over_ranks(spent, world)))


def measure(options: Options, world: World, run_dir: Path) -> list[tuple[Cost, Cost]]:
    """Run blocks in turn; returns the costs of a step, instrumented and bare, of each pair."""
    case = TrainCase(
        model=options.model,
        image_size=options.image_size,
        dtype=options.dtype,
        batch=options.batch * world.size,
        n_ranks=world.size,
        strategy="ddp",
    )
    recorder = Recorder(clock_for(world.device))
    writer = RecordWriter(run_dir, world.rank)
    context = Context(
        world=world, recorder=recorder, writer=writer, progress=Progress(is_shown=False),
        run_dir=run_dir,
    )  # fmt: skip
    training = prepare(case, world, recorder)
    bare, loop = BareLoop(case, training, world), TrainLoop(training, context, 0)

    def instrumented(n_steps: int) -> None:
        with watched_device(world.device, world.n_cores, recorder):
            loop.measure(n_steps)

    step_s = max(cost_of(run, 5, world).wall_s for run in (instrumented, bare.run))
    n_steps = max(1, round(options.block_s / step_s))
    pairs = []
    for pair in range(options.pairs + 1):
        if pair % 2:
            ours = cost_of(instrumented, n_steps, world)
            pairs.append((ours, cost_of(bare.run, n_steps, world)))
        else:
            theirs = cost_of(bare.run, n_steps, world)
            pairs.append((cost_of(instrumented, n_steps, world), theirs))
    return pairs[1:]  # the first pair warms up


def compare_costs(name: str, pairs: list[tuple[float, float]]) -> dict[str, object]:
    """The comparison; its name includes the seconds of a bare step and the added ones."""
    bare_s = statistics.median(bare for _, bare in pairs)
    added = compare("", [ours - bare + bare_s for ours, bare in pairs], [bare_s] * len(pairs))
    low_us, middle_us, high_us = (
        1e6 * bare_s * (float(str(added[key])) - 1) for key in ("low", "ratio", "high")
    )
    name += f" ({bare_s * 1e3:.4g} ms bare, {middle_us:+.0f} us, {low_us:+.0f} to {high_us:+.0f})"
    return compare(name, *zip(*pairs, strict=True))


def main(options: Options) -> None:
    with joined("overhead") as meeting, tempfile.TemporaryDirectory() as directory:
        world = meeting.world
        pairs = measure(options, world, Path(directory))
    if world.is_first:
        name = f"instrumented over bare step: {options.model} {options.dtype}, {world.size} ranks"
        comparisons = [
            compare_costs(f"{name}, wall time", [(a.wall_s, b.wall_s) for a, b in pairs]),
            compare_costs(f"{name}, CPU time", [(a.cpu_s, b.cpu_s) for a, b in pairs]),
        ]
        show(comparisons, as_json=options.json)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

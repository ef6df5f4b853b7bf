"""Compare steps of the executor with steps of stock PyTorch on the same model, in turn.

    mpirun -np 2 python benchmarks/executor.py --json      ddp, pipelines, tensor parallel
    python benchmarks/executor.py --json                   one device
    bash setup/virtual_cluster.sh run -- mpirun -np 5 --hostfile hosts/virtual.txt \\
        .venv/bin/python benchmarks/executor.py --json     five nodes

| group | against | bar |
|---|---|---|
| ddp | DistributedDataParallel, behind our marks and bare | 0.97 |
| pipeline | torch.distributed.pipelining: same stages, schedule, microbatches | 1.0 |
| tensor | DTensor's parallelize_module by columns, then rows | 0.97; GPT blocks 1.0 |
| keys | attention that gathers its input, or keys and values, over a ring; 4 ranks | none |
| sharded | FSDP2's fully_shard, DeepSpeed's ZeRO-3: parameters, gradients, state | 0.95 |
| single | a plain loop | 0.98 |

Both sides start from the same weights, get the same batches in the same processes on one thread
each, and run blocks of steps in turn. Both are rebuilt several times, because memory addresses
affect their speed. The ratio is their time over ours, of a block on the slowest rank. Before
timing, their losses must agree for a few steps. `cpu_ratio` compares CPU seconds of all ranks,
which other programs on the machine disturb less. `memory_ratio`, for sharded state, compares by how
much a rank's process grows at its peak.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import tyro
from comparison import compare, joined, show
from executor_cases import Case, cases
from executor_sharded import peaks
from executor_sides import Side

from harness.errors import VerificationError
from harness.measure.statistics import paired_ratio
from harness.runtime.devices.memory import keep_freed_memory
from harness.runtime.devices.precision import set_tensor_cores
from harness.runtime.devices.sampling import settle
from harness.runtime.ranks.gather import barrier, gather_numbers, maximum_over_ranks
from harness.runtime.ranks.world import World

_N_CHECKED = 3
# The order of sums changes a loss near 2 by some 1e-7, and a hundred times that one step later.
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Options:
    only: str = ""
    """Run only cases whose names contain this."""
    pairs: int = 40
    """Blocks of steps of each side."""
    builds: int = 5
    """Number of times that both sides are built, because memory addresses affect their speed."""
    block_s: float = 0.25
    """Approximate duration of a block."""
    quick: bool = False
    """Smoke test: a few cases, two short blocks each."""
    json: bool = False
    """Print one JSON object per comparison."""


@dataclass
class Blocks:
    """Times of one side's blocks."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def timed(side: Side, n_steps: int, world: World) -> tuple[float, float]:
    """Time a block of steps; returns wall seconds of the slowest rank and CPU seconds of all."""
    barrier()
    settle(world.device)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(n_steps):
        side.step()
    settle(world.device)
    wall_s = time.perf_counter() - start_s
    cpu_s = sum(gather_numbers(time.process_time() - start_cpu_s, world))
    side.rest()
    return maximum_over_ranks([wall_s], world)[0], cpu_s


def loss_difference(sides: list[Side], world: World) -> float:
    """Train each side a few steps; returns the largest difference of losses, relative to ours.

    Raises:
        VerificationError: the losses differ.
    """
    curves = []
    for side in sides:
        parts = [float(side.step()) for _ in range(_N_CHECKED)]
        curves.append([sum(gather_numbers(part, world)) for part in parts])
    worst = max(
        abs(a - b) / abs(a) for curve in curves[1:] for a, b in zip(curves[0], curve, strict=True)
    )
    if not worst < _TOLERANCE:
        raise VerificationError(
            f"losses differ by {worst:.1e} of theirs, more than {_TOLERANCE:g}: "
            f"{dict(zip((side.name for side in sides), curves, strict=True))}"
        )
    return worst


def take_turns(
    sides: list[Side],
    found: dict[str, Blocks],
    n_pairs: int,
    n_steps: int,
    world: World,
    randomness: random.Random,
) -> None:
    """Time blocks of the sides in turn, in the same order on all ranks."""
    order = list(sides)
    for pair in range(n_pairs + 1):
        randomness.shuffle(order)
        for side in order:
            wall_s, cpu_s = timed(side, n_steps, world)
            if pair:  # the first pair warms up
                found[side.name].wall_s.append(wall_s / n_steps)
                found[side.name].cpu_s.append(cpu_s / n_steps)


def measure(case: Case, options: Options, world: World) -> list[dict[str, object]]:
    """Compare the executor with all other sides."""
    n_builds = 1 if options.quick else options.builds
    n_pairs = 2 if options.quick else math.ceil(options.pairs / n_builds)
    found: defaultdict[str, Blocks] = defaultdict(Blocks)
    name, difference = "", 0.0
    for build in range(n_builds):
        sides = case.sides()
        name = sides[0].name
        difference = max(difference, loss_difference(sides, world))
        step_s = min(timed(side, 2, world)[0] for side in sides) / 2
        n_steps = max(1, round((0.0 if options.quick else options.block_s) / step_s))
        take_turns(sides, found, n_pairs, n_steps, world, random.Random(build))
        del sides  # before the next ones are built
        gc.collect()  # because both have reference cycles
    ours = found.pop(name)
    memory = peaks(case.makers(), world) if case.makers is not None else {}
    return [
        _compared(f"{case.name}: {other} over {name}", case.bar, theirs, ours)
        | {"n_builds": n_builds, "loss_difference": difference, "n_ranks": world.size}
        | _memory_ratio(memory, name, other)
        for other, theirs in found.items()
    ]


def _compared(name: str, bar: float, theirs: Blocks, ours: Blocks) -> dict[str, object]:
    cpu = paired_ratio(theirs.cpu_s, ours.cpu_s)
    return {
        **compare(name, theirs.wall_s, ours.wall_s),
        "bar": bar,
        "cpu_ratio": cpu.median,
        "cpu_low": cpu.low,
        "cpu_high": cpu.high,
        "ours_s": statistics.median(ours.wall_s),
        "load": os.getloadavg()[0],
    }


def _memory_ratio(memory: dict[str, float], name: str, other: str) -> dict[str, object]:
    if not memory:
        return {}
    return {"memory_ratio": memory[other] / memory[name], "ours_bytes": memory[name]}


def table_line(found: dict[str, Any]) -> str:
    is_met = "met" if found["ratio"] >= found["bar"] else "MISSED"
    memory = f"  memory {found['memory_ratio']:.3f}" if "memory_ratio" in found else ""
    return (
        f"{found['name']:62s} {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})  "
        f"bar {found['bar']:.2f} {is_met:6s}  "
        f"cpu {found['cpu_ratio']:.3f} ({found['cpu_low']:.3f} to {found['cpu_high']:.3f})  "
        f"ours {found['ours_s'] * 1e3:.1f} ms  losses {found['loss_difference']:.0e}{memory}"
    )


def is_wanted(case: Case, options: Options) -> bool:
    quick = ("ddp lenet", "pipeline mlp 1f1b", "tensor mlp of 1", "single resnet18")
    return options.only in case.name and (not options.quick or case.name in quick)


def main(options: Options) -> None:
    with joined("executor", n_threads=1) as meeting:
        world = meeting.world
        keep_freed_memory(world.device)
        set_tensor_cores("fp32", world.device)
        for case in cases(world):
            if not is_wanted(case, options):
                continue
            found = measure(case, options, world)
            if world.is_first and options.json:
                show(found, as_json=True)
            elif world.is_first:
                print(*map(table_line, found), sep="\n", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

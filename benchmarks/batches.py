"""Compare steps of several batches on a GPU with what two of the batches predict.

    python benchmarks/batches.py --json

Times forward and backward of each batch, and sums its kernels. A profile measures the largest batch
and an eighth of it; from these two, by their calibration, the steps of the others are predicted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import tyro
from comparison import provenance
from torch.profiler import ProfilerActivity, profile

from harness.domain.profile import Measurement, Profile, WholeStep
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.devices.precision import Precision
from harness.workloads.train.config import TrainCase
from harness.workloads.train.setup import make_task

_BATCHES = {
    "resnet50": (128, 96, 64, 48, 32, 24, 16, 8),
    "resnet18": (256, 128, 64, 32, 16),
    "gpt2": (8, 6, 4, 3, 2, 1),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    models: tuple[str, ...] = tuple(_BATCHES)
    """Any of them."""
    dtype: str = "bf16"
    """fp32, tf32, bf16 or fp16."""
    json: bool = False
    """Print one JSON object for each batch."""


def time_of(step: Callable[[], None], n_steps: int = 15) -> float:
    """Median over three blocks of the seconds of a step."""
    for _ in range(5):
        step()
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(n_steps):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start_s) / n_steps)
    return statistics.median(found)


def kernels_s(step: Callable[[], None]) -> float:
    """Sum of the seconds of a step's kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        step()
        torch.cuda.synchronize()
    return sum(event.device_time_total for event in traced.events()) / 1e6


def measure(model: str, dtype: str) -> dict[int, WholeStep]:
    """The step and the sum of kernels of each batch."""
    device, batches = torch.device("cuda"), _BATCHES[model]
    case = TrainCase(model=model, dtype=dtype, batch=batches[0], n_ranks=1, strategy="single")
    task, precision = make_task(case), Precision(dtype, device)
    task.model.to(device)
    found = {}
    for n in batches:
        data = draw_batch(task, n, 0, device)

        def step(data=data, n=n) -> None:
            task.model.zero_grad(set_to_none=True)
            with precision.autocast():
                loss = task.sum_loss(task.model(*data.inputs), data.targets) / n
            loss.backward()

        step_s = time_of(step)
        found[n] = WholeStep(
            device_kind="gpu", batch=n, dtype=dtype, step_s=step_s, operators_s=kernels_s(step),
            is_queued=True,
        )  # fmt: skip
    return found


def predicted_s(steps: dict[int, WholeStep]) -> dict[int, float]:
    """The steps of the other batches, from the largest and an eighth of it."""
    known = [steps[max(steps)], steps[max(steps) // 8]]
    point = Measurement(
        device_kind="gpu", operator="all", shape={}, dtype=known[0].dtype, forward_s=0.0,
        backward_s=0.0,
    )  # fmt: skip
    profile = Profile(model="all", measurements=[point], whole_steps=known)
    found = {}
    for n, step in steps.items():
        factor, host_s = profile.calibration_of("", "gpu", n)
        if step not in known:
            found[n] = max(factor * step.operators_s, host_s)
    return found


def main(options: Options) -> None:
    for model in options.models:
        steps = measure(model, options.dtype)
        found = predicted_s(steps)
        for n, step in steps.items():
            row = {
                "name": f"{model} {options.dtype} batch {n}: forward and backward",
                "value": step.step_s * 1e3,
                "unit": "ms",
                "kernels_ms": step.operators_s * 1e3,
                **provenance(),
            }
            if n in found:
                row |= {"predicted": found[n] * 1e3, "error": found[n] / step.step_s - 1}
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                told = f", predicted {row['error']:+.0%}" if n in found else ""
                print(f"{row['name']}: {row['value']:.1f} ms{told}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

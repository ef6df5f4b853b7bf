"""Compare the samples that training takes to a loss at several batches with those that the gradient
noise scale predicts.

    python benchmarks/noise_scale.py --json

At each batch every learning rate of a ladder trains with several seeds; the rate with the fewest
samples (median over seeds) counts. The noise scale is measured where the smallest batch has reached
the loss, as `train --noise-steps` does.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import dataclass, replace

import torch
import tyro
from comparison import provenance

from harness.domain.record import Sample
from harness.measure.derive.noise import NoiseScale, noise_scale, samples_needed
from harness.runtime.data import open_data
from harness.runtime.data.batch import Batch
from harness.runtime.models.task import Task
from harness.workloads.train.config import TrainCase
from harness.workloads.train.files import data_options
from harness.workloads.train.noise import DrawnSamples
from harness.workloads.train.setup import make_task

_MOST_EPOCHS = 40
_NOISE_BATCH, _NOISE_STEPS = 64, 256


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = "lenet"
    """A model for the images of digits."""
    batches: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    """Samples of a step, the smallest first."""
    rates: tuple[float, ...] = (0.03, 0.06, 0.12, 0.24, 0.48, 0.96)
    """Learning rates of SGD without momentum, ascending."""
    loss: float = 0.3
    """Mean loss of all samples at which a training ends."""
    seeds: int = 3
    """Trainings of each batch and rate."""
    json: bool = False
    """Print one JSON object for each batch."""


def mean_loss(task: Task, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch."""
    loss: torch.Tensor = task.sum_loss(task.model(*batch.inputs), batch.targets)
    return loss / len(batch.targets)


def samples_to_loss(
    task: Task, everything: Batch, batch: int, rate: float, loss: float, most: float
) -> float:
    """Samples until the mean loss is reached; infinite if that takes more than `most`."""
    n, done, due = len(everything.targets), 0, 500.0
    optimizer = torch.optim.SGD(task.model.parameters(), lr=rate)
    while done < most:
        drawn = torch.randint(n, (batch,))
        optimizer.zero_grad()
        mean_loss(task, everything.each(lambda column, drawn=drawn: column[drawn])).backward()
        optimizer.step()
        done += batch
        if done >= due:
            with torch.no_grad():
                found = float(mean_loss(task, everything))
            if found < loss or not math.isfinite(found):
                return done if found < loss else math.inf
            due = max(done + batch, 1.05 * due)
    return math.inf


def squares(task: Task, everything: Batch) -> list[Sample]:
    """The squared norms of gradients that `train --noise-steps` records."""
    plan = DrawnSamples(n_samples=len(everything.targets), shares=(_NOISE_BATCH,))
    found = []
    for step in range(_NOISE_STEPS):
        rows = torch.tensor(plan.global_indices(step))
        loss = mean_loss(task, everything.each(lambda column, rows=rows: column[rows]))
        gradients = torch.autograd.grad(loss, list(task.model.parameters()))
        square = float(sum(gradient.square().sum() for gradient in gradients))
        labels = {"n_distinct": plan.n_distinct(step)}
        found.append(Sample(metric="gradient_square_norm", value=square, labels=labels))
    return found


def main(options: Options) -> None:
    """Print samples, measured and predicted, relative to the smallest batch."""
    case = TrainCase(model=options.model, data="digits", strategy="single")
    task = make_task(case)
    data = open_data("digits", data_options(case), task, max(options.batches))
    everything: Batch = data.__getitems__(list(range(len(data))))
    first: float | None = None
    noise: NoiseScale | None = None
    for batch in options.batches:
        found: dict[float, float] = {}
        for rate in options.rates:
            each = []
            most = min(_MOST_EPOCHS * len(data), 2 * min(found.values(), default=math.inf))
            for seed in range(options.seeds):
                task = make_task(replace(case, seed=seed))
                torch.manual_seed(seed)
                each.append(samples_to_loss(task, everything, batch, rate, options.loss, most))
            found[rate] = statistics.median(each)
            if noise is None and math.isfinite(each[-1]):
                noise = noise_scale(squares(task, everything))
            if math.isinf(found[rate]) and math.isfinite(min(found.values())):
                break  # higher rates are worse
        rate = min(found, key=found.__getitem__)
        if noise is None or math.isinf(found[rate]):
            sys.exit(f"batch {batch} never reaches a loss of {options.loss:g}: raise --loss")
        first = first or found[rate]
        measured = found[rate] / first
        at_least, predicted, at_most = (
            samples_needed(batch, scale) / samples_needed(options.batches[0], scale)
            for scale in (noise.high, noise.n_samples, noise.low)
        )
        row = {
            "name": f"{options.model}: samples predicted by the noise scale / taken, batch {batch}",
            "learning_rate": rate,
            "n_samples": found[rate],
            "noise_scale": noise.n_samples,
            "measured": measured,
            "predicted": predicted,
            "ratio": predicted / measured,
            "low": at_least / measured,
            "high": at_most / measured,
            "n_pairs": options.seeds,
        }
        if options.json:
            print(json.dumps({**row, **provenance()}), flush=True)
        else:
            print(
                f"batch {batch:4d}: {found[rate]:.0f} samples at rate {rate:g}, {measured:.2f} "
                f"times the first; predicted {predicted:.2f} (noise scale {noise})", flush=True,
            )  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""Compare the samples that training takes to a loss at several batches with those that the gradient
noise scale predicts.

    python benchmarks/noise_scale.py --json

At each batch every learning rate of a ladder trains with several seeds; the rate with the fewest
samples (median over seeds) counts. The noise scale grows while the loss falls, so it is measured,
as `train --noise-steps` does, at points of one training by the smallest batch B, which are equally
many samples apart. A point with the scale N counts by 1 / (B + N), the progress of a sample there.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
_NOISE_BATCH, _NOISE_STEPS, _N_POINTS = 64, 128, 8


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = "lenet"
    """A model for the images of digits."""
    batches: tuple[int, ...] = (8, 16, 32, 64, 128)
    """Samples of a step, the smallest first."""
    rates: tuple[float, ...] = (0.06, 0.12, 0.24, 0.48)
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


class Training:
    """Trains one model on all samples of digits, which are drawn independently of each other."""

    def __init__(self, options: Options, seed: int) -> None:
        case = TrainCase(model=options.model, data="digits", strategy="single", seed=seed)
        self.task, self._loss = make_task(case), options.loss
        data = open_data("digits", data_options(case), self.task, max(options.batches))
        self.everything: Batch = data.__getitems__(list(range(len(data))))
        self.n_samples = len(data)
        torch.manual_seed(seed)

    def samples_to_loss(
        self, batch: int, rate: float, most: float, watch: Callable[[int], None] = lambda _: None
    ) -> float:
        """Samples until the loss is reached; infinite if that takes more than `most`.

        Args:
            watch: called before each step with the samples so far.
        """
        done, due = 0, 500.0
        optimizer = torch.optim.SGD(self.task.model.parameters(), lr=rate)
        while done < most:
            watch(done)
            drawn = torch.randint(self.n_samples, (batch,))
            optimizer.zero_grad()
            mean_loss(self.task, self._samples(drawn)).backward()
            optimizer.step()
            done += batch
            if done >= due:
                with torch.no_grad():
                    found = float(mean_loss(self.task, self.everything))
                if found < self._loss or not math.isfinite(found):
                    return done if found < self._loss else math.inf
                due = max(done + batch, 1.05 * due)
        return math.inf

    def _samples(self, rows: torch.Tensor) -> Batch:
        return self.everything.each(lambda column: column[rows])

    def noise_scale(self) -> NoiseScale:
        """As `train --noise-steps` measures it."""
        plan = DrawnSamples(n_samples=self.n_samples, shares=(_NOISE_BATCH,))
        squares = []
        for step in range(_NOISE_STEPS):
            loss = mean_loss(self.task, self._samples(torch.tensor(plan.global_indices(step))))
            gradients = torch.autograd.grad(loss, list(self.task.model.parameters()))
            square = float(sum(gradient.square().sum() for gradient in gradients))
            labels = {"n_distinct": plan.n_distinct(step)}
            squares.append(Sample(metric="gradient_square_norm", value=square, labels=labels))
        found = noise_scale(squares)
        assert found is not None, "gradients of two numbers of samples"
        return found


def fewest_samples(options: Options, batch: int) -> tuple[float, float]:
    """Samples to the loss by the best learning rate, and that rate."""
    found: dict[float, float] = {}
    for rate in options.rates:
        each = []
        for seed in range(options.seeds):
            training = Training(options, seed)
            best = min(found.values(), default=math.inf)
            most = min(_MOST_EPOCHS * training.n_samples, 2 * best)
            each.append(training.samples_to_loss(batch, rate, most))
        found[rate] = statistics.median(each)
        if math.isinf(found[rate]) and math.isfinite(min(found.values())):
            break  # higher rates are worse
    rate = min(found, key=found.__getitem__)
    if math.isinf(found[rate]):
        sys.exit(f"batch {batch} never reaches a loss of {options.loss:g}: raise --loss")
    return found[rate], rate


def noise_on_the_way(options: Options, batch: int, rate: float, n_samples: float) -> list[float]:
    """The noise scales at points of a training that takes about so many samples."""
    training, found = Training(options, 0), []
    due = [n_samples * (k + 0.5) / _N_POINTS for k in range(_N_POINTS)]

    def watch(done: int) -> None:
        if due and done >= due[0]:
            due.pop(0)
            found.append(training.noise_scale().n_samples)

    training.samples_to_loss(batch, rate, 2 * n_samples, watch)
    return found


def mean_scale(scales: Sequence[float], batch: int) -> float:
    """The mean over the progress of a training, without points where it is unknown."""
    known = [scale for scale in scales if math.isfinite(scale)]
    weights = [1 / (batch + scale) for scale in known]
    return sum(w * scale for w, scale in zip(weights, known, strict=True)) / sum(weights)


def main(options: Options) -> None:
    """Print samples, measured and predicted, relative to the smallest batch."""
    least = options.batches[0]
    found = {batch: fewest_samples(options, batch) for batch in options.batches}
    scales = noise_on_the_way(options, least, found[least][1], found[least][0])
    scale = mean_scale(scales, least)
    for batch, (n_samples, rate) in found.items():
        measured = n_samples / found[least][0]
        predicted = samples_needed(batch, scale) / samples_needed(least, scale)
        ratio = predicted / measured
        row = {
            "name": f"{options.model}: samples predicted by the noise scale / taken, batch {batch}",
            "learning_rate": rate,
            "n_samples": n_samples,
            "noise_scale": scale,
            "noise_scales": scales,
            "measured": measured,
            "predicted": predicted,
            **dict.fromkeys(("ratio", "low", "high"), ratio),
            "n_pairs": options.seeds,
        }
        if options.json:
            print(json.dumps({**row, **provenance()}), flush=True)
        else:
            print(
                f"batch {batch:4d}: {n_samples:.0f} samples at rate {rate:g}, {measured:.2f} times "
                f"the first; predicted {predicted:.2f} (noise scale {scale:.0f})"
            )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))

"""Which global batch reaches the same loss first, by the gradient noise scale."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.measure.derive.noise import NoiseScale, choose_scale, noise_scale, samples_needed
from harness.measure.store import find_runs, read_run
from harness.plan.advise.advice import Advice, best_of
from harness.plan.advise.pricing import Priced, price

# Times today's batch.
_FACTORS = (0.25, 0.5, 2, 4, 8)
_N_SETS = 8  # the fastest at today's batch; also the fastest device alone, and the most machines


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """A global batch on the machines that train it fastest.

    Attributes:
        needed: see `samples_needed`.
        gain: seconds to the same loss with today's batch / with this one.
    """

    best: Priced
    needed: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Today's batch on the best set, and others by standard strategies, ascending."""

    noise: NoiseScale
    choices: list[BatchChoice]


def measured_noise(results: Path | None, model: str) -> NoiseScale | None:
    """The noise scale by the trainings of a model with --noise-steps; see `choose_scale`."""
    return choose_scale(
        noise_scale(read_run(path, header)[0].ranks.get(0, ()))
        for path, header in reversed(find_runs(results)[0] if results is not None else [])
        if header.workload == "train" and header.status == "ok"
        if header.config.get("noise_steps") and header.config.get("model") == model
    )


def compare_batches(advice: Advice, noise: NoiseScale) -> Batches:
    """Compare the predicted steps of other batches with that of today's, also where it was
    measured, so that errors of predictions cancel."""
    now, scale = advice.best, noise.n_samples
    found = [now, *_other_batches(advice)]
    plain = replace(now, is_measured=False, step_s=now.predicted_s).at(advice.request.factor)

    def gain(one: Priced) -> float:
        saved = 1 if math.isinf(scale) else (scale + now.batch) / (scale + one.batch)
        return 1.0 if one is now else one.samples_per_s / plain.samples_per_s * saved

    choices = [
        BatchChoice(best=one, needed=samples_needed(one.batch, scale), gain=gain(one))
        for one in found
    ]
    return Batches(noise=noise, choices=sorted(choices, key=lambda one: one.best.batch))


def _other_batches(advice: Advice) -> Iterator[Priced]:
    sets, request = advice.sets, advice.request
    most = max(sets, key=lambda one: one.cluster.n_devices)
    chosen = {id(one): one for one in (*sets[:_N_SETS], advice.best, advice.single, most) if one}
    each = request.per_device_batch if request.batch is None else request.batch
    assert each is not None, "one of both is given"
    for batch in (int(factor * each) for factor in _FACTORS):
        if request.batch is None:
            other = replace(request, per_device_batch=batch)
        else:
            other = replace(request, batch=batch)
        priced = [price(other, one.cluster) for one in chosen.values()] if batch else []
        if fits := [one for one in priced if one is not None]:
            yield best_of(fits)

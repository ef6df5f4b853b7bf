"""Trial steps: train the best few plans of a search in turn, and choose the fastest measured one.

The minimum of thousands of noisy predictions is biased low (the winner's curse). So a few measured
steps decide between the best plans of different searches; plans with similar times get more steps.

A machine's speed drifts, so times are compared within a round. A race drops slow candidates early,
which leaves time for close ones (Maron and Moore, Hoeffding races, NIPS 1993). The interval of
`paired_ratio`, which assumes no distribution, decides which are slow.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from harness.domain.strategy import Strategy
from harness.errors import StrategyError
from harness.measure.recorder import Recorder
from harness.measure.statistics import paired_ratio
from harness.measure.text import table
from harness.plan.costs import PlanResult
from harness.plan.portfolio import Searched
from harness.plan.search.objective import Candidate
from harness.runtime.data import DataOptions, open_data
from harness.runtime.data.batch import Batch
from harness.runtime.devices.memory import move_model
from harness.runtime.devices.precision import set_tensor_cores
from harness.runtime.devices.sampling import clock_for
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models import build_task
from harness.runtime.models.shared_build import build_on_host
from harness.runtime.ranks.gather import barrier, broadcast_result, maximum_over_ranks, wait_for_all
from harness.runtime.ranks.world import Context
from harness.units import format_duration
from harness.workloads.planning.config import SearchConfig

LEAST_ROUNDS, MOST_ROUNDS = 4, 24


@dataclass(frozen=True, kw_only=True)
class Place:
    """Result of one racer.

    Attributes:
        duration_s: drift-corrected seconds: the median over its rounds of its time over the
            round's mean, times the median of these means. Means are geometric, over the racers
            that were never dropped.
        n_rounds: rounds in which it was timed.
    """

    index: int
    duration_s: float
    n_rounds: int


def race(
    time_one: Callable[[int], float], n: int, is_late: Callable[[], bool]
) -> list[list[float]]:
    """Time n racers in turn until one is left, `is_late` is true, or MOST_ROUNDS are done.

    From LEAST_ROUNDS on, a racer is dropped when the interval of its ratio to another lies above 1.
    On several ranks all must call it, and both functions must return the same values on all.

    Args:
        time_one: time one racer; returns seconds.
        is_late: whether to stop; called after each round but the first few.

    Returns:
        The seconds of each racer by round.
    """
    seconds: list[list[float]] = [[] for _ in range(n)]
    running = list(range(n))
    for k in range(MOST_ROUNDS):
        turn = k % len(running)
        for racer in running[turn:] + running[:turn]:
            seconds[racer].append(time_one(racer))
        if k + 1 < LEAST_ROUNDS:
            continue
        ahead = [one for one in running if not _is_behind(one, running, seconds)]
        running = ahead or running  # racers could each be behind another, in a cycle
        if len(running) == 1 or is_late():
            break
    return seconds


def _is_behind(racer: int, running: Sequence[int], seconds: Sequence[Sequence[float]]) -> bool:
    others = [other for other in running if other != racer]
    return any(paired_ratio(seconds[racer], seconds[other]).low > 1 for other in others)


def places(seconds: Sequence[Sequence[float]]) -> list[Place]:
    """Rank the result of `race`: most rounds first, then fastest first."""
    most = max(map(len, seconds))
    stayed = np.log([times for times in seconds if len(times) == most]).mean(axis=0)
    level_s = float(np.exp(np.median(stayed)))
    found = [
        Place(
            index=k,
            duration_s=level_s * float(np.exp(np.median(np.log(times) - stayed[: len(times)]))),
            n_rounds=len(times),
        )
        for k, times in enumerate(seconds)
    ]
    return sorted(found, key=lambda place: (-place.n_rounds, place.duration_s))


_log = logging.getLogger(__name__)

# A plan that is predicted to take longer than this many times the best is not tried. In
# `benchmarks/figures/searched.jsonl` all 669 pairs of strategies that are predicted to be further
# apart were measured in that order; of 166 pairs between 1.3 and 1.5, seven were not.
_WORTH_TRYING = 1.5
_STEPS_A_ROUND = 2
# Time limit of the further rounds, which run until the plans' times differ significantly.
_SECONDS = 60.0


class Tried(NamedTuple):
    """A plan that was trained for some steps, and its result."""

    candidate: Candidate
    place: Place


def worth_trying(found: Searched, most: int) -> list[Candidate]:
    """Choose at most `most` plans whose predictions are close to the best, as long as the state of
    all fits into memory beside the activations of each; fastest first."""
    chosen: list[Candidate] = []
    simulator = found.simulator
    state = np.zeros_like(simulator.limits)
    activations = np.zeros_like(state)
    limit_s = _WORTH_TRYING * found.best.step_s
    for candidate in unlike_first([c for c in found.ranked() if c.step_s <= limit_s]):
        if len(chosen) == most:
            break
        outcome = simulator.simulate(found.strategy(candidate)).outcome
        own = np.minimum(outcome.static_bytes, outcome.memory_bytes)
        largest = np.maximum(activations, outcome.memory_bytes - own)
        if np.all(state + own + largest <= simulator.limits):
            state, activations = state + own, largest
            chosen.append(candidate)
    return sorted(chosen, key=lambda candidate: candidate.step_s)


def unlike_first(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The first of each schedule and sharded state, of one device and of those without stages, then
    the others, because predictions of like plans err alike."""
    firsts = {_likeness(candidate): candidate for candidate in reversed(ranked)}
    return sorted(ranked, key=lambda candidate: candidate not in firsts.values())


def _likeness(candidate: Candidate) -> tuple[object, ...]:
    strategy = candidate.strategy
    schedule = len(strategy.stages) > 1 and strategy.schedule
    return candidate.n_devices > 1, schedule, strategy.shard_state


def try_out(search_config: SearchConfig, found: Searched | None, context: Context) -> list[Tried]:
    """Train the best plans for a few steps each, in turn; all ranks must call it.

    Args:
        found: the search's result on rank 0; None on other ranks.

    Returns:
        On rank 0 the plans tried, fastest first. Empty on other ranks, if only one plan is worth
        trying, or if the executor supports none of them.

    Raises:
        PeerError: another rank died or hangs in a step.
    """
    candidates: list[Candidate] = []

    def choose() -> list[Strategy]:
        nonlocal candidates
        assert found is not None
        candidates = worth_trying(found, search_config.trials)
        return [found.strategy(candidate) for candidate in candidates]

    strategies = broadcast_result(choose, list[Strategy], context.world)
    if len(strategies) < 2:
        return []
    seconds = _measure(search_config, strategies, context)
    if found is None or not seconds:
        return []
    known, ranked = list(seconds), places(list(seconds.values()))
    for place in ranked:
        name = strategies[known[place.index]].name
        context.recorder.sample("trial_step_s", place.duration_s, plan=name)
        predicted_s = candidates[known[place.index]].step_s
        context.recorder.sample("trial_predicted_step_s", predicted_s, plan=name)
    return [Tried(candidates[known[place.index]], place) for place in ranked]


def _measure(
    search_config: SearchConfig, strategies: Sequence[Strategy], context: Context
) -> dict[int, list[float]]:
    """Seconds of a step on the slowest rank in each round, by index of the strategy; strategies
    that the executor does not support are left out."""
    set_tensor_cores(search_config.dtype, context.world.device)
    built = _build(search_config, strategies, context)
    if not built:
        return {}
    trials = list(built.values())
    for trial in trials:
        trial.run(1)  # warm-up
    start_s, n_timed = time.monotonic(), [0] * len(trials)

    def time_one(k: int) -> float:
        n_timed[k] += 1
        context.progress.update("trial steps, round", max(n_timed), MOST_ROUNDS, "at most")
        return maximum_over_ranks([trials[k].run(_STEPS_A_ROUND)], context.world)[0]

    def is_late() -> bool:
        (elapsed_s,) = maximum_over_ranks([time.monotonic() - start_s], context.world)
        return elapsed_s > _SECONDS

    rounds = dict(zip(built, race(time_one, len(trials), is_late), strict=True))
    # No rank is in a step any more, because all ranks have shared the time of the last step.
    for trial in trials:
        trial.close()
    trials.clear()
    built.clear()
    gc.collect()  # because engines form reference cycles
    if context.world.device.type == "cuda":
        torch.cuda.empty_cache()
    return rounds


def _build(
    search_config: SearchConfig, strategies: Sequence[Strategy], context: Context
) -> dict[int, _Trial]:
    """Build trials by index of their strategy; all ranks refuse the same strategies."""
    built: dict[int, _Trial] = {}
    for index, strategy in enumerate(strategies):
        try:
            built[index] = _Trial(search_config, strategy, context)
        except StrategyError as error:
            if context.world.is_first:
                _log.warning("%s is not tried: %s", strategy.name, error)
        wait_for_all(context.world)  # because ranks take different times to build their shards
    return built


def trial_title(tried: Sequence[Tried]) -> str:
    """How fast the fastest plan is; empty if none was tried."""
    if not tried:
        return ""
    measured, predicted = tried[0].place.duration_s, tried[0].candidate.step_s
    return (
        f"fastest of {len(tried)} plans that were tried: {format_duration(measured)} per step, "
        f"predicted {format_duration(predicted)}"
    )


_BASELINES = {"single": "one device", "ddp": "data parallel"}


def trial_ratios(tried: Sequence[Tried], result: PlanResult) -> str:
    """How fast the fastest plan is beside one device and data parallel: measured where these were
    tried too, else predicted; empty if none was tried."""
    if not tried:
        return ""
    measured = {candidate.method: place.duration_s for candidate, place in tried}
    fastest_s, parts = tried[0].place.duration_s, []
    speedups = (result.speedup_over_single, result.speedup_over_ddp)
    for (name, words), predicted in zip(_BASELINES.items(), speedups, strict=True):
        if name == tried[0].candidate.method:
            parts.append(f"it is {words}")
        elif name in measured:
            ratio = measured[name] / fastest_s
            parts.append(f"measured {ratio:.2f} times as fast as {words}")
        elif not math.isnan(predicted):
            parts.append(f"predicted {predicted:.2f} times as fast as {words} (not tried)")
    return ", ".join(parts)


def trial_doubts(tried: Sequence[Tried], ranked: Sequence[Candidate]) -> list[str]:
    """A warning if data parallel, one device or a plan unlike all that were tried may be faster,
    because the predictions of these are further off than the plan's is slower."""
    if not tried:
        return []
    methods = {candidate.method for candidate, _ in tried}
    likenesses = {_likeness(candidate) for candidate, _ in tried}
    others = [
        candidate
        for candidate in ranked
        if candidate.method not in methods
        and (candidate.method in _BASELINES or _likeness(candidate) not in likenesses)
    ]
    ratios = [candidate.step_s / place.duration_s for candidate, place in tried]
    factor = max(max(ratio, 1 / ratio) for ratio in ratios)
    nearest = min(others, key=lambda candidate: candidate.step_s, default=None)
    if nearest is None or nearest.step_s >= factor * tried[0].candidate.step_s:
        return []
    gap = nearest.step_s / tried[0].candidate.step_s
    return [
        f"warning: predictions of the tried plans are up to {factor:.3g} times off; "
        f"{nearest.method}, which was not tried and is predicted to take {gap:.2f} times as long, "
        "may be faster: run profile and links again on idle devices, or train it, too"
    ]


def trial_lines(tried: Sequence[Tried]) -> list[str]:
    """Table of the plans tried; empty if none was."""
    rows = [
        [
            candidate.method,
            format_duration(candidate.step_s),
            format_duration(place.duration_s),
            f"{candidate.step_s / place.duration_s - 1:+.1%}",
            str(place.n_rounds),
        ]
        for candidate, place in tried
    ]
    heads = ["tried for some steps", "predicted", "measured", "error", "rounds"]
    return ["", *table(heads, rows)] if rows else []


class _Trial:
    """One strategy's engine on this rank, with a batch of synthetic samples."""

    def __init__(self, search_config: SearchConfig, strategy: Strategy, context: Context) -> None:
        # Imported here, because the first process of a rank reads flags only.
        from harness.runtime.executor.engine import ExecutorEngine

        self._recorder = Recorder(clock_for(context.world.device), context.recorder.reached)
        model, options = search_config.model, search_config.model_options()
        task = build_on_host(lambda: build_task(model, options, search_config.seed), context.world)
        move_model(task.model, None, is_channels_last=search_config.channels_last)
        options_of_engine = EngineOptions(
            dtype=search_config.dtype,
            # Constant weights: values that grow or diverge could change the time of a step.
            optimizer=replace(search_config.optimizer_options(), learning_rate=0.0),
            bucket_bytes=round(search_config.bucket_mib * (1 << 20)),
            reduce_dtype=search_config.reduce_dtype,
        )
        self._engine = ExecutorEngine(
            task, context.world, self._recorder, options_of_engine,
            ExecutorPlan(
                strategy=strategy, batch_norm=search_config.norm_scope, seed=search_config.seed,
                timeout_s=context.collective_timeout_s, is_compiled=search_config.compile,
            ),
        )  # fmt: skip
        data = DataOptions(
            data_dir=Path(), n_samples=strategy.batch, seed=search_config.seed,
            dlrm=search_config.dlrm_options(),
        )  # fmt: skip
        fed = self._engine.samples
        batch: Batch = open_data("synthetic", data, task, strategy.batch).__getitems__(fed)
        self._batch = batch.ready_for(context.world.device)
        counts = (task.n_targets,) * strategy.batch
        self._share = Share(n_local=len(fed), n_global=strategy.batch, counts=counts)

    def run(self, n_steps: int) -> float:
        """Return seconds of a step on this rank; all ranks must call it.

        An untimed step follows the barrier, because steps of a pipeline overlap: the first step
        after a barrier takes longer than those that follow.
        """
        barrier()
        self._train(1)
        start_s = time.perf_counter()
        self._train(n_steps)
        return (time.perf_counter() - start_s) / n_steps

    def close(self) -> None:
        """Free resources shared with other ranks; all ranks must call it after their last step."""
        self._engine.close()

    def _train(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self._engine.step(lambda: self._batch, self._share)
        self._recorder.discard()  # waits for the device

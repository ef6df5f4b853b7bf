"""Changes of a running training's strategy: when they are due, how they are carried out, records.

    step 4 | step 5 | step 6 | change | step 7         an engine is built beside training, in a
             |--- engine of the next ---|              thread; training stands still in `change`

Between two steps rank 0 names the change that is due, and all ranks act alike. An error in a change
is a warning, and training goes on as before.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from harness.domain.strategy import Strategy
from harness.errors import DataError, HarnessError, StrategyError
from harness.inputs import read_file
from harness.measure.store import write_atomically
from harness.runtime.engines.standstill import kept_alike
from harness.runtime.ranks.gather import (
    broadcast_result,
    gather_numbers,
    maximum_over_ranks,
    raise_on_all_ranks,
    run_on_rank_0,
)
from harness.runtime.ranks.world import Context
from harness.units import format_bytes, format_duration
from harness.workloads.train.cache import Start, TrainingCache
from harness.workloads.train.config import TrainCase
from harness.workloads.train.keeper import first_strategy
from harness.workloads.train.next_plan import NextPlanner
from harness.workloads.train.plan import Planned
from harness.workloads.train.policies import POLICIES
from harness.workloads.train.policy import LEAD_STEPS, Current, Due, PolicyInputs
from harness.workloads.train.requests import ChangeAnswer, answer_request, read_request
from harness.workloads.train.setup import Training, continue_by

if TYPE_CHECKING:
    from harness.runtime.executor.cache.activations import Tap
    from harness.runtime.executor.change.elastic import ElasticExecutor
    from harness.runtime.executor.change.transfer import PairBytes
    from harness.runtime.executor.engine import ExecutorEngine

_log = logging.getLogger(__name__)

_Sample = Callable[..., None]


class StrategyChanges:
    """The changes of one run; all ranks construct it before the first step."""

    @kept_alike(())  # planning captures the model, whose dropout draws
    def __init__(
        self, case: TrainCase, context: Context, planned: Planned, training: Training
    ) -> None:
        self._case, self._context = case, context
        self._current = Current(planned=planned)
        self._planner = NextPlanner(case, context, len(training.data))
        # Captures the model and compiles the simulator, for which training would have to wait.
        run_on_rank_0(lambda: self._planner.step_s(planned.strategy, 0), context.world)
        inputs = PolicyInputs(
            case=case,
            context=context,
            planner=self._planner,
            training=training,
            start=self._start(planned),
            current=self._current,
            cache=TrainingCache(case, context, training) if case.cache != "off" else None,
        )
        self._policies = [make(inputs) for flag, make in POLICIES.items() if case.is_set(flag)]
        self._cache, self._n_steps = inputs.cache, training.n_steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="next engine")
        self._building: Future[_Built] | None = None
        self._next: Due | None = None
        self._waiting: dict[int, Due] = {}  # by policy
        self._n_begun = 0
        self._blocked_s = 0.0  # seconds standing still while the next engine is built

    def _start(self, planned: Planned) -> Planned:
        """The plan with which training began, on all ranks."""

        def read() -> Planned | None:
            path = first_strategy(self._case, self._context.run_dir)
            if path is None:
                return None
            data = read_file(path, "strategy file", StrategyError)
            return self._planner.planned(Strategy.from_json(data, source=str(path)))

        if not self._case.continues or self._case.shrink == "none":  # which alone goes back to it
            return planned
        return broadcast_result(read, Planned | None, self._context.world) or planned

    def before_step(self, step: int, training: Training) -> Training:
        """Carry out all changes that are due; returns the training that goes on.

        Args:
            step: the measured step that comes next.
        """
        elastic = training.elastic
        assert elastic is not None, "other engines were refused"
        while True:
            if self._next is None:
                self._begin_next(step, elastic)
            if self._next is None or not self._is_ready(step):
                return training
            due, self._next = self._next, None
            trained = elastic.engine
            try:
                training, text = self._change(due, step, training, elastic)
                answer = ChangeAnswer(id=due.request, text=text)
            except HarnessError as error:
                # Of this rank alone: a full disk, of the cache or after the change.
                if isinstance(error, DataError) or elastic.engine is not trained:
                    raise
                answer = ChangeAnswer(id=due.request, error=str(error))
            self._tell(answer)

    def _take_first(self, step: int) -> Due | None:
        """Take the change that comes first; None if there is none, or it has become needless."""
        for number, policy in enumerate(self._policies):
            found = None if number in self._waiting else policy.due(step)
            if found is not None:
                self._waiting[number] = found
        if not self._waiting:
            return None
        first = min(self._waiting, key=lambda number: self._waiting[number].step or 0)
        due = self._waiting.pop(first)
        if due.error:
            self._tell(ChangeAnswer(id=due.request, error=due.error))
            return None
        now = self._current
        if due.n_skipped is not None and not now.n_skipped < due.n_skipped <= now.n_frozen:
            return None  # another change has done it, or trains these layers again
        return due

    def _begin_next(self, step: int, elastic: ElasticExecutor) -> None:
        """Take the change that comes first, if there is one, and build its engine."""
        due, now, cache = self._take_first(step), self._current, self._cache
        if due is None:
            return
        strategy = (due.planned or now.planned).strategy
        n_frozen = now.n_frozen if due.n_frozen is None else due.n_frozen
        start = Start()
        if cache is not None:
            first_step = max(step, due.step or 0)
            n_left = self._n_steps - first_step
            start = cache.start(first_step, n_frozen, elastic, self._still_s, n_left)
        if start.n_skipped < (due.n_skipped or 0):
            if start.tap is not None:
                return  # more layers have frozen, whose outputs are not complete
            due = msgspec.structs.replace(due, why=f"{due.why} are not kept")
        self._next = due

        def make(n_skipped: int = 0, tap: Tap | None = None) -> ExecutorEngine:
            return elastic.build(strategy, n_frozen, n_skipped, tap)

        def build() -> _Built:
            start_s = time.perf_counter()
            engine = make() if cache is None else cache.build(start, make)
            build_s = time.perf_counter() - start_s
            return _Built(engine, build_s, self._predict_steps(strategy, n_frozen, start.n_skipped))

        self._building = self._pool.submit(build)
        start_s = time.perf_counter()
        if self._context.world.backend == "nccl":  # a new group blocks the device
            self._building.exception()
        self._blocked_s = time.perf_counter() - start_s

    def _is_ready(self, step: int) -> bool:
        """Whether the next change is due; without a step: once all ranks have built its engine, or
        wait for it because a change with a step has to be built next."""
        assert self._next is not None
        assert self._building is not None
        if self._next.step is not None:
            return step >= self._next.step
        known = [
            *(due.step for due in self._waiting.values()),
            *(p.next_step() for p in self._policies),
        ]
        if any(other is not None and other <= step + LEAD_STEPS for other in known):
            return True
        return min(gather_numbers(float(self._building.done()), self._context.world)) > 0

    def _change(
        self, due: Due, step: int, training: Training, elastic: ElasticExecutor
    ) -> tuple[Training, str]:
        """Carry out a change and record it; returns the training and a line about the change.

        Raises:
            HarnessError: on every rank, if the engine cannot be built or its state cannot be moved.
        """
        world, recorder, building = self._context.world, self._context.recorder, self._building
        assert building is not None
        start, start_s = recorder.clock.mark(), time.perf_counter()
        raise_on_all_ranks(building.result, world)
        engine, build_s, steps_s = building.result()
        predicted, before = elastic.predict_bytes(engine), self._name()
        waited_s = time.perf_counter() - start_s  # a change without a step does not wait
        recorder.step = None
        sample: _Sample = partial(recorder.sample, step=step, change=self._n_begun)
        self._n_begun += 1  # also if it fails
        training, moved, cached = self._switch(engine, due, step, training, sample)
        after = self._name()
        still_s = self._blocked_s + time.perf_counter() - start_s
        still_s, build_s, waited_s = maximum_over_ranks([still_s, build_s, waited_s], world)
        recorder.step = None
        recorder.add_marks("change", start, recorder.clock.mark(), name=f"{before} to {after}")
        if world.is_first:
            sample("change_s", still_s, before=before, after=after, why=due.why)
            sample("change_build_s", build_s)
            for side, step_s in steps_s.items():
                sample("change_step_predicted_s", step_s, side=side)
            path = self._context.run_dir / f"strategy-{step}.json"
            write_atomically(path, self._current.planned.strategy.to_json())
            transfer_s = self._record_transfer(sample, moved, predicted, cached)
            self._current.still_s = max(0.0, still_s - waited_s - transfer_s)
        moved_text = format_bytes(sum(moved.values()))
        if cached:
            moved_text += f" of state and {format_bytes(sum(cached.values()))} of cached outputs"
        return training, (
            f"step {step} is the first by {after} instead of {before} ({due.why}): training stood "
            f"still for {format_duration(still_s)}, {moved_text} moved"
        )

    def _switch(
        self, engine: ExecutorEngine, due: Due, step: int, training: Training, sample: _Sample
    ) -> tuple[Training, PairBytes, PairBytes]:
        """Go on by another engine; returns the bytes of state and of cached outputs that moved."""
        elastic = training.elastic
        assert elastic is not None
        cached: PairBytes = {}
        if self._cache is not None:
            cached = self._cache.fill(engine, training, sample)
        moved = elastic.change(engine)
        if self._cache is not None:
            self._cache.take_over(engine, elastic, step, sample)
            training = replace(training, data=self._cache.data_for(engine))
        now = self._current
        planned, first = due.planned or now.planned, step + self._case.warm_up
        with kept_alike(()):  # a loader draws a seed from the generator of dropout
            training = continue_by(
                training, self._case, self._context.world, engine, planned, first
            )
        now.planned, now.n_skipped = planned, engine.prefix.n_skipped
        if due.n_frozen is not None:
            now.n_frozen = due.n_frozen
        return training, moved, cached

    def _record_transfer(
        self, sample: _Sample, moved: PairBytes, predicted: PairBytes, cached: PairBytes
    ) -> float:
        """Record the bytes of each pair of ranks; returns the predicted seconds of moving them."""
        transfer_s = self._planner.predict_change_s(Counter(predicted) + Counter(cached))
        sample("change_predicted_s", transfer_s)
        for metric, pairs in (("change_bytes", moved), ("change_predicted_bytes", predicted)):
            for (source, target), n in sorted(pairs.items()):
                sample(metric, n, source=source, target=target)
        return transfer_s

    def _still_s(self, pair_bytes: PairBytes) -> float:
        """Predict how long training stands still for a change that moves so many bytes; rank 0."""
        return self._current.still_s + self._planner.predict_change_s(pair_bytes)

    def _predict_steps(self, strategy: Strategy, n_frozen: int, n_skipped: int) -> dict[str, float]:
        """The simulated step before and after a change, on rank 0."""
        if not self._context.world.is_first:
            return {}
        now = self._current
        return {
            "before": self._planner.step_s(now.planned.strategy, now.n_frozen, now.n_skipped),
            "after": self._planner.step_s(strategy, n_frozen, n_skipped),
        }

    def _name(self) -> str:
        """The current strategy, with its frozen layers, in a few words."""
        n_frozen = self._current.n_frozen
        frozen = f", {n_frozen} layer{'s' * (n_frozen > 1)} frozen" if n_frozen else ""
        cached = f", {self._current.n_skipped} cached" if self._current.n_skipped else ""
        return f"{self._current.planned.strategy.name}{frozen}{cached}"

    def _tell(self, answer: ChangeAnswer) -> None:
        """Log the outcome of a change on rank 0, and answer its controller."""
        if not self._context.world.is_first:
            return
        if answer.error:
            _log.warning("the strategy stays: %s", answer.error)
        else:
            _log.info("%s", answer.text)
        if answer.id:
            answer_request(self._context.run_dir, answer)

    def begin_step(self, samples: list[int]) -> None:
        """Begin a measured step, which is of these samples, before it is trained."""
        if self._cache is not None:
            self._cache.begin_step(samples)

    def close(self) -> None:
        """Refuse a request that came too late; all ranks may call it after the last step."""
        self._pool.shutdown(wait=True)
        for policy in self._policies:
            policy.close()
        if self._cache is not None:
            self._cache.close()
        if not (self._case.controlled and self._context.world.is_first):
            return
        with suppress(HarnessError):
            request = read_request(self._context.run_dir)
            if request is not None:
                self._tell(ChangeAnswer(id=request.id, error="the run has trained its last step"))


class _Built(NamedTuple):
    """The next engine, seconds of building it, and predicted steps before and after the change."""

    engine: ExecutorEngine
    build_s: float
    steps_s: dict[str, float]

"""Changes of a running training's strategy: when they are due, how they are carried out, records.

    step 4 | step 5 | step 6 | change | step 7         an engine is built beside training, in a
             |--- engine of the next ---|              thread; training stands still in `change`

Between two steps rank 0 says what is due, and all ranks act alike. An error in a change is a
warning, and training goes on as before.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from harness.errors import ConfigError, HarnessError
from harness.inputs import read_file
from harness.measure.store import write_atomically
from harness.runtime.ranks.broadcast import broadcast_result
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.gather import gather_numbers, maximum_over_ranks, raise_on_all_ranks
from harness.units import format_bytes, format_duration
from harness.workloads.train.config import TrainCase, parse_change
from harness.workloads.train.engines import executor_trainer
from harness.workloads.train.next_plan import NextPlanner
from harness.workloads.train.plan import Planned
from harness.workloads.train.requests import Answer, Request, answer_request, read_request
from harness.workloads.train.setup import Training, continue_by

if TYPE_CHECKING:
    from harness.runtime.executor.change.elastic import ElasticExecutor
    from harness.runtime.executor.engine import ExecutorEngine

_log = logging.getLogger(__name__)


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """A change that has been decided on, on every rank.

    Attributes:
        step: the first measured step by the new strategy; None: as soon as it is prepared.
        request: id of the controller's request; empty for --change.
    """

    planned: Planned
    why: str
    step: int | None = None
    request: str = ""


class StrategyChanges:
    """The changes of one run; all ranks construct it before the first step."""

    def __init__(self, case: TrainCase, context: Context, planned: Planned | None) -> None:
        self._case, self._context = case, context
        self._current = planned
        self._planner = NextPlanner(case, context)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="next engine")
        self._building: Future[tuple[ExecutorEngine, float]] | None = None
        self._next: Due | None = None
        self._later = broadcast_result(self._scheduled, list[Due], context.world)

    def _scheduled(self) -> list[Due]:
        found = []
        for text in self._case.change:
            step, file = parse_change(text)
            data = read_file(file, "strategy file", ConfigError)
            planned = self._planner.plan(data, str(file))
            found.append(Due(planned=planned, why=f"--change {text}", step=step))
        return found

    def before_step(self, step: int, training: Training) -> Training:
        """Change the strategy if a change is due; returns the training that goes on.

        Args:
            step: the measured step that comes next.
        """
        elastic = training.trainer.elastic
        if elastic is None:
            return training
        if self._next is None:
            self._begin_next(elastic)
        if self._next is None or not self._is_ready(step):
            return training
        due, self._next = self._next, None
        try:
            training, text = self._change(due, step, training, elastic)
            answer = Answer(id=due.request, text=text)
        except HarnessError as error:
            answer = Answer(id=due.request, error=str(error))
        self._tell(answer)
        return training

    def _begin_next(self, elastic: ElasticExecutor) -> None:
        """Take the next change, if there is one, and build its engine."""
        if self._later:
            self._next = self._later.pop(0)
        elif self._case.controlled:
            self._next = self._requested()
        if self._next is not None:
            strategy = self._next.planned.strategy
            self._building = self._pool.submit(_timed, lambda: elastic.build(strategy))
            if self._context.world.backend == "nccl":  # a new group blocks the device
                self._building.exception()

    def _requested(self) -> Due | None:
        """What a controller has asked for, on every rank."""
        world = self._context.world
        request: Request | None = None
        error = ""
        if world.is_first:
            try:
                request = read_request(self._context.run_dir)
            except HarnessError as problem:
                error = str(problem)
        if max(gather_numbers(float(request is not None or bool(error)), world)) == 0:
            return None

        def due() -> Due:
            if error:
                raise ConfigError(error)
            assert request is not None
            planned = self._planner.plan(request.data, request.source)
            return Due(planned=planned, why=f"control {request.source}", request=request.id)

        try:
            return broadcast_result(due, Due, world)
        except HarnessError as problem:
            self._tell(Answer(id="" if request is None else request.id, error=str(problem)))
            return None

    def _is_ready(self, step: int) -> bool:
        """Whether the next change is due; without a step: once all ranks have built its engine."""
        assert self._next is not None
        assert self._building is not None
        if self._next.step is not None:
            return step >= self._next.step
        is_done = self._building.done()
        return min(gather_numbers(float(is_done), self._context.world)) > 0

    def _change(
        self, due: Due, step: int, training: Training, elastic: ElasticExecutor
    ) -> tuple[Training, str]:
        """Carry out a change; returns the training and a line about it.

        Raises:
            HarnessError: on every rank, if the engine cannot be built or its state cannot be moved.
        """
        world, recorder, building = self._context.world, self._context.recorder, self._building
        assert building is not None
        raise_on_all_ranks(lambda: _check(building), world)
        engine, build_s = building.result()
        predicted = elastic.predict_bytes(engine)
        start, start_s = recorder.clock.mark(), time.perf_counter()
        cost = elastic.change(engine)
        trainer = executor_trainer(engine, elastic)
        training = continue_by(
            training, self._case, world, trainer, due.planned, step + self._case.warm_up
        )
        before, after = self._name(self._current), self._name(due.planned)
        still_s, build_s = maximum_over_ranks([time.perf_counter() - start_s, build_s], world)
        recorder.step = None
        recorder.add_marks("change", start, recorder.clock.mark(), name=f"{before} to {after}")
        if world.is_first:
            self._record(due, step, still_s, build_s, cost.pair_bytes, predicted)
        self._current = due.planned
        n_bytes = sum(cost.pair_bytes.values())
        return training, (
            f"step {step} is the first by {after} instead of {before} ({due.why}): training stood "
            f"still for {format_duration(still_s)}, {format_bytes(n_bytes)} moved"
        )

    def _record(
        self,
        due: Due,
        step: int,
        still_s: float,
        build_s: float,
        moved: dict[tuple[int, int], int],
        predicted: dict[tuple[int, int], int],
    ) -> None:
        def sample(metric: str, value: float, **labels: Any) -> None:
            self._context.recorder.sample(metric, value, step=step, **labels)

        before, after = self._current, due.planned
        sample("change_s", still_s, before=self._name(before), after=self._name(after), why=due.why)
        sample("change_predicted_s", self._planner.predict_change_s(predicted))
        sample("change_build_s", build_s)
        for plan, side in ((before, "before"), (after, "after")):
            if plan is not None and plan.predicted_step_s is not None:
                sample("change_step_predicted_s", plan.predicted_step_s, side=side)
        for metric, pairs in (("change_bytes", moved), ("change_predicted_bytes", predicted)):
            for (source, target), n in sorted(pairs.items()):
                sample(metric, n, source=source, target=target)
        write_atomically(self._context.run_dir / f"strategy-{step}.json", after.strategy.to_json())

    def _name(self, planned: Planned | None) -> str:
        return self._case.strategy if planned is None else planned.strategy.name

    def _tell(self, answer: Answer) -> None:
        """Log what became of a change on rank 0, and answer its controller."""
        if not self._context.world.is_first:
            return
        if answer.error:
            _log.warning("the strategy stays: %s", answer.error)
        else:
            _log.info("%s", answer.text)
        if self._case.controlled:
            answer_request(self._context.run_dir, answer)

    def close(self) -> None:
        """Refuse a request that came too late; all ranks may call it after the last step."""
        self._pool.shutdown(wait=True)
        if not (self._case.controlled and self._context.world.is_first):
            return
        request = read_request(self._context.run_dir)
        if request is not None:
            self._tell(Answer(id=request.id, error="the run has trained its last step"))


def _timed(build: Callable[[], ExecutorEngine]) -> tuple[ExecutorEngine, float]:
    start_s = time.perf_counter()
    return build(), time.perf_counter() - start_s


def _check(building: Future[Any]) -> None:
    """Wait until an engine is built.

    Raises:
        HarnessError: it could not be built.
    """
    building.result()

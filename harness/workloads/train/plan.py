"""The strategy of a training run and its prediction, made on rank 0 and told to all.

What is missing is measured before, as runs of their own (`train_needs`). A repeat takes what an
earlier one planned, as long as model, profile, cluster and code are the same. Where the devices
have been found at another pace since, that plan is predicted anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from harness.domain.graph import Graph
from harness.domain.partition import n_replicas, volume
from harness.domain.prediction import Prediction
from harness.domain.sharding import full_blocks, full_shape, has_tasks
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, ModelError, StrategyError
from harness.measure.store import read_header
from harness.plan.simulate.simulator import Simulator
from harness.runtime.ranks.broadcast import from_first
from harness.runtime.ranks.context import Context
from harness.workloads.common.contract import Need
from harness.workloads.planning.files import find_plan, write_plan
from harness.workloads.planning.inputs import Inputs, read_inputs
from harness.workloads.planning.needs import links_need, profile_need
from harness.workloads.planning.predict import predict, predict_asynchronous
from harness.workloads.planning.search_config import PLANNED_DTYPES, SearchConfig, question_of
from harness.workloads.search.workload import (
    Found,
    found_by_search,
    measure_optimizer,
    search,
    search_need,
)
from harness.workloads.train.build import build_strategy, load_strategy
from harness.workloads.train.config import TrainCase, is_file

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What every rank is told.

    Attributes:
        predicted_step_s: None where the simulator does not know how it is trained.
        flops: of each rank in a step.
    """

    strategy: Strategy
    predicted_step_s: float | None
    flops: tuple[float, ...]


class _Told(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's answer: a plan, or that the optimizer must be timed first, or neither.

    Attributes:
        must_search: once the optimizer has been timed.
    """

    strategy: Strategy | None = None
    predicted_step_s: float | None = None
    flops: tuple[float, ...] = ()
    must_measure: bool = False
    must_search: bool = False


def is_predictable(case: TrainCase) -> bool:
    """Whether the simulator knows how the run trains."""
    return not case.zero_stage and case.engine != "deepspeed"


def train_needs(case: TrainCase) -> list[Need]:
    """Runs that measure what the strategy or its prediction is made from."""
    if case.engine != "executor" and not (case.predict and is_predictable(case)):
        return []
    try:
        question = question_of(case)
    except HarnessError:
        return []  # the run itself says what is wrong
    needs = [links_need()] if case.n_ranks > 1 else []
    needs.append(profile_need(question, case.microbatches or 1))
    if case.strategy == "searched":
        needs.append(search_need(question))
    return needs


def plan_training(case: TrainCase, context: Context, shares: Sequence[int] = ()) -> Planned | None:
    """The run's strategy and prediction, which rank 0 writes; all ranks must call it.

    Args:
        shares: samples of each rank where the engine shares a batch out by itself.

    Returns:
        None for an engine that needs no strategy, where its links or operators are not known.

    Raises:
        StrategyError: the strategy does not fit the model, the batch or the ranks, or is stale.
        PlanError: nothing fits into memory, or links or operators have not been measured.
        ConfigError, ModelError, DataError: flags, model and data do not go together.
    """
    if case.engine == "deepspeed" or (case.engine == "torch" and not _is_known(case)):
        return None
    planner = _Planner(case, context, shares)
    told = msgspec.json.decode(from_first(planner.begin, context.world), type=_Told)
    if told.must_measure:
        told = planner.make(must_search=told.must_search)
    if told.strategy is None:
        return None
    return Planned(strategy=told.strategy, predicted_step_s=told.predicted_step_s, flops=told.flops)


def _is_known(case: TrainCase) -> bool:
    return is_predictable(case) and case.dtype in PLANNED_DTYPES


class _Planner:
    """Rank 0's part; on the other ranks it knows nothing."""

    def __init__(self, case: TrainCase, context: Context, shares: Sequence[int]) -> None:
        self._case = case
        self._context = context
        self._shares = shares or [1] * context.world.size
        self.inputs: Inputs | None = None
        self._kept: tuple[Strategy, Prediction] | None = None

    def begin(self) -> bytes:
        """What is known without measuring: an earlier plan, or that there is nothing to plan by."""
        question = question_of(self._case)
        try:
            self.inputs = read_inputs(question, self._context.run_dir)
        except HarnessError as error:
            if self._case.engine == "executor":
                raise
            if self._case.predict or isinstance(error, ModelError):
                _log.warning("the step is not predicted: %s", error)
            return msgspec.json.encode(_Told())
        self._check_samples_apart(self.inputs.graph)
        found = self._known(question)
        if found is not None and self._is_present(*found):
            return self._tell(*found)
        self._kept = found
        must_search = found is None and self._case.strategy == "searched"
        return msgspec.json.encode(_Told(must_measure=True, must_search=must_search))

    def _is_present(self, strategy: Strategy, prediction: Prediction) -> bool:
        """Whether it was predicted by the profile as it is, at the pace that is known now."""
        assert self.inputs is not None
        paces = self.inputs.profile.paces(self.inputs.graph.content_hash())
        return strategy.made_for == self.inputs.made_for and prediction.paces == paces

    def _known(self, question: SearchConfig) -> tuple[Strategy, Prediction] | None:
        """What a search or an earlier repeat has planned for the same inputs."""
        assert self.inputs is not None
        run_dir, case = self._context.run_dir, self._case
        header, made_for = read_header(run_dir), self.inputs.made_for
        if case.strategy == "searched":
            # Repeats train one plan, though a run between them has added to the profile.
            repeated = header.repeat > 0 and find_plan(
                run_dir.parent, header, made_for, any_profile=True
            )
            return repeated or found_by_search(question, self.inputs, self._context)
        if case.balance == "speed":
            return None  # its shares were measured for this repeat
        found = find_plan(run_dir.parent, header, made_for)
        if found is not None and is_file(case.strategy):
            return found if self._load() == found[0] else None
        return found

    def _check_samples_apart(self, graph: Graph) -> None:
        """Refuse data parallelism by another engine, which gives each rank a batch of its own,
        where an operator needs all samples of the batch."""
        mixing, n_ranks = graph.mixing_operator(), self._context.world.size
        if mixing is not None and n_ranks > 1 and self._case.engine != "executor":
            raise StrategyError(
                f"operator {mixing.name!r} needs all samples of a batch at once, "
                f"{self._case.strategy} shares them out over {n_ranks} ranks: add --engine executor"
            )

    def make(self, *, must_search: bool) -> _Told:
        """Time the optimizer, then make the strategy and predict it; all ranks must call it."""
        question, world = question_of(self._case), self._context.world
        rates = measure_optimizer(question, self.inputs, world)
        if must_search:
            found = search(question, self.inputs, rates, self._context)
            answer = from_first(lambda: self._tell_found(found), world)
        else:
            answer = from_first(lambda: self._build(question, rates), world)
        return msgspec.json.decode(answer, type=_Told)

    def _tell_found(self, found: Found | None) -> bytes:
        assert found is not None
        return self._tell(found.strategy, found.prediction)

    def _build(self, question: SearchConfig, rates: tuple[float, ...]) -> bytes:
        """Of any strategy that need not be searched.

        Args:
            rates: seconds of the optimizer per byte of parameters, by rank.
        """
        assert self.inputs is not None
        is_ours = self._case.engine == "executor"
        device = self._context.world.device if is_ours else None
        try:
            simulator = self.inputs.simulator(question, rates, device)
            strategy, prediction = self._predicted(simulator)
        except HarnessError as error:
            if is_ours:
                raise
            _log.warning("the step is not predicted: %s", error)
            return msgspec.json.encode(_Told())
        return self._tell(strategy, prediction)

    def _predicted(self, simulator: Simulator) -> tuple[Strategy, Prediction | None]:
        """The strategy that is known, in the user's file, or well known, and its step."""
        case, search_s = self._case, None
        if self._kept is not None:
            strategy, before = self._kept
            method, search_s = before.method, before.search_s
        elif is_file(case.strategy):
            strategy, method = self._load(), "file"
        else:
            strategy, method = build_strategy(case, simulator, self._shares), "builder"
        if not is_predictable(case):
            return strategy, None
        if case.is_asynchronous:
            return strategy, predict_asynchronous(simulator, strategy, method=method)
        return strategy, predict(simulator, strategy, method=method, search_s=search_s)

    def _load(self) -> Strategy:
        """The strategy of the user's file, as made for what was measured here."""
        assert self.inputs is not None
        strategy = load_strategy(self._case, self.inputs.graph, self.inputs.cluster)
        return msgspec.structs.replace(strategy, made_for=self.inputs.made_for)

    def _tell(self, strategy: Strategy, prediction: Prediction | None) -> bytes:
        assert self.inputs is not None
        write_plan(self._context.run_dir, strategy, prediction)
        flops = device_flops(self.inputs.graph, strategy, self._context.world.size)
        step_s = None if prediction is None else prediction.step_s
        return msgspec.json.encode(
            _Told(strategy=strategy, predicted_step_s=step_s, flops=tuple(flops))
        )


def device_flops(graph: Graph, strategy: Strategy, n_devices: int) -> list[float]:
    """FLOPs of each device in a step: its blocks' parts of each operator's forward and backward.

    Halos and copies that several devices compute alike are not counted twice.
    """
    flops = [0.0] * n_devices
    for operator in filter(has_tasks, graph.operators):
        plan = strategy.operators[operator.name]
        shape = full_shape(operator, batch=strategy.batch, graph_batch=graph.batch)
        whole = operator.forward_flops + operator.backward_flops
        parts = full_blocks(operator, plan.partition, batch=strategy.batch, graph_batch=graph.batch)
        for block, device in zip(parts, plan.devices, strict=True):
            own = whole * volume(block) / math.prod(shape.values())
            flops[device] += own / n_replicas(plan.partition)
    return flops

"""The strategy of a training run and its prediction, read or built on rank 0 and broadcast.

Missing measurements and searches run before, as needs (`train_needs`). A repeat uses the plan of
an earlier repeat if model, profile, cluster and code are the same. If the profile has been
calibrated again since, that plan is predicted again.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from harness.domain.checkpoints import with_recomputation
from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import SCORE_FLOPS, Graph
from harness.domain.partition import volume
from harness.domain.prediction import Prediction
from harness.domain.run import RunHeader
from harness.domain.shard_state import ShardState, averaged_replicas, shards_in_nodes
from harness.domain.sharding import full_blocks, has_tasks
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.errors import HarnessError, ModelError, PlanError, StrategyError
from harness.measure.store import read_header
from harness.plan import builders
from harness.plan.builders import check_replicas
from harness.plan.layouts.degrees import microbatches_of, parse_layout, profiled_layout
from harness.plan.search.space import balanced_pipeline, proportional_shares, usual_microbatches
from harness.plan.simulate.simulator import Simulator, Trial, operator_seconds
from harness.plan.simulate.unflushed import simulate_unflushed
from harness.runtime.capture.meta_run import StepFlops
from harness.runtime.ranks.gather import broadcast_result
from harness.runtime.ranks.world import Context
from harness.workloads.common.contract import Need, config_json
from harness.workloads.common.flags import fitted_flags, shared_flags
from harness.workloads.planning.config import SearchConfig
from harness.workloads.planning.files import find_failure, find_plan, find_search, write_plan
from harness.workloads.planning.inputs import (
    Inputs,
    capture_graph,
    check_profile,
    links_need,
    predict,
    profile_need,
    read_inputs,
    search_need,
)
from harness.workloads.train.config import TrainCase, is_file, is_layout
from harness.workloads.train.files import check_files, check_fit, fitted_options, load_for


def load_strategy(case: TrainCase, graph: Graph, cluster: Cluster) -> Strategy:
    """Load the strategy's file of a run and check that it fits the run.

    Raises:
        StrategyError: the file is missing, malformed, stale, or for another model, batch or
            cluster.
    """
    strategy = load_for(case)
    if not case.continues:  # ranks that go on may have other shares of a host
        check_fresh(strategy, graph, cluster)
    validate(strategy, graph, cluster)
    if strategy.made_for.cluster_hash not in ("", fingerprint(graph, cluster).cluster_hash):
        _log.warning(
            "%s was planned with other measurements of the links: search plans by the newest",
            case.strategy,
        )
    return strategy


def build_strategy(case: TrainCase, simulator: Simulator, shares: Sequence[int]) -> Strategy:
    """Build the well-known strategy of a run for these devices.

    Args:
        shares: samples of each rank under `ddp`.

    Raises:
        StrategyError: the flags do not fit the model or the ranks.
    """
    graph, cluster = simulator.graph, simulator.cluster
    state: ShardState = "none" if _has_unlike_replicas(case, cluster) else case.sharded_state
    found = []
    for plain in _candidates(case, simulator, shares):
        strategy = msgspec.structs.replace(plain, shard_state=state)
        if case.recompute:
            strategy = with_recomputation(strategy, graph, case.recompute_segments)
        validate(strategy, graph, cluster)
        found.append(strategy)
    if case.is_asynchronous and len(found) > 1:
        strategy = min(found, key=lambda one: simulate_unflushed(simulator, one).step_s)
    else:
        strategy = simulator.fastest(found)
    if not case.continues:  # ranks that are left may share nothing
        _check_shared_weights(simulator, strategy)
    made_for = fingerprint(graph, cluster, simulator.profile)
    return msgspec.structs.replace(strategy, made_for=made_for)


def _has_unlike_replicas(case: TrainCase, cluster: Cluster) -> bool:
    """Whether the ranks that are left train averaged replicas whose parts of a state differ."""
    if case.sync_every == 1 or not case.continues:
        return False
    replicas = averaged_replicas(tuple(range(cluster.n_devices)), cluster.node_of())
    return len(set(map(len, replicas))) > 1


def _candidates(case: TrainCase, simulator: Simulator, shares: Sequence[int]) -> list[Strategy]:
    """One, or several numbers of microbatches of `pipeline` or given degrees."""
    graph, cluster, batch = simulator.graph, simulator.cluster, case.batch
    if case.strategy == "single":
        return [builders.single(graph, batch)]
    if case.strategy == "ddp":
        if case.engine == "executor" and case.balance == "speed":
            seconds = operator_seconds(simulator, batch).sum(axis=1).tolist()
            shares = proportional_shares(seconds, batch) or shares
        is_even = max(shares) - min(shares) <= 1
        strategy = builders.ddp(graph, cluster, batch, shares=None if is_even else shares)
        if case.sync_every > 1 and case.engine == "executor":
            check_replicas(strategy, graph)
        return [strategy]
    if case.strategy == "tensor":
        return [builders.tensor_parallel(graph, cluster, batch)]
    if case.strategy == "hybrid":
        return [builders.hybrid(graph, cluster, batch)]
    build = _by_degrees if is_layout(case.strategy) else _pipeline
    return [build(case, simulator, n) for n in _microbatches(case, simulator)]


def _check_shared_weights(simulator: Simulator, strategy: Strategy) -> None:
    """Refuse to shard state that no two devices hold."""
    state = strategy.shard_state
    if state == "none":
        return
    if all(len(group) < 2 for _, group in Trial(simulator, strategy).slices()):
        where, remedy = "", ", or use ddp, or fewer stages than ranks"
        if simulator.options.sync_every > 1:
            where, remedy = " of a replica", ""
        elif shards_in_nodes(state):
            where, remedy = " of a host", f", or use --shard-state {state.removesuffix('_in_node')}"
        raise StrategyError(
            f"--shard-state {state} divides weights among the devices{where} that hold them, and "
            f"strategy {strategy.name!r} has each on one device{where}: drop it{remedy}"
        )


def _microbatches(case: TrainCase, simulator: Simulator) -> list[int]:
    if case.microbatches:
        return [case.microbatches]
    if is_layout(case.strategy):
        return microbatches_of(parse_layout(case.strategy), simulator, case.batch)
    return usual_microbatches(simulator, case.batch)


def _pipeline(case: TrainCase, simulator: Simulator, n_microbatches: int) -> Strategy:
    return balanced_pipeline(
        simulator,
        case.batch,
        n_microbatches,
        n_stages=case.stages or 0,
        schedule=case.schedule,
    )


def _by_degrees(case: TrainCase, simulator: Simulator, n_microbatches: int) -> Strategy:
    layout, is_averaged = parse_layout(case.strategy), case.sync_every > 1
    strategy = profiled_layout(
        layout.with_replicas_together() if is_averaged else layout,
        simulator,
        case.batch,
        n_microbatches=n_microbatches,
        schedule=case.schedule,
    )
    if is_averaged and layout.dp > 1:
        check_replicas(strategy, simulator.graph)
    return strategy


def search_config_of(case: TrainCase) -> SearchConfig:
    """Select the flags of a training run that its plan depends on, and no others.

    Raises:
        ModelError, DataError: the model does not accept the data, or the data are missing.
    """
    return replace(
        SearchConfig(**shared_flags(case, SearchConfig)),
        batch_size=case.batch,
        # A lost rank's part of sharded state would be lost.
        shard_state="none" if case.survive and case.asked_state is None else case.shard_state,
        **fitted_flags(fitted_options(case)),
    )


_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan of a run, on every rank.

    Attributes:
        flops: FLOPs of each rank in a step.
    """

    strategy: Strategy
    predicted_step_s: float
    flops: tuple[StepFlops, ...]


def check_inputs(case: TrainCase, results: Path) -> None:
    """Refuse a run whose files are missing or malformed; for a built-in model, also files of
    strategies that do not fit it, and more --stages than operators.

    A user's model is captured by the run alone, because its code may end or block the process.
    """
    check_files(case)
    if train_needs(case):
        check_profile(search_config_of(case).profile_config(), results)
    if ":" in case.model or not (case.stages or case.change or is_file(case.strategy)):
        return
    search_config = search_config_of(case)
    if not case.change and search_config.profile_config().path(results).exists():
        return  # the run itself refuses them at once
    graph = capture_graph(search_config)
    check_fit(case, graph)
    n_operators = sum(map(has_tasks, graph.operators))
    if (case.stages or 0) > n_operators:
        raise StrategyError(
            f"{case.stages} stages cannot be made of the {n_operators} operators of {case.model}: "
            f"use --stages 1 to {n_operators}"
        )


def train_needs(case: TrainCase) -> list[Need]:
    """Runs that measure the inputs of the strategy or its prediction."""
    if case.engine == "deepspeed" or (case.engine == "torch" and not case.predict):
        return []
    try:
        search_config = search_config_of(case)
    except HarnessError:
        return []  # the run itself reports the error
    needs = [links_need()] if case.n_ranks > 1 else []
    needs.append(profile_need(search_config, case.microbatches or 1))
    if case.strategy == "searched":
        needs.append(search_need(search_config))
    return needs


def plan_training(case: TrainCase, context: Context, shares: Sequence[int] = ()) -> Planned | None:
    """Plan the run on rank 0, write the plan into the run and broadcast it; all ranks must call it.

    Args:
        shares: samples of each rank under `ddp`; empty for equal shares.

    Returns:
        None if the engine needs no strategy and its step cannot be predicted.

    Raises:
        StrategyError: the strategy does not fit the model, the batch or the ranks, or is stale.
        PlanError: nothing fits into memory, or links or operators have not been measured.
        ConfigError, ModelError, DataError: flags, model and data contradict each other.
    """
    if case.engine == "deepspeed":
        return None
    return broadcast_result(lambda: _plan(case, context, shares), Planned | None, context.world)


def _plan(case: TrainCase, context: Context, shares: Sequence[int]) -> Planned | None:
    """Plan a run on rank 0; None if the engine needs no strategy and its step cannot be
    predicted."""
    search_config, n_ranks = search_config_of(case), context.world.size
    try:
        inputs = read_inputs(search_config, context.run_dir)
    except HarnessError as error:
        _report_unpredicted(case, error)
        return None
    check_samples_apart(case, inputs.graph, n_ranks)
    planner = _Planner(case, context.run_dir, shares or [1] * n_ranks, search_config, inputs)
    try:
        strategy, prediction = planner.plan()
    except HarnessError as error:
        _report_unpredicted(case, error)
        return None
    # A run that changes its strategy has no single step to compare with a prediction.
    write_plan(context.run_dir, strategy, None if case.is_elastic else prediction)
    return Planned(
        strategy=strategy,
        predicted_step_s=prediction.step_s,
        flops=tuple(device_flops(inputs.graph, strategy, n_ranks)),
    )


def _report_unpredicted(case: TrainCase, error: HarnessError) -> None:
    """Raise the error if the engine cannot train without a strategy, else log that the step is not
    predicted."""
    if case.engine == "executor":
        raise error
    if case.predict or isinstance(error, ModelError):
        _log.warning("the step is not predicted: %s", error)


def check_samples_apart(case: TrainCase, graph: Graph, n_ranks: int) -> None:
    """Refuse engines other than the executor if an operator needs all samples of the batch, because
    they compute each rank's samples separately."""
    mixing = graph.mixing_operator()
    if mixing is not None and n_ranks > 1 and case.engine != "executor":
        raise StrategyError(
            f"operator {mixing.name!r} needs all samples of a batch at once, {case.strategy} "
            f"shares them out over {n_ranks} ranks: add --engine executor"
        )


@dataclass(frozen=True)
class _Planner:
    """Plans a run by its inputs."""

    case: TrainCase
    run_dir: Path
    shares: Sequence[int]
    search_config: SearchConfig
    inputs: Inputs

    def plan(self) -> tuple[Strategy, Prediction]:
        """Load the plan of an earlier repeat, of a search or of the user's file, or build one, and
        predict its step by the profile in its current state, calibration included."""
        kept, inputs, case = self._load_earlier(), self.inputs, self.case
        if kept is not None:
            strategy, before = kept
            known = inputs.profile.calibrations(inputs.graph.content_hash())
            if strategy.made_for == inputs.made_for and before.calibrations == known:
                return kept
        simulator = inputs.simulator(self.search_config, sync_every=case.sync_every)
        search_s = None
        if kept is not None:
            method, search_s = before.method, before.search_s
        elif is_file(case.strategy):
            strategy, method = self._load(), "file"
        else:
            strategy, method = build_strategy(case, simulator, self.shares), "builder"
        return strategy, predict(
            simulator, strategy, method=method, search_s=search_s,
            is_asynchronous=case.is_asynchronous,
        )  # fmt: skip

    def _load_earlier(self) -> tuple[Strategy, Prediction] | None:
        """Load the plan of a search or of an earlier repeat with the same inputs."""
        case, results, made_for = self.case, self.run_dir.parent, self.inputs.made_for
        header = read_header(self.run_dir)
        if case.strategy == "searched":
            # All repeats train one plan, even if a run between them has added to the profile.
            repeated = header.repeat > 0 and find_plan(results, header, made_for, any_profile=True)
            return repeated or self._found_by_search(header)
        if case.balance == "speed" and case.engine != "executor":
            return None  # each repeat measures its own shares
        found = find_plan(results, header, made_for)
        if found is not None and is_file(case.strategy):
            return found if self._load() == found[0] else None
        return found

    def _found_by_search(self, header: RunHeader) -> tuple[Strategy, Prediction]:
        results, config = self.run_dir.parent, config_json(self.search_config)
        made_for = self.inputs.made_for
        found = find_search(results, config, header.cluster, made_for, header.commit)
        if found is None:
            failure = find_failure(results, "search", config, header.cluster)
            raise PlanError(
                failure
                or f"no search in {results} has planned {self.search_config.model} for these "
                "devices by their newest measurements: run ./entry.sh search"
            )
        return found

    def _load(self) -> Strategy:
        """Load the user's file and give it the fingerprint of these inputs."""
        strategy = load_strategy(self.case, self.inputs.graph, self.inputs.cluster)
        return msgspec.structs.replace(strategy, made_for=self.inputs.made_for)


def device_flops(graph: Graph, strategy: Strategy, n_devices: int) -> list[StepFlops]:
    """FLOPs of each device in a step: its share of each operator's forward and backward.

    Work is counted once: copies of a block share its FLOPs, and halos do not count.
    """
    flops = [StepFlops(0.0, 0.0)] * n_devices
    for operator in filter(has_tasks, graph.operators):
        plan = strategy.operators[operator.name]
        scores = operator.attrs.get(SCORE_FLOPS, 0.0)
        assert isinstance(scores, int | float)
        parts = full_blocks(operator, plan.partition, batch=strategy.batch, graph_batch=graph.batch)
        computed = sum(map(volume, parts))
        for block, device in zip(parts, plan.devices, strict=True):
            share = volume(block) / computed
            before, whole = flops[device], operator.forward_flops + operator.backward_flops
            flops[device] = StepFlops(before.total + share * whole, before.scores + share * scores)
    return flops

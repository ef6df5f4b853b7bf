"""The inputs of planning (the model's graph, the measured cluster, the profile) and their runs."""

import shlex
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import MadeFor, fingerprint, is_by
from harness.domain.graph import Graph
from harness.domain.prediction import Prediction
from harness.domain.profile import Profile, knows
from harness.domain.run import RunHeader
from harness.domain.strategy import Strategy
from harness.errors import ConfigError, GraphError, HarnessError, PlanError
from harness.measure.store import read_header
from harness.plan.fit import OperatorTimes
from harness.plan.simulate.report import contention_seconds, sent_bytes, spans
from harness.plan.simulate.simulator import Simulation, Simulator
from harness.plan.simulate.unflushed import Unflushed, simulate_unflushed
from harness.runtime.capture.capture import Captured, capture
from harness.runtime.faithfulness.held import hold_once
from harness.runtime.models import build_task
from harness.runtime.models.factory import weights_on_meta
from harness.runtime.models.task import Task
from harness.runtime.models.user_code import code_digest
from harness.runtime.ranks.host import code_commit
from harness.workloads.common.contract import Need, config_json
from harness.workloads.common.flags import flag_words
from harness.workloads.planning.config import ProfileConfig, SearchConfig, part_sizes
from harness.workloads.planning.files import find_cluster, find_failure, find_search, has_profiled

# Flags that change how much is measured, but not the meaning of a measurement.
_EFFORT_FLAGS = ("shards", "time_budget_s", "min_samples", "rounds", "warm_up")


def links_need() -> Need:
    """Need the links between all ranks, measured once for a set of nodes."""

    def is_met(results: Path, cluster: Cluster) -> bool:
        return find_cluster(results, cluster) is not None

    return Need(name="links", config={}, is_met=is_met)


def profile_settings(config: ProfileConfig) -> dict[str, Any]:
    """The settings that two profile runs must share to measure the same operators."""
    return {name: value for name, value in config_json(config).items() if name not in _EFFORT_FLAGS}


def profile_need(search_config: SearchConfig, n_parts: int = 1) -> Need:
    """Need the profile of a model's operators on each kind of device.

    Args:
        n_parts: a further number of parts that the batch is cut into (microbatches).
    """
    config = search_config.profile_config(n_parts)
    wanted = profile_settings(config)

    def is_met(results: Path, cluster: Cluster) -> bool:
        file = config.path(results)
        parts = part_sizes(config.batch_size, [1, n_parts])
        code = code_digest(config.model)
        return has_profiled(results, wanted, cluster, file=file, parts=parts, code=code)

    return Need(name="profile", config=config_json(config), is_met=is_met)


def check_profile(config: ProfileConfig, results: Path) -> None:
    """Refuse a damaged profile, which a run would read or add to.

    Raises:
        GraphError: names the file.
    """
    path = config.path(results)
    try:
        if path.is_file():
            Profile.load(path)
    except GraphError as error:
        raise GraphError(f"{error}: restore the file, or remove it to measure again") from None


def search_need(search_config: SearchConfig) -> Need:
    """Need a search with these flags on these ranks, by this commit, cluster and profile."""
    config = config_json(search_config)

    def is_met(results: Path, cluster: Cluster) -> bool:
        found = find_search(results, config, cluster, commit=code_commit())
        measured = find_cluster(results, cluster) or cluster
        try:
            profile = Profile.load(search_config.profile_config().path(results))
        except HarnessError:
            return False
        return found is not None and is_by(found[0].made_for, measured, profile)

    return Need(name="search", config=config, is_met=is_met)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    graph: Graph
    cluster: Cluster
    profile: Profile

    @property
    def made_for(self) -> MadeFor:
        """The fingerprint that a strategy planned with these inputs carries."""
        return fingerprint(self.graph, self.cluster, self.profile)

    def simulator(
        self,
        search_config: SearchConfig,
        frozen: frozenset[str] = frozenset(),
        skipped: frozenset[str] = frozenset(),
        sync_every: int = 1,
    ) -> Simulator:
        """Make the simulator that predicts steps with this configuration.

        Args:
            frozen: operators that are not trained.
            skipped: those of them whose outputs are cached.
            sync_every: steps between two averages of replicas.
        """
        variant = search_config.optimizer_options().variant
        options = search_config.simulator_options().with_optimizer(
            variant, self.profile, self.cluster, is_averaging=search_config.ema is not None
        )
        return Simulator(
            self.graph,
            self.profile,
            self.cluster,
            options=replace(options.averaging(sync_every), frozen=frozen, skipped=skipped),
            memory_bytes=search_config.memory_bytes,
        )


def capture_graph(search_config: SearchConfig, results: Path | None = None) -> Graph:
    """Capture the model's graph for the global batch, on the meta device if the model allows it.

    Args:
        results: directory that remembers graphs which passed the faithfulness check; a graph
            that is not among them is compared with its model on the CPU. None skips the check.

    Raises:
        ModelError: there is no such model, it cannot be captured, or its graph trains differently.
    """
    try:
        with weights_on_meta():
            task, captured = _captured(search_config)
    except HarnessError:
        raise
    except Exception:  # the factory does not work on the meta device
        task, captured = _captured(search_config)
    if results is not None:
        make = partial(_captured, search_config)
        hold_once(captured, task, search_config.model, search_config.dtype, results, make)
    return captured.graph


def _captured(search_config: SearchConfig) -> tuple[Task, Captured]:
    task = build_task(search_config.model, search_config.model_options())
    return task, capture(task, search_config.batch_size, search_config.model)


def read_inputs(search_config: SearchConfig, run_dir: Path) -> Inputs:
    """Capture the model, and read cluster and profile from the results directory; rank 0 only.

    Raises:
        PlanError: links or operators of these devices have not been measured; if the run that
            should have measured them failed, the error gives that run's reason.
        ConfigError: the ranks are not in the order of their nodes.
        ModelError: no such model, or it cannot be captured.
    """
    results, header = run_dir.parent, read_header(run_dir)
    _check_order(header)
    # One device has no links to measure.
    unmeasured = header.cluster if header.cluster.n_devices == 1 else None
    cluster = find_cluster(results, header.cluster) or unmeasured
    if cluster is None:
        failure = find_failure(results, "links", {}, header.cluster)
        raise PlanError(
            failure
            or f"{results} holds no measured links of these {header.cluster.n_devices} ranks: run "
            "./entry.sh links on them"
        )
    graph = capture_graph(search_config, results)
    config = search_config.profile_config()
    path = config.path(results)
    profile = Profile.load(path) if path.is_file() else None
    if profile is None or not _knows(profile, search_config, graph, cluster):
        failure = find_failure(results, "profile", profile_settings(config), header.cluster)
        raise PlanError(
            failure
            or f"{path} does not hold every operator of {search_config.model} and the "
            f"optimizer's step on these devices: run {_profile_command(config)} on them"
        )
    return Inputs(graph=graph, cluster=cluster, profile=profile)


def _knows(profile: Profile, search_config: SearchConfig, graph: Graph, cluster: Cluster) -> bool:
    """Whether the profile holds every operator and the optimizer's step on every kind of device."""
    variant = search_config.optimizer_options().variant
    return knows(profile, graph, cluster) and all(
        profile.optimizer_s_per_byte(device.kind, variant) is not None for device in cluster.devices
    )


def _profile_command(config: ProfileConfig) -> str:
    """The command that profiles everything missing."""
    names = [field.name for field in fields(config)]
    words = flag_words(asdict(config), names, ProfileConfig())
    return shlex.join(["./entry.sh", "profile", *words])


def _check_order(header: RunHeader) -> None:
    """A strategy's device k is rank k, and a cluster lists devices node by node."""
    by_rank = [info.hostname for info in header.ranks]
    by_node = [node.name for node in header.cluster.nodes for _ in node.devices]
    if by_rank != by_node:
        raise ConfigError(
            f"ranks are on {', '.join(by_rank)}, planning needs them node by node "
            f"({', '.join(by_node)}): start them with mpirun --map-by slot"
        )


def predict(
    simulator: Simulator,
    strategy: Strategy,
    *,
    method: str,
    search_s: float | None = None,
    is_asynchronous: bool = False,
) -> Prediction:
    """Simulate one step of a strategy.

    Args:
        method: how the strategy was found, such as `search` or `builder`.

    Raises:
        StrategyError: the strategy does not fit the graph or the cluster.
    """
    sent: list[float] = []
    found: Unflushed | Simulation
    if is_asynchronous:
        found = simulate_unflushed(simulator, strategy)
        by_rank, waited_s = found.spans, found.contention_s
    else:
        found = simulator.simulate(strategy)
        by_rank, waited_s, sent = spans(found), contention_seconds(found), sent_bytes(found)
    return Prediction(
        strategy=strategy.name,
        method=method,
        step_s=found.step_s,
        memory_bytes=found.memory_bytes,
        spans={str(rank): own for rank, own in by_rank.items()},
        contention_s={str(rank): s for rank, s in enumerate(waited_s)},
        sent_bytes={str(rank): round(n) for rank, n in enumerate(sent)},
        profile_fit_error=largest_fit_error(simulator, strategy),
        search_s=search_s,
        calibrations=simulator.profile.calibrations(simulator.graph.content_hash()),
    )


def largest_fit_error(simulator: Simulator, strategy: Strategy) -> float | None:
    """Largest relative error of the fits that stand in for unmeasured shards; None without any."""
    times = OperatorTimes(simulator.profile)
    errors = []
    for costs in map(simulator.costs, set(strategy.microbatch_sizes())):
        for op in simulator.placed:
            operator = simulator.graph.operators[op]
            plan = strategy.operators[operator.name]
            for block, device in zip(costs.blocks(op, plan), plan.devices, strict=True):
                sizes = [stop - start for start, stop in block]
                shape = dict(zip(costs.shapes[op], sizes, strict=True))
                shape = {dim: n for dim, n in shape.items() if dim in operator.shape}
                kind = simulator.cluster.devices[device].kind
                if not times.is_measured(operator, kind, shape):
                    errors.append(times.relative_error(operator, kind) or 0.0)
    return max(errors, default=None)

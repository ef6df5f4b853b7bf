"""What the runs of a results directory measured on these machines: steps of plans, and how far
predictions were off."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import is_by
from harness.domain.graph import Graph
from harness.domain.prediction import STRATEGY_FILE
from harness.domain.profile import Profile
from harness.domain.run import RunHeader
from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.measure.derive.prediction import read_prediction
from harness.measure.derive.settings import strategy_name
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import full_times
from harness.measure.store import find_runs, read_run, without_samples
from harness.plan.advise.sets import part_of
from harness.plan.costs import FAMILIES

# Four in five of the cells in docs/readings.md have a median error below it.
_USUAL_ERROR = 0.15
_MOST_RUNS = 60
# Settings of a training that change its step, where a strategy's file does not say them.
_PLAIN: dict[str, Any] = {
    "sync_every": 1,
    "asynchronous": False,
    "freeze": "none",
    "change": [],
    "compile": False,
    "reduce_dtype": "fp32",
}


@dataclass(frozen=True, kw_only=True)
class KnownPlan:
    """A plan that a search of the results chose or tried on some machines, or that was trained.

    Attributes:
        cluster: the machines, as `part_of` has them.
        name: by `describe_strategy`.
        strategy: None where no file has it, or it leaves some of the machines idle.
        step_s: median over its trial steps and trainings; None where it was not tried.
        is_raced: trial steps compared it with other plans.
    """

    cluster: Cluster
    batch: int
    name: str
    strategy: Strategy | None = None
    step_s: float | None = None
    is_raced: bool = False


def known_plans(
    results: Path | None, graph: Graph, cluster: Cluster, profile: Profile, optimizer: str
) -> tuple[KnownPlan, ...]:
    """The plans of these results that were made with the same measurements, for all machines or
    some: all that were tried, and of each set of machines the newest that a search found.

    Args:
        optimizer: one of OPTIMIZER_STEPS; steps with another one do not count.
    """
    # By machines, name and batch, the newest first.
    found: dict[tuple[tuple[str, ...], str, int], KnownPlan] = {}
    steps: dict[tuple[tuple[str, ...], str, int], list[float]] = defaultdict(list)
    for path, header in reversed(find_runs(results)[0] if results is not None else []):
        try:
            plans = _plans_of(path, header, graph, cluster, profile, optimizer)
        except HarnessError:
            continue
        for plan in plans:
            machines = tuple(device.name for device in plan.cluster.devices)
            key = machines, plan.name, plan.batch
            has_newer = any(one.strategy for own, one in found.items() if own[0] == machines)
            if key not in found and plan.step_s is None and has_newer:
                continue
            newer = found.get(key, plan)
            found[key] = replace(
                newer,
                strategy=newer.strategy or plan.strategy,
                is_raced=newer.is_raced or plan.is_raced,
            )
            steps[key] += [] if plan.step_s is None else [plan.step_s]
    return tuple(
        replace(one, step_s=statistics.median(own)) if (own := steps[key]) else one
        for key, one in found.items()
    )


def _plans_of(
    path: Path,
    header: RunHeader,
    graph: Graph,
    cluster: Cluster,
    profile: Profile,
    optimizer: str,
) -> list[KnownPlan]:
    """The chosen plan of a run that ended well, and all that it tried, if its measurements are
    these."""
    config = header.config
    is_planned = config.get("strategy") == "searched" or bool(config.get("strategy_digest"))
    is_search = header.workload == "search"
    if header.status != "ok" or not (is_search or (header.workload == "train" and is_planned)):
        return []
    strategy = Strategy.load(path / STRATEGY_FILE)
    at = {device.name: k for k, device in enumerate(cluster.devices)}
    devices = [at[name] for name in strategy.made_for.devices if name in at]
    measured = cluster if len(devices) == cluster.n_devices else cluster.part(devices)
    is_same = strategy.made_for.graph_hash == graph.content_hash()
    if not devices or not is_same or not is_by(strategy.made_for, measured, profile):
        return []
    steps = _steps(path, header, strategy.name) if _is_plain(config, optimizer) else {}
    machines = part_of(cluster, devices)
    plans = [
        KnownPlan(cluster=machines, batch=strategy.batch, name=name, step_s=s, is_raced=is_search)
        for name, s in steps.items()
        if name != strategy.name
    ]
    used = sorted({devices[k] for own in strategy.stage_devices() for k in own})
    node_of = cluster.node_of()
    is_all = len({node_of[k] for k in used}) == len(machines.nodes)
    own = KnownPlan(
        cluster=machines if is_all else part_of(cluster, used),
        batch=strategy.batch,
        name=strategy.name,
        strategy=strategy if is_all else None,
        step_s=steps.get(strategy.name),
        is_raced=is_all and is_search and bool(steps),
    )
    return [*plans, own]


def _is_plain(config: dict[str, Any], optimizer: str) -> bool:
    """Whether a run's steps are those of its strategy's file with this optimizer."""
    name = config.get("optimizer", "sgd")
    own = "momentum" if name == "sgd" and config.get("momentum", 0.9) > 0 else name
    return own == optimizer and all(config.get(key, v) == v for key, v in _PLAIN.items())


def _steps(path: Path, header: RunHeader, name: str) -> dict[str, float]:
    """Seconds of a step by the plan's name: of a search's trials, or the median of a training."""
    if header.workload == "search":
        return _trials(path, header, "trial_step_s")
    times = full_times(read_run(path, header)[0])
    return {name: statistics.median(times.values())} if times else {}


def _trials(path: Path, header: RunHeader, metric: str) -> dict[str, float]:
    """Seconds by the plan's name."""
    records = read_run(path, header)[0].ranks.get(0, [])
    return {str(sample.labels["plan"]): sample.value for sample in samples_of(records, metric)}


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """The range of measured / predicted steps.

    Attributes:
        n_strategies: that the range comes from; 0 where fewer than two were measured.
        by_family: the range of each family of which several strategies were measured.
    """

    low: float = 1 - _USUAL_ERROR
    high: float = 1 + _USUAL_ERROR
    n_strategies: int = 0
    by_family: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def source(self) -> str:
        if self.n_strategies:
            return f"measured / predicted of {self.n_strategies} strategies on this cluster"
        return f"{_USUAL_ERROR:.0%} either way, because fewer than two strategies were measured"

    def of(self, family: str) -> tuple[float, float]:
        """The range of a family of strategies."""
        return self.by_family.get(family, (self.low, self.high))


def uncertainty_of(results: Path | None, cluster: Cluster) -> Uncertainty:
    """The range of the medians over repeats of each strategy that was trained, or tried by a
    search, on these nodes."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for family, strategy, ratio in _ratios(results, cluster):
        ratios[family, strategy].append(ratio)
    families: dict[str, list[float]] = defaultdict(list)
    for (family, _), found in ratios.items():
        families[family].append(statistics.median(found))
    medians = [one for own in families.values() for one in own]
    if len(medians) < 2:
        return Uncertainty()
    low, high = _range(medians)
    by_family = {family: _range(own) for family, own in families.items() if len(own) > 1}
    return Uncertainty(low=low, high=high, n_strategies=len(medians), by_family=by_family)


def _range(ratios: list[float]) -> tuple[float, float]:
    return min(1.0, *ratios), max(1.0, *ratios)


def _ratios(results: Path | None, cluster: Cluster) -> Iterator[tuple[str, str, float]]:
    """Family, strategy and measured / predicted step, of each training and each trial."""
    if results is None or not results.is_dir():
        return
    known = _kinds(cluster)
    runs = [
        (path, header)
        for path, header in without_samples(find_runs(results)[0])[0]
        if header.workload in ("search", "train")
        if header.status == "ok" and _kinds(header.cluster) <= known
    ]
    for path, header in runs[-_MOST_RUNS:]:
        try:
            prediction = read_prediction(path)
            if prediction is None:
                continue
            model = header.config.get("model")
            if header.workload == "search":
                predicted = {prediction.strategy: prediction.step_s}
                predicted |= _trials(path, header, "trial_predicted_step_s")
                for plan, step_s in _trials(path, header, "trial_step_s").items():
                    if plan in predicted:
                        yield "searched", f"{model} searched {plan}", step_s / predicted[plan]
                continue
            run = read_run(path, header)[0]
            times = full_times(run)
        except HarnessError:
            continue
        if times:
            measured_s = statistics.median(times.values())
            strategy = header.config.get("strategy", "")
            trained = f"{model} {strategy_name(run)} {prediction.strategy}"
            family = strategy if strategy in FAMILIES else "searched"
            yield family, trained, measured_s / prediction.step_s


def _kinds(cluster: Cluster) -> set[tuple[str, str]]:
    return {(node.name, device.kind) for node in cluster.nodes for device in node.devices}

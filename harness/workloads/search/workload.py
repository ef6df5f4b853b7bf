"""The search workload: which strategy trains a model fastest on these ranks, and why.

Rank 0 searches while the others sleep; then all train the best few plans for some steps.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import is_by
from harness.domain.prediction import STRATEGY_FILE, Prediction
from harness.domain.profile import Profile
from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.measure.store import Run, read_header
from harness.plan import builders
from harness.plan.portfolio import Searched, search_portfolio
from harness.plan.report import result_lines
from harness.plan.request import PlanRequest, PlanResult
from harness.plan.request import Progress as PlanProgress
from harness.plan.simulate.simulator import compile_events
from harness.runtime.devices.memory import peak_bytes
from harness.runtime.ranks.agreement import gather_numbers
from harness.runtime.ranks.broadcast import from_first, wait_for_all
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.host import code_commit
from harness.runtime.ranks.world import World
from harness.units import format_duration, parse_bytes
from harness.workloads.common.contract import Need, Workload, config_json
from harness.workloads.common.model_flags import ModelFlags, flag_words
from harness.workloads.planning.files import find_cluster, find_search, write_plan
from harness.workloads.planning.inputs import Inputs, read_inputs
from harness.workloads.planning.needs import links_need, profile_need
from harness.workloads.planning.optimizer import Updated, optimizer_s_per_byte
from harness.workloads.planning.predict import predict
from harness.workloads.planning.search_config import SearchConfig, search_cases
from harness.workloads.search.trials import Tried, trial_lines, try_out
from harness.workloads.train.config import TrainConfig


def measure_optimizer(
    question: SearchConfig, inputs: Inputs | None, world: World
) -> tuple[float, ...]:
    """Seconds of an optimizer step per byte of parameters, by rank; all ranks must call it.

    Args:
        inputs: rank 0's; the others' is ignored.
    """

    def updated() -> bytes:
        assert inputs is not None
        return msgspec.msgpack.encode(Updated.of(inputs.graph, world.size))

    told = msgspec.msgpack.decode(from_first(updated, world), type=Updated)
    mine = optimizer_s_per_byte(told, question.optimizer_options(), world.device)
    wait_for_all(world)
    return tuple(gather_numbers(mine, world))


@dataclass(frozen=True, kw_only=True)
class Found:
    """The plan that was chosen; rank 0 only.

    Attributes:
        tried: plans that were trained for some steps; the first is chosen. Nothing where the
            prediction alone decided.
    """

    strategy: Strategy
    prediction: Prediction
    result: PlanResult
    tried: list[Tried]


def search(
    question: SearchConfig, inputs: Inputs | None, rates: tuple[float, ...], context: Context
) -> Found | None:
    """Search on rank 0, then try the best plans on all ranks, which must all call it.

    Args:
        inputs: rank 0's; the others' is ignored.

    Returns:
        None on the other ranks.

    Raises:
        PlanError: nothing fits into memory.
        PeerError: another rank died or hangs in a trial step.
    """
    searcher = _Searcher(question, rates, context)

    def look() -> bytes:
        assert inputs is not None
        searcher.search(inputs)
        return b""

    from_first(look, context.world)
    tried = try_out(question, searcher.found, context)
    return searcher.choose(tried) if context.world.is_first else None


class _Searcher:
    """Rank 0's part, with progress on its terminal; on the other ranks it knows nothing."""

    def __init__(self, question: SearchConfig, rates: tuple[float, ...], context: Context) -> None:
        self._question, self._rates, self._context = question, rates, context
        self._search_s = self._search_cpu_s = 0.0
        self.found: Searched | None = None

    def search(self, inputs: Inputs) -> None:
        question = self._question
        simulator = inputs.simulator(question, self._rates, self._context.world.device)
        compile_events(simulator, builders.single(inputs.graph, question.batch_size))
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        request = PlanRequest(
            cluster=inputs.cluster,
            graph=inputs.graph,
            profile=inputs.profile,
            batch=question.batch_size,
            memory_bytes=parse_bytes(question.memory) if question.memory else None,
            budget=question.search_budget or None,
            seconds=question.search_seconds,
            seed=question.seed,
            progress=self._show,
        )
        self.found = search_portfolio(request, options=simulator.options)
        self._search_s = time.perf_counter() - start_s
        self._search_cpu_s = time.process_time() - cpu_start_s

    def _show(self, progress: PlanProgress) -> None:
        done = round(100 * (progress.fraction or 0.0))
        best = format_duration(progress.best_step_s)
        note = f"% {progress.phase}, {progress.n_proposals} judged, best {best}"
        self._context.progress.update("search", done, 100, note)

    def choose(self, tried: list[Tried]) -> Found:
        """What was fastest when tried, else by prediction."""
        assert self.found is not None
        result = msgspec.structs.replace(
            self.found.result(tried[0].candidate if tried else None),
            search_cpu_s=self._search_cpu_s,
            peak_rss_bytes=peak_bytes(self._context.world.device)["rss"],
        )
        prediction = predict(
            self.found.simulator, result.strategy, method=result.method, search_s=self._search_s
        )
        return Found(strategy=result.strategy, prediction=prediction, result=result, tried=tried)


def run_search(config: SearchConfig, context: Context) -> dict[str, Any]:
    """Search for the fastest strategy; rank 0 writes it with its prediction into the run.

    Raises:
        PlanError: nothing fits, or links or operators have not been measured.
        PeerError: another rank died or hangs in a trial step.
    """
    inputs: Inputs | None = None

    def read() -> bytes:
        nonlocal inputs
        inputs = read_inputs(config, context.run_dir)
        return b""

    from_first(read, context.world)
    rates = measure_optimizer(config, inputs, context.world)
    for rank, rate in enumerate(rates):
        context.recorder.sample("optimizer_s_per_byte", rate, rank=rank)
    found = search(config, inputs, rates, context)
    if found is None:
        return {}
    write_plan(context.run_dir, found.strategy, found.prediction)
    result = found.result
    return {
        "strategy": found.strategy.name,
        "predicted_step_s": found.prediction.step_s,
        "speedup_over_single": result.speedup_over_single,
        "speedup_over_ddp": result.speedup_over_ddp,
        "n_proposals": result.n_proposals,
        "search_s": found.prediction.search_s,
        "text": [*result_lines(result), *trial_lines(found.tried)],
    }


def search_text(runs: list[Run]) -> str:
    """What each search found, and why; a line for one that found nothing."""
    return "\n\n".join(_run_text(run) for run in runs)


def _run_text(run: Run) -> str:
    header = run.header
    if header.status != "ok":
        return f"{header.config.get('model')}: {header.ending}"
    lines = header.texts("text")
    return "\n".join([*lines, f"train it with: {_training_command(run)}"])


def _training_command(run: Run) -> str:
    """What trains the plan; flags that have their defaults are left out."""
    config = run.header.config
    names = [field.name for field in fields(ModelFlags)]
    names += ["dtype", "optimizer", "momentum", "bucket_mib"]
    words = ["./entry.sh", "train", *flag_words(config, names, TrainConfig())]
    words += ["--batch-size", str(config["batch_size"]), "--rank-counts", str(config["n_ranks"])]
    return shlex.join([*words, "--strategy", str(run.path / STRATEGY_FILE)])


def _n_ranks(config: SearchConfig, n_started: int) -> int:
    return min(config.n_ranks or n_started, n_started)


def _needs(config: SearchConfig) -> list[Need]:
    links = [links_need()] if config.n_ranks > 1 else []
    return [*links, profile_need(config)]


WORKLOAD = Workload(
    config=SearchConfig,
    cases=search_cases,
    body=run_search,
    table=search_text,
    n_ranks=_n_ranks,
    needs=_needs,
)


def search_need(question: SearchConfig) -> Need:
    """A search for this question on these ranks, by this code and by what is measured now."""
    config = config_json(question)

    def is_met(results: Path, cluster: Cluster) -> bool:
        found = find_search(results, config, cluster, commit=code_commit())
        measured = find_cluster(results, cluster) or cluster
        try:
            profile = Profile.load(question.profile_config().path(results))
        except HarnessError:
            return False
        return found is not None and is_by(found[0].made_for, measured, profile)

    return Need(name="search", workload=SEARCH, config=question, is_met=is_met)


def found_by_search(
    question: SearchConfig, inputs: Inputs, context: Context
) -> tuple[Strategy, Prediction] | None:
    """What a search has found for this question and these inputs; rank 0 only."""
    header = read_header(context.run_dir)
    return find_search(
        context.run_dir.parent,
        config_json(question),
        header.cluster,
        inputs.made_for,
        header.commit,
    )

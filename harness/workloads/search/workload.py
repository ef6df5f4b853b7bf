"""The search workload: find the fastest strategy for a model on these ranks.

Rank 0 searches while the others sleep; then all ranks train the best few plans for some steps.
"""

import shlex
import time
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import msgspec

from harness.domain.prediction import STRATEGY_FILE, Prediction
from harness.errors import HarnessError
from harness.measure.store import Run
from harness.measure.text import for_each_run
from harness.plan import builders
from harness.plan.costs import PlanRequest, PlanResult, SearchProgress
from harness.plan.portfolio import Searched, search_portfolio
from harness.plan.report import result_lines
from harness.runtime.devices.memory import peak_bytes
from harness.runtime.ranks.gather import run_on_rank_0
from harness.runtime.ranks.world import Context
from harness.units import format_duration
from harness.workloads.common.contract import Need, Workload
from harness.workloads.common.flags import ModelFlags, RunOptions, fitted_flags, flag_words
from harness.workloads.planning.config import SearchConfig, search_cases
from harness.workloads.planning.files import write_plan
from harness.workloads.planning.inputs import (
    check_profile,
    links_need,
    predict,
    profile_need,
    read_inputs,
)
from harness.workloads.search.trials import (
    Tried,
    trial_doubts,
    trial_lines,
    trial_ratios,
    trial_title,
    try_out,
)


class _Searcher:
    """Searches on rank 0, with progress on its terminal; `found` stays None on other ranks."""

    def __init__(self, search_config: SearchConfig, context: Context) -> None:
        self._search_config, self._context = search_config, context
        self._search_s = self._search_cpu_s = 0.0
        self.found: Searched | None = None

    def search(self) -> None:
        search_config = self._search_config
        inputs = read_inputs(search_config, self._context.run_dir)
        simulator = inputs.simulator(search_config)
        # Compiles the event loop, once per machine, so that no search's time includes it.
        simulator.simulate(builders.single(inputs.graph, search_config.batch_size))
        start_s, cpu_start_s = time.perf_counter(), time.process_time()
        request = PlanRequest(
            cluster=inputs.cluster,
            graph=inputs.graph,
            profile=inputs.profile,
            batch=search_config.batch_size,
            memory_bytes=search_config.memory_bytes,
            budget=search_config.search_budget,
            seconds=search_config.search_seconds,
            shard_state=search_config.asked_state,
            seed=search_config.seed,
            progress=self._show,
        )
        self.found = search_portfolio(request, options=simulator.options)
        self._search_s = time.perf_counter() - start_s
        self._search_cpu_s = time.process_time() - cpu_start_s

    def _show(self, progress: SearchProgress) -> None:
        done = round(100 * (progress.fraction or 0.0))
        best = format_duration(progress.best_step_s)
        note = f"% {progress.phase}, {progress.n_proposals} judged, best {best}"
        self._context.progress.update("search", done, 100, note)

    def choose(self, tried: list[Tried]) -> tuple[PlanResult, Prediction]:
        """Choose the plan with the fastest trial steps, or the best prediction without trials."""
        assert self.found is not None
        result = msgspec.structs.replace(
            self.found.result(tried[0].candidate if tried else None),
            search_cpu_s=self._search_cpu_s,
            peak_rss_bytes=peak_bytes(self._context.world.device)["rss"],
        )
        prediction = predict(
            self.found.simulator, result.strategy, method=result.method, search_s=self._search_s
        )
        return result, prediction

    def lines(self, result: PlanResult, tried: list[Tried]) -> list[str]:
        """The answer for people, with the trial steps."""
        assert self.found is not None
        answer = result_lines(result, trial_title(tried), trial_ratios(tried, result))
        return [*answer, *trial_lines(tried), *trial_doubts(tried, self.found.ranked())]


def run_search(config: SearchConfig, context: Context) -> dict[str, Any]:
    """Search on rank 0, try the best plans on all ranks, and write the chosen plan and its
    prediction into the run on rank 0.

    Raises:
        PlanError: no plan fits into memory, or links or operators have not been measured.
        PeerError: another rank died or hangs in a trial step.
    """
    searcher = _Searcher(config, context)
    run_on_rank_0(searcher.search, context.world)
    tried = try_out(config, searcher.found, context)
    if not context.world.is_first:
        return {}
    result, prediction = searcher.choose(tried)
    write_plan(context.run_dir, result.strategy, prediction)
    return {
        "strategy": result.strategy.name,
        "predicted_step_s": prediction.step_s,
        "speedup_over_single": result.speedup_over_single,
        "speedup_over_ddp": result.speedup_over_ddp,
        "n_proposals": result.n_proposals,
        "search_s": prediction.search_s,
        "text": searcher.lines(result, tried),
    }


@for_each_run
def search_text(run: Run) -> list[str]:
    """A search's plan with its explanation."""
    n_ranks = run.header.config["n_ranks"]
    where = f" on {n_ranks} ranks, started as this search" if n_ranks > 1 else ""
    text = f"train it{where}, with: {_training_command(run)}"
    return ["\n".join([*run.header.texts("text"), text])]


def _training_command(run: Run) -> str:
    """The command that trains the plan; flags at their defaults are left out."""
    config = _given_sizes(msgspec.convert(run.header.config, SearchConfig))
    names = ["model", *(field.name for field in fields(ModelFlags) if field.name != "model")]
    names += ["dtype", "optimizer", "momentum", "ema", "bucket_mib", "reduce_dtype"]
    words = ["./entry.sh", "train", *flag_words(vars(config), names, SearchConfig())]
    words += ["--batch-size", str(config.batch_size), "--n-ranks", str(config.n_ranks)]
    if run.path.parent.absolute() != RunOptions.results.absolute():
        words += ["--results", str(run.path.parent)]
    return shlex.join([*words, "--strategy", str(run.path / STRATEGY_FILE)])


def _given_sizes(config: SearchConfig) -> SearchConfig:
    """Leave out the model's sizes that follow from the others."""
    every = fitted_flags(config.model_options())
    for name in every:
        left_out: dict[str, Any] = {name: None}
        fewer = replace(config, **left_out)
        with suppress(HarnessError):
            if fitted_flags(fewer.model_options()) == every:
                config = fewer
    return config


def _needs(config: SearchConfig) -> list[Need]:
    links = [links_need()] if config.n_ranks != 1 else []
    return [*links, profile_need(config)]


WORKLOAD = Workload(
    config=SearchConfig,
    cases=search_cases,
    body=run_search,
    table=search_text,
    needs=_needs,
    check=lambda config, results: check_profile(config.profile_config(), results),
)

"""The search workload: which strategy trains a model fastest on these ranks, and why.

Rank 0 searches; the others measure their part and leave, so that they take nothing from it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.prediction import STRATEGY_FILE, Prediction
from harness.domain.strategy import Strategy
from harness.measure.store import Run, read_header
from harness.plan import builders
from harness.plan.portfolio import plan_with_simulator
from harness.plan.report import result_lines
from harness.plan.request import PlanRequest, PlanResult
from harness.plan.request import Progress as PlanProgress
from harness.plan.simulate.simulator import compile_events
from harness.runtime.agreement import gather_numbers
from harness.runtime.context import Context
from harness.runtime.executor.deferred import in_place_bytes
from harness.runtime.memory import peak_bytes
from harness.units import format_duration, parse_bytes
from harness.workloads.contract import Need, Workload
from harness.workloads.plan_config import SearchConfig, search_cases
from harness.workloads.plan_files import find_search, write_plan
from harness.workloads.plan_inputs import Inputs, read_inputs
from harness.workloads.plan_needs import links_need, plain, profile_need
from harness.workloads.plan_optimizer import optimizer_s_per_byte, parameter_sizes
from harness.workloads.plan_predict import predict
from harness.workloads.plan_share import from_first, wait_for_all


class _Sizes(msgspec.Struct, frozen=True):
    """Bytes of the parameters that the optimizer is timed on."""

    sizes: list[int]


def measure_optimizer(
    question: SearchConfig, inputs: Inputs | None, context: Context
) -> tuple[float, ...]:
    """Seconds of an optimizer step per byte of parameters, by rank; all ranks must call it.

    Args:
        inputs: rank 0's; the others' is ignored.
    """

    def sizes() -> bytes:
        assert inputs is not None
        return msgspec.msgpack.encode(_Sizes(parameter_sizes(inputs.graph)))

    told = msgspec.msgpack.decode(from_first(sizes, context.world), type=_Sizes)
    mine = optimizer_s_per_byte(told.sizes, question.optimizer_options(), context.world.device)
    wait_for_all(context.world)
    return tuple(gather_numbers(mine, context.world))


def search(
    question: SearchConfig, inputs: Inputs, rates: tuple[float, ...], context: Context
) -> tuple[Strategy, Prediction, PlanResult]:
    """Search on this rank, with progress on rank 0's terminal.

    Raises:
        PlanError: nothing fits into memory.
    """
    simulator = inputs.simulator(question, rates, in_place_bytes(context.world.device))
    compile_events(simulator, builders.single(inputs.graph, question.batch_size))
    start_s, cpu_start_s = time.perf_counter(), time.process_time()

    def show(progress: PlanProgress) -> None:
        done = round(100 * (progress.fraction or 0.0))
        best = format_duration(progress.best_step_s)
        note = f"% {progress.phase}, {progress.n_proposals} judged, best {best}"
        context.progress.update("search", done, 100, note)

    request = PlanRequest(
        cluster=inputs.cluster,
        graph=inputs.graph,
        profile=inputs.profile,
        batch=question.batch_size,
        memory_bytes=parse_bytes(question.memory) if question.memory else None,
        budget=question.search_budget or None,
        seconds=question.search_seconds,
        seed=question.seed,
        progress=show,
    )
    result = plan_with_simulator(request, options=simulator.options)
    search_s = time.perf_counter() - start_s
    result = msgspec.structs.replace(
        result,
        search_cpu_s=time.process_time() - cpu_start_s,
        peak_rss_bytes=peak_bytes(context.world.device)["rss"],
    )
    strategy: Strategy = result.strategy
    prediction = predict(simulator, strategy, method=result.method, search_s=search_s)
    return strategy, prediction, result


def run_search(config: SearchConfig, context: Context) -> dict[str, Any]:
    """Search for the fastest strategy; rank 0 writes it with its prediction into the run.

    Raises:
        PlanError: nothing fits, or links or operators have not been measured.
    """
    inputs: Inputs | None = None

    def read() -> bytes:
        nonlocal inputs
        inputs = read_inputs(config, context.run_dir)
        return b""

    from_first(read, context.world)
    rates = measure_optimizer(config, inputs, context)
    for rank, rate in enumerate(rates):
        context.recorder.sample("optimizer_s_per_byte", rate, rank=rank)
    if inputs is None:
        return {}
    strategy, prediction, result = search(config, inputs, rates, context)
    write_plan(context.run_dir, strategy, prediction)
    return {
        "strategy": strategy.name,
        "predicted_step_s": prediction.step_s,
        "speedup_over_single": result.speedup_over_single,
        "speedup_over_ddp": result.speedup_over_ddp,
        "n_proposals": result.n_proposals,
        "search_s": prediction.search_s,
        "text": result_lines(result),
    }


def search_text(runs: list[Run]) -> str:
    """What each search found, and why; a line for one that found nothing."""
    return "\n\n".join(_run_text(run) for run in runs)


def _run_text(run: Run) -> str:
    header = run.header
    if header.status != "ok":
        return f"{header.config.get('model')}: {header.status}: {header.reason.splitlines()[0]}"
    lines = [str(line) for line in header.summary.get("text", [])]
    return "\n".join([*lines, f"train it with: train --strategy {run.path / STRATEGY_FILE}"])


def _n_ranks(config: SearchConfig, n_started: int) -> int:
    return min(config.n_ranks or n_started, n_started)


def _needs(config: SearchConfig) -> list[Need]:
    return [links_need(), profile_need(config)]


SEARCH = Workload(
    summary="find the fastest strategy for a model on these ranks, and say why",
    config=SearchConfig,
    cases=search_cases,
    body=run_search,
    table=search_text,
    n_ranks=_n_ranks,
    needs=_needs,
)


def search_need(question: SearchConfig) -> Need:
    """A search for this question on these ranks."""
    config = plain(question)

    def is_met(results: Path, cluster: Cluster) -> bool:
        return find_search(results, config, cluster) is not None

    return Need(name="search", workload=SEARCH, config=question, is_met=is_met)


def found_by_search(
    question: SearchConfig, inputs: Inputs, context: Context
) -> tuple[Strategy, Prediction] | None:
    """What a search has found for this question and these inputs; rank 0 only."""
    header = read_header(context.run_dir)
    return find_search(context.run_dir.parent, plain(question), header.cluster, inputs.made_for)

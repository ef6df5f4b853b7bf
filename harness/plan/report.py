"""A search's result for people, as JSON, and its progress on a terminal; names of strategies."""

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from harness.domain.einsum import expert_dim
from harness.domain.graph import Graph, Operator
from harness.domain.partition import REPLICA, SAMPLE, Cut, n_parts
from harness.domain.profile import OPTIMIZER_STEPS
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.inputs import one_line
from harness.measure.text import table
from harness.plan.costs import PlanResult, SearchProgress
from harness.units import format_bytes, format_duration

# Kinds that say something about a strategy: the others follow them.
_TELLING = ("conv2d", "linear", "embedding", "attention", "ring", "gathered", "lstm", "experts")
_PLURALS = {
    "conv2d": "convolutions",
    "linear": "MLPs",
    "embedding": "tables",
    "attention": "attention",
    "ring": "ring attention",
    "gathered": "attention over gathered keys",
    "lstm": "LSTMs",
    "other": "operators",
}


def style(cuts: Mapping[str, Cut], devices: list[int]) -> str:
    """One operator's parallelism: `whole`, `data-parallel`, `sample-by-feature-parallel`."""
    cut = [dim for dim, parts in cuts.items() if n_parts(parts) > 1]
    if not cut:
        return "whole"
    if cut == [REPLICA]:
        return "replicated"
    if cut == [SAMPLE]:
        return "data-parallel" if len(set(devices)) > 1 else "whole"
    return f"{cut[0]}-parallel" if len(cut) == 1 else "-by-".join(cut) + "-parallel"


def describe_plans(plans: Iterable[tuple[str, Mapping[str, Cut], list[int]]]) -> str:
    """Summarise (kind, cuts, devices) of all operators, such as
    `data-parallel MLPs, tables on one device each`."""
    styles: dict[str, Counter[str]] = {}
    places: set[int] = set()
    for kind, cuts, devices in plans:
        places.update(devices)
        styles.setdefault(kind, Counter())[style(cuts, devices)] += 1
    telling = {kind: styles[kind] for kind in styles if kind in _TELLING} or styles
    if len(places) == 1:
        return "single device"
    phrases = []
    for kind, counts in telling.items():
        for name, _ in counts.most_common():
            noun = _PLURALS.get(kind, kind)
            share = "" if len(counts) == 1 else f" ({counts[name]} of {counts.total()})"
            phrases.append(
                f"{noun}{share} on one device each" if name == "whole" else f"{name} {noun}{share}"
            )
    return ", ".join(phrases)


def _kind(operator: Operator, plan: OperatorPlan) -> str:
    if plan.keys != "input":
        return plan.keys
    return "experts" if expert_dim(operator) else operator.kind


def describe_strategy(strategy: Strategy, graph: Graph) -> str:
    """Name a strategy, with its stages, replicas and microbatches when it has several."""
    plans = [
        (_kind(op, plan), plan.partition, plan.devices)
        for op in graph.operators
        if has_tasks(op)
        for plan in (strategy.operators[op.name],)
    ]
    text = describe_plans(plans)
    if len(strategy.stages) > 1:
        replicas = "-".join(str(len(devices)) for devices in strategy.stage_devices())
        text = f"{len(strategy.stages)} stages on {replicas} devices, {text}"
    if strategy.n_microbatches > 1:
        text += f", {strategy.n_microbatches} microbatches ({strategy.schedule})"
    return text + memory_saved(strategy)


def memory_saved(strategy: Strategy) -> str:
    """How it saves memory, such as `, recomputed, sharded parameters`; empty if it does not."""
    text = ", recomputed" if any(stage.recompute for stage in strategy.stages) else ""
    if len(strategy.stages) > 1 and any(stage.segments > 1 for stage in strategy.stages):
        text += " in segments"
    return text + (f", sharded {strategy.shard_state}" if strategy.shard_state != "none" else "")


_MOST_DEVICES = 16
_LONGEST_NOTE = 50  # of a plan, so that its row fits a terminal; --json has all of it
_ROUNDING = 1e-9
_LEAST_INTERVAL_S = 0.1  # between two texts of the progress line


def result_lines(result: PlanResult, title: str = "", ratios: str = "") -> list[str]:
    """The plan, why it was chosen, what the others cost, and memory.

    Args:
        title, ratios: how fast it is, and how fast beside standard strategies, where measured.
    """
    step = f"{format_duration(result.predicted_step_s)} per step"
    title = title or f"best plan by {result.cost}: {step}"
    if result.interrupted:
        title += " (interrupted: best so far)"
    if not ratios:
        ratios = f"predicted {result.speedup_over_single:.2f} times as fast as one device"
        if not math.isnan(result.speedup_over_ddp):
            ratios += f", {result.speedup_over_ddp:.2f} times as fast as data parallel"
    lines = [
        title,
        f"  {ratios}",
        *_gap(result),
        f"  found by {result.method}; {result.n_proposals} judged, "
        f"{result.proposals_per_s:.0f}/s, {format_duration(result.search_cpu_s)} of CPU, "
        f"{format_bytes(result.peak_rss_bytes)} at most",
        "",
        *(f"  {line}" for line in result.explanation),
        "",
    ]
    return [*lines, *_plans(result), "", *memory_lines(result.memory_bytes, result.optimizer)]


def _gap(result: PlanResult) -> list[str]:
    """How far the plan may be from the best one."""
    if result.lower_bound_s is None:
        return []
    gap = result.predicted_step_s / result.lower_bound_s - 1
    if gap < _ROUNDING:
        return ["  optimal: no plan of this kind is faster by this cost"]
    least = format_duration(result.lower_bound_s)
    return [f"  at most {gap:.1%} above the best plan, which takes at least {least}"]


def _plans(result: PlanResult) -> list[str]:
    def row(name: str, step_s: float | None, note: str) -> list[str]:
        if step_s is None:
            return [name, "-", "-", note or "does not fit"]
        ratio = step_s / result.predicted_step_s
        return [name, format_duration(step_s), f"{ratio:.2f}", note]

    rows = [row("this plan", result.predicted_step_s, "")]
    rows += [
        row(other.name, other.step_s, one_line(other.note, _LONGEST_NOTE))
        for other in result.runners_up
    ]
    return table(["plan", "predicted step", "times this plan", "note"], rows)


def memory_lines(memory_bytes: Mapping[str, int], optimizer: str = "") -> list[str]:
    """A table of the devices' peaks, with the optimizer whose state is in them."""
    with_state = f" ({OPTIMIZER_STEPS[optimizer].words})" if optimizer else ""
    devices = list(memory_bytes.items())
    rows = [[name, format_bytes(n_bytes)] for name, n_bytes in devices[:_MOST_DEVICES]]
    lines = table(["device", f"peak memory{with_state}"], rows)
    if len(devices) > _MOST_DEVICES:
        lines.append(f"... and {len(devices) - _MOST_DEVICES} more (--json has all)")
    return lines


class ProgressLine:
    """Rewrites one line of a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_live = self._stream.isatty()
        self._last_s = float("-inf")
        self._width = 0

    def __call__(self, progress: SearchProgress) -> None:
        share = "" if progress.fraction is None else f"{progress.fraction:4.0%}  "
        self.show(
            f"{share}{progress.n_proposals} judged  best "
            f"{format_duration(progress.best_step_s)}  {progress.phase}"
        )

    def show(self, text: str) -> None:
        """Rewrite the line, unless it has just been written."""
        now_s = time.monotonic()
        if not self._is_live or now_s - self._last_s < _LEAST_INTERVAL_S:
            return
        self._last_s = now_s
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Leave the line empty for later output."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

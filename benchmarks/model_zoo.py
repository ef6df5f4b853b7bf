"""Test that each strategy trains users' models correctly or refuses them.

    python benchmarks/model_zoo.py --json
    python benchmarks/model_zoo.py --only no_grad_branch roll_batch --strategies ddp --ranks 3 4

The zoo (tests/runtime/executor/zoo) has small models with one construct each: contexts, autograd
functions, hooks, operators that mix samples, buffers, outputs, control flow. It also has models of
transformers, timm and torchvision at tiny width. Each is trained for four steps by plain PyTorch on
one device, and by the executor over gloo: by the well-known strategies, by a searched one and by
random ones. Predictions are for devices of 10 GFLOP/s, and `captured_s` is processor time.
`--resume FILE` leaves out the rows that a file of `--json` has. One line per model and strategy:

    ok        losses, gradients, parameters and buffers equal those of one device: 1e-9 in float64,
              or ten times the difference to one device whose first weights are off by rounding, of
              float32 if the float64 model computes in that inside
    refused   an error of one line, on all ranks
    random    trained, but the model draws random numbers, so that trainings differ
    wrong     a different result, or a result although one device refuses
    crash     any other exception, an exception on some ranks only, or a hang

Exits with 1 if any is wrong or crashes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import tyro
from comparison import provenance

from harness.domain.graph import Graph
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, first_line
from harness.runtime.capture.capture import capture
from harness.runtime.devices.precision import Float32Watch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "runtime" / "executor"))
from equivalence_check import RanksBySize
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond, worst
from equivalence_ranks import RanksFailedError
from equivalence_reference import Trace
from equivalence_training import merged
from zoo import ZOO
from zoo.training import (
    BATCH,
    STRATEGIES,
    Planner,
    Refusal,
    ZooCase,
    strategies_of,
    train_on_ranks,
    train_single,
)

# A sum that is split rounds differently in 16 bits. Microbatches on one device have the same
# effect, so twice that difference is still equal.
_ROUNDINGS = 2.0
_SPLITS = ([BATCH // 2] * 2, [BATCH // 4] * 4)
# Where rounding grows, such as in a batch norm over two values, one device that starts with weights
# off by their rounding shows how far; a multiple of that is still equal.
_ROUNDING, _FACTOR = 2.0**-52, 10.0
_SHIFTS = (1, -1, 2)
_FLOAT32_ROUNDING = 2.0**-23
_BF16_ROUNDING = 2.0**-9


@dataclass(frozen=True, kw_only=True)
class Options:
    only: tuple[str, ...] = ()
    """Models of the zoo; all by default."""
    strategies: tuple[str, ...] = ()
    """Names of strategies, such as ddp or 1f1b; all by default."""
    ranks: tuple[int, ...] = (2,)
    """Numbers of ranks of the well-known strategies."""
    random: int = 3
    """Number of random strategies per model, on 2, 3 and 4 ranks."""
    seed: int = 0
    """Seed of weights, samples and random strategies."""
    timeout_s: float = 60.0
    """Time limit of a strategy."""
    resume: Path | None = None
    """File of earlier rows, which are left out."""
    json: bool = False
    """Print a JSON object for each model and strategy, and one for all."""


Row = dict[str, Any]


def _single(case: ZooCase, sizes: list[int]) -> Trace | str:
    """Train on one device; returns the trace, or the error."""
    return _single_of(case.model, case.seed, tuple(sizes))


@lru_cache(maxsize=8)
def _single_of(model: str, seed: int, sizes: tuple[int, ...]) -> Trace | str:
    none = Strategy(name="none", batch=BATCH, operators={})
    try:
        return train_single(ZooCase(model=model, strategy=none, seed=seed), list(sizes))
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"


def _judged(case: ZooCase, found: Trace, sizes: list[int]) -> Row:
    """Compare a training with that on one device."""
    wanted = _single(case, sizes)
    row: Row = {"loss": found.losses[-1], "step_s": found.step_s}
    if isinstance(wanted, str):
        return {**row, "status": "wrong", "reason": f"one device refuses it: {wanted}"}
    row["single_loss"] = wanted.losses[-1]
    model = ZOO[case.model]
    if model.is_random:
        return {**row, "status": "random"}
    if model.without is not None:
        row["difference"] = _loss_distance(found, wanted)
        others = [train_single(case, s) for s in _SPLITS]
        if any(tensor.element_size() == 2 for tensor in wanted.state.values()):
            # As sums of parts do, whose terms are of 16 bits too.
            others.append(train_single(case, sizes, offset=_BF16_ROUNDING))
        rounding = max(_loss_distance(one, wanted) for one in others)
        return {**row, "status": "ok" if row["difference"] <= _ROUNDINGS * rounding else "wrong"}
    wanted = _with_nil_gradients(wanted, found)
    row["difference"] = worst(found, wanted).difference
    beyond = first_beyond(found, wanted, FLOAT64_TOLERANCES["sgd"])
    if beyond is None:
        return {**row, "status": "ok"}
    with Float32Watch() as watch:
        shifted = [train_single(case, sizes, offset=k * _ROUNDING) for k in _SHIFTS]
    if watch.is_seen:
        shifted.append(train_single(case, sizes, offset=_FLOAT32_ROUNDING))
    row["rounding"] = max(worst(one, wanted).difference for one in shifted)
    if row["difference"] <= _FACTOR * row["rounding"]:
        return {**row, "status": "ok"}
    return {**row, "status": "wrong", "reason": f"{beyond.of} differs by {beyond.difference:.3g}"}


def _with_nil_gradients(wanted: Trace, found: Trace) -> Trace:
    """Treat a gradient that plain PyTorch leaves out as zero."""
    gradients = [
        {**{name: torch.zeros_like(g) for name, g in there.items()}, **own}
        for own, there in zip(wanted.gradients, found.gradients, strict=True)
    ]
    return replace(wanted, gradients=gradients)


def _loss_distance(a: Trace, b: Trace) -> float:
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


def _refused(reason: str) -> Row:
    is_one_line = "\n" not in reason.strip()
    return {"status": "refused" if is_one_line else "crash", "reason": reason}


def _trained(case: ZooCase, n_ranks: int, ranks: RanksBySize, options: Options) -> Row:
    try:
        answers = ranks.run(n_ranks, train_on_ranks, case, timeout_s=options.timeout_s)
    except RanksFailedError as error:
        return {"status": "crash", "reason": str(error).strip()}
    refusals = [answer for answer in answers if isinstance(answer, Refusal)]
    traces = [answer for answer in answers if isinstance(answer, Trace)]
    if refusals and traces:
        return {"status": "crash", "reason": f"some ranks alone refuse: {refusals[0].reason}"}
    if refusals:
        return _refused(refusals[0].reason)
    has_norm = ZOO[case.model].has_norm
    sizes = case.strategy.microbatch_sizes() if has_norm else [BATCH]
    return _judged(case, merged(traces), sizes)


def _predicted_and_trained(
    case: ZooCase, graph: Graph, n_ranks: int, ranks: RanksBySize, options: Options
) -> Row:
    try:
        predicted_s = Planner(graph, n_ranks).predict(case.strategy)
    except HarnessError as error:
        return _refused(str(error))
    return {"predicted_step_s": predicted_s, **_trained(case, n_ranks, ranks, options)}


def _rows_of(
    name: str, ranks: RanksBySize, options: Options, done: set[tuple[str, str, int]]
) -> Iterator[Row]:
    chosen = [s for s in STRATEGIES if not options.strategies or s in options.strategies]
    names = {n: [s for s in chosen if (name, s, n) not in done] for n in options.ranks}
    if (name, "capture", 0) in done or not (any(names.values()) or options.random):
        return
    start_s = time.process_time()
    try:
        graph = capture(ZOO[name].task(seed=options.seed), BATCH, name).graph
    except HarnessError as error:
        yield {"strategy": "capture", **_refused(str(error))}
        return
    except Exception as error:
        yield {"strategy": "capture", "status": "crash", "reason": repr(error)}
        return
    captured_s, is_held = round(time.process_time() - start_s, 2), False
    for strategy_name, n_ranks, made in strategies_of(graph, names, options.seed, options.random):
        if (name, strategy_name, n_ranks) in done:
            continue
        start_s = time.perf_counter()
        row: Row = {"strategy": strategy_name, "n_ranks": n_ranks, "captured_s": captured_s}
        if isinstance(made, Strategy):
            case = ZooCase(model=name, strategy=made, seed=options.seed, is_held=is_held)
            row |= _predicted_and_trained(case, graph, n_ranks, ranks, options)
            is_held = is_held or row["status"] == "ok"
        else:
            row |= _refused(made.reason)
        yield {**row, "duration_s": round(time.perf_counter() - start_s, 2)}


def _rows_in(path: Path) -> set[tuple[str, str, int]]:
    """Model, strategy and number of ranks of each row of a file that may not exist yet."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    rows = (row for row in found if "strategy" in row)
    return {(row["model"], row["strategy"], row.get("n_ranks", 0)) for row in rows}


def rows(options: Options, ranks: RanksBySize) -> Iterator[Row]:
    """Yield a row for each model, strategy and number of ranks."""
    unknown = set(options.only) - set(ZOO)
    if unknown:
        sys.exit(f"no model {min(unknown)!r} in the zoo: choose of {', '.join(ZOO)}")
    names = options.only or tuple(ZOO)
    done = _rows_in(options.resume) if options.resume else set()
    for index, name in enumerate(names):
        if sys.stderr.isatty():
            print(f"\r\033[K{index + 1}/{len(names)} {name}", end="", file=sys.stderr)
        for row in _rows_of(name, ranks, options, done):
            yield {"model": name, **row}


def _text(row: Row) -> str:
    reason = str(row.get("reason", "")).strip().splitlines() or [""]
    losses = [f"{row[key]:.6f}" for key in ("loss", "single_loss") if key in row]
    n_ranks = f"{row.get('n_ranks', ''):1}"
    shown = [f"{row['model']:24}", f"{row['strategy']:12}", n_ranks, f"{row['status']:8}", *losses]
    return "  ".join([*shown, reason[-1]]).rstrip()


def main(options: Options) -> int:
    """Train and print; returns 1 if anything is wrong or crashed."""
    logging.getLogger("harness").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    start_s = time.perf_counter()
    counts: Counter[str] = Counter()
    with RanksBySize() as ranks:
        for row in rows(options, ranks):
            counts[row["status"]] += 1
            print(json.dumps(row) if options.json else _text(row), flush=True)
    total = {
        "name": "model_zoo",
        **counts,
        "duration_s": round(time.perf_counter() - start_s),
        **provenance(),
    }
    print(json.dumps(total) if options.json else ", ".join(f"{n} {s}" for s, n in counts.items()))
    return int(counts["wrong"] + counts["crash"] > 0)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

"""Compare training by random valid strategies of the executor with training on one device.

    python benchmarks/executor_equivalence.py --cases 300 --seed 0 --output results.json

Each case is a random model (real topology, narrow layers), strategy (any partitions, devices,
stages and schedule) and training setup on 1 to 5 ranks over gloo. Three steps are compared with
plain PyTorch on one device: the loss of each step, every gradient, and the parameters and buffers
at the end. Replicas must be bit-equal. Prints the largest difference by model, schedule and number
of ranks, writes all cases, and prints each unequal case, which can be run again:

    python benchmarks/executor_equivalence.py --case-file case.json --shrink

`--shard-state parameters` shards state in every case.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import tyro
from comparison import provenance

from harness.domain.shard_state import ShardState, shards_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "runtime" / "executor"))
from equivalence_cases import Case, any_case, attention_case, copied_case, program_case, random_case
from equivalence_check import Finding, RanksBySize, check
from executor_shrink import shrink

SERIES = {
    "random": random_case,
    "copies": copied_case,
    "attention": attention_case,
    "any": any_case,
    "programs": program_case,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    series: Literal["random", "copies", "attention", "any", "programs"] = "random"
    """Any strategies; with copies of operators; attentions that are cut by positions; all of them,
    of models with all kinds of operators; of models that are drawn too."""
    cases: int = 300
    """Number of random cases."""
    seed: int = 0
    """Seed of the random cases."""
    only: tuple[int, ...] = ()
    """Run only these cases, by number in the series."""
    models: tuple[str, ...] = ()
    """Run only cases of these models."""
    ranks: tuple[int, ...] = ()
    """Run only cases on these numbers of ranks."""
    shard_state: ShardState | None = None
    """Shard this state in every case, and run 1f1b where zero bubble cannot."""
    device: Literal["cpu", "cuda:0", "nccl_rules"] = "cpu"
    """Train the strategies on this device, which all ranks share; one device in plain PyTorch, with
    which they are compared, is the CPU. nccl_rules: CPUs, with process groups that keep NCCL's
    rules."""
    compile: Literal["", "aot_eager", "inductor"] = ""
    """Compile segments by this backend of torch.compile in every case, but for asynchronous ones.
    aot_eager only traces them, and is faster."""
    case_file: Path | None = None
    """Run this case, as printed for an unequal one, rather than a series."""
    shrink: bool = False
    """Reduce each unequal case to a minimal one."""
    output: Path | None = None
    """Write all findings to this file, as JSON."""


def wanted_cases(options: Options) -> list[Case]:
    """The selected cases, grouped by number of ranks."""
    if options.case_file is not None:
        return [msgspec.json.decode(options.case_file.read_bytes(), type=Case)]
    indices = options.only or range(options.cases)
    make = SERIES[options.series]
    cases = [_compiled(_sharded(make(options.seed, index), options), options) for index in indices]
    return [
        case
        for case in sorted(cases, key=lambda case: case.n_ranks)
        if (not options.models or case.model in options.models)
        and (not options.ranks or case.n_ranks in options.ranks)
    ]


def _sharded(case: Case, options: Options) -> Case:
    if options.shard_state is None:
        return case
    schedule = case.strategy.schedule
    if shards_parameters(options.shard_state) and schedule == "zero_bubble":
        schedule = "1f1b"
    strategy = msgspec.structs.replace(
        case.strategy, shard_state=options.shard_state, schedule=schedule
    )
    return msgspec.structs.replace(case, strategy=strategy)


def _compiled(case: Case, options: Options) -> Case:
    backend = "" if case.is_asynchronous else options.compile
    return msgspec.structs.replace(case, backend=backend)


def _cell(findings: list[Finding]) -> str:
    """Largest difference of some cases, and the number of equal ones."""
    if not findings:
        return ""
    n_equal = sum(finding.is_equal for finding in findings)
    exact = [f.worst.difference for f in findings if f.worst and f.case.dtype == "float64"]
    shown = f"{max(exact):.0e}" if exact else "-"
    return f"{shown} ({n_equal}/{len(findings)})"


def table(findings: list[Finding]) -> str:
    """Largest relative difference and number of equal cases, by model, schedule and ranks."""
    sizes = sorted({finding.case.n_ranks for finding in findings})
    rows: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        model = finding.case.model.partition(" ")[0]  # of a drawn program, its first word
        rows.setdefault((model, finding.case.strategy.schedule), []).append(finding)
        rows.setdefault((model, "all"), []).append(finding)
        rows.setdefault(("all", finding.case.strategy.schedule), []).append(finding)
    rows["all", "all"] = findings
    lines = [f"{'model':24} {'schedule':12}" + "".join(f"{f'{n} ranks':>16}" for n in sizes)]
    for (model, schedule), found in sorted(rows.items()):
        cells = (_cell([f for f in found if f.case.n_ranks == n]) for n in sizes)
        lines.append(f"{model:24} {schedule:12}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def summary(findings: list[Finding], duration_s: float) -> dict[str, object]:
    """Summary of all cases for the output file."""

    def worst(optimizer: str) -> float:
        exact = (f for f in findings if f.case.dtype == "float64" and f.case.optimizer == optimizer)
        return max((f.worst.difference for f in exact if f.worst is not None), default=0)

    return {
        "n_cases": len(findings),
        "n_equal": sum(finding.is_equal for finding in findings),
        "n_refused": sum(bool(finding.refusal) for finding in findings),
        "worst_float64_sgd": worst("sgd"),
        "worst_float64_adamw": worst("adamw"),
        "duration_s": duration_s,
        **provenance(),
    }


def _row(finding: Finding) -> dict[str, object]:
    case = finding.case
    return {
        "name": case.name,
        "model": case.model,
        "n_ranks": case.n_ranks,
        "schedule": case.strategy.schedule,
        "shard_state": case.strategy.shard_state,
        "n_stages": len(case.strategy.stages),
        "n_microbatches": case.strategy.n_microbatches,
        "batch": case.strategy.batch,
        "optimizer": case.optimizer,
        "dropout": case.dropout,
        "dtype": case.dtype,
        "tolerance": finding.tolerance,
        "worst": finding.worst,
        "is_equal": finding.is_equal,
        "error": finding.error,
        "refusal": finding.refusal,
        "duration_s": round(finding.duration_s, 3),
    }


def _report(finding: Finding, options: Options, ranks: RanksBySize) -> None:
    print(finding.text(), flush=True)
    if options.shrink:
        smallest = shrink(finding.case, lambda case: not check(case, ranks).is_equal)
        print("smallest:", check(smallest, ranks).text(), flush=True)


def run(options: Options) -> list[Finding]:
    """Run all cases; prints unequal ones at once."""
    findings = []
    cases = wanted_cases(options)
    with RanksBySize(options.device) as ranks:
        for index, case in enumerate(cases):
            finding = check(case, ranks)
            findings.append(finding)
            if finding.refusal:
                print(f"{finding.case.model} refused: {finding.refusal}", flush=True)
            elif not finding.is_equal:
                _report(finding, options, ranks)
            elif sys.stderr.isatty():
                print(f"\r{index + 1}/{len(cases)}", end="", file=sys.stderr, flush=True)
    return findings


def main(options: Options) -> int:
    """Run all cases, print and write the results; returns 1 if any case is wrong."""
    logging.getLogger("harness").setLevel(logging.ERROR)  # hides names of gathered operators
    start = time.perf_counter()
    findings = run(options)
    facts = summary(findings, time.perf_counter() - start)
    print(table(findings))
    print(
        f"{facts['n_equal']} of {facts['n_cases']} cases equal, {facts['n_refused']} refused, "
        f"{facts['duration_s']:.0f} s"
    )
    if options.output is not None:
        written = {**facts, "cases": [_row(finding) for finding in findings]}
        options.output.write_bytes(msgspec.json.format(msgspec.json.encode(written), indent=1))
    return int(any(not (finding.is_equal or finding.refusal) for finding in findings))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

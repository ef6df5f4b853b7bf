"""Compare trainings that change their strategy between steps with training on one device.

    python benchmarks/change_equivalence.py --cases 100 --seed 0 --json > results.json

Each case is a random model, a training setup and two or three random strategies (any cuts, stages,
replicas and schedules, on 1 to 5 ranks of which some may idle); it changes from one to the next at
random steps, in the same processes. Compared with plain PyTorch on one device: the loss of each
step, and at the end parameters, buffers and the optimizer's state. The ranks must have read each
sample of each global batch. Also counts process groups, open files and memory over many changes.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import tyro
from comparison import provenance

from harness.errors import ModelError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "runtime" / "executor"))
from change_cases import ChangingCase, random_changing_case
from change_check import ChangeFinding, check_change
from change_training import Footprint, change_often
from equivalence_check import RanksBySize


@dataclass(frozen=True, kw_only=True)
class Options:
    cases: int = 100
    """Number of random cases."""
    seed: int = 0
    """Seed of the random cases."""
    only: tuple[int, ...] = ()
    """Run only these cases, by number in the series."""
    freeze: bool = False
    """Freeze more layers at each change, or train some again, on one device too."""
    any: bool = False
    """Draw models and strategies of all kinds, on up to 6 ranks."""
    device: Literal["cpu", "cuda:0", "nccl_rules"] = "cpu"
    """Train on this device, which all ranks share; plain PyTorch stays on the CPU. nccl_rules:
    CPUs, with process groups that keep NCCL's rules."""
    changes: int = 100
    """Number of changes over which groups, files and memory are counted. 0 skips it."""
    json: bool = False
    """Print one JSON object instead of lines."""


def wanted_cases(options: Options) -> list[ChangingCase]:
    """The selected cases, grouped by number of ranks, without those whose drawn model this version
    of torch cannot capture."""
    cases = []
    for index in options.only or range(options.cases):
        try:
            case = random_changing_case(
                options.seed, index, is_freezing=options.freeze, is_any=options.any
            )
        except ModelError as error:
            print(f"case {index} is left out: {error}", file=sys.stderr, flush=True)
        else:
            cases.append(case)
    return sorted(cases, key=lambda changing: changing.case.n_ranks)


def footprint(ranks: RanksBySize, n_changes: int) -> dict[str, Any]:
    """Growth over the last nine tenths of many changes between two strategies on 3 ranks."""
    series = (random_changing_case(0, index) for index in range(1000))
    changing = next(c for c in series if c.case.n_ranks == 3 and c.case.model == "mlp")
    found: Any = ranks.run(3, change_often, (changing, n_changes), timeout_s=1800)
    ends: list[tuple[Footprint, Footprint]] = [(own[n_changes // 10], own[-1]) for own in found]
    return {
        "n_changes": n_changes,
        "more_groups": max(last.n_groups - first.n_groups for first, last in ends),
        "more_files": max(last.n_files - first.n_files for first, last in ends),
        "more_rss_bytes": max(last.rss_bytes - first.rss_bytes for first, last in ends),
    }


def summary(findings: list[ChangeFinding], duration_s: float) -> dict[str, Any]:
    """The summary of all cases."""

    def worst(optimizer: str) -> float:
        of = [f.worst for f in findings if f.changing.case.optimizer == optimizer]
        return max((one.difference for one in of if one is not None), default=0.0)

    return {
        "n_cases": len(findings),
        "n_equal": sum(finding.is_equal for finding in findings),
        "n_refused": sum(bool(finding.refusal) for finding in findings),
        "n_changes": sum(len(finding.changing.changes) for finding in findings),
        "n_freezing": sum(any(finding.changing.frozen) for finding in findings),
        "n_moved_bytes": sum(finding.n_moved_bytes for finding in findings),
        "worst_sgd": worst("sgd"),
        "worst_adamw": worst("adamw"),
        "worst_loss": max((finding.worst_loss for finding in findings), default=0.0),
        "duration_s": duration_s,
        **provenance(),
    }


def run(options: Options, ranks: RanksBySize) -> list[ChangeFinding]:
    """Run all cases; prints unequal ones at once."""
    findings = []
    for changing in wanted_cases(options):
        findings.append(check_change(changing, ranks))
        if not findings[-1].is_equal or not options.json:
            print(findings[-1].text(), file=sys.stderr, flush=True)
    return findings


def main(options: Options) -> int:
    """Run all cases and print the results; returns 1 if any case is unequal or fails."""
    logging.getLogger("harness").setLevel(logging.ERROR)  # hides names of gathered operators
    start_s = time.perf_counter()
    with RanksBySize(options.device) as ranks:
        findings = run(options, ranks)
        facts = summary(findings, time.perf_counter() - start_s)
        if options.changes:
            facts["footprint"] = footprint(ranks, options.changes)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(facts), indent=1).decode())
    else:
        print(
            f"{facts['n_equal']} of {facts['n_cases']} cases equal, {facts['n_refused']} refused, "
            f"{facts['duration_s']:.0f} s"
        )
    return int(facts["n_equal"] + facts["n_refused"] != facts["n_cases"])


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))

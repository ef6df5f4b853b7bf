"""Runs cases on ranks and compares each with training on one device."""

from __future__ import annotations

import re
import time

import msgspec
from equivalence_cases import Case
from equivalence_compare import FLOAT64_TOLERANCES, Worst, first_beyond, rounded_tolerance, worst
from equivalence_ranks import Ranks, RanksFailedError
from equivalence_reference import Trace, train_alone, train_alone_asynchronously
from equivalence_training import merged, train_by_strategy

from harness.domain.strategy import OperatorPlan, Stage, Strategy


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What comparing one case found.

    Attributes:
        worst: the tensor that is farthest.
        first: the first tensor, in the order of training, beyond the tolerance.
        error: why the case could not be carried out; empty if it was.
        refusal: what all ranks said of the model or the strategy before they trained.
    """

    case: Case
    tolerance: float = 0.0
    worst: Worst | None = None
    first: Worst | None = None
    error: str = ""
    refusal: str = ""
    duration_s: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not (self.error or self.refusal) and self.first is None

    def text(self) -> str:
        """The case, what is wrong with it, and its strategy, to run it again."""
        case = self.case
        which = f"{case.name}: {case.model} on {case.n_ranks} ranks, {case.strategy.schedule}"
        if self.is_equal:
            return f"{which}: equal"
        wrong = self.error or f"refused: {self.refusal}"
        if self.first is not None and self.worst is not None:
            wrong = (
                f"{self.first.of} differs by {self.first.difference:.3g} (tolerance "
                f"{self.tolerance:.1g}); worst: {self.worst.of} by {self.worst.difference:.3g}"
            )
        return f"{which}: {wrong}\n{msgspec.json.encode(case).decode()}"


class RanksBySize(Ranks):
    """Ranks that train cases."""

    def train(self, case: Case) -> Trace:
        """Train a case by its strategy."""
        traces = self.run(case.n_ranks, train_by_strategy, case)
        return merged(traces)  # type: ignore[arg-type]


def on_one_device(strategy: Strategy) -> Strategy:
    """The same microbatches, with every operator whole on device 0."""
    plans = {name: OperatorPlan({}, [0]) for name in strategy.operators}
    return msgspec.structs.replace(
        strategy, name="single", operators=plans, stages=[Stage()], schedule="gpipe"
    )


def reference(case: Case, ranks: RanksBySize) -> Trace:
    """What the case must equal: plain PyTorch, or, to draw the same dropout masks, the executor on
    one device, which without dropout is compared with plain PyTorch as every strategy is."""
    if case.is_asynchronous:
        return train_alone_asynchronously(case)
    if case.dropout == "off":
        return train_alone(case)
    alone = msgspec.structs.replace(case, n_ranks=1, strategy=on_one_device(case.strategy))
    return ranks.train(alone)


_REFUSED = re.compile(r"^harness\.errors\.(?:Model|Strategy|Config)Error: (.*)$", re.MULTILINE)


def refusal(error: str, n_ranks: int) -> str:
    """The error of one line that all ranks raised alike; empty if they did not."""
    found = _REFUSED.findall(error)
    return found[0] if len(found) == n_ranks and len({*found}) == 1 else ""


def _otherwise_split(case: Case) -> list[Trace]:
    """Trainings on one device by other numbers of microbatches, for a model that takes several."""
    alone = on_one_device(case.strategy)
    if alone.n_microbatches == 1 or case.dropout != "off":
        return []
    splits = [msgspec.structs.replace(alone, n_microbatches=n) for n in (1, 2, 3, alone.batch)]
    return [train_alone(msgspec.structs.replace(case, strategy=one)) for one in splits]


def assert_equal(case: Case, ranks: RanksBySize) -> None:
    """Fail unless training a case equals training on one device."""
    finding = check(case, ranks)
    assert finding.is_equal, finding.text()


def check(case: Case, ranks: RanksBySize) -> Finding:
    """Carry out a case and compare it; never raises for what the executor does wrong."""
    start = time.perf_counter()
    try:
        found = ranks.train(case)
        wanted = reference(msgspec.structs.replace(case, dtype="float64"), ranks)
        tolerance = FLOAT64_TOLERANCES[case.optimizer]
        if case.dtype != "float64":
            tolerance = rounded_tolerance(reference(case, ranks), _otherwise_split(case), wanted)
    except RanksFailedError as error:
        refused, duration_s = refusal(str(error), case.n_ranks), time.perf_counter() - start
        told = "" if refused else str(error)
        return Finding(case=case, error=told, refusal=refused, duration_s=duration_s)
    return Finding(
        case=case,
        tolerance=tolerance,
        worst=worst(found, wanted),
        first=first_beyond(found, wanted, tolerance),
        duration_s=time.perf_counter() - start,
    )

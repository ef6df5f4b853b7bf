"""Runs trainings that change their strategy, and compares each with one device."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import msgspec
from change_cases import ChangingCase, train_alone
from change_training import RankTrace, train_and_change, train_and_rebuild
from equivalence_check import RanksBySize, on_one_device, refusal
from equivalence_compare import FLOAT64_TOLERANCES, Worst, worst
from equivalence_ranks import RanksFailedError
from equivalence_reference import Trace
from equivalence_training import merged

# The same sums in another order; see FLOAT64_TOLERANCES for AdamW.
LOSS_TOLERANCES = {"sgd": 1e-12, "adamw": 1e-7}
# The rounding of one weight. A loss may differ this many times as much as that of one device whose
# weights start off by it.
_ROUNDING, _FACTOR = 2.0**-52, 10.0


class ChangeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing one case.

    Attributes:
        worst: the tensor that is farthest from one device's.
        worst_loss: the largest relative difference of a loss.
        loss_tolerance: larger than LOSS_TOLERANCES where one device that starts with weights off by
            their rounding differs by more, as deep models with batch normalisation do.
        n_moved_bytes: bytes that travelled in all changes.
        error: any other fault: a rank that failed, a sample that is missing or read twice.
        refusal: what all ranks said of the model or a strategy.
    """

    changing: ChangingCase
    worst: Worst | None = None
    worst_loss: float = 0.0
    loss_tolerance: float = 0.0
    n_moved_bytes: int = 0
    error: str = ""
    refusal: str = ""
    duration_s: float = 0.0

    @property
    def is_equal(self) -> bool:
        optimizer = self.changing.case.optimizer
        return (
            not (self.error or self.refusal)
            and self.worst is not None
            and self.worst.difference <= FLOAT64_TOLERANCES[optimizer]
            and self.worst_loss <= self.loss_tolerance
        )

    def text(self) -> str:
        """The case, and what is wrong with it."""
        case = self.changing.case
        which = f"{case.name}: {case.model} on {case.n_ranks} ranks, {case.optimizer}"
        if self.is_equal:
            return f"{which}: equal"
        if self.refusal:
            return f"{which}: refused: {self.refusal}"
        wrong = self.error or f"loss by {self.worst_loss:.3g}, worst {self.worst}"
        return f"{which}: {wrong}"


def check_change(changing: ChangingCase, ranks: RanksBySize) -> ChangeFinding:
    """Carry out a case and compare it; never raises for what the executor does wrong."""
    start_s, case = time.perf_counter(), changing.case
    try:
        traces: Any = ranks.run(case.n_ranks, train_and_change, changing)
        wanted = reference(changing, ranks)
    except RanksFailedError as error:
        refused = refusal(str(error), case.n_ranks)
        told = "" if refused else str(error)
        return ChangeFinding(changing=changing, error=told, refusal=refused)
    found = merged(traces)
    worst_loss, tolerance = _loss_difference(found, wanted), LOSS_TOLERANCES[case.optimizer]
    if ranks.device != "cpu":  # whose kernels sum in other orders
        tolerance = FLOAT64_TOLERANCES[case.optimizer]
    if worst_loss > tolerance and case.dropout == "off":
        rounded = train_alone(changing, offset=_ROUNDING)
        tolerance = max(tolerance, _FACTOR * _loss_difference(rounded, wanted))
    return ChangeFinding(
        changing=changing,
        worst=worst(found, wanted),
        worst_loss=worst_loss,
        loss_tolerance=tolerance,
        n_moved_bytes=sum(n for moved in traces[0].moved for n in moved.values()),
        error=_wrong_samples(changing, traces),
        duration_s=time.perf_counter() - start_s,
    )


def _loss_difference(found: Trace, wanted: Trace) -> float:
    return worst(*(replace(one, state={}) for one in (found, wanted))).difference


def reference(changing: ChangingCase, ranks: RanksBySize) -> Trace:
    """One device: plain PyTorch, or, for the same dropout masks, the executor."""
    case = changing.case
    if case.dropout == "off":
        return train_alone(changing)
    alone = ChangingCase(
        case=msgspec.structs.replace(case, n_ranks=1, strategy=on_one_device(case.strategy)),
        changes=[(step, on_one_device(strategy)) for step, strategy in changing.changes],
    )
    traces: Any = ranks.run(1, train_and_rebuild, alone)
    return merged(traces)


def _wrong_samples(changing: ChangingCase, traces: list[RankTrace]) -> str:
    """Empty if the ranks read exactly the samples of each batch."""
    for step, batch in enumerate(changing.batches()):
        read = {sample for trace in traces for sample in trace.fed[step]}
        if read != set(batch):
            return f"step {step} is of samples {sorted(batch)}, the ranks read {sorted(read)}"
    return ""

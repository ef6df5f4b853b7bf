"""Every strategy of a small space, one after another: the oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.domain.strategy import OperatorPlan
from harness.plan.search.objective import Objective
from harness.plan.simulate.simulator import Trial


def search_exhaustively(
    trial: Trial, menus: Mapping[int, Sequence[OperatorPlan]], objective: Objective
) -> None:
    """Judge all combinations of the menus, like an odometer: each step changes few operators.

    Ends early when the objective says so.
    """
    ops = list(menus)
    at = [0] * len(ops)
    for op in ops:
        trial.replace(op, menus[op][0])
    while not objective.is_over():
        objective.judge(trial)
        k = len(ops) - 1
        while k >= 0 and at[k] + 1 == len(menus[ops[k]]):
            at[k] = 0
            trial.replace(ops[k], menus[ops[k]][0])
            k -= 1
        if k < 0:
            return
        at[k] += 1
        trial.replace(ops[k], menus[ops[k]][at[k]])

"""Makes a failing case small: operators that do not matter go whole to one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from equivalence_cases import Case
from equivalence_models import small_graph
from made_graphs import small_cluster

from harness.domain.strategy import OperatorPlan, Stage, Strategy, validate
from harness.errors import StrategyError

Fails = Callable[[Case], bool]


def _with(case: Case, **changes: object) -> Case | None:
    strategy = msgspec.structs.replace(case.strategy, **changes)
    try:
        validate(strategy, small_graph(case.model), small_cluster(case.n_ranks))
    except StrategyError:
        return None
    return msgspec.structs.replace(case, strategy=strategy)


def _flows(strategy: Strategy) -> Iterator[dict[str, object]]:
    one_stage = {n: OperatorPlan(p.partition, p.devices) for n, p in strategy.operators.items()}
    yield {"operators": one_stage, "stages": [Stage()], "schedule": "gpipe", "n_microbatches": 1}
    yield {"operators": one_stage, "stages": [Stage()], "schedule": "gpipe"}
    yield {"n_microbatches": 1}
    yield {"stages": [Stage() for _ in strategy.stages]}
    yield {"schedule": "gpipe"}


def _whole(strategy: Strategy, names: list[str]) -> dict[str, OperatorPlan]:
    plans = dict(strategy.operators)
    for name in names:
        plans[name] = OperatorPlan({}, [plans[name].devices[0]], plans[name].stage)
    return plans


def shrink(case: Case, fails: Fails) -> Case:
    """The smallest case found that still fails."""
    for changes in _flows(case.strategy):
        smaller = _with(case, **changes)
        if smaller is not None and fails(smaller):
            case = smaller
    if case.n_steps > 1:
        once = msgspec.structs.replace(case, n_steps=1)
        case = once if fails(once) else case
    return _shrink_operators(case, fails)


def _shrink_operators(case: Case, fails: Fails) -> Case:
    n_together = len(case.strategy.operators)
    while n_together:
        names = [n for n, plan in case.strategy.operators.items() if len(plan.devices) > 1]
        for first in range(0, len(names), n_together):
            some = names[first : first + n_together]
            smaller = _with(case, operators=_whole(case.strategy, some))
            if smaller is not None and fails(smaller):
                case = smaller
        n_together //= 2
    return _shrink_devices(case, fails)


def _shrink_devices(case: Case, fails: Fails) -> Case:
    """Gather whole operators on one device, as far as the case goes on failing."""
    for name, plan in list(case.strategy.operators.items()):
        for device in range(min(plan.devices)) if len(plan.devices) == 1 else ():
            moved = {**case.strategy.operators, name: OperatorPlan({}, [device], plan.stage)}
            smaller = _with(case, operators=moved)
            if smaller is not None and fails(smaller):
                case = smaller
                break
    return case

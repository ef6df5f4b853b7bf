"""Cases of models with batch norms, and what their ranks run."""

from __future__ import annotations

from unittest import mock

from equivalence_cases import Case
from equivalence_models import small_graph
from equivalence_reference import Trace
from equivalence_training import make_engine, train_by_strategy

from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.runtime.executor.gradients.counts import backward_calls
from harness.runtime.executor.gradients.deferred import WeightGradients
from harness.runtime.ranks.world import World


def norms_case(
    model: str,
    plans: dict[str, OperatorPlan],
    batch: int,
    *,
    others: OperatorPlan | None = None,
    **flow: object,
) -> Case:
    """A case on two ranks; operators without a plan have that of `others`, or are on device 0."""
    others = others or OperatorPlan({}, [0])
    operators = filter(has_tasks, small_graph(model).operators)
    placed = {op.name: plans.get(op.name, others) for op in operators}
    strategy = Strategy(name=model, batch=batch, operators=placed, **flow)  # type: ignore[arg-type]
    return Case(name=model, model=model, n_ranks=2, strategy=strategy)


def joined_parameters(case: Case, world: World) -> int:
    """Of how many parameters this rank joins the microbatches."""
    engine = make_engine(case, case.make_task(), world)
    modules = [
        segment.module
        for program, _ in engine._programs.values()
        for segments in program.stages.values()
        for segment in segments
    ]
    return sum(len(backward_calls(module).joined) for module in modules)


def train_joined_on_rank_1(case: Case, world: World) -> Trace:
    """Train a case whose microbatches are joined on one rank alone."""
    with mock.patch.object(WeightGradients, "joins", return_value=world.rank == 1):
        return train_by_strategy(case, world)

"""FlexFlow's 2018 notation of a plan, and the plan as a Strategy.

    op[9] linear9:	dim(1 4 ) gpu(0 1 2 3 )

dims are samples first, then features; later versions of FlexFlow print them the other way round.
"""

from __future__ import annotations

from harness.domain.fingerprint import MadeFor
from harness.domain.strategy import OperatorPlan, Strategy
from harness.plan.published.flexflow2018.model import LINEAR, Plan, Problem

MODEL_NAME = "alexnet of flexflow2018"


def format_plan(problem: Problem, plan: Plan) -> list[str]:
    """One line per layer."""
    lines = []
    for index, (layer, cut) in enumerate(zip(problem.layers, plan, strict=True)):
        dims = (cut.n_samples, cut.n_features) if layer.kind == LINEAR else (cut.n_samples,)
        dim_text = "".join(f"{parts} " for parts in dims)
        gpu_text = "".join(f"{device} " for device in cut.devices)
        lines.append(f"op[{index}] {layer.name}:\tdim({dim_text}) gpu({gpu_text})")
    return lines


def to_strategy(problem: Problem, plan: Plan, name: str) -> Strategy:
    """The plan as the strategy that it is."""
    operators = {}
    for layer, cut in zip(problem.layers, plan, strict=True):
        parts = {"sample": cut.n_samples, "feature": cut.n_features}
        operators[layer.name] = OperatorPlan(
            partition={dim: n for dim, n in parts.items() if n > 1}, devices=list(cut.devices)
        )
    return Strategy(
        name=name,
        batch=problem.machine.batch,
        operators=operators,
        made_for=MadeFor(model=MODEL_NAME),
    )

"""FlexFlow's 2018 notation of a plan, and the plan as a Strategy.

    op[9] linear9:	dim(1 4 ) gpu(0 1 2 3 )

dims are samples first, then features; later versions of FlexFlow print them the other way round.
"""

from __future__ import annotations

import re

from harness.domain.fingerprint import MadeFor
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import PlanError
from harness.plan.flexflow2018.model import LINEAR, Cut, Plan, Problem

_LINE = re.compile(r"^op\[(\d+)\] (\S+):\s+dim\(([\d ]*)\) gpu\(([\d ]*)\)$")

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


def parse_plan(problem: Problem, lines: list[str]) -> Plan:
    """Read what `format_plan` printed.

    Raises:
        PlanError: not in the notation, or not a plan of this problem.
    """
    cuts = []
    for index, line in enumerate(lines):
        match = _LINE.match(line.strip())
        if match is None or int(match.group(1)) != index:
            raise PlanError(
                f"line {index + 1} is {line!r}: write it like op[{index}] conv1: dim(2 ) gpu(0 1 )"
            )
        if index < len(problem.layers) and match.group(2) != problem.layers[index].name:
            raise PlanError(
                f"line {index + 1} plans {match.group(2)!r}, the model's layer is "
                f"{problem.layers[index].name!r}: list the layers in order"
            )
        dims = [int(number) for number in match.group(3).split()]
        devices = tuple(int(number) for number in match.group(4).split())
        if not 1 <= len(dims) <= 2:
            raise PlanError(f"line {index + 1} has {len(dims)} dims: write samples, then features")
        cuts.append(Cut(dims[0], dims[1] if len(dims) == 2 else 1, devices))
    problem.check(tuple(cuts))
    return tuple(cuts)


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

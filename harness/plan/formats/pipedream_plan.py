"""PipeDream's hybrid_conf.json: which modules form a stage, and which ranks replicate it.

    {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]},
     "stage_to_depth_map": {"0": 1, "1": 0}}

A module is one of the files that PipeDream generates from a plan (the last is the loss), so the
file alone does not say which operators a stage has: `to_strategy` needs that from elsewhere, such
as the stage_id of a PipeDream profile. PipeDream's replicas take whole minibatches in turn; here
they share each microbatch, which has the same weights and no staleness.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from harness.domain.files import Count, decode, encode
from harness.domain.graph import Graph
from harness.domain.partition import SAMPLE
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import StrategyError
from harness.inputs import shorten


class PipeDreamPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file's content.

    Attributes:
        stage_to_depth_map: stages after each one, which bounds its in-flight minibatches; optional.
    """

    module_to_stage_map: list[Count]
    stage_to_rank_map: dict[str, list[Count]]
    stage_to_depth_map: dict[str, Count] | None = None

    def __post_init__(self) -> None:
        stages = set(self.module_to_stage_map)
        if not stages or stages != set(range(len(stages))):
            raise StrategyError(
                f"module_to_stage_map has stages {shorten(sorted(stages))}: they must count from 0 "
                "without gaps"
            )
        if set(self.stage_to_rank_map) != {str(stage) for stage in stages}:
            raise StrategyError(
                f"module_to_stage_map has stages {shorten(sorted(stages))}, stage_to_rank_map has "
                f"{shorten(list(self.stage_to_rank_map))}: they must be the same"
            )
        stage_of: dict[int, str] = {}
        for stage, ranks in self.stage_to_rank_map.items():
            if not ranks or min(ranks) < 0:
                raise StrategyError(
                    f"stage {stage} of stage_to_rank_map has ranks {shorten(ranks)}: name one or "
                    "more, from 0"
                )
            for rank in ranks:
                if rank in stage_of:
                    raise StrategyError(
                        f"rank {rank} is in stages {stage_of[rank]} and {stage} of "
                        "stage_to_rank_map, PipeDream runs one stage on a rank: give every stage "
                        "ranks of its own"
                    )
                stage_of[rank] = stage

    def ranks(self) -> list[list[int]]:
        """Ranks of each stage, by stage."""
        return [self.stage_to_rank_map[str(i)] for i in range(len(self.stage_to_rank_map))]

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self, indent=4)

    @classmethod
    def from_json(cls, data: bytes, *, source: str = "PipeDream plan") -> PipeDreamPlan:
        """Parse and validate.

        Raises:
            StrategyError: malformed or inconsistent; names `source`.
        """
        return decode(data, cls, source=source, error=StrategyError)


def stages_by_modules(plan: PipeDreamPlan, graph: Graph) -> dict[str, int]:
    """The stage of each operator, where the plan's modules are modules of the captured model.

    These are its children (`layer1`), or theirs (`features.3`), in order of use; the loss may
    follow them. An operator that is no module belongs to the module before it.

    Raises:
        StrategyError: the model has another number of modules.
    """
    names = [op.name for op in graph.operators if has_tasks(op)]
    paths = {op.name: str(op.attrs.get("module", "")).split(".") for op in graph.operators}
    counts = []
    for depth in (1, 2):
        found: list[list[str]] = []
        module_of: dict[str, int] = {}
        for name in names:
            path = paths[name][:depth]
            if path != [""] and path not in found:
                found.append(path)
            module_of[name] = max(0, len(found) - 1)
        counts.append(len(found))
        if len(plan.module_to_stage_map) in (len(found), len(found) + 1):
            return {name: plan.module_to_stage_map[at] for name, at in module_of.items()}
    raise StrategyError(
        f"module_to_stage_map has {len(plan.module_to_stage_map)} modules, model {graph.name!r} "
        f"has {counts[0]} children and {counts[1]} modules below them: write one entry for each, "
        "or give a strategy file"
    )


def to_strategy(
    plan: PipeDreamPlan, graph: Graph, stage_of: Mapping[str, int], *, batch: int
) -> Strategy:
    """The plan as a 1F1B strategy, with as many microbatches as keep every rank busy: one each.

    Args:
        stage_of: stage of each operator by name.

    Raises:
        StrategyError: an operator without a stage.
    """
    ranks = plan.ranks()
    operators = {}
    for operator in graph.operators:
        if not has_tasks(operator):
            continue
        stage = stage_of.get(operator.name)
        if stage is None or not 0 <= stage < len(ranks):
            raise StrategyError(
                f"operator {operator.name!r} has stage {stage}, the plan has stages 0 to "
                f"{len(ranks) - 1}: say which one it belongs to"
            )
        operators[operator.name] = OperatorPlan({SAMPLE: len(ranks[stage])}, ranks[stage], stage)
    return Strategy(
        name=f"pipedream {'-'.join(str(len(r)) for r in ranks)}",
        batch=batch,
        operators=operators,
        n_microbatches=sum(map(len, ranks)),
        schedule="1f1b",
        stages=[Stage() for _ in ranks],
    )


def from_strategy(strategy: Strategy) -> PipeDreamPlan:
    """One module per stage and one for the loss, as PipeDream generates them.

    Raises:
        StrategyError: a stage that is more than replicated, or in unequal shares, which the format
            cannot hold, or one without operators.
    """
    ranks: dict[int, list[int]] = {}
    for name, plan in strategy.operators.items():
        cut = plan.partition.get(SAMPLE, 1)
        if isinstance(cut, list):
            raise StrategyError(
                f"operator {name!r} is cut into shares {cut}: a PipeDream plan holds equal "
                "replicas only"
            )
        if cut != len(plan.devices) or len(set(plan.devices)) != len(plan.devices):
            raise StrategyError(
                f"operator {name!r} is cut into {plan.partition}: a PipeDream plan holds "
                "replicas only"
            )
        if ranks.setdefault(plan.stage, plan.devices) != plan.devices:
            raise StrategyError(
                f"operator {name!r} is on devices {plan.devices}, its stage {plan.stage} on "
                f"{ranks[plan.stage]}: a PipeDream plan has one set per stage"
            )
    n_stages = len(strategy.stages)
    if sorted(ranks) != list(range(n_stages)):
        raise StrategyError(
            f"strategy {strategy.name!r} has {n_stages} stages and operators in {sorted(ranks)}: "
            "each stage needs some, counting from 0"
        )
    return PipeDreamPlan(
        module_to_stage_map=[*range(n_stages), n_stages - 1],
        stage_to_rank_map={str(i): list(ranks[i]) for i in range(n_stages)},
        stage_to_depth_map={str(i): n_stages - 1 - i for i in range(n_stages)},
    )

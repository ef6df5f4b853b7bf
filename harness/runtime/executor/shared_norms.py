"""Batch norms that several operators call: all of them update the same running statistics."""

from __future__ import annotations

from collections import defaultdict

from torch.nn.modules.batchnorm import _BatchNorm

from harness.domain.strategy import Strategy
from harness.errors import StrategyError
from harness.runtime.capture import Captured


def check_shared_norms(captured: Captured, strategy: Strategy) -> None:
    """Refuse to update running statistics in another order than one device does.

    Operators of two devices would update statistics of their own, and a stage updates those of
    several microbatches before the next stage begins.

    Raises:
        StrategyError: names the module and two of its operators.
    """
    callers: dict[int, list[str]] = defaultdict(list)
    for name, node in captured.nodes.items():
        if node.op != "call_module":
            continue
        module = captured.module.get_submodule(str(node.target))
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats:
            callers[id(module)].append(name)
    for first, *others in callers.values():
        own = strategy.operators[first]
        for other in others:
            plan = strategy.operators[other]
            if (plan.stage, plan.devices, plan.partition) != (
                own.stage,
                own.devices,
                own.partition,
            ):
                raise StrategyError(
                    f"operators {first!r} and {other!r} call one batch norm, and strategy "
                    f"{strategy.name!r} gives them unlike stages, devices or cuts (stages "
                    f"{own.stage} and {plan.stage}, devices {own.devices} and {plan.devices}): "
                    "plan them alike, or use --batch-norm frozen"
                )

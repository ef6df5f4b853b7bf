"""Check that a strategy changes buffers in forward as often, and in the order, as one device."""

from __future__ import annotations

from collections import defaultdict

from torch.nn.modules.batchnorm import _BatchNorm

from harness.domain.strategy import Strategy
from harness.errors import StrategyError
from harness.runtime.capture.capture import Captured
from harness.runtime.executor.geometry.values import MetaModel


def check_shared_norms(captured: Captured, strategy: Strategy) -> None:
    """Check that operators with shared running statistics are planned equally.

    Operators on different devices would update separate statistics, and a stage updates statistics
    of several microbatches before the next stage starts.

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
        known = strategy.operators[first]
        for other in others:
            plan = strategy.operators[other]
            if (plan.stage, plan.devices, plan.partition) != (
                known.stage,
                known.devices,
                known.partition,
            ):
                raise StrategyError(
                    f"operators {first!r} and {other!r} call one batch norm, and strategy "
                    f"{strategy.name!r} gives them unlike stages, devices or cuts (stages "
                    f"{known.stage} and {plan.stage}, devices {known.devices} and {plan.devices}): "
                    "plan them alike, or use --batch-norm frozen"
                )


def check_writers(captured: Captured, meta: MetaModel, strategy: Strategy) -> None:
    """Check that modules that change buffers in forward, such as spectral norm, run once per step.

    Batch norms are exempt, because the executor updates their statistics correctly.

    Raises:
        StrategyError: names the operator and the buffer.
    """
    writes = meta.at(max(strategy.microbatch_sizes())).writes
    for name, node in captured.nodes.items():
        if node not in writes:
            continue
        plan, n_runs = strategy.operators[name], strategy.n_microbatches
        per_device = max(plan.devices.count(device) for device in plan.devices)
        if n_runs * per_device == 1 and not strategy.stages[plan.stage].recompute:
            continue
        why = f"{n_runs} microbatches" if n_runs > 1 else "recomputation"
        why = why if per_device == 1 else f"{per_device} parts of it on one device"
        raise StrategyError(
            f"operator {name!r} changes its buffer {writes[node]!r} in every forward, which one "
            f"device runs once a step, and strategy {strategy.name!r} more often ({why}): use "
            "--microbatches 1 without --recompute, or --engine torch"
        )

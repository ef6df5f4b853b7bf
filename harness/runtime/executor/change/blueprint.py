"""A captured model without the memory of its weights, from which further engines are built."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from harness.domain.freezing import FreezableLayer
from harness.runtime.capture.capture import Captured
from harness.runtime.capture.meta_copy import stand_ins
from harness.runtime.executor.state.weights import CHANNELS_LAST, IS_REPEATED
from harness.runtime.models.task import Task

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Blueprint:
    """Keeps the structure of a task and of its graph; every tensor is one element, repeated.

    Args:
        task, captured: the model and its graph, before an engine has taken weights and hooks.
    """

    def __init__(self, task: Task, captured: Captured) -> None:
        last = {n for n, p in captured.module.named_parameters() if _is_channels_last(p)}
        captured.module.meta[CHANNELS_LAST] = frozenset(last)
        self._task, self._captured = _copied(task, captured)

    def make(self, frozen: Sequence[FreezableLayer] = ()) -> tuple[Task, Captured]:
        """A task and its graph for one engine, which allocates the slices that it keeps.

        Args:
            frozen: layers that are no longer trained; their modules are in evaluation mode.
        """
        task, captured = _copied(self._task, self._captured)
        captured.module.meta[IS_REPEATED] = True
        for module in {name for layer in frozen for name in layer.modules}:
            captured.module.get_submodule(module).eval()
        names = captured.untrained.union(*(layer.parameters for layer in frozen))
        return task, replace(captured, untrained=names)


def _copied(task: Task, captured: Captured) -> tuple[Task, Captured]:
    # Model and graph share tensors, so both are copied by one memo.
    memo = stand_ins(nn.ModuleList([task.model, captured.module]), _repeated)
    model: nn.Module = copy.deepcopy(task.model, memo)
    module: fx.GraphModule = copy.deepcopy(captured.module, memo)
    for parameter in (*task.model.parameters(), *captured.module.parameters()):
        _copy_hooks(parameter, memo[id(parameter)])
    twins = dict(zip(captured.module.graph.nodes, module.graph.nodes, strict=True))
    nodes = {name: twins[node] for name, node in captured.nodes.items()}
    return replace(task, model=model), replace(captured, module=module, nodes=nodes)


def _repeated(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype with the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _copy_hooks(source: nn.Parameter, target: object) -> None:
    for name in _HOOKS:
        if getattr(source, name):
            setattr(target, name, copy.copy(getattr(source, name)))


def _is_channels_last(parameter: Tensor) -> bool:
    is_last = parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    return is_last and not parameter.is_contiguous()

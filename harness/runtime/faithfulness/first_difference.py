"""Find the first operator at which a captured graph differs from its model, and likely causes.

The model runs under a mode that intercepts every torch call and keeps fingerprints of each result
and its gradient. The first operator of the graph whose output has none of these fingerprints
computes another value. If there is none, the first in backward order whose gradient has none of
them passes another gradient back.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from harness.runtime.capture.capture import Captured
from harness.runtime.capture.operators import UNDEFINED
from harness.runtime.capture.saved import tensors_within
from harness.runtime.data.batch import Batch
from harness.runtime.devices.random_sources import seed_all
from harness.runtime.executor.geometry.layout import owners
from harness.runtime.executor.geometry.values import MetaModel
from harness.runtime.faithfulness.outcomes import OperatorRun, bits_of
from harness.runtime.faithfulness.state import simple_attributes
from harness.runtime.models.task import Task
from harness.runtime.tracing.constructs import function_name
from harness.runtime.tracing.hooks import has_gradient_hooks

_TORCH = str(Path(torch.__file__).parent)
_TORCH_FUNCTIONS = ("BackwardHookFunction", "CheckpointFunction")
# torch's files that switch contexts for module hooks.
_INTERNAL = {str(Path(torch.__file__).parent / "utils" / "hooks.py")}
_OWN_RUN = str(Path(__file__).with_name("comparison.py"))
# Shape, dtype and fingerprint of a tensor.
_Print = tuple[torch.Size, torch.dtype, tuple[int, ...]]


@dataclass
class _Seen:
    """One result: whether it requires a gradient, and the gradient's fingerprint once known."""

    has_gradient: bool
    gradient: _Print | None = None


@dataclass
class _Results:
    """Tensors that one side computed, by fingerprint."""

    by_print: defaultdict[_Print, list[_Seen]] = field(default_factory=lambda: defaultdict(list))

    def add(self, tensor: Tensor) -> tuple[_Print, _Seen]:
        """Keep the fingerprint of a tensor, and of its gradient during backward."""
        key, seen = _fingerprint(tensor), _Seen(tensor.requires_grad)
        self.by_print[key].append(seen)
        if tensor.requires_grad and not tensor.is_leaf:

            def keep(gradient: Tensor | None) -> None:
                seen.gradient = None if gradient is None else _fingerprint(gradient)

            tensor.register_hook(keep)
        return key, seen


def _fingerprint(tensor: Tensor) -> _Print:
    return tensor.shape, tensor.dtype, tuple(bits_of(tensor).tolist())


class _DifferenceRecorder(TorchFunctionMode):
    """Keeps the model's results and the constructs that it uses."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.results = _Results()
        self.constructs: dict[str, str] = {}
        self._device = device.type
        self._outer = self._contexts()

    def _contexts(self) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_autocast_enabled(self._device)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        has_gradient, has_autocast = self._contexts()
        if function_name(func) == "register_hook":
            self._add_construct("a hook on a tensor", _user_frame())
        if function_name(func) == "requires_grad_":
            self._add_construct("a change of requires_grad", _user_frame())
        if isinstance(result, torch.dtype) and has_autocast and result.itemsize == 2:
            read = f"a read of a dtype, {result} here and torch.float32 in the graph"
            self._add_construct(read, _user_frame())
        if (has_gradient, has_autocast) != self._outer:
            self._add_context(is_autocast=has_autocast != self._outer[1])
        for tensor in tensors_within(result):
            self.results.add(tensor)
        return result

    def add_output(self, module: nn.Module, given: Any, result: Any) -> None:
        """Keep a module's result, because an autograd function's result bypasses this mode."""
        with torch._C.DisableTorchFunction():  # the fingerprint's calls are not the model's
            for tensor in tensors_within(result):
                self.results.add(tensor)

    def _add_context(self, *, is_autocast: bool) -> None:
        frame = _user_frame()
        if frame is None:
            return
        if frame.f_code.co_varnames[:1] == ("ctx",):
            self._add_construct(
                f"the autograd function {frame.f_code.co_qualname.rpartition('.')[0]}", frame
            )
        else:
            self._add_construct("autocast" if is_autocast else "torch.no_grad or the like", frame)

    def _add_construct(self, construct: str, frame: FrameType | None) -> None:
        """Keep a construct with the first place that uses it."""
        file = "" if frame is None else Path(frame.f_code.co_filename).name
        place = "" if frame is None else f" ({file}:{frame.f_lineno})"
        self.constructs.setdefault(construct, f"{construct}{place}")


def _user_frame() -> FrameType | None:
    """The innermost frame of the user's code; None if the call came from torch's module hooks or
    from the harness."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file in _INTERNAL:
            return None
        if file != __file__ and not file.startswith(_TORCH):
            return None if file == _OWN_RUN else frame
        frame = frame.f_back
    return None


def find_first_difference(
    task: Task, captured: Captured, meta: MetaModel, batches: Sequence[Batch], seed: int
) -> str:
    """Train the batches by model and graph and compare them operator by operator.

    Changes both modules; the caller must restore them (`preserved`).

    Returns:
        The operator, and its output or gradient, and constructs of the model that tracing may drop,
        likely ones first; empty if nothing is known.
    """
    constructs = {text: text for text in _hooks_of(task.model)}
    recordings, runs = [], []
    attributes = {path: dict(vars(module)) for path, module in task.model.named_modules()}
    buffers = {name: (b, b.detach().clone()) for name, b in task.model.named_buffers()}
    seed_all(seed)
    for batch in batches:
        recording = _record(task, batch)
        recordings.append(recording)
        constructs = {**recording.constructs, **constructs}
    constructs |= {text: text for text in _written(task.model, buffers, attributes)}
    for buffer, value in buffers.values():
        buffer.data.copy_(value)
    seed_all(seed)
    for batch in batches:
        run = _OperatorResult(captured, meta, batch)
        task.sum_loss(run.run(*batch.inputs), batch.targets).backward()
        runs.append(run)
    pairs = zip(recordings, runs, strict=True)
    found = next(filter(None, (run.first_difference(one.results) for one, run in pairs)), "")
    parts = [f"the first to differ is {found}"] if found else []
    if constructs:
        parts.append(f"the model has {', '.join(list(constructs.values())[:3])}")
    return "; ".join(parts)


def _record(task: Task, batch: Batch) -> _DifferenceRecorder:
    recording = _DifferenceRecorder(batch.targets.device)
    handle = nn.modules.module.register_module_forward_hook(recording.add_output)
    try:
        with recording:
            outputs = task.model(*batch.inputs)
    finally:
        handle.remove()
    loss = task.sum_loss(outputs, batch.targets)
    for name in _python_functions(loss):
        recording.constructs.setdefault(name, name)
    loss.backward()
    return recording


def _python_functions(loss: Tensor) -> list[str]:
    """Names of autograd functions defined in Python, from the autograd graph of a loss."""
    names: dict[str, None] = {}
    seen, open_nodes = set(), [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            name = type(node).__name__.removesuffix("Backward")
            if name not in _TORCH_FUNCTIONS:
                names[f"the autograd function {name}"] = None
        open_nodes += [following for following, _ in node.next_functions]
    return list(names)


def _hooks_of(model: nn.Module) -> Iterable[str]:
    for path, module in model.named_modules():
        for kind in ("backward", "backward_pre", "forward", "forward_pre"):
            if getattr(module, f"_{kind}_hooks", None):
                yield f"a {kind.replace('_', ' ')} hook on {path or 'the model'}"
    for name, parameter in model.named_parameters():
        if has_gradient_hooks(parameter):
            yield f"a hook on the parameter {name}"


def _written(
    model: nn.Module,
    buffers: dict[str, tuple[Tensor, Tensor]],
    attributes: dict[str, dict[str, Any]],
) -> Iterable[str]:
    """Buffers, and attributes that are simple or tensors, that forward changed, except those of
    torch's own modules."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn"):
            continue
        for name, buffer in module.named_buffers(path, recurse=False):
            known, value = buffers.get(name, (buffer, buffer))
            if known is not buffer or not torch.equal(buffer, value):
                yield f"the buffer {name}, which forward writes"
        before, simple = attributes.get(path, {}), simple_attributes(module)
        for name, value in vars(module).items():
            old = before.get(name, value)
            is_tensor = isinstance(old, Tensor) or isinstance(value, Tensor)
            if (old is not value) if is_tensor else (name in simple and old != value):
                yield f"the attribute {f'{path}.{name}'.strip('.')}, which forward writes"


class _OperatorResult(OperatorRun):
    """A run of the graph on one batch."""

    def __init__(self, captured: Captured, meta: MetaModel, batch: Batch) -> None:
        super().__init__(captured, meta, len(batch.targets))
        self._results = _Results()
        self._owner = owners(captured)
        self._nodes: list[tuple[fx.Node, _Print, _Seen]] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        is_defined = n.op != "placeholder" and function_name(n.target) not in UNDEFINED
        if n in self._owner and isinstance(value, Tensor) and is_defined:
            self._nodes.append((n, *self._results.add(value)))
        return value

    def first_difference(self, model: _Results) -> str:
        """The first operator with an output or gradient that the model did not compute, or ""."""
        for node, key, seen in self._nodes:
            known = model.by_print.get(key)
            if not known:
                return f"the output of {self._described(node)}"
            if all(one.has_gradient != seen.has_gradient for one in known):
                sides = ("graph", "model") if seen.has_gradient else ("model", "graph")
                return (
                    f"the gradient of {self._described(node)}, which is there in the {sides[0]} "
                    f"and not in the {sides[1]}"
                )
        for node, key, seen in reversed(self._nodes):
            known = [one for one in model.by_print[key] if one.has_gradient == seen.has_gradient]
            if all(one.gradient != seen.gradient for one in known):
                return f"the gradient of {self._described(node)}"
        return ""

    def _described(self, node: fx.Node) -> str:
        kind = function_name(node.target)
        if node.op == "call_module":
            kind = type(self.fetch_attr(str(node.target))).__name__
        return f"operator {self._owner[node]!r} ({kind})"

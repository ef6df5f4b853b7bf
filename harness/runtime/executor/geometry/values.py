"""Shapes, dtypes and constants of a captured model's values at any batch size."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.errors import ModelError, first_line
from harness.runtime.capture.capture import Captured
from harness.runtime.capture.meta_copy import meta_copy
from harness.runtime.models.task import InputSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of a tensor.

    Attributes:
        is_differentiable: whether it receives a gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool


@dataclass(frozen=True)
class Values:
    """The outputs of a captured model's nodes for one batch size.

    Attributes:
        tensors: outputs that are a tensor.
        constants: outputs without tensors, such as a size.
        writes: the buffer that a node's module changes; batch and instance norms excluded.
    """

    tensors: dict[fx.Node, TensorMeta]
    constants: dict[fx.Node, Any]
    writes: dict[fx.Node, str]


class _Recording(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: dict[fx.Node, Any] = {}
        self.last: fx.Node | None = None
        self.writes: dict[fx.Node, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.last = n
        called = [self.module.get_submodule(str(n.target))] if n.op == "call_module" else []
        buffers = {name: b for module in called for name, b in module.named_buffers()}
        before = {name: buffer._version for name, buffer in buffers.items()}
        value = super().run_node(n)
        changed = [name for name, buffer in buffers.items() if buffer._version != before[name]]
        if changed:
            self.writes[n] = changed[0]
        self.found[n] = tree_map_only(Tensor, _meta_of, value)
        return value


def _meta_of(tensor: Tensor) -> TensorMeta:
    return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class MetaModel:
    """A copy of a captured model on the meta device, which infers shapes and dtypes."""

    def __init__(
        self, captured: Captured, inputs: tuple[InputSpec, ...], device: torch.device
    ) -> None:
        self._nodes = list(captured.module.graph.nodes)
        self.module: fx.GraphModule = meta_copy(captured.module)
        for module in self.module.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()  # because in training it refuses single values
        self._inputs = inputs
        self.device = device
        self._known: dict[int, Values] = {}

    @classmethod
    def of(cls, captured: Captured, inputs: tuple[InputSpec, ...], device: torch.device) -> Self:
        """The copy that comparisons and engines share while the same parameters are trained and the
        same modules are in training mode."""
        module = captured.module
        trained = tuple(parameter.requires_grad for parameter in module.parameters())
        key = device, trained, tuple(part.training for part in module.modules())
        if key not in captured.shared:
            captured.shared.clear()
            captured.shared[key] = cls(captured, inputs, device)
        found: Self = captured.shared[key]
        return found

    def at(self, samples: int) -> Values:
        """The values for a number of samples, cached."""
        if samples not in self._known:
            self._known[samples] = self._run(samples)
        return self._known[samples]

    def at_twice(self, samples: int) -> Values | None:
        """The values for twice as many samples; None if the model does not support that."""
        try:
            return self.at(2 * samples)
        except ModelError as error:
            _log.info("%s", error)
            return None

    def _run(self, samples: int) -> Values:
        recording = _Recording(self.module)
        try:
            with torch.device("meta"):  # for tensors that modules create
                inputs = [
                    torch.empty(samples, *spec.shape, dtype=spec.dtype, device="meta")
                    for spec in self._inputs
                ]
                recording.run(*inputs)
        except Exception as error:
            raise ModelError(
                f"operator {recording.last} does not take a batch of {samples} samples, as its "
                f"strategy asks ({first_line(error)}): read the batch size from the input (-1, "
                "x.shape[0]) where it is written out, or give every device the whole batch, "
                "without microbatches"
            ) from error
        tensors: dict[fx.Node, TensorMeta] = {}
        constants: dict[fx.Node, Any] = {}
        writes: dict[fx.Node, str] = {}
        for node, twin in zip(self._nodes, self.module.graph.nodes, strict=True):
            if twin in recording.writes:
                writes[node] = recording.writes[twin]
            value = recording.found.get(twin)
            if isinstance(value, TensorMeta):
                tensors[node] = value
            elif isinstance(value, torch.device):
                constants[node] = self.device
            elif not any(isinstance(part, TensorMeta) for part in tree_leaves(value)):
                constants[node] = value
        return Values(tensors, constants, writes)

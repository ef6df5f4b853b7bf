"""Train a few batches by a model or by its graph; what they computed, and its difference.

A difference in float64 is no rounding error. The graph is run operator by operator, as the executor
does on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from harness.runtime.capture.capture import Captured
from harness.runtime.data.batch import Batch
from harness.runtime.devices.precision import NARROW_DTYPES, has_gradients
from harness.runtime.devices.random_sources import RandomSources, seed_all
from harness.runtime.engines.replicas import fingerprint_of
from harness.runtime.executor.geometry.values import MetaModel


def widened(tensor: Tensor) -> Tensor:
    """Convert a real tensor to float64, a complex one to complex128; return others unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


class Narrowing(TorchFunctionMode):
    """Detects results below 64 bits, and autocast, which does not cast float64."""

    def __init__(self) -> None:
        super().__init__()
        self.is_detected = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        device_type = "cpu"
        if isinstance(result, Tensor):
            device_type = result.device.type
            self.is_detected |= result.dtype in (torch.float32, torch.bfloat16, torch.float16)
        self.is_detected |= torch.is_autocast_enabled(device_type)
        return result


@contextmanager
def in_float64(*roots: nn.Module) -> Iterator[None]:
    """Convert parameters and buffers to float64 in the block; restore their data at its end."""
    tensors = {id(t): t for root in roots for t in (*root.parameters(), *root.buffers())}
    wide = [t for t in tensors.values() if has_gradients(t)]
    before = [t.data for t in wide]
    try:
        for tensor in wide:
            tensor.data = widened(tensor.data)
        yield
    finally:
        for tensor, data in zip(wide, before, strict=True):
            tensor.data = data


class OperatorRun(fx.Interpreter):
    """Runs the operators of a graph; nodes without tensors, such as sizes, take the values of the
    meta run instead, so their side effects do not happen.

    Args:
        samples: batch size.
    """

    def __init__(self, captured: Captured, meta: MetaModel, samples: int) -> None:
        super().__init__(captured.module)
        self._constants = meta.at(samples).constants

    def run_node(self, n: fx.Node) -> Any:
        if n.op.startswith("call") and n in self._constants:
            return self._constants[n]
        return super().run_node(n)


# Rounding of sums in another order; a wrong gradient differs by 1e-3 and more. Differences are
# relative to a tensor's largest element, or to `_FLOOR` times the model's if that is larger.
EXACT = 1e-9
_ROUNDED = {
    torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4,
    torch.bfloat16: 3e-2, torch.float16: 1e-2,
}  # fmt: skip
_FLOOR = 1e-3


@dataclass(frozen=True)
class TrainedBatch:
    """Results of training on one batch.

    Attributes:
        tensors: what was kept of each tensor, by name, in order of comparison.
        random: digests of the random states afterwards, by source.
    """

    loss: float
    tensors: dict[str, Tensor]
    random: dict[str, str]


# What is kept of a tensor of a batch: batch, name, tensor.
Keep = Callable[[int, str, Tensor], Tensor]


def keep_bits(batch: int, name: str, tensor: Tensor) -> Tensor:
    return bits_of(tensor)


def keep_values(batch: int, name: str, tensor: Tensor) -> Tensor:
    """Keep the values, on the host, because the device need not hold all gradients twice."""
    return real_of(tensor).to("cpu", copy=True)


def keep_distance(expected: Sequence[TrainedBatch]) -> Keep:
    """Keep the largest difference of two elements from the expected values, and the largest
    expected value; computed on the device, tensor by tensor."""

    def keep(batch: int, name: str, tensor: Tensor) -> Tensor:
        found = real_of(tensor)
        wanted = expected[batch].tensors[name].to(found.device)
        return torch.tensor([_distance(found, wanted), _largest(wanted)], dtype=torch.float64)

    return keep


def bits_of(tensor: Tensor) -> Tensor:
    """A fingerprint of two numbers, equal for equal bits, 0 for zeros of any shape."""
    return fingerprint_of(real_of(tensor)).cpu()


def real_of(tensor: Tensor) -> Tensor:
    """Convert to a dense tensor, complex to real pairs and booleans to integers."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    dense = torch.view_as_real(dense) if dense.is_complex() else dense
    return dense.to(torch.uint8) if dense.dtype == torch.bool else dense


def rounding_of(model: nn.Module, dtype: str) -> float:
    """The relative rounding tolerance of the narrowest of training dtype and parameter dtypes."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in _ROUNDED}
    dtypes |= {NARROW_DTYPES[dtype]} if dtype in NARROW_DTYPES else set()
    return max((_ROUNDED[dtype] for dtype in dtypes), default=EXACT)


def is_equal(found: list[TrainedBatch], expected: list[TrainedBatch]) -> bool:
    """Whether all bits and random states are equal."""
    return all(
        a.random == b.random and all(torch.equal(a.tensors[k], b.tensors[k]) for k in b.tensors)
        for a, b in zip(found, expected, strict=True)
    )


def _differences(found: list[TrainedBatch]) -> Iterator[tuple[float, int, str]]:
    for k, batch in enumerate(found):
        for kind in ("loss", "gradient", "buffer"):
            kept = {n: t.tolist() for n, t in batch.tensors.items() if n.startswith(kind)}
            model_wide = max((largest for _, largest in kept.values()), default=0.0)
            for name, (distance, largest) in kept.items():
                yield distance / (max(largest, _FLOOR * model_wide) or 1.0), k, name


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements; a missing gradient is one 0, equal to any zeros."""
    if one.dtype == other.dtype and torch.equal(one, other):
        return 0.0
    if one.shape != other.shape and one.any() and other.any():
        return math.inf
    distance = _largest(one.double() - other.double()) if one.any() or other.any() else 0.0
    return math.inf if math.isnan(distance) else distance


def difference_of(found: list[TrainedBatch]) -> float:
    """The largest relative difference over all tensors, of what `keep_distance` kept."""
    return max(difference for difference, _, _ in _differences(found))


def first_beyond(found: list[TrainedBatch]) -> tuple[int, str]:
    """Batch and name of the first tensor beyond rounding; else of the one that differs most."""
    differences = list(_differences(found))
    beyond = [one for one in differences if one[0] > _ROUNDED[torch.float32]]
    _, k, name = beyond[0] if beyond else max(differences)
    return k, name


def names_beyond(found: list[TrainedBatch]) -> set[str]:
    """Names of all tensors that differ beyond rounding."""
    limit = _ROUNDED[torch.float32]
    return {name for distance, _, name in _differences(found) if distance > limit}


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


Loss = Callable[[Any, Batch], Tensor]


class AccumulatesTwice(Exception):
    """A backward adds to a gradient that has been kept and freed."""


class Side:
    """One of the two compared: the model or its graph.

    A gradient is freed once it is kept, because those of a large model need as much memory as its
    weights.

    Args:
        parameters, buffers: return tensors by the model's names.
    """

    def __init__(
        self,
        call: Callable[[Batch], Any],
        parameters: Callable[[], Mapping[str, Tensor]],
        buffers: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.call, self._parameters, self.buffers = call, parameters, buffers
        self.frees_gradients = True

    def train(
        self, batches: Sequence[Batch], loss_of: Loss, keep: Keep, seed: int
    ) -> list[TrainedBatch]:
        """Run forward and backward of each batch, without optimizer steps.

        Raises:
            AccumulatesTwice: a second call, from the same state, will keep all gradients to the
                end.
        """
        seed_all(seed)
        return [self._train(k, batch, loss_of, keep) for k, batch in enumerate(batches)]

    def _train(self, k: int, batch: Batch, loss_of: Loss, keep: Keep) -> TrainedBatch:
        parameters = self._parameters()
        for parameter in parameters.values():
            parameter.grad = None
        loss = loss_of(self.call(batch), batch)

        def keep_gradient(name: str, gradient: Tensor) -> Tensor:
            return keep(k, f"gradient of {name}", gradient)

        with self._freed(parameters, keep_gradient) as kept:
            loss.backward()
        zero = torch.zeros(1, dtype=torch.float64)
        for name, parameter in parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None or name not in kept:
                kept[name] = keep_gradient(name, zero if gradient is None else gradient)
        tensors = {"loss": keep(k, "loss", loss)}
        tensors |= {f"gradient of {name}": kept[name] for name in parameters}
        for name, buffer in self.buffers().items():
            tensors[f"buffer {name}"] = keep(k, f"buffer {name}", buffer)
        return TrainedBatch(float(loss.detach()), tensors, RandomSources().digests())

    @contextmanager
    def _freed(
        self, parameters: Mapping[str, Tensor], keep: Callable[[str, Tensor], Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """Keep and free each gradient when backward has computed it."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        kept: dict[str, Tensor] = {}

        def free(parameter: Tensor) -> None:
            name = names[id(parameter)]
            if name in kept:
                self.frees_gradients = False
                raise AccumulatesTwice
            if parameter.grad is not None:
                kept[name] = keep(name, parameter.grad)
                parameter.grad = None

        is_freed = self.frees_gradients
        trained = [p for p in parameters.values() if is_freed and p.is_leaf and p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(free) for p in trained]
        try:
            yield kept
        finally:
            for hook in hooks:
                hook.remove()

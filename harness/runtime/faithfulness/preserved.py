"""Run a model and restore its buffers, gradients and attributes, and the random states."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_CONTAINERS = (dict, list, set)


def seed_all(seed: int) -> None:
    """Seed every source of random numbers that a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class RandomSources:
    """A snapshot of the states of torch's, Python's and numpy's random generators."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Reset the generators to the snapshot."""
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        np.random.set_state(self._numpy)

    def digests(self) -> dict[str, str]:
        """A digest of the state, by source."""
        states = {
            "torch": [self._torch.tolist(), [state.tolist() for state in self._cuda]],
            "Python's random": self._python,
            "numpy.random": [str(part) for part in self._numpy],
        }
        return {k: hashlib.sha256(pickle.dumps(v)).hexdigest() for k, v in states.items()}


class _Snapshot:
    """State of modules that forward and backward may change, except parameter values."""

    def __init__(self, roots: tuple[nn.Module, ...]) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}
        self._attributes = [(m, dict(m.__dict__), _contents(m)) for m in modules.values()]
        buffers = {id(b): b for m in modules.values() for b in _plain_tensors(m)}
        self._buffers = [(b, b.detach().clone()) for b in buffers.values()]
        parameters = {id(p): p for root in roots for p in root.parameters()}
        self._gradients = [(p, p.grad) for p in parameters.values()]

    def restore(self) -> None:
        """Restore the state in place, so that references to containers and tensors stay valid."""
        for module, attributes, contents in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in contents.items():
                _refill(attributes[name], content)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _contents(module: nn.Module) -> dict[str, Any]:
    return {k: v.copy() for k, v in module.__dict__.items() if isinstance(v, _CONTAINERS)}


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


def _plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Buffers and tensors that are plain attributes."""
    for value in (*module._buffers.values(), *module.__dict__.values()):
        if isinstance(value, Tensor) and value.is_leaf:
            yield value


@contextmanager
def preserved(*roots: nn.Module) -> Iterator[None]:
    """Restore modules and random states at the block's end, also after an error; the block starts
    without gradients."""
    snapshot, state = _Snapshot(roots), RandomSources()
    for root in roots:
        root.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        snapshot.restore()
        state.restore()

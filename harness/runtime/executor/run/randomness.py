"""Save and restore the random state, for a forward that is run twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def random_state(device: torch.device) -> tuple[Tensor, ...]:
    """The states of the generators that a forward on a device uses."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


@contextlib.contextmanager
def repeated(state: tuple[Tensor, ...], device: torch.device) -> Iterator[None]:
    """Use a saved state within the context; restore the current state on exit."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(state[0])
        if devices:
            torch.cuda.set_rng_state(state[1], device)
        yield

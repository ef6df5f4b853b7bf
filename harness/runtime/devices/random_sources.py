"""The generators of random numbers that a model may draw from: torch's, Python's and numpy's."""

from __future__ import annotations

import hashlib
import pickle
import random

import numpy as np
import torch


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

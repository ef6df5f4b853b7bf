"""Accuracies on held-out samples, measured after each epoch of a training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness.errors import ConfigError
from harness.runtime.data import entry_for
from harness.runtime.data.batch import Batch
from harness.runtime.engines.engine import Engine
from harness.runtime.models.shared_build import build_on_host
from harness.runtime.models.task import logits_of
from harness.runtime.ranks.gather import gather_numbers
from harness.runtime.ranks.world import Context
from harness.workloads.train.config import TrainCase
from harness.workloads.train.files import data_options
from harness.workloads.train.setup import make_task


class Evaluation:
    """Measures accuracies of one run; all ranks construct it, each with a copy of the model.

    Raises:
        ConfigError: the model classifies nothing.
    """

    def __init__(self, case: TrainCase, context: Context) -> None:
        self._world = context.world
        entry = entry_for(case.data, case.model)
        state = torch.get_rng_state()  # which building a model advances
        task = build_on_host(lambda: make_task(case), self._world)
        torch.set_rng_state(state)
        self._is_averaging = case.ema is not None
        open_data: Any = entry.held_out
        assert open_data is not None, "other data were refused"
        if not task.n_classes or task.target_shape:
            raise ConfigError(
                f"--evaluate counts samples whose class is found, {case.model} gives a sample no "
                "single class: drop it"
            )
        self._model = task.model.to(self._world.device).eval()
        self._data = open_data(data_options(case), task, case.batch)
        own = range(self._world.rank, len(self._data), self._world.size)
        self._parts = [list(own[at : at + case.batch]) for at in range(0, len(own), case.batch)]

    def accuracies(self, engine: Engine) -> dict[str, float]:
        """The share of held-out samples whose class is found, by metric: by the trained parameters
        and, with --ema, by their averages. All ranks must call it."""
        found = {"accuracy": self._accuracy(engine.model_state())}
        if self._is_averaging:
            found["averaged_accuracy"] = self._accuracy(engine.averaged_state())
        return found

    @torch.no_grad()
    def _accuracy(self, state: dict[str, Tensor]) -> float:
        self._model.load_state_dict(state)
        n_right = float(sum(map(self._n_right, self._parts)))
        counts = gather_numbers(n_right, self._world) if self._world.size > 1 else [n_right]
        return sum(counts) / len(self._data)

    def _n_right(self, indices: list[int]) -> int:
        batch: Batch = self._data.__getitems__(indices).to(self._world.device)
        found = logits_of(self._model(*batch.inputs)).argmax(dim=-1)
        return int((found == batch.targets).sum())

"""The accuracy of a model in training on samples that are not trained by."""

import torch

from harness.errors import ConfigError
from harness.runtime.data import entry_for
from harness.runtime.engines.engine import Engine
from harness.runtime.models.task import logits_of
from harness.runtime.ranks.gather import gather_numbers
from harness.runtime.ranks.world import Context
from harness.workloads.train.cases import data_options
from harness.workloads.train.config import TrainCase
from harness.workloads.train.setup import make_task


class Evaluation:
    """Measures accuracies of one run; all ranks construct it, each with a copy of the model.

    Raises:
        ConfigError: the data have no samples that are held out, or classify nothing.
    """

    def __init__(self, case: TrainCase, context: Context) -> None:
        self._world = context.world
        entry = entry_for(case.data, case.model)
        state = torch.get_rng_state()  # which building a model advances
        task = make_task(case)
        torch.set_rng_state(state)
        if entry.held_out is None or not task.n_classes:
            raise ConfigError(
                f"--evaluate needs samples that are not trained by, and --data {case.data} holds "
                "out none: use --data digits, or drop --evaluate"
            )
        self._model = task.model.to(self._world.device).eval()
        data = entry.held_out(data_options(case), task, case.batch)
        self._n_samples: int = len(data)  # type: ignore[arg-type]
        own = list(range(self._world.rank, self._n_samples, self._world.size))
        self._batch = data.__getitems__(own).to(self._world.device)  # type: ignore[attr-defined]

    @torch.no_grad()
    def accuracy(self, engine: Engine) -> float:
        """The share of held-out samples whose class is found; all ranks must call it."""
        self._model.load_state_dict(engine.model_state())
        found = logits_of(self._model(*self._batch.inputs)).argmax(dim=-1)
        n_right = float((found == self._batch.targets).sum())
        counts = gather_numbers(n_right, self._world) if self._world.size > 1 else [n_right]
        return sum(counts) / self._n_samples

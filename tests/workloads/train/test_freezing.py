"""When layers freeze, and when all are trained again because the learning rate has dropped."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from harness.domain.freezing import FreezableLayer
from harness.errors import ConfigError
from harness.runtime.engines.optimizers import LearningRates
from harness.workloads.train.config import TrainCase
from harness.workloads.train.policies import FreezingPolicy

LAYERS = [FreezableLayer((), frozenset(), frozenset({f"layers.{k}.weight"})) for k in range(4)]
CASE = TrainCase(
    freeze="schedule", freeze_alpha=0.5, freeze_interval=10, steps=50, learning_rate=0.1,
    lr_schedule="step", lr_step_size=25, lr_gamma=0.1, unfreeze=10, shrink="search",
)  # fmt: skip
ALL = [(10, 2), (20, 3), (25, 0), (35, 2), (45, 3)]


class Norms:
    """Of layer 1 the least."""

    def take(self):
        return [4.0, 1.0, 3.0, 2.0]


def changes_of(case, first=0, **changes):
    """(step, frozen layers) of all changes, asked between all steps."""
    case = replace(case, first_step=first, **changes)
    elastic = SimpleNamespace(layers=LAYERS, watch_gradients=Norms)
    rates = LearningRates(case.learning_rate, case.lr_schedule, case.lr_step_size or 50, 0.1)
    training = SimpleNamespace(
        elastic=elastic, n_steps=case.steps, rates=rates,
        plan=SimpleNamespace(n_steps_per_epoch=5),
    )  # fmt: skip
    inputs = SimpleNamespace(case=case, training=training, current=SimpleNamespace(planned="start"))
    policy = FreezingPolicy(inputs)
    found = []
    for step in range(first, case.steps):
        while (due := policy.due(step)) is not None:
            found.append(due)
    assert all((due.planned == "start") == (due.n_frozen == 0) for due in found)
    return [(due.step, due.n_frozen) for due in found]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, ALL),
        ({"unfreeze": 100}, [(10, 2), (20, 3), (30, 4)]),
        # Three drops, of which two are a hundredth; intervals of an epoch begin anew.
        ({"unfreeze": 100, "lr_step_size": 9, "freeze_interval": None}, [
            (5, 2), (10, 3), (15, 4), (18, 0), (23, 2), (28, 3), (33, 4), (36, 0), (41, 2), (46, 3),
        ]),
        # The cosine is half at step 25, and a quarter at step 34.
        ({"unfreeze": 2, "lr_schedule": "cosine", "lr_step_size": None, "steps": 34}, ALL[:3]),
        ({"freeze": "gradient"}, [(10, 2), (20, 3), (25, 0), (35, 2), (45, 3)]),
    ],
)  # fmt: skip
def test_layers_freeze_by_interval_until_the_learning_rate_drops(changes, wanted):
    assert changes_of(CASE, **changes) == wanted


@pytest.mark.parametrize(
    ("first", "wanted"),
    [(15, [(15, 2), *ALL[1:]]), (20, [(20, 3), *ALL[2:]]), (25, ALL[3:]), (26, ALL[3:])],
)
def test_a_run_that_goes_on_freezes_as_the_whole_one(first, wanted):
    assert changes_of(CASE, first=first) == wanted


def test_the_gradient_rule_goes_on_from_the_layers_that_the_state_trains(tmp_path):
    """Three were frozen, which no schedule tells."""
    state = {
        "n_ranks": 1, "step": 15, "names": {}, "parameters": [], "is_survivors": False,
        "shapes": {}, "trained": ["layers.3.weight", "head.weight"],
    }  # fmt: skip
    metadata = {"format": "state shards 2", "state": json.dumps(state)}
    save_file({"model - x": torch.zeros(1)}, tmp_path / "shard0.safetensors", metadata=metadata)
    found = changes_of(CASE, first=15, freeze="gradient", load_state=tmp_path)
    assert found == [(15, 3), (20, 4), (25, 0), (35, 2), (45, 3)]


def test_a_run_that_ends_before_its_first_interval_is_refused():
    with pytest.raises(ConfigError, match="each interval of 10 steps, the run has 10: lower"):
        changes_of(CASE, steps=10)

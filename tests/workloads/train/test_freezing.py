"""When layers freeze, and when all are trained again because the learning rate has dropped."""

import json
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from made_graphs import layers, small_cluster
from safetensors.torch import save_file

from harness.domain.freezing import FreezableLayer
from harness.errors import ConfigError, StrategyError
from harness.plan.builders import ddp
from harness.runtime.data.batch import Batch
from harness.runtime.engines.optimizers import LearningRates
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients.update import LayerNorms, LossScale
from harness.workloads.train import replanning
from harness.workloads.train.cache import _check_repeats
from harness.workloads.train.config import TrainCase
from harness.workloads.train.policies import FreezingPolicy
from harness.workloads.train.replanning import ShrinkPolicy

LAYERS = [FreezableLayer((), frozenset(), frozenset({f"layers.{k}.weight"})) for k in range(4)]
CASE = TrainCase(
    freeze="schedule", freeze_alpha=0.5, freeze_interval=10, steps=50, learning_rate=0.1,
    lr_schedule="step", lr_step_size=25, lr_gamma=0.1, unfreeze=10, shrink="search",
)  # fmt: skip
ALL = [(10, 2), (20, 3), (25, 0), (35, 2), (45, 3)]


class Norms(LayerNorms):
    """Of layer 1 the least in the first steps, later of others."""

    def __init__(self, **options):
        super().__init__(LAYERS, SimpleNamespace(size=1, device=torch.device("cpu")), **options)

    def add(self, step):
        self._own += torch.tensor([(k * 7 + step // 4 * 3) % 8 + 1.0 for k in range(4)])
        self.sums = replace(self.sums, n_steps=self.sums.n_steps + 1)


class Run:
    """The policy of a run, asked between all steps from the first one on.

    Attributes:
        changes: (step, frozen layers) of each.
        saved: the last of them, and the state of the norms, before each step.
    """

    def __init__(self, case, planned="shrunk"):
        elastic = SimpleNamespace(layers=LAYERS, watch_gradients=lambda **how: Norms(**how))
        rates = LearningRates(case.learning_rate, case.lr_schedule, case.lr_step_size or 50, 0.1)
        training = SimpleNamespace(
            elastic=elastic, n_steps=case.steps, rates=rates,
            plan=SimpleNamespace(n_steps_per_epoch=5),
        )  # fmt: skip
        current = SimpleNamespace(planned=planned)
        inputs = SimpleNamespace(case=case, training=training, start="start", current=current)
        policy = FreezingPolicy(inputs)
        self.changes, self.saved = [], {}
        for step in range(case.first_step, case.steps):
            n_frozen = [0, *(n for at, n in self.changes if at < step)][-1]
            self.saved[step] = n_frozen, policy._norms and policy._norms.state()
            # A change is carried out before the next one is asked for.
            while not (self.changes and self.changes[-1][0] > step):
                if (due := policy.due(step)) is None:
                    break
                assert (due.planned == "start") == (due.n_frozen == 0)
                self.changes.append((due.step, due.n_frozen))
            if policy._norms is not None:
                policy._norms.add(step)


def changes_of(case, first=0, **changes):
    """(step, frozen layers) of all changes."""
    return Run(replace(case, first_step=first, **changes)).changes


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
        ({"freeze": "gradient"}, [(10, 1), (20, 2), (25, 0), (35, 2), (45, 3)]),
    ],
)  # fmt: skip
def test_layers_freeze_by_interval_until_the_learning_rate_drops(changes, wanted):
    assert changes_of(CASE, **changes) == wanted


@pytest.mark.parametrize(
    ("first", "wanted"),
    [
        (5, ALL), (15, [(15, 2), *ALL[1:]]), (20, [(20, 3), *ALL[2:]]), (25, ALL[2:]),
        (26, [(26, 0), *ALL[3:]]),
    ],
)  # fmt: skip
def test_a_run_that_goes_on_freezes_as_the_whole_one(first, wanted):
    """Its strategy may be of fewer trained layers than those after the drop."""
    assert changes_of(CASE, first=first) == wanted


def test_a_run_that_goes_on_by_the_strategy_of_the_start_stays_there():
    assert Run(replace(CASE, first_step=26), planned="start").changes == ALL[3:]


def save_state(directory, n_frozen, freezing):
    state = {
        "n_ranks": 1, "step": 15, "names": {}, "parameters": [], "is_survivors": False,
        "shapes": {}, "trained": [f"layers.{k}.weight" for k in range(n_frozen, 4)] + ["head"],
        "freezing": msgspec.to_builtins(freezing),
    }  # fmt: skip
    metadata = {"format": "state shards 2", "state": json.dumps(state)}
    save_file({"model - x": torch.zeros(1)}, directory / "shard0.safetensors", metadata=metadata)


@pytest.mark.parametrize("interval", [3, 10])
def test_the_gradient_rule_goes_on_as_in_the_whole_run(tmp_path, interval):
    case = replace(CASE, freeze="gradient", freeze_interval=interval, load_state=tmp_path)
    whole = Run(case)
    assert len(whole.changes) > 4
    for first in range(1, case.steps):
        n_frozen, freezing = whole.saved[first]
        save_state(tmp_path, n_frozen, freezing)
        at_first = [n for at, n in whole.changes if at == first] or [n_frozen]
        later = [change for change in whole.changes if change[0] > first]
        wanted = [(first, n) for n in at_first if n or first >= 25] + later
        assert changes_of(case, first=first) == wanted, first


def test_a_run_that_ends_before_its_first_interval_is_refused():
    with pytest.raises(ConfigError, match="each interval of 10 steps, the run has 10: lower"):
        changes_of(CASE, steps=10)


@pytest.mark.parametrize("continues", ["", "RUN"])
def test_ranks_that_are_left_without_a_pipeline_train_on_without_its_rule(continues, caplog):
    strategy = ddp(layers()[0], small_cluster(2), 8)
    inputs = SimpleNamespace(
        case=replace(CASE, shrink="pipetransformer", continues=continues),
        start=SimpleNamespace(strategy=strategy), current=SimpleNamespace(n_frozen=1),
        context=SimpleNamespace(world=SimpleNamespace(is_first=True)), searches=[],
    )  # fmt: skip
    if not continues:
        with pytest.raises(StrategyError, match="two stages or more"):
            ShrinkPolicy(inputs)
        return
    assert ShrinkPolicy(inputs).due(1) is None
    assert "not planned again: PipeTransformer's rule needs" in caplog.text


def test_the_model_is_planned_again_as_layers_freeze_and_are_cached(monkeypatch):
    """The first search goes on when layers are cached; the strategy of step 5 has no cache."""
    current = SimpleNamespace(
        planned=SimpleNamespace(strategy=ddp(layers()[0], small_cluster(2), 8))
    )
    inputs = SimpleNamespace(
        case=replace(CASE, shrink="search"), start=current.planned, current=current,
        training=SimpleNamespace(n_steps=50),
        context=SimpleNamespace(world=SimpleNamespace(is_first=True)), searches=[],
    )  # fmt: skip
    asked, is_done = [], iter([0.0, 1.0, 1.0, 1.0, 1.0])
    monkeypatch.setattr(replanning.BesideSearch, "warm_up", lambda self: None)
    monkeypatch.setattr(replanning, "gather_numbers", lambda *_: [next(is_done)])
    monkeypatch.setattr(replanning, "broadcast_result", lambda make, *_: make())
    monkeypatch.setattr(replanning.BesideSearch, "start", lambda _, n_left: asked.append(n_left))
    monkeypatch.setattr(ShrinkPolicy, "_request", lambda _, n_left: (current.n_frozen, n_left))
    monkeypatch.setattr(ShrinkPolicy, "_answer", lambda *_: None)
    policy = ShrinkPolicy(inputs)
    frozen_and_cached = [(0, 0), (2, 0), (2, 2), (2, 2), (3, 2), (3, 0), (0, 0)]
    for step, (current.n_frozen, current.n_skipped) in enumerate(frozen_and_cached):
        assert policy.due(step) is None
    policy.close()
    assert asked == [(2, 49), (2, 47), (3, 46), (0, 44)]


def test_norms_leave_out_a_step_whose_gradients_overflow_on_any_rank():
    world = SimpleNamespace(size=1, rank=0, device=torch.device("cpu"))
    scale, norms = LossScale("fp16", world), LayerNorms(LAYERS, world)
    other, own = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([other, own])
    owners = SimpleNamespace(own={WeightSlice("layers.1.weight", ((0, 2),)): own}, of=lambda _: 0)
    for most in (float("inf"), 1.0):
        other.grad, own.grad = torch.full((2,), most), torch.tensor([3.0, 4.0]) * scale.factor()
        scale.unscale(optimizer, is_muted=False)
        has_overflowed = scale.has_overflowed(optimizer)
        norms.add(SimpleNamespace(names={}), owners, None, has_overflowed)
        scale.step(optimizer, is_muted=False)
    assert norms.state().squares == [0, 25, 0, 0]


@pytest.mark.parametrize("n_samples", [1, 30, 1000])
def test_a_cache_refuses_data_of_which_few_samples_change(n_samples):
    class Flipped(dict):
        """The last tenth of the samples, or the only one, is flipped at every second reading."""

        n_read = 0

        def __len__(self):
            return n_samples

        def __missing__(self, index):
            self.n_read += 1
            is_flipped = index >= n_samples * 9 // 10 and self.n_read % 2
            return Batch((torch.tensor([is_flipped, index]),), torch.tensor([0]))

    with pytest.raises(ConfigError, match="not the same when it is read again"):
        _check_repeats(Flipped())

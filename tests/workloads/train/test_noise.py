"""The extra steps that measure the gradient noise scale."""

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import msgspec
import planned_results
import pytest
import torch
import train_on_ranks
from local_ranks import largest_difference, run_on_ranks
from made_runs import world_of
from safetensors.torch import load_file
from torch import nn

from harness.measure.derive.noise import noise_scale
from harness.measure.derive.spans import samples_of
from harness.runtime.data import open_data
from harness.runtime.engines.engine import Clip, Share
from harness.runtime.ranks.world import Progress
from harness.workloads.train.config import TrainCase
from harness.workloads.train.files import data_options
from harness.workloads.train.noise import DrawnSamples, gradient_norms, warn_of_masks
from harness.workloads.train.plan import search_config_of
from harness.workloads.train.setup import make_task
from harness.workloads.train.table import train_text
from harness.workloads.train.workload import run_train

CASE = TrainCase(
    model="train_on_ranks:tiny_mlp", image_size=8, n_classes=5, batch=24, n_samples=40, steps=0,
    warm_up=3, learning_rate=0.05, weight_decay=0.1, no_sync_steps=0, noise_steps=16,
    strategy="single",
)  # fmt: skip


def square(case, state, indices):
    """The squared norm of the mean gradient of some samples, by plain PyTorch."""
    task = make_task(case)
    task.model.load_state_dict(state)
    batch = open_data(case.data, data_options(case), task, case.batch).__getitems__(indices)
    loss = task.sum_loss(task.model(*batch.inputs), batch.targets) / len(indices)
    gradients = torch.autograd.grad(loss, list(task.model.parameters()))
    return sum(float(gradient.square().sum()) for gradient in gradients)


def test_records_are_of_the_drawn_samples_and_parameters_stay():
    case = replace(CASE, steps=2)
    (found,), run = run_on_ranks(train_with_state, case, 1)
    plan = DrawnSamples(n_samples=40, shares=(24,), seed=2)  # after 2 steps
    records = samples_of(run.ranks[0], "gradient_square_norm")
    assert [r.labels["n_distinct"] for r in records] == [24, 3] * 8
    for step, record in enumerate(records):
        own = plan.global_indices(step)[: int(record.labels["n_distinct"])]
        assert record.value == pytest.approx(square(case, found, own), rel=1e-4)
    header = msgspec.structs.replace(run.header, config={"batch": case.batch})
    scale = noise_scale(run.ranks[0])
    rows = train_text([replace(run, header=header)]).split("gradient noise scale, samples")[1]
    assert rows.splitlines()[1].endswith(f"24     {1 + 24 / scale.n_samples:.2f}")
    assert str(scale) in rows


def train_with_state(case, context):
    """Train; the parameters as they are before the extra steps."""
    run_train(replace(case, save_model=True), context)
    return load_file(context.run_dir / "model.safetensors")


def test_samples_count_alike_where_they_have_unlike_numbers_of_targets():
    """Of two samples with gradients 1 and 9, summed over 1 and 3 targets."""
    counts = [(1, 1), (3, 3), (1, 3)]
    engine = SimpleNamespace(clip=Clip(None))

    def step(_, share):
        total = sum({1: 1.0, 3: 9.0}[n] for n in share.counts)
        engine.clip.norm = torch.tensor(total * share.weight)

    engine.step = step
    training = SimpleNamespace(
        engine=engine, share=lambda at, _: Share(n_local=2, n_global=2, counts=counts[at])
    )
    context = SimpleNamespace(world=world_of(0, 1), progress=Progress(is_shown=False))
    found = gradient_norms(training, context, 3, "noise steps")
    assert found == pytest.approx([2 / 4, 18 / 4, 10 / 4])  # sums over the mean number of targets


def test_training_goes_on_as_if_nothing_had_been_measured():
    measured = replace(
        CASE, model="train_on_ranks:tiny_random", steps=5, noise_every=2, n_ranks=2, strategy="ddp",
        engine="executor", dtype="fp16", exact_dropout=True, ema=0.9, max_grad_norm=0.5,
        save_sharded=True,
    )  # fmt: skip
    alone = replace(measured, noise_steps=0, noise_every=None)
    of_torch = {"engine": "torch", "exact_dropout": False, "save_sharded": False}
    cases = {  # the first training of a process draws further random numbers
        "first": alone, "executor": measured, "executor alone": alone,
        "torch": replace(measured, **of_torch), "torch alone": replace(alone, **of_torch),
    }  # fmt: skip
    write = partial(planned_results.write_inputs, search_config=search_config_of(alone), size=2)
    (found, _), run = run_on_ranks(train_on_ranks.planned_trainings, cases, 2, write)
    for name in ("executor", "torch"):
        one, other = found[name], found[f"{name} alone"]
        assert largest_difference(one["state"], other["state"]) == 0
        assert one["summary"] == other["summary"]
    one, other = (found[name]["sharded"] for name in ("executor", "executor alone"))
    assert one["loss_scale"] == other["loss_scale"]
    assert len(found["torch"]["squares"]) > 8  # after the last step, where none overflowed
    before = Counter(r.step for r in samples_of(run.ranks[0], "gradient_square_norm"))
    assert [*before] == [1, 3]
    assert min(before.values()) > 16


def test_dropout_is_warned_of_unless_its_probability_is_0(caplog):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(0.0)))
    warn_of_masks(model)
    assert not caplog.messages
    model[1][0].p = 0.1
    warn_of_masks(model)
    assert "too low: measure it with --dropout 0" in caplog.text


@pytest.mark.parametrize(("batch", "few"), [(2, 1), (7, 1), (64, 8), (60, 6), (33, 3)])
def test_few_samples_repeat_equally_often(batch, few):
    plan = DrawnSamples(n_samples=10_000, shares=(batch,))
    assert len(set(plan.global_indices(0))) > 0.9 * batch
    assert plan.global_indices(0) != plan.global_indices(2)
    counts = Counter(plan.global_indices(1))
    assert len(plan.global_indices(1)) == batch
    assert plan.n_distinct(1) == few
    assert {n % (batch // few) for n in counts.values()} == {0}

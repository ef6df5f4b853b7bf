"""The train workload on local ranks: what is learned, what is recorded, what is refused."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import train_on_ranks
from local_ranks import largest_difference, run_on_ranks
from safetensors.torch import load_file

from harness.errors import ConfigError
from harness.measure.derive.spans import phase_table, samples_of, spans_of
from harness.measure.derive.training import training_summary
from harness.runtime.capture.capture import capture
from harness.runtime.models.factory import task_of
from harness.runtime.models.task import ModelOptions, Wrapper
from harness.workloads.planning.inputs import capture_graph
from harness.workloads.train.config import TrainCase
from harness.workloads.train.plan import search_config_of
from harness.workloads.train.setup import (
    _has_local_loss,
    _optimizer_options,
    make_task,
    reduces_all,
    set_norm_scope,
)
from harness.workloads.train.table import train_text
from harness.workloads.train.workload import _save, run_train

# 40 samples in batches of 17: every third batch has 6, which 5 ranks share as 2, 1, 1, 1, 1.
CASE = TrainCase(
    model="train_on_ranks:tiny_mlp", image_size=8, n_classes=5, batch=17, n_samples=40, steps=20,
    warm_up=0, learning_rate=0.05, no_sync_steps=2,
)  # fmt: skip
# fp32 sums in another order: 20 steps of differences of 1e-7 stay far below.
TOLERANCE = 1e-5


CASES = {
    "uneven": CASE,
    # The last batch of each epoch has one sample: the second of two ranks has none.
    "empty": replace(CASE, batch=4, n_samples=9, steps=6),
    "speed": replace(CASE, balance="speed"),
    "frozen": replace(
        CASE, model="train_on_ranks:tiny_norm", batch_norm="frozen", steps=6, weight_decay=0.1,
        no_decay=("1d", "4.*"),
    ),
    "local": replace(CASE, model="train_on_ranks:tiny_norm", batch_norm="local", steps=6),
    "bf16": replace(CASE, dtype="bf16"),
    "fp16": replace(CASE, dtype="fp16"),
    "reduced": replace(CASE, reduce_dtype="bf16"),
    "quantized": replace(CASE, reduce_dtype="int8"),
    "short": replace(CASE, steps=3),
    "stopped": replace(CASE, steps=6, lr_schedule="step", lr_step_size=3, lr_gamma=1e-12),
}  # fmt: skip


@pytest.fixture(scope="session")
def one_rank():
    return run_on_ranks(train_on_ranks.trained_parameters_of, CASES, 1)[0][0]


@pytest.fixture(scope="session")
def more_ranks():
    """By number of ranks: each rank's parameters, by case."""
    cases = {2: CASES, 3: {"uneven": CASE}}
    return {
        n: run_on_ranks(train_on_ranks.trained_parameters_of, c, n)[0] for n, c in cases.items()
    }


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ddp_trains_what_one_device_trains(one_rank, more_ranks, n_ranks):
    results = [result["uneven"] for result in more_ranks[n_ranks]]
    assert largest_difference(one_rank["uneven"], results[0]) < TOLERANCE
    for other in results[1:]:
        assert largest_difference(results[0], other) == 0.0


@pytest.mark.parametrize("name", ["empty", "speed", "frozen"])
def test_two_ranks_train_what_one_does(one_rank, more_ranks, name):
    assert largest_difference(one_rank[name], more_ranks[2][0][name]) < TOLERANCE


def test_local_batch_norm_is_another_model(one_rank, more_ranks):
    assert largest_difference(one_rank["local"], more_ranks[2][0]["local"]) > 100 * TOLERANCE


def test_training_lowers_the_loss(one_rank):
    losses = one_rank["uneven"]["losses"]
    assert losses[-1] < losses[0] - 0.1


def test_the_learning_rate_of_a_step_is_the_schedules(one_rank):
    """After three steps it is next to nothing."""
    short, stopped = (
        {name: value for name, value in one_rank[case].items() if name != "losses"}
        for case in ("short", "stopped")
    )
    assert largest_difference(short, stopped) < 1e-9


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "reduced", "quantized"])
def test_narrow_dtypes_train_nearly_the_same(one_rank, more_ranks, dtype):
    exact, narrow = one_rank["uneven"]["losses"], more_ranks[2][0][dtype]["losses"]
    assert not torch.equal(exact, narrow)
    # bf16 keeps 8 bits: losses of about 1.6 differ by some 1e-2.
    assert float((exact - narrow).abs().max()) < 0.05


TWO_RANKS = replace(
    CASE, model="lenet", image_size=None, n_classes=None, batch=128, n_samples=None, warm_up=2,
    strategy="ddp", n_ranks=2,
)  # fmt: skip


@pytest.fixture(scope="session")
def two_ranks():
    return run_on_ranks(run_train, TWO_RANKS, 2)


def test_every_step_has_its_phases(two_ranks):
    _, run = two_ranks
    for records in run.ranks.values():
        for step in range(20):
            kinds = {span.kind for span in spans_of(records) if span.step == step}
            assert kinds == {
                "step", "data", "host_to_device", "forward", "backward", "communication",
                "optimizer",
            }  # fmt: skip


def median_rest(run):
    """Of a step, outside of all phases: the median over steps, of the worse rank."""
    tables = [phase_table(records) for records in run.ranks.values()]
    rests = [(table.phases["other"] / table.step_s).tolist() for table in tables]
    return max(sorted(own)[len(own) // 2] for own in rests)


def test_phases_sum_to_the_step_within_2_percent(two_ranks):
    """The median over steps: a rank may lose the processor between two marks on a busy machine.
    Where it does in most steps, the run says nothing, and another one is made."""
    _, run = two_ranks
    for records in run.ranks.values():
        table = phase_table(records)
        assert sum(table.phases.values()) == pytest.approx(table.step_s)
    rest = median_rest(run)
    for _ in range(4):
        if rest < 0.02:
            break
        rest = median_rest(run_on_ranks(run_train, TWO_RANKS, 2)[1])
    assert rest < 0.02


def test_buckets_carry_all_gradients(two_ranks):
    _, run = two_ranks
    spans = [r for r in spans_of(run.ranks[0]) if r.kind == "communication"]
    assert sum(span.n_bytes for span in spans if span.step == 7) == 4 * 61706


def test_counters_are_recorded_each_step(two_ranks):
    _, run = two_ranks
    counters = ("nic_sent_bytes", "nic_received_bytes", "n_samples", "n_synchronisations", "loss")
    for metric in counters:
        steps = [r.step for r in samples_of(run.ranks[1], metric)]
        assert steps == list(range(20)), metric


def test_loopback_carries_at_least_the_gradients(two_ranks):
    """Both ranks of an all-reduce over two send half of the buffer twice, on one interface."""
    _, run = two_ranks
    sent = [r.value for r in samples_of(run.ranks[0], "nic_sent_bytes")]
    assert sorted(sent)[10] >= 2 * 4 * 61706


def test_the_summary_has_every_number(two_ranks):
    results, run = two_ranks
    summary = training_summary(run)
    assert summary.n_samples == 128
    assert summary.flops_per_s > 0
    assert summary.exposed_communication_s is not None
    assert summary.no_sync_exposed_s is not None
    assert summary.slowed_compute_s is not None
    assert summary.ring_bytes == 4 * 61706
    assert summary.memory_bytes["rss"] > 50e6
    assert results[0]["n_parameters"] == 61706
    assert results[0]["parameters_digest"] == results[1]["parameters_digest"]


def test_a_ring_of_all_gradients_is_of_ranks_that_hold_all_parameters():
    states = ("auto", "none", "optimizer", "gradients", "parameters")
    cases = [replace(CASE, strategy="ddp", shard_state=state) for state in states]
    assert [reduces_all(case) for case in cases] == [True, True, True, True, False]
    assert not reduces_all(replace(CASE, strategy="pipeline"))


def test_ranks_with_unequal_data_are_refused_and_unequal_replicas_make_the_run_invalid():
    results, _ = run_on_ranks(train_on_ranks.refused_trainings, replace(CASE, steps=2), 2)
    for data, replicas in results:
        assert data.startswith("DataError: --data synthetic has 40 samples on rank 0 and 41 on")
        assert replicas.startswith("VerificationError: replicas differ: ranks 0 and 1 hold unequal")


def test_epochs_are_timed():
    begin_s = time.perf_counter()
    _, run = run_on_ranks(run_train, replace(CASE, epochs=2), 1)
    whole_s = time.perf_counter() - begin_s
    epochs = samples_of(run.ranks[0], "epoch_s")
    steps = [r.duration_s for r in spans_of(run.ranks[0]) if r.kind == "step"]
    assert [epoch.step for epoch in epochs] == [0, 1]
    assert len(steps) == 6
    assert sum(steps) <= sum(epoch.value for epoch in epochs) < whole_s


def test_a_rank_without_samples_is_timed_without_synchronisation_too():
    case = replace(CASE, batch=4, n_samples=1, steps=2, profiler_steps=1)
    _, run = run_on_ranks(run_train, case, 2)
    for records in run.ranks.values():
        assert len(samples_of(records, "no_sync_step_s")) == CASE.no_sync_steps
        assert len([span for span in spans_of(records) if span.kind == "step"]) == case.steps
        assert samples_of(records, "kernel_s")
    assert "longest kernels of rank 0" in train_text([run])


@pytest.mark.parametrize("mode", ["local", "global", "frozen"])
def test_what_is_planned_has_the_norms_that_are_trained(mode):
    case = replace(CASE, model="train_on_ranks:tiny_norm", batch_norm=mode, engine="executor")
    search_config = search_config_of(case)
    trained = capture(make_task(case), case.batch, case.model).graph
    assert capture_graph(search_config).content_hash() == trained.content_hash()
    frozen = [op for op in trained.operators if op.attrs.get("statistics") == "frozen"]
    assert bool(frozen) == (mode == "frozen")
    # Local and global statistics take a device equally long.
    profiled = search_config.profile_config().batch_norm
    assert profiled == {"local": "local", "global": "local", "frozen": "frozen"}[mode]


def test_batch_norm_over_all_ranks_needs_gpus():
    with pytest.raises(ConfigError, match="instead of zero1 to zero3: --strategy ddp"):
        set_norm_scope(torch.nn.BatchNorm1d(2), "global", torch.device("cpu"))


def test_a_model_that_no_plan_can_be_made_of_trains_where_none_is_needed():
    case = replace(CASE, model="train_on_ranks:tiny_uncapturable", strategy="single", n_ranks=1)
    (summary,), _ = run_on_ranks(run_train, case, 1)
    assert summary["last_loss"] < summary["first_loss"]


def test_a_loss_that_is_another_without_its_model_is_refused_where_no_plan_is_needed():
    case = replace(
        CASE, model="train_on_ranks:tiny_clamping", strategy="ddp", n_ranks=2, image_size=None,
        n_classes=None,
    )  # fmt: skip
    for error in run_on_ranks(train_on_ranks.error_of, case, 2)[0]:
        assert re.match(
            r"ModelError: the loss of train.*:tiny_clamping for 3 samples is .* from "
            "its outputs and labels: compute the loss without numpy",
            error,
        ), error


def test_averaged_replicas_agree_and_learn(one_rank):
    case = replace(CASE, sync_every=4, strategy="ddp", n_ranks=2)
    results, run = run_on_ranks(run_train, case, 2)
    assert results[0]["parameters_digest"] == results[1]["parameters_digest"]
    losses = [sample.value for sample in samples_of(run.ranks[0], "loss")]
    assert losses[0] == pytest.approx(float(one_rank["uneven"]["losses"][0]))
    assert losses[-1] < losses[0] - 0.1
    sums = [s for s in spans_of(run.ranks[0]) if s.kind == "communication"]
    n_parameters = results[0]["n_parameters"]
    assert [s.name for s in sums] == [f"fragment{k % 4}" for k in range(20)]
    assert sum(s.n_bytes for s in sums[:4]) == 4 * n_parameters
    assert len(samples_of(run.ranks[0], "no_sync_step_s")) == case.no_sync_steps


def test_ranks_of_a_host_train_one_replica():
    """Two ranks on each of two hosts get the samples that one would get there."""
    whole = replace(CASE, batch=16, n_samples=32)
    case = replace(whole, sync_every=4, strategy="ddp", outer_lr=0.7, outer_momentum=0.5)
    _, two = run_on_ranks(run_train, replace(case, n_ranks=2), 2)
    results, four = run_on_ranks(train_on_ranks.train_on_two_hosts, replace(case, n_ranks=4), 4)
    wanted, found = ([s.value for s in samples_of(r.ranks[0], "loss")] for r in (two, four))
    assert found == pytest.approx(wanted, rel=1e-4)
    assert len({result["parameters_digest"] for result in results}) == 1
    names = {s.name for s in spans_of(four.ranks[3]) if s.kind == "communication"}
    assert names == {"bucket0", *(f"fragment{k}" for k in range(4))}


def test_weights_that_do_not_decay_have_the_users_names():
    case = replace(CASE, weight_decay=0.1, no_decay=("1.*", "1d"))
    task = make_task(case)
    task = replace(task, model=Wrapper(task.model))
    options = _optimizer_options(case, task)
    names = [n for n, p in task.model.named_parameters() if options.group_of(n, p.dim())]
    assert names == ["model.1.weight", "model.1.bias", "model.3.bias"]
    with pytest.raises(ConfigError, match=r"--no-decay norm\* matches no trained parameter of"):
        _optimizer_options(replace(case, no_decay=("1d", "norm*")), task)
    with pytest.raises(ConfigError, match=r"--no-decay 1d \*t leaves none of 4 parameters that"):
        _optimizer_options(replace(case, no_decay=("1d", "*t")), task)


def test_deepspeed_trains_the_same():
    case = replace(
        CASE, optimizer="adamw", learning_rate=1e-2, steps=6, lr_schedule="cosine",
        weight_decay=0.1, no_decay=("1d",),
    )  # fmt: skip
    zero = replace(case, engine="deepspeed", n_ranks=2)
    cases = {name: replace(zero, strategy=name) for name in ("zero2", "zero3")}
    reduced = replace(zero, strategy="zero2", reduce_dtype="bf16")
    (alone,), _ = run_on_ranks(train_on_ranks.model_states, {"alone": case}, 1)
    narrow = replace(zero, strategy="zero3", dtype="bf16", model="train_on_ranks:tiny_norm")
    more = {"reduced": reduced, "narrow": narrow}
    (together, _), _ = run_on_ranks(train_on_ranks.model_states, {**cases, **more}, 2)
    for name in cases:
        assert largest_difference(alone["alone"], together[name]) < TOLERANCE, name
    assert TOLERANCE < largest_difference(alone["alone"], together["reduced"]) < 0.1
    assert together["narrow"]["2.running_mean"].any()  # statistics and weights of one dtype


class ModelOnly:
    """An engine whose optimizer's state nobody may ask for."""

    def model_state(self, *, is_for_first):
        weight = torch.arange(6.0).reshape(2, 3)
        named = {"encoder.weight": weight, "decoder.weight": weight, "model.bias": torch.ones(2)}
        named["model._extra_state"] = {"version": 2}
        return {f"model.{name}": tensor for name, tensor in named.items()}


def test_tied_weights_are_written_under_each_name_and_no_optimizer_is_gathered(tmp_path, caplog):
    context = SimpleNamespace(world=SimpleNamespace(is_first=True), run_dir=tmp_path)
    _save(TrainCase(save_model=True), SimpleNamespace(engine=ModelOnly(), prefix="model."), context)
    found = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "encoder.weight": (2, 3), "decoder.weight": (2, 3), "model.bias": (2,)
    }  # fmt: skip
    assert torch.equal(found["decoder.weight"], found["encoder.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert "model.safetensors leaves out model._extra_state, because" in caplog.text


class Alone(torch.nn.Linear):
    """Returns nothing but its loss."""

    def __init__(self, loss):
        super().__init__(4, 3)
        self.loss = loss

    def forward(self, x):
        return self.loss(super().forward(x))


@pytest.mark.parametrize(
    ("loss", "is_local"),
    [
        (lambda y: F.mse_loss(y, y * 2), False),
        (lambda y: F.cosine_similarity(y[:, 0], y[:, 1], dim=0), True),
        (lambda y: y[y > 0].mean(), True),  # which cannot be captured
    ],
)
def test_a_loss_of_each_ranks_samples_is_noticed_if_it_may_be_no_mean_over_samples(loss, is_local):
    task = task_of("m:f", (Alone(loss), (torch.rand(2, 4),)), ModelOptions())
    worlds = [SimpleNamespace(size=n, is_first=True) for n in (1, 2)]
    assert [_has_local_loss(CASE, task, world) for world in worlds] == [False, is_local]

"""A program's own training by a strategy, against plain PyTorch on one device."""

import copy
import dataclasses
import multiprocessing
import os
from functools import cache
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from trainer_on_ranks import (
    BATCH,
    EMA_DECAY,
    MAX_NORM,
    METRICS,
    N_EPOCHS,
    make_data,
    make_model,
    make_optimizer,
    make_scheduler,
    train_alone,
    train_alone_on_a_gpu,
    train_and_change,
    train_averaged,
)
from waiting import start_and_join

from harness.domain.cluster import Cluster
from harness.errors import (
    ConfigError,
    DataError,
    LaunchError,
    ModelError,
    PeerError,
    StrategyError,
)
from harness.plan.builders import ddp, pipeline, single, tensor_parallel
from harness.runtime.capture.capture import capture
from harness.runtime.data.batch import BatchPlan
from harness.runtime.executor.state.groups import OptimizerGroups
from harness.runtime.models.factory import task_of
from harness.runtime.models.task import ModelOptions
from harness.runtime.ranks.gather import gather_numbers, wait_for_all
from harness.runtime.ranks.world import World
from harness.trainer import Trainer

N_RANKS = 3


@cache
def graph():
    return capture(task_of("words", make_model(), ModelOptions()), BATCH, "words").graph


def loss_of(model, samples):
    words, labels = (torch.stack([s[key] for s in samples]) for key in ("words", "labels"))
    logits = model(words=words)["logits"]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train_plainly(until=N_EPOCHS):
    """The losses, the state, the averaged state, the evaluation of all samples and the optimizer's
    state of plain PyTorch."""
    model, _ = make_model()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(EMA_DECAY)
    )
    average.update_parameters(model)
    optimizer = make_optimizer(list(model.named_parameters()))
    scheduler, data = make_scheduler(optimizer), make_data()
    plan = BatchPlan(n_samples=len(data), shares=(BATCH,), positions=((),), is_shuffled=True)
    losses = []
    for step in range(until * plan.n_steps_per_epoch):
        loss = loss_of(model, [data[k] for k in plan.global_indices(step)])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        average.update_parameters(model)
        losses += [loss.item(), norm.item()]
        if step % plan.n_steps_per_epoch == plan.n_steps_per_epoch - 1:
            scheduler.step()
    states = model.state_dict(), average.module.state_dict()
    words, labels = (torch.stack([s[key] for s in data]) for key in ("words", "labels"))
    logits, n_labels = model(words=words)["logits"], (labels != -100).sum().item()
    found = {name: (f(logits, labels) / n_labels).item() for name, f in METRICS.items()}
    return losses, *states, {"loss": loss_of(model, data).item(), **found}, optimizer.state_dict()


def test_strategies_train_what_plain_pytorch_does(tmp_path):
    found = graph()
    names = [op.name for op in found.operators if op.kind != "input"]
    # Two of the three ranks; the third idles.
    before = pipeline(found, BATCH, [names[:2], names[2:]], [[1], [0]], n_microbatches=3)
    (tmp_path / "strategy.json").write_bytes(before.to_json())
    cluster = Cluster.uniform(1, N_RANKS, kind="rank", memory_bytes=1, inside_bytes_per_s=1.0)
    after = msgspec.structs.replace(tensor_parallel(found, cluster, BATCH), shard_state="optimizer")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.trainer", "torch._dynamo"])
    directory, file = str(tmp_path), str(tmp_path / "strategy.json")
    start_and_join(context, train_and_change, N_RANKS, directory, file, after)
    wanted_losses, wanted, wanted_average, wanted_evaluation, _ = train_plainly()
    _, wanted_model, *_, wanted_optimizer = train_plainly(until=2)
    for rank in range(N_RANKS):
        losses, results, refusals, files, plain, loaded = torch.load(tmp_path / f"result{rank}")
        state, average, evaluation = results
        assert losses == pytest.approx(wanted_losses, rel=1e-12)
        assert list(state) == list(average) == list(wanted)
        torch.testing.assert_close(state, dict(wanted), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(average, dict(wanted_average), rtol=1e-10, atol=1e-12)
        assert evaluation == pytest.approx(wanted_evaluation, rel=1e-7)  # a loss is in fp32
        model, optimizer = plain
        torch.testing.assert_close(model, dict(wanted_model), rtol=1e-10, atol=1e-12)
        assert optimizer["param_groups"] == wanted_optimizer["param_groups"]
        torch.testing.assert_close(optimizer, wanted_optimizer, rtol=1e-10, atol=1e-12)
        make_optimizer(list(make_model()[0].named_parameters())).load_state_dict(optimizer)
        is_equal, loaded_optimizer = loaded
        assert is_equal
        torch.testing.assert_close(loaded_optimizer, optimizer, rtol=0, atol=0)
        assert "state has groups of [1] parameters, the optimizer" in refusals["other groups"]
        assert "is no state_dict() of a torch optimizer" in refusals["no state"]
        assert "a batch of this Trainer, got a Tensor: give" in refusals["wrong batch"]
        assert "a batch of this Trainer, got one of another: give" in refusals["another's batch"]
        assert "has 15 samples on rank 0 and 14 on rank 2: give" in refusals["unequal data"]
        assert "sample 0 of the data has words, and" in refusals["wrong data"]  # of rank 1
        # Rank 1 cannot write, so that the first trainer's state, which the second loads, is whole.
        assert "saved/.rank1/shard1.safetensors on " in refusals["unwritten"]
        assert files == ["groups.json", *(f"shard{n}.safetensors" for n in range(N_RANKS))]
        assert "elsewhere holds no shard*.safetensors: give" in refusals["missing"]
        assert refusals["missing"].endswith("kept: True")
        assert "sample 7 of the data is another on rank 1 than on rank 0" in refusals["other data"]
        assert refusals["closed"].startswith("this Trainer is closed")
        assert refusals["metric"].startswith("metric 'all' of outputs (")
        assert refusals["metric"].endswith("return one number, the sum over its samples")
        assert refusals["loss"].startswith("a metric is named 'loss', as the loss is")
        assert refusals["unlike metrics"].startswith("rank 1 has the metrics ['normaliser', 'acc")
        assert (
            refusals["listed metrics"]
            == "metrics is of type list: give a dict of functions by name"
        )
        assert refusals["warns"] == str(rank == 0)
        assert "is of the optimizer AdamW, this one is RMSprop" in refusals["other optimizer"]
        assert "which the strategy cuts: use an optimizer" in refusals["factors"]
        assert refusals["unequal weights"].startswith("ranks 0 and 2 have unequal")


def test_replicas_are_averaged_evaluated_and_resumed(tmp_path):
    cluster = Cluster.uniform(1, N_RANKS, kind="rank", memory_bytes=1, inside_bytes_per_s=1.0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.trainer", "torch._dynamo"])
    strategy = ddp(graph(), cluster, BATCH)
    start_and_join(context, train_averaged, N_RANKS, str(tmp_path), strategy)
    ((wanted, wanted_evaluation), _), _ = torch.load(tmp_path / "result0")
    model, _ = make_model()
    model.load_state_dict(wanted)
    assert wanted_evaluation == pytest.approx(loss_of(model, make_data()).item(), rel=1e-7)
    for rank in range(N_RANKS):
        found, left_early = torch.load(tmp_path / f"result{rank}")
        for state, evaluation in found:
            assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
            assert evaluation == wanted_evaluation
        said = "has trained 1 steps and waited" if rank == 1 else "over ranks [0, 1, 2] failed"
        assert said in left_early


def test_a_program_without_a_process_group_is_refused():
    with pytest.raises(LaunchError, match="this program has no process group"):
        Trainer(*make_model(), strategy="none.json", optimizer=make_optimizer)


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_plain(losses, state):
    """That they are those of plain PyTorch."""
    wanted_losses, wanted, *_ = train_plainly()
    assert losses == pytest.approx(wanted_losses, rel=1e-10)
    torch.testing.assert_close(state, dict(wanted), rtol=1e-9, atol=1e-11)


@pytest.mark.usefixtures("alone")
def test_one_device_trains_what_plain_pytorch_does():
    assert_plain(*train_alone(single(graph(), BATCH)))


@pytest.mark.gpu
def test_a_gpu_trains_what_plain_pytorch_does(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ["FIRST_GPU"])
    file, strategy = str(tmp_path / "found"), single(graph(), BATCH)
    context = multiprocessing.get_context("spawn")
    start_and_join(context, train_alone_on_a_gpu, 1, file, strategy)
    assert_plain(*torch.load(file))


@pytest.mark.usefixtures("alone")
def test_no_wait_of_a_program_outlasts_its_process_group(monkeypatch):
    monkeypatch.setattr(dist, "new_group", None)  # a group of wait_for_all's waits a day
    wait_for_all(dataclasses.replace(World.of_program(), size=2))


@pytest.mark.usefixtures("alone")
def test_the_end_of_a_rank_outside_a_step_is_a_peers(monkeypatch):
    def all_gather(*_args):
        raise RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:2")

    monkeypatch.setattr(dist, "all_gather", all_gather)
    world = dataclasses.replace(World.of_program(), size=2)
    message = r"^rank 0 waited for ranks \[1\] \(Connection closed by peer \[::1\]:2\): one of"
    with pytest.raises(PeerError, match=message):
        gather_numbers(1.0, world)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_parameter_that_is_frozen_or_freed_later_is_refused(is_trained):
    model, example = make_model()
    model.table.requires_grad_(is_trained)
    strategy = single(graph(), BATCH)
    with Trainer(model, example, strategy=strategy, optimizer=torch.optim.SGD) as trainer:
        batch = next(trainer.batches(make_data()))
        trainer.step(batch)
        model.table.requires_grad_(not is_trained)
        message = f"table.weight is {not is_trained}, and was {is_trained} when the Trainer"
        with pytest.raises(ConfigError, match=message):
            trainer.step(batch)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("is_given", [True, False])
def test_a_parameter_that_is_hooked_later_is_refused(name, is_given):
    model, example = make_model()
    model.inner.weight.register_hook(lambda gradient: 2 * gradient)  # which the Trainer runs
    strategy = single(graph(), BATCH)
    with Trainer(model, example, strategy=strategy, optimizer=torch.optim.SGD) as trainer:
        batch = next(trainer.batches(make_data()))
        trainer.step(batch)
        held = trainer.optimizer.param_groups[0]["params"]
        getattr(model.table.weight if is_given else held[0], name)(lambda _: None)
        with pytest.raises(ConfigError, match="has a hook that the Trainer was made without"):
            trainer.step(batch)
        with pytest.raises(AttributeError):
            trainer.optimizer = torch.optim.SGD(held)  # which nothing would step


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "use",
    [
        copy.deepcopy,
        nn.Module.state_dict,
        torch.optim.swa_utils.AveragedModel,
        lambda model: [p.data.clamp_(-1, 1) for p in model.parameters()],
    ],
)
def test_the_use_of_an_emptied_model_is_refused(use):
    model, example = make_model()
    model.unread = nn.Linear(2, 2)
    with Trainer(model, example, strategy=single(graph(), BATCH), optimizer=torch.optim.SGD):
        model.zero_grad()
        with pytest.raises(ConfigError, match="uses its model after the Trainer has emptied it"):
            use(model)


@pytest.mark.usefixtures("alone")
def test_hooks_of_state_dict_change_no_state(tmp_path):
    def change(module, state, prefix, metadata):
        state["renamed"] = state.pop(f"{prefix}table.weight")

    def make():
        model, example = make_model()
        model.register_state_dict_post_hook(change)
        strategy = single(graph(), BATCH)
        return Trainer(model, example, strategy=strategy, optimizer=make_optimizer)

    with make() as trainer, make() as another:
        trainer.step(next(trainer.batches(make_data())))
        trainer.save(tmp_path)
        another.load(tmp_path)
        states = trainer.state_dict(), another.state_dict()
    wanted = make_model()[0].state_dict()
    assert list(states[0]) == list(wanted)
    assert not torch.equal(states[0]["table.weight"], wanted["table.weight"])
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


@pytest.mark.usefixtures("alone")
def test_a_buffer_that_a_hook_assigns_is_kept():
    def count(module, given, output):
        module.seen = module.seen + output.detach().sum()

    model = Scaled(1.0)
    model.head.register_buffer("seen", torch.zeros(()))
    model.head.register_forward_hook(count)
    plain, example = copy.deepcopy(model), {"x": torch.zeros(2, 4)}
    strategy = single(capture(task_of("hooked", (model, example), ModelOptions()), 4, "m").graph, 4)
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(4, 4, generator=drawn), torch.arange(4) % 3)
    with Trainer(model, example, strategy=strategy, optimizer=make_optimizer) as trainer:
        trainer.step(next(trainer.batches(data)))
        found = trainer.state_dict()["head.seen"]
    plain(data.tensors[0])
    torch.testing.assert_close(found, plain.head.seen)


@pytest.mark.usefixtures("alone")
def test_a_parameter_is_freed_by_another_trainer(tmp_path):
    def make(named):
        return torch.optim.Adagrad([p for _, p in named], initial_accumulator_value=0.5)

    states = []
    for is_trained in (False, True):
        model, example = make_model()
        model.table.requires_grad_(is_trained)
        strategy = single(graph(), BATCH)
        with Trainer(model, example, strategy=strategy, optimizer=make) as trainer:
            if is_trained:
                trainer.load(tmp_path)
            trainer.step(next(trainer.batches(make_data())))
            trainer.save(tmp_path)
            states.append(trainer.optimizer_state_dict()["state"])
    assert [state.get(0, {}).get("step") for state in states] == [None, 1]
    assert [state[1]["step"] for state in states] == [1, 2]
    assert states[1][0]["sum"].min() == 0.5  # of words that the batch has not


@pytest.mark.usefixtures("alone")
def test_the_optimizers_state_is_that_of_plain_pytorch_with_frozen_parameters():
    model, example = make_model()
    model.inner.weight.requires_grad_(False)
    plain, data = copy.deepcopy(model), make_data()[:BATCH]
    optimizer = make_optimizer(list(plain.named_parameters()))
    loss_of(plain, data).backward()
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.02
    wanted = optimizer.state_dict()
    strategy = single(graph(), BATCH)
    with Trainer(model, example, strategy=strategy, optimizer=make_optimizer) as trainer:
        for batch in trainer.batches(data, shuffle=False):
            trainer.step(batch)
        trainer.optimizer.param_groups[1]["lr"] = 0.02
        found = trainer.optimizer_state_dict()
        trainer.load_state_dict(plain.state_dict(), found)
    assert found["param_groups"] == wanted["param_groups"]
    torch.testing.assert_close(found["state"], wanted["state"], rtol=1e-10, atol=1e-12)
    optimizer.load_state_dict(found)


class Dropping(nn.Module):
    """Trained otherwise than evaluated, by modules and by functions."""

    def __init__(self, factor):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last, self.factor = nn.Dropout(0.3), nn.Linear(8, 3), factor

    def forward(self, x):
        found = self.drop(self.norm(self.first(x)))
        found = nn.functional.dropout(found, 0.4, self.training)
        found = torch.dropout(input=found, p=0.1, train=self.training)
        return self.last(found) * (1 if self.training else self.factor)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("factor", [1, 2])
def test_evaluation_is_that_of_the_model_or_refused(factor):
    torch.manual_seed(0)
    model, example = Dropping(factor), torch.rand(2, 4)
    strategy = single(capture(task_of("", (model, example), ModelOptions()), 4, "").graph, 4)
    rows, classes = torch.rand(10, 4), torch.arange(10) % 3
    data, losses = TensorDataset(rows, classes), []
    for is_evaluated in (False, factor == 1):
        given = copy.deepcopy(model), example
        with Trainer(*given, strategy=strategy, optimizer=make_optimizer) as trainer:
            for batch in trainer.batches(data):
                losses.append(trainer.mean_loss(trainer.step(batch)))
                if is_evaluated:
                    trainer.evaluate(data)
            if factor == 1:
                found, state = trainer.evaluate(data), trainer.state_dict()
            else:
                with pytest.raises(ModelError, match=r"^Dropping computes otherwise in evaluation"):
                    trainer.evaluate(data)
    assert losses[:2] == losses[2:]  # evaluations have changed nothing
    if factor == 1:
        model.load_state_dict(state)
        wanted = nn.functional.cross_entropy(model.eval()(rows), classes)
        assert found == {"loss": pytest.approx(wanted.item(), rel=1e-5)}


def mean_right(logits, labels):
    return (logits.argmax(-1) == labels).double().mean()


@pytest.mark.usefixtures("alone")
def test_a_metric_that_is_a_mean_is_refused():
    given = single(graph(), BATCH), make_optimizer
    with Trainer(*make_model(), strategy=given[0], optimizer=given[1]) as trainer:
        message = r"'mean' of outputs \(6, 4, 5\) .*it is (.*), and \1 of the same samples twice"
        with pytest.raises(ConfigError, match=message):
            trainer.evaluate(make_data(), metrics={"mean": mean_right})


def leave_out(named):
    return torch.optim.SGD([p for name, p in named if name != "last.bias"])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"strategy": "none.json"}, StrategyError, "none.json"),
        ({"strategy": lambda g: single(g, BATCH, device=1)}, StrategyError, "2 devices, and"),
        ({"model": nn.Linear(2, 2), "example": torch.rand(2, 2)}, StrategyError, "another model"),
        ({"model": nn.DataParallel(nn.Linear(2, 2))}, ModelError, "a DataParallel, .* its .module"),
        ({"model": nn.Linear(2, 2), "example": None}, ModelError, "no example inputs of Linear"),
        ({"model": lambda: None, "example": None}, ModelError, "the model is of type NoneType"),
        ({"model": "own:net"}, ModelError, "the model is of type str, not an nn.Module"),
        ({"device": "meta"}, ConfigError, "device is meta, and this host has .* GPUs: give cpu"),
        ({"device": "gpu"}, ConfigError, "device is gpu, and this host has .* GPUs: give cpu"),
        ({"epoch": "1"}, ConfigError, "epoch is '1': give a number, 0 for the first"),
        ({"ema_decay": 1.5}, ConfigError, "ema_decay is 1.5: give one between"),
        ({"max_grad_norm": -1.0}, ConfigError, "max_grad_norm is -1.0: give one above 0"),
        ({"dtype": "half"}, ConfigError, "'half' is none of fp32, bf16, fp16"),
        ({"optimizer": leave_out}, ConfigError, "4 of 5 parameters, last.bias is missing"),
        ({"optimizer": lambda named: named}, ConfigError, "an object of type list"),
        ({"optimizer": torch.optim.LBFGS}, ConfigError, "LBFGS, whose step takes a closure"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, ConfigError, "is of type SGD, and"),
        ({"example": {"words": torch.rand(2)}}, ModelError, "the model: its forward fails"),
        ({"data": make_data()[:4]}, DataError, "holds 4 samples, one batch"),
        ({"data": iter(make_data())}, DataError, "^the data is of type list_iterator"),
        ({"data": [{"words": 1}] * 9}, DataError, "sample 0 of the data has words, and the model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
@pytest.mark.usefixtures("alone")
def test_what_does_not_fit_is_refused(changes, error, message):
    model, example = make_model()
    given = {"model": model, "example": example, "optimizer": make_optimizer} | changes
    data, epoch = given.pop("data", make_data()), given.pop("epoch", 0)
    strategy = given.get("strategy", lambda found: single(found, BATCH))
    given["strategy"] = strategy(graph()) if callable(strategy) else strategy
    with pytest.raises(error, match=message):
        next(Trainer(**given).batches(data, epoch=epoch))


class Remembering(torch.optim.SGD):
    """Keeps what a file of a state cannot hold."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["names"] = ["a", "b"]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"kept_in": torch.float32}, r"kept_in of torch.float32, which a file"),
        ({"most": (1, float("inf"))}, r"most of \(1, inf\), which a file"),
    ],
)
def test_a_group_that_a_file_cannot_hold_is_refused(group, message):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [weight], **group}], lr=0.1)
    with pytest.raises(ConfigError, match=message):
        OptimizerGroups.gathered(optimizer, {weight: "w"}, SimpleNamespace(size=1))


def test_a_file_holds_a_rate_of_numpy(tmp_path):
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=np.cos(0.5))
    OptimizerGroups.gathered(optimizer, {weight: "w"}, SimpleNamespace(size=1)).write(tmp_path)
    assert OptimizerGroups.read(tmp_path).groups["w"]["lr"] == np.cos(0.5)


@pytest.mark.usefixtures("alone")
def test_what_a_file_cannot_hold_is_not_saved(tmp_path):
    def make(named):
        return Remembering([p for _, p in named], lr=0.1)

    with Trainer(*make_model(), strategy=single(graph(), BATCH), optimizer=make) as trainer:
        for batch in trainer.batches(make_data()):
            trainer.step(batch)
        with pytest.raises(ConfigError, match=r"keeps names of \['a', 'b'\] for model.table"):
            trainer.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.usefixtures("alone")
def test_a_rate_that_is_a_tensor_stays_one(tmp_path):
    def make(named):
        return torch.optim.AdamW([p for _, p in named], lr=torch.tensor(0.01))

    states = []
    for is_second in (False, True):
        given = *make_model(seed=is_second), tmp_path / "saved"
        with Trainer(*given[:2], strategy=single(graph(), BATCH), optimizer=make) as trainer:
            if is_second:
                trainer.load(given[2])
            else:
                trainer.optimizer.param_groups[0]["lr"].fill_(0.02)
                trainer.save(given[2])
            rate = trainer.optimizer.param_groups[0]["lr"]
            assert isinstance(rate, torch.Tensor)
            assert rate == torch.tensor(0.02)
            for batch in trainer.batches(make_data()):
                trainer.step(batch)
            states.append(trainer.state_dict())
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())


class Scaled(nn.Module):
    def __init__(self, std):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x):
        return self.head(x / (self.std + 1e-6))


@pytest.mark.usefixtures("alone")
def test_a_state_whose_buffer_is_not_that_of_the_graph_is_refused(tmp_path):
    example = {"x": torch.zeros(2, 4)}
    task = task_of("scaled", (Scaled(2.0), example), ModelOptions())
    strategy = single(capture(task, BATCH, "scaled").graph, BATCH)
    with Trainer(Scaled(2.0), example, strategy=strategy, optimizer=make_optimizer) as trainer:
        trainer.save(tmp_path)
        trainer.load(tmp_path)
    with Trainer(Scaled(1.0), example, strategy=strategy, optimizer=make_optimizer) as trainer:
        before = trainer.state_dict()
        message = "another std than the model, from which the graph has computed constants: give"
        with pytest.raises(ConfigError, match=message):
            trainer.load(tmp_path)
        assert all(torch.equal(before[name], x) for name, x in trainer.state_dict().items())


@pytest.mark.usefixtures("alone")
def test_groups_are_not_merged_by_a_load(tmp_path):
    strategy = single(graph(), BATCH)
    with Trainer(*make_model(), strategy=strategy, optimizer=make_optimizer) as trainer:
        trainer.save(tmp_path)

    def make(named):
        return torch.optim.AdamW([p for _, p in named])

    with Trainer(*make_model(seed=1), strategy=strategy, optimizer=make) as trainer:
        before = trainer.state_dict()
        message = "the state has lr 0.03 of table.weight and 0.01 of inner.weight, which are in one"
        with pytest.raises(ConfigError, match=message):
            trainer.load(tmp_path)
        assert all(torch.equal(before[name], x) for name, x in trainer.state_dict().items())

"""A training goes on from its whole state, gathered or in files, under another strategy."""

import copy
import os

import msgspec
import pytest
import torch
from equivalence_check import reference
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond
from equivalence_exchanges import sharded
from equivalence_named import make_case
from equivalence_priming import evaluated_by_both
from equivalence_ranks import local_world
from equivalence_reference import Trace, plain_optimizer
from equivalence_training import (
    Move,
    load_and_train,
    make_engine,
    merged,
    train_and_save,
    train_step,
    whole_state,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harness.errors import ConfigError, ResultsError
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.state.files import check_sharded, load_sharded, open_sharded
from harness.runtime.executor.state.shard import StateMetadata
from harness.runtime.executor.state.weights import Weights

AVERAGED = 3  # a seed with averages of parameters, some of which do not decay


def named(model, n_ranks, batch, name, **changes):
    name, _, state = name.partition(", sharded ")
    return sharded(make_case(model, name, n_ranks, batch, **changes), state or "none")


def make_move(model, n_ranks, before, after, directory, **changes):
    """From a strategy on so many ranks to another; both are (ranks, batch, name)."""
    case = named(model, *before, n_steps=4, **changes)
    return Move(
        case=case, after=named(model, *after).strategy, n_before=2, directory=str(directory)
    )


def assert_uninterrupted(found, move, ranks):
    wanted = reference(move.case, ranks)
    wanted = Trace(losses=wanted.losses, gradients=wanted.gradients[-1:], state=wanted.state)
    assert first_beyond(found, wanted, FLOAT64_TOLERANCES[move.case.optimizer]) is None


def test_an_evaluation_has_the_running_statistics_of_the_state(ranks):
    case = make_case("branchy", "ddp", batch_norm="local")
    for found, wanted in ranks.run(case.n_ranks, evaluated_by_both, case):
        assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "before", "after", "optimizer", "dropout"),
    [
        ("disordered", (2, "tensor parallel"), (2, "1f1b"), "sgd", "off"),
        ("lenet", (3, "tensor parallel"), (3, "1f1b"), "adamw", "off"),
        (
            "lenet", (3, "ddp, sharded parameters"), (3, "2-1 gpipe, sharded gradients"),
            "adamw", "off",
        ),
        ("exported", (3, "1f1b"), (3, "ddp"), "adamw", "off"),
        ("mlp", (2, "tensor parallel"), (2, "ddp, sharded gradients"), "adamw", "exact"),
        ("resnet18", (2, "ddp"), (1, "single"), "sgd", "off"),
        ("vit", (2, "1f1b"), (3, "tensor parallel"), "adamw", "off"),
        ("tokens", (2, "hybrid"), (1, "single"), "sgd", "off"),
    ],
)  # fmt: skip
def test_other_ranks_go_on_from_what_each_rank_wrote(
    model, before, after, optimizer, dropout, ranks, tmp_path
):
    move = make_move(
        model, before[0], (before[0], 6, before[1]), (after[0], 6, after[1]), tmp_path / "state",
        optimizer=optimizer, dropout=dropout, seed=AVERAGED,
    )  # fmt: skip
    first = ranks.run(before[0], train_and_save, move)
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == [f"shard{rank}.safetensors" for rank in range(before[0])]
    rest = merged(ranks.run(after[0], load_and_train, move))
    losses = [sum(parts) for parts in zip(*first, strict=True)]
    found = Trace(losses=losses + rest.losses, gradients=rest.gradients, state=rest.state)
    assert_uninterrupted(found, move, ranks)


def test_no_rank_writes_what_another_does(ranks, tmp_path):
    move = make_move("mlp", 2, (2, 6, "ddp"), (2, 6, "ddp"), tmp_path)
    ranks.run(2, train_and_save, move)
    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    whole = sum(p.numel() for p in move.case.make_task().model.parameters())
    assert sizes[0] > 2 * 8 * whole  # weights and momenta, which both hold
    assert sizes[1] < 8 * whole


def test_sharded_state_is_on_one_rank_each(ranks, tmp_path):
    move = make_move("mlp", 2, (2, 6, "ddp, sharded optimizer"), (2, 6, "ddp"), tmp_path)
    ranks.run(2, train_and_save, move)
    found = [load_file(path) for path in sorted(tmp_path.iterdir())]
    momenta = [{name for name in one if name.startswith("optimizer")} for one in found]
    assert momenta[0]
    assert momenta[1]
    assert not momenta[0] & momenta[1]
    n_whole = sum(p.numel() for p in move.case.make_task().model.parameters())
    assert sum(t.numel() for one in found for n, t in one.items() if n.startswith("opt")) == n_whole


def one_device(model, **changes):
    case = make_case(model, "single", 1, 6, **changes)
    return case, make_engine(case, local_world(0, 1))


@pytest.mark.parametrize(("model", "seed"), [("disordered", 0), ("disordered", 2), ("exported", 5)])
def test_a_whole_state_is_that_of_plain_pytorch(model, seed):
    case, engine = one_device(model, seed=seed)
    plain = case.make_task()
    optimizer = plain_optimizer(case, plain.model)
    for step in range(2):
        train_step(engine, case, step)
        batch = case.batch(plain, step)
        optimizer.zero_grad()
        (plain.sum_loss(plain.model(*batch.inputs), batch.targets) / 6).backward()
        optimizer.step()
    found = whole_state(engine, local_world(0, 1))
    assert list(found["model"]) == list(plain.model.state_dict())
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(found["model"][name], tensor)
    states = {k: optimizer.state.get(p) for k, p in enumerate(plain.model.parameters())}
    wanted = {k: values for k, values in states.items() if values}
    torch.testing.assert_close(found["optimizer"]["state"], wanted)


def test_a_state_of_another_model_or_optimizer_is_refused():
    _, engine = one_device("disordered")
    state = whole_state(engine, local_world(0, 1))
    other = {**state, "optimizer": {"state": {0: {"step": torch.ones(()), "exp_avg": 1.0}}}}
    with pytest.raises(ConfigError, match="has exp_avg of a parameter, this optimizer keeps m"):
        engine.load_full_state(lambda: other)
    more = {**state, "model": {**state["model"], "head.other": torch.zeros(1)}}
    with pytest.raises(ConfigError, match="the model has not: load the state of the same"):
        engine.load_full_state(lambda: more)
    state["model"]["head.weight"] = torch.zeros(7, 8)
    with pytest.raises(ConfigError, match=r"head.weight is of \(6, 8\), the state has one of"):
        engine.load_full_state(lambda: state)
    del state["model"]["head.weight"]
    with pytest.raises(ConfigError, match=r"head.weight is of \(6, 8\), the state has no such"):
        engine.load_full_state(lambda: state)


def test_averages_of_a_state_are_dropped_with_a_warning(caplog):
    _, engine = one_device("disordered")
    state = whole_state(engine, local_world(0, 1))
    averaged = {**state, "optimizer": {"state": {0: {"average": torch.ones(())}}}}
    engine.load_full_state(lambda: averaged)
    assert caplog.messages == [
        "averages of parameters in the state are dropped: use ema to keep them"
    ]


def test_a_pipe_is_no_shard(tmp_path):
    os.mkfifo(tmp_path / "shard0.safetensors")
    with pytest.raises(ResultsError, match=r"shard0.safetensors .*Not a regular file"):
        load_sharded(tmp_path)


def test_shards_that_do_not_belong_together_are_refused(ranks, tmp_path):
    with pytest.raises(ResultsError, match="holds no shard"):
        load_sharded(tmp_path)
    move = make_move("mlp", 2, (2, 6, "tensor parallel"), (1, 6, "single"), tmp_path)
    ranks.run(2, train_and_save, move)
    first, kept = tmp_path / "shard0.safetensors", tmp_path / "shard1.safetensors"
    tensors = load_file(first)
    others = {name.split()[-1] for name in load_file(kept)}
    lost = next(n for n in tensors if n.startswith("model 0:") and n.split()[-1] in others)
    with safe_open(first, framework="pt") as file:
        metadata = file.metadata()
    save_file({name: x for name, x in tensors.items() if name != lost}, first, metadata)
    with pytest.raises(ResultsError, match=r"holds \d+ of the \d+ elements of"):
        open_sharded(tmp_path)  # before anything is loaded
    kept.rename(tmp_path / "elsewhere")
    with pytest.raises(ResultsError, match=r"1 of 2 shards, shard1.safetensors is missing"):
        load_sharded(tmp_path)
    ranks.run(2, train_and_save, Move(case=move.case, after=move.after, n_before=1,
                                      directory=move.directory))  # fmt: skip
    (tmp_path / "elsewhere").rename(kept)
    with pytest.raises(ResultsError, match="different saves: their step are 1 and 2;"):
        load_sharded(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"run": "b"}, "different saves: their run are 'a' and 'b'; keep each in a directory"),
        ({"step": -1}, r"shard1.safetensors: Expected `int` >= 0 - at `\$.step`"),
    ],
)
def test_shards_of_two_runs_and_impossible_steps_are_refused(tmp_path, changed, message):
    state = StateMetadata(
        n_ranks=2, step=3, names={}, parameters=[], is_survivors=False, shapes={}, trained=[],
        run="a",
    )  # fmt: skip
    for rank, told in enumerate((state, msgspec.structs.replace(state, **changed))):
        metadata = {"format": "state shards 2", "state": msgspec.json.encode(told).decode()}
        save_file({}, tmp_path / f"shard{rank}.safetensors", metadata)
    with pytest.raises(ResultsError, match=message):
        check_sharded(tmp_path)


def test_a_buffer_that_repeats_its_rows_keeps_its_values():
    """As position numbers of a text model do; only a blueprint's tensors have no values yet."""
    model = torch.nn.Module()
    model.register_buffer("rows", torch.arange(3).expand(2, 3))
    weights = Weights(model, torch.device("cpu"))
    weights.hold(WeightSlice.whole("rows", model.rows), model.rows)
    weights.allocate()
    assert model.rows.tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("use", [copy.deepcopy, torch.nn.Module.state_dict])
def test_a_copy_of_weights_without_memory_is_refused(use):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    weights, piece = (
        Weights(model, torch.device("cpu")),
        WeightSlice.whole("0.weight", model[0].weight),
    )
    weights.hold(piece, model[0].weight)
    weights.refuse_others(model, [])
    use(model)
    weights.refuse_others(model, [piece])
    with pytest.raises(ConfigError, match=r"emptied it, .*read trainer\.state_dict\(\)"):
        use(model)


def test_a_constant_of_a_graph_stays_with_the_program_that_made_it():
    model, classes = torch.nn.Linear(2, 2), torch.ones(2)
    model.register_buffer("classes", classes)
    Weights(model, torch.device("cpu")).release_others(model)
    assert [x.numel() for x in (model.weight, model.classes, classes)] == [0, 0, 2]

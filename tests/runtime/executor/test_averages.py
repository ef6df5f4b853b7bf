"""Replicas of any strategy that are averaged train as one after the other in plain PyTorch."""

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import torch
from averages_training import (
    Averaged,
    read_and_train,
    train_and_survive,
    train_and_write,
    train_one_after_the_other,
    train_replicas,
)
from equivalence_compare import FLOAT64_TOLERANCES
from equivalence_models import small_graph
from equivalence_named import case_of, strategies
from equivalence_ranks import RanksFailedError
from made_graphs import small_cluster

from harness.domain.sharding import has_tasks
from harness.errors import StrategyError
from harness.plan.layouts.degrees import layout_strategy, parse_layout
from harness.runtime.engines.optimizers import OuterOptions
from harness.runtime.executor.sharded.replicas import Replicas
from harness.runtime.executor.state.files import load_sharded

MEAN, DILOCO = (
    OuterOptions(sync_every=1),
    OuterOptions(sync_every=1, learning_rate=0.7, momentum=0.9),
)
RARE = OuterOptions(sync_every=3, learning_rate=0.7, momentum=0.9)


def degrees(model, text, batch, n_microbatches):
    layout, graph = parse_layout(text).with_replicas_together(), small_graph(model)
    seconds = [[1.0] * len(list(filter(has_tasks, graph.operators)))] * layout.n_devices
    return layout_strategy(
        layout, graph, small_cluster(layout.n_devices), batch,
        n_microbatches=n_microbatches, seconds=seconds,
    )  # fmt: skip


def averaged(model, strategy, outer=RARE, hosts="", **changes):
    case = case_of(model, strategy, batch_norm="local", **changes)
    return Averaged(case=case, outer=outer, hosts=hosts)


def ddp(model, n_ranks, batch):
    return strategies(model, n_ranks, batch)["ddp"]


def sharded_ddp(model, n_ranks, batch, state):
    return msgspec.structs.replace(ddp(model, n_ranks, batch), shard_state=state)


def assert_close(found, wanted, optimizer):
    for name, tensor in wanted.items():
        scale = float(tensor.abs().max()) or 1.0
        difference = float((found[name] - tensor).abs().max())
        assert difference <= FLOAT64_TOLERANCES[optimizer] * scale, name


def assert_trained_one_by_one(training, ranks):
    found = ranks.run(training.case.n_ranks, train_replicas, training)
    firsts = sorted({one.replica for one in found})
    wanted = train_one_after_the_other(training, [found[rank].samples for rank in firsts])
    optimizer = training.case.optimizer
    for one in found:
        replica = wanted[firsts.index(one.replica)]
        assert_close(one.own, replica.own, optimizer)
        assert_close(one.agreed, replica.agreed, optimizer)
    losses = [sum(parts) for parts in zip(*(one.losses for one in found), strict=True)]
    of_replicas = [sum(parts) for parts in zip(*(one.losses for one in wanted), strict=True)]
    assert losses == pytest.approx(of_replicas, rel=1e-8)


@pytest.mark.parametrize(
    ("model", "strategy", "outer", "hosts", "changes"),
    [
        # Fragments are cut in the order of slices, here that of names; else they are whole.
        ("mlp", lambda: ddp("mlp", 3, 7), RARE, "", {"seed": 1}),  # clipped, unequal shares
        ("gpt2", lambda: ddp("gpt2", 2, 4), DILOCO, "", {"optimizer": "adamw"}),
        ("lenet", lambda: ddp("lenet", 4, 8), RARE, "aabb", {"seed": 1}),
        ("disordered", lambda: degrees("disordered", "dp=2,pp=2", 8, 2), DILOCO, "", {}),
        ("mlp", lambda: degrees("mlp", "dp=2,pp=2", 6, 1), DILOCO, "aabb", {"seed": 1}),
        ("gpt2", lambda: degrees("gpt2", "tp=2,dp=2", 4, 1), MEAN, "", {"optimizer": "adamw"}),
        # No sample affects tables of positions, learned queries, or weights made of weights.
        ("positions", lambda: ddp("positions", 3, 7), DILOCO, "", {"optimizer": "adamw"}),
        ("positions", lambda: degrees("positions", "tp=2,dp=2", 8, 1), MEAN, "", {}),
        ("positions", lambda: degrees("positions", "dp=2,pp=2", 8, 2), DILOCO, "", {}),
        ("positions", lambda: degrees("positions", "dp=2,tp=2,shares=3-1", 8, 1), DILOCO, "", {}),
        ("positions", lambda: sharded_ddp("positions", 4, 8, "parameters"), RARE, "aabb", {}),
        ("made_weights", lambda: degrees("made_weights", "dp=2,pp=2", 8, 2), RARE, "", {}),
        ("relative", lambda: degrees("relative", "tp=2,dp=2", 8, 1), DILOCO, "", {}),
        ("weight_views", lambda: ddp("weight_views", 2, 8), RARE, "", {}),
        ("scalars", lambda: degrees("scalars", "tp=2,dp=2", 8, 1), DILOCO, "", {}),
        # State is sharded within a replica; with the seed 4 in small units.
        ("lenet", lambda: sharded_ddp("lenet", 4, 8, "optimizer"), RARE, "aabb", {"seed": 1}),
        ("gpt2", lambda: sharded_ddp("gpt2", 4, 4, "gradients"), MEAN, "aabb", {"seed": 4}),
        (
            "gpt2", lambda: sharded_ddp("gpt2", 4, 4, "parameters_in_node"), DILOCO, "abab",
            {"seed": 4, "optimizer": "adamw"},
        ),
    ],
)  # fmt: skip
def test_replicas_train_as_one_after_the_other(model, strategy, outer, hosts, changes, ranks):
    assert_trained_one_by_one(
        averaged(model, strategy(), outer, hosts, n_steps=5, **changes), ranks
    )


@pytest.mark.parametrize("hosts", ["", "aabb"])
def test_replicas_train_so_under_the_rules_of_nccl(hosts, nccl_ranks):
    for strategy in (degrees("mlp", "dp=2,pp=2", 6, 2), ddp("mlp", 4, 8)):
        assert_trained_one_by_one(averaged("mlp", strategy, DILOCO, hosts, seed=1), nccl_ranks)


@pytest.mark.parametrize(
    ("model", "strategy", "optimizer"),
    [
        ("mlp", lambda: ddp("mlp", 3, 7), "adamw"),
        ("branchy", lambda: ddp("branchy", 2, 8), "sgd"),
        ("disordered", lambda: degrees("disordered", "dp=2,pp=2", 8, 2), "sgd"),
        ("mlp", lambda: sharded_ddp("mlp", 4, 8, "optimizer"), "adamw"),
        ("lenet", lambda: sharded_ddp("lenet", 4, 8, "parameters"), "sgd"),
    ],
)
def test_a_state_goes_on_bit_by_bit(model, strategy, optimizer, ranks, tmp_path):
    hosts = "aabb" if strategy().shard_state != "none" else ""
    training = averaged(model, strategy(), hosts=hosts, n_steps=7, optimizer=optimizer)
    whole = ranks.run(training.case.n_ranks, train_replicas, training)
    saved = replace(training, directory=str(tmp_path), n_before=4)
    first = ranks.run(training.case.n_ranks, train_and_write, saved)
    rest = ranks.run(training.case.n_ranks, read_and_train, saved)
    for one, before, after in zip(whole, first, rest, strict=True):
        assert one.losses == before.losses + after.losses
        for name in one.own:
            assert torch.equal(one.own[name], after.own[name]), name
            assert torch.equal(one.agreed[name], after.agreed[name]), name
    read = load_sharded(tmp_path)
    assert read["step"] == 4
    for name, tensor in first[0].agreed.items():
        assert torch.equal(read["model"][name], tensor)


def test_another_number_of_replicas_begins_with_what_they_agreed_on(ranks, tmp_path):
    training = averaged("mlp", ddp("mlp", 3, 6))
    saved = replace(training, directory=str(tmp_path), n_before=3)
    first = ranks.run(3, train_and_write, saved)
    fewer = averaged("mlp", ddp("mlp", 2, 6))
    found = ranks.run(2, read_and_train, replace(fewer, directory=str(tmp_path), n_before=3))
    for one in found:
        assert all(torch.equal(one.own[name], first[0].agreed[name]) for name in one.own)
    assert found[0].warnings == [
        "the state has own parameters of 3 replicas, and 2 are averaged: each begins with the "
        "parameters that they agreed on and the optimizer's state of the first"
    ]


def test_one_replica_that_is_left_writes_the_average(ranks, tmp_path):
    training = averaged("disordered", degrees("disordered", "dp=2,pp=2", 8, 2), optimizer="adamw")
    saved = replace(training, directory=str(tmp_path), n_before=3)
    first = ranks.run(4, train_and_survive, saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "shard2.safetensors", "shard3.safetensors",
    ]  # fmt: skip
    left = averaged("disordered", ddp("disordered", 2, 8), optimizer="adamw")
    found = ranks.run(2, read_and_train, replace(left, directory=str(tmp_path), n_before=3))
    assert found[0].warnings[0].startswith("the state has own parameters of 0 replicas, and 2 are")
    for one in found:
        assert all(torch.equal(one.own[name], first[0].agreed[name]) for name in one.own)


@pytest.mark.parametrize(
    ("strategy", "hosts", "message"),
    [
        (lambda: degrees("mlp", "dp=1,pp=2", 6, 1), "", "has one, because its 2 ranks exchange"),
        (lambda: degrees("mlp", "dp=2,pp=2", 6, 1), "abab", "has one, because its 4 ranks"),
        (
            lambda: sharded_ddp("mlp", 3, 6, "gradients"), "aab",
            r"ranks \(0, 1\) share .* as do \(2,\): give each replica as many ranks",
        ),
    ],
)  # fmt: skip
def test_what_is_no_set_of_whole_replicas_is_refused(strategy, hosts, message, ranks):
    training = averaged("mlp", strategy(), hosts=hosts)
    with pytest.raises(RanksFailedError, match=message):
        ranks.run(training.case.n_ranks, train_replicas, training)


def test_replicas_that_are_cut_unlike_are_refused(ranks):
    # A rank that trains alone, and two that cut the model between them.
    world = SimpleNamespace(hostnames=["a", "b", "b"], size=3, rank=0)
    strategy = ddp("mlp", 3, 6)
    assert Replicas.of_exchanges(strategy, world, []).all == [(0,), (1, 2)]
    with pytest.raises(StrategyError, match="has one"):
        Replicas.of_exchanges(strategy, world, [(0, 1)])

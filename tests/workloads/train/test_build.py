"""The strategies that training names: built for these devices, or read and refused."""

from dataclasses import replace

import msgspec
import planned_results
import pytest

from harness.domain.fingerprint import fingerprint
from harness.errors import StrategyError
from harness.plan import builders
from harness.plan.estimates import roofline_profile
from harness.plan.simulate.simulator import Simulator
from harness.plan.simulate.unflushed import simulate_unflushed
from harness.workloads.planning.inputs import capture_graph
from harness.workloads.train.config import TrainCase
from harness.workloads.train.files import check_files, load_for
from harness.workloads.train.plan import (
    build_strategy,
    check_inputs,
    load_strategy,
    search_config_of,
)

CASE = TrainCase(model="lenet", strategy="pipeline", engine="executor", batch=24, n_ranks=3)


@pytest.fixture(scope="session")
def simulator():
    graph = capture_graph(search_config_of(CASE))
    rates = {planned_results.KIND: planned_results.RATES}
    profile = roofline_profile(graph, rates, n_parts=[2, 3], n_microbatches=(1, 2, 4))
    return Simulator(graph, profile, planned_results.measured_cluster(3))


def built(simulator, **changes):
    return build_strategy(replace(CASE, **changes), simulator, [8, 8, 8])


def test_names_mean_what_planning_means_by_them(simulator):
    graph, cluster = simulator.graph, simulator.cluster
    made_for = fingerprint(graph, cluster, simulator.profile)
    expected = {
        "single": builders.single(graph, 24),
        "ddp": builders.ddp(graph, cluster, 24),
        "tensor": builders.tensor_parallel(graph, cluster, 24),
        "hybrid": builders.hybrid(graph, cluster, 24),
    }
    for name, strategy in expected.items():
        found = built(simulator, strategy=name)
        assert found == msgspec.structs.replace(strategy, made_for=made_for)


def test_state_that_no_two_ranks_hold_is_not_sharded_by_ranks_that_are_left(simulator):
    with pytest.raises(StrategyError, match="has each on one device: drop it, or use ddp"):
        built(simulator, shard_state="optimizer")
    with pytest.raises(StrategyError, match=r"on one device of a host: .* --shard-state optimizer"):
        built(simulator, strategy="ddp", shard_state="optimizer_in_node")
    assert built(simulator, shard_state="optimizer", continues="RUN").stages


def test_unlike_replicas_of_ranks_that_are_left_shard_no_state(simulator):
    (first, second, third), cluster = simulator.cluster.nodes, simulator.cluster
    pair = msgspec.structs.replace(first, devices=[*first.devices, *second.devices])
    unlike = Simulator(
        simulator.graph, simulator.profile, msgspec.structs.replace(cluster, nodes=[pair, third])
    )
    changes = {"strategy": "ddp", "shard_state": "gradients", "sync_every": 2, "continues": "RUN"}
    assert built(unlike, **changes).shard_state == "none"
    assert built(unlike, **changes | {"sync_every": 1}).shard_state == "gradients"
    assert built(simulator, **changes).shard_state == "gradients"


def test_ddp_shares_samples_by_speed(simulator):
    devices = list(simulator.cluster.devices)
    devices[1] = msgspec.structs.replace(devices[1], speed=devices[1].speed / 3)
    cluster = simulator.cluster.with_devices(devices)
    unlike = Simulator(simulator.graph, simulator.profile, cluster)
    for given, wanted in ((unlike, [10, 4, 10]), (simulator, 3)):
        found = built(given, strategy="ddp", balance="speed")
        assert found.operators["features.0"].partition == {"sample": wanted}


def test_averaged_replicas_are_in_a_row_and_compute_all_by_themselves(simulator):
    found = built(simulator, strategy="dp=3", sync_every=8)
    assert {tuple(plan.devices) for plan in found.operators.values()} == {(0, 1, 2)}


def test_a_pipeline_has_a_stage_for_each_rank_in_the_order_of_the_model(simulator):
    found = built(simulator, microbatches=4)
    assert found.stage_devices() == [(0,), (1,), (2,)]
    assert (found.n_microbatches, found.schedule) == (4, "1f1b")
    stages = [found.operators[op.name].stage for op in simulator.graph.operators[1:]]
    assert stages == sorted(stages)


def test_degrees_are_tensor_data_and_pipeline_parallel(simulator):
    found = built(simulator, strategy="pp=3", microbatches=4)
    pipeline = built(simulator, microbatches=4)
    assert found == msgspec.structs.replace(pipeline, name=found.name)
    assert built(simulator, strategy="tp=2").n_microbatches == 1
    assert built(simulator, strategy="dp=3").operators["features.0"].partition == {"sample": 3}
    with pytest.raises(StrategyError, match="needs 4 devices, the cluster has 3"):
        built(simulator, strategy="dp=2,pp=2")


def test_microbatches_are_those_that_are_predicted_to_be_fastest(simulator):
    found = built(simulator)
    seconds = {n: simulator.step_s(built(simulator, microbatches=n)) for n in (3, 6, 12)}
    assert found.n_microbatches == min(seconds, key=seconds.__getitem__)


def test_microbatches_of_asynchronous_training_are_those_of_its_own_step(simulator):
    found = built(simulator, asynchronous=True)
    tried = {n: built(simulator, asynchronous=True, microbatches=n) for n in (3, 6, 12)}
    seconds = {n: simulate_unflushed(simulator, one).step_s for n, one in tried.items()}
    assert found.n_microbatches == min(seconds, key=seconds.__getitem__)
    assert seconds != {n: simulator.step_s(one) for n, one in tried.items()}


def test_fewer_stages_than_ranks_have_replicas(simulator):
    found = built(simulator, stages=2, microbatches=4)
    assert sorted(len(devices) for devices in found.stage_devices()) == [1, 2]


def test_an_interleaved_pipeline_gives_each_rank_two_stages(simulator):
    found = built(simulator, schedule="interleaved", microbatches=3)
    assert found.stage_devices() == [(0,), (1,), (2,)] * 2


@pytest.fixture
def load(simulator, tmp_path):
    def read(strategy, **changes):
        path = tmp_path / "plan.json"
        path.write_bytes(strategy.to_json())
        case = replace(CASE, strategy=str(path), **changes)
        return load_strategy(case, simulator.graph, simulator.cluster)

    return read


def test_a_file_is_read_as_it_is(simulator, load):
    strategy = built(simulator, strategy="hybrid")
    assert load(strategy) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"module_to_stage_map": [0, 1], "stage_to_rank_map": {"0": [0], "1": [1]}}',
         r"plan\.json is a pipedream plan: convert it by `python -m harness\.plan convert"),
        ("name: ddp\n", r"plan\.json is no strategy, its first line is 'name: ddp': give JSON"),
        ('{"forward_stage_layer_ids": []}', "and a strategy has name, batch and operators"),
    ],
)  # fmt: skip
def test_a_file_of_another_project_is_refused_with_the_remedy(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(StrategyError, match=message):
        load_for(replace(CASE, strategy=str(path)))


def test_a_file_for_another_batch_is_refused(simulator, load):
    with pytest.raises(StrategyError, match=r"is for a batch of 24, the run has 12: give --batch-"):
        load(built(simulator, strategy="ddp"), batch=12)


def test_a_change_to_another_batch_is_refused_before_the_launch(simulator, tmp_path):
    path = tmp_path / "next.json"
    path.write_bytes(built(simulator, strategy="ddp").to_json())
    check_files(replace(CASE, change=(f"3:{path}",)))
    with pytest.raises(StrategyError, match=r"next\.json is for a batch of 24, the run has 12"):
        check_files(replace(CASE, change=(f"3:{path}",), batch=12))


@pytest.mark.parametrize("n", [-2, 0, 25])
def test_a_file_with_too_many_or_no_microbatches_is_refused_for_any_model(simulator, tmp_path, n):
    path = tmp_path / "plan.json"
    strategy = msgspec.structs.replace(built(simulator, strategy="ddp"), n_microbatches=n)
    path.write_bytes(strategy.to_json())
    for case in (replace(CASE, strategy=str(path)), replace(CASE, change=(f"3:{path}",))):
        with pytest.raises(StrategyError, match=rf"plan\.json: .* of 24 into {n} microbatches"):
            check_files(replace(case, model="nets:small"))


def test_a_plan_that_does_not_fit_the_model_is_refused_before_it_is_profiled(simulator, tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(built(simulator, strategy="ddp").to_json())
    case = replace(CASE, strategy=str(path))
    check_inputs(case, tmp_path)
    with pytest.raises(StrategyError, match="it is for another model"):
        check_inputs(replace(case, model="resnet18"), tmp_path)
    with pytest.raises(StrategyError, match=r"plan\.json: .*it is for another model"):
        check_inputs(replace(CASE, model="resnet18", change=(f"3:{path}",)), tmp_path)
    with pytest.raises(StrategyError, match="15 stages cannot be made of the 13 operators of len"):
        check_inputs(replace(CASE, n_ranks=20, stages=15), tmp_path)


def test_a_stale_file_is_refused_with_what_changed(simulator, load):
    strategy = built(simulator, strategy="ddp")
    other = msgspec.structs.replace(
        strategy.made_for, cluster_hash="other", devices={"elsewhere:0": "a GPU"}
    )
    stale = msgspec.structs.replace(strategy, made_for=other)
    with pytest.raises(StrategyError, match=r"'ddp' is stale: device 'elsewhere:0' is gone"):
        load(stale)
    assert load(stale, continues="run") == stale  # of fewer ranks on the same hosts


def test_a_file_planned_with_older_measurements_is_trained_with_a_warning(simulator, load, caplog):
    strategy = built(simulator, strategy="ddp")
    older = msgspec.structs.replace(strategy.made_for, cluster_hash="other")
    load(msgspec.structs.replace(strategy, made_for=older))
    assert "was planned with other measurements of the links" in caplog.text
    caplog.clear()
    load(strategy)
    assert not caplog.text


def test_a_file_for_more_ranks_is_refused(simulator, load):
    strategy = built(simulator, strategy="single")
    plans = {
        name: msgspec.structs.replace(plan, devices=[3])
        for name, plan in strategy.operators.items()
    }
    with pytest.raises(StrategyError, match=r"is for 4 devices, the run has 3 ranks: start mo"):
        load(msgspec.structs.replace(strategy, operators=plans))

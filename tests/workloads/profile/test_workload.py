"""The profile workload: what is measured, the file, and real runs on local ranks."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import msgspec
import profile_on_ranks
import pytest
import torch
from local_ranks import run_on_ranks
from made_graphs import profile_by_keys
from made_runs import local_header
from torch import nn

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Measurement, Profile
from harness.domain.sharding import has_tasks
from harness.errors import ConfigError, ModelError
from harness.measure.derive.spans import samples_of
from harness.measure.store import Run
from harness.plan.__main__ import main as plan
from harness.plan.builders import ddp, single, tensor_parallel
from harness.plan.fit import OperatorTimes
from harness.plan.simulate.costs import Costs
from harness.plan.simulate.options import SimulatorOptions
from harness.runtime.capture.capture import capture, capture_model
from harness.runtime.profiling.subgraph import is_microbatch
from harness.workloads.planning.config import points_of
from harness.workloads.profile import workload as profile
from harness.workloads.profile.store import read_profile, with_whole_steps
from harness.workloads.profile.workload import ProfileConfig, profile_cases, profile_text

QUICK = ProfileConfig(
    model="lenet", batch_size=8, shards=(1, 2), time_budget_s=0.001, min_samples=1, warm_up=1
)

captured_model = cache(capture_model)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "lenett"}, ModelError, "no model 'lenett'"),
        ({"batch_size": 0}, ConfigError, "--batch-size 0 must be at least 1"),
        ({"warm_up": 0}, ConfigError, "--warm-up 0 must be at least 1"),
        ({"time_budget_s": 0.0}, ConfigError, "--time-budget-s 0"),
        ({"dropout": 1.0}, ConfigError, "--dropout 1.0 is a probability"),
        ({"dlrm_table_rows": (0,)}, ConfigError, "--dlrm-table-rows 0 must be at least 1 each"),
        ({"shards": (1, 9)}, ConfigError, "--shards 9 must be between 1 and --batch-size 8"),
        ({"image_size": 5}, ModelError, "cannot take images of 5 x 5"),
    ],
)
def test_impossible_flags_are_refused_with_their_values(change, error, message):
    with pytest.raises(error, match=message):
        profile_cases(replace(QUICK, **change), 2)


def test_a_model_is_captured_where_it_is_measured(monkeypatch):
    # Exporting writes the device into operators that make tensors; meta plays the GPU.
    device = torch.device("meta")
    captured_on = []

    def capturing(task, batch, name):
        captured_on.extend(parameter.device for parameter in task.model.parameters())
        return capture(task, batch, name)

    monkeypatch.setattr(profile, "capture", capturing)
    task, captured = profile._prepare(
        QUICK, SimpleNamespace(world=SimpleNamespace(device=device, size=1))
    )
    assert set(captured_on) == {device}
    for model in (task.model, captured.module):
        assert {parameter.device for parameter in model.parameters()} == {device}


@pytest.mark.parametrize("fits", [True, False])
def test_a_model_too_large_for_the_device_is_captured_and_compared_on_the_host(
    fits, monkeypatch, tmp_path
):
    """`fits`: its weights, but not its gradients."""
    move, held = nn.Module.to, []

    def to(module, device, **_):
        if torch.device(device).type == "meta" and not fits:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return module.to_empty(device=device) if fits else move(module, device)

    def hold(captured, task, *_):
        held.append({p.device.type for m in (task.model, captured.module) for p in m.parameters()})
        if held[-1] != {"cpu"}:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr(profile, "hold_once", hold)
    world = SimpleNamespace(device=torch.device("meta"), size=1)
    task, captured = profile._prepare(QUICK, SimpleNamespace(world=world))
    profile._hold(captured, task, QUICK, tmp_path)
    assert held == ([{"meta"}] if fits else []) + [{"cpu"}]
    assert profile._is_on_host(task)


def test_a_part_of_a_batch_that_each_device_holds_less_of_is_a_microbatch():
    graph = captured_model("lenet", 8)
    assert [is_microbatch(graph, n, 2) for n in (8, 4, 3, 1)] == [False, False, True, True]


def test_equal_operators_are_measured_once():
    graph = captured_model("resnet18", 4)
    points = points_of(graph, [1], [1])
    assert len({point.identity for point in points}) == len(points)
    n_placed = sum(op.kind != "input" for op in graph.operators)
    assert len(points) < n_placed / 2
    assert {point.key for point in points} == {
        op.profile_key for op in graph.operators if op.kind != "input"
    }


def test_attention_is_measured_whole_and_by_heads():
    points = [
        p for p in points_of(captured_model("vit_b_16", 8), [1, 2], [2]) if "n_heads" in p.key
    ]
    assert [(p.shape["sample"], p.dim, p.size) for p in points] == [
        (8, "", 0),
        (8, "heads", 6),
        (4, "", 0),
    ]
    assert "heads" not in points[0].shape
    assert points[1].shape["heads"] == 6


def as_profile(graph, points, kind="device"):
    measured = [
        Measurement(
            device_kind=kind, operator=p.key, shape=p.shape, forward_s=1e-3, backward_s=2e-3
        )
        for p in points
    ]
    return Profile(model=graph.name, measurements=measured)


@pytest.mark.parametrize("model", ["lenet", "vit_b_16"])
@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_the_standard_strategies_find_every_time_measured(model, n_microbatches, monkeypatch):
    graph = captured_model(model, 8)
    profile = as_profile(graph, points_of(graph, [1, 2, 4], [1, 2]))
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=1 << 40)
    looked_up = []
    lookup = OperatorTimes.lookup

    def noted(self, operator, *args, **kwargs):
        found = lookup(self, operator, *args, **kwargs)
        is_measured = self.is_measured(operator, *args, kwargs["shape"])
        looked_up.append((operator.name, kwargs, not is_measured))
        return found

    monkeypatch.setattr(OperatorTimes, "lookup", noted)
    costs = Costs(graph, profile, cluster, 8 // n_microbatches, SimulatorOptions())
    position = graph.index()
    strategies = [single(graph, 8), ddp(graph, cluster, 8)]
    # Weights are cut at the whole batch; at smaller ones and without weights times are fitted.
    strategies += [tensor_parallel(graph, cluster, 8)] if n_microbatches == 1 else []
    for strategy in strategies:
        for name, part in strategy.operators.items():
            costs.operator(position[name], part)
    cut = ("linear", "conv2d", "embedding", "attention", "loss", "flatten")
    kinds = {op.name: op.kind for op in graph.operators}
    assert len(looked_up) > 20
    fitted = [(name, told) for name, told, is_fitted in looked_up if is_fitted]
    assert not [name for name, _ in fitted if kinds[name] in cut]
    assert n_microbatches == 1 or not fitted


def test_half_the_heads_take_their_measured_time_not_half():
    graph = captured_model("vit_b_16", 8)
    points = points_of(graph, [1], [2])
    profile = as_profile(graph, points)
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=1 << 40)
    costs = Costs(graph, profile, cluster, 8, SimulatorOptions())
    op, name = next((i, op.name) for i, op in enumerate(graph.operators) if op.kind == "attention")
    part = tensor_parallel(graph, cluster, 8).operators[name]
    assert part.partition == {"heads": 2}
    assert costs.operator(op, part).forward_s.tolist() == [1e-3, 1e-3]


def test_a_profile_of_another_model_or_dtype_is_refused(tmp_path):
    path = tmp_path / "p.json"
    graph = captured_model("lenet", 4)
    path.write_bytes(as_profile(graph, points_of(graph, [1], [1])).to_json())
    assert read_profile(path, "lenet", "float32").measurements
    with pytest.raises(ConfigError, match="profiles 'lenet', not 'vgg16'"):
        read_profile(path, "vgg16", "float32")
    with pytest.raises(ConfigError, match="measured in float32, not bfloat16"):
        read_profile(path, "lenet", "bfloat16")


def values(run, metric):
    return [record for records in run.ranks.values() for record in samples_of(records, metric)]


def test_kinds_are_measured_by_themselves_and_planned_on(tmp_path, capsys):
    path = tmp_path / "lenet.json"
    config = replace(QUICK, profile_file=path)
    kinds = ["fast", "fast", "slow"]
    results, run = run_on_ranks(profile_on_ranks.profile_kinds, (config, kinds), 3)
    profile = Profile.load(path)
    graph = Graph.load(tmp_path / "lenet.graph.json")
    points = points_of(graph, [1, 2], [1, 2])
    by_kind = {k: [p for p in profile.measurements if p.device_kind == k] for k in set(kinds)}
    assert {k: len(found) for k, found in by_kind.items()} == dict.fromkeys(kinds, len(points))
    assert results[0]["n_measured"] == 2 * len(points)
    # Two ranks of one kind share its work.
    n_each = [len(samples_of(run.ranks[rank], "operator_saved_bytes")) for rank in range(3)]
    assert abs(n_each[0] - n_each[1]) <= 2
    assert n_each[2] == len(points)
    found = values(run, "profile_calibration")
    assert {(r.labels["device_kind"], r.labels["batch"]): r.value for r in found} == {
        (step.device_kind, step.batch): step.calibration for step in profile.whole_steps
    }
    steps = {(step.device_kind, step.batch) for step in profile.whole_steps}
    assert steps == {(kind, samples) for kind in kinds for samples in (8, 1)}
    run = replace(run, header=msgspec.structs.replace(run.header, summary=results[0]))
    text = profile_text([run])
    assert f"{len(graph.operators) - 1} of {len(graph.operators) - 1}" in text
    assert "whole step" in text
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=1 << 30, kind="slow")
    (tmp_path / "c.json").write_bytes(cluster.to_json())
    flags = ["search", "--profile", str(path), "--cluster", str(tmp_path / "c.json")]
    assert plan([*flags, "--search-budget", "50"]) == 0
    assert "best plan by simulator" in capsys.readouterr().out


def test_a_second_run_measures_only_what_is_missing(tmp_path):
    config = replace(QUICK, profile_file=tmp_path / "lenet.json")
    results, _ = run_on_ranks(profile_on_ranks.profile_twice, config, 1)
    first, second, third = results[0]
    graph = Graph.load(tmp_path / "lenet.graph.json")
    n = [len(points_of(graph, counts, counts)) for counts in ([1, 2], [1, 2, 4])]
    assert (first["n_known"], first["n_measured"]) == (0, n[0])
    assert (second["n_known"], second["n_measured"]) == (n[0], n[1] - n[0])
    assert (third["n_known"], third["n_measured"]) == (n[1], 0)
    # Each later run times the step again, whether shapes were missing or not.
    for samples in (8, 1):
        assert len({run["step_s"][samples] for run in (first, second, third)}) == 3


def test_a_slow_kind_of_device_may_take_longer_than_a_collective(tmp_path):
    config = replace(QUICK, profile_file=tmp_path / "lenet.json", rounds=1)
    results, _ = run_on_ranks(profile_on_ranks.profile_beside_a_slow_rank, config, 2)
    assert results[0]["n_measured"] > 0


def test_a_run_that_was_killed_half_way_is_completed(tmp_path):
    config = replace(QUICK, profile_file=tmp_path / "lenet.json", rounds=2, min_samples=4)
    results, _ = run_on_ranks(profile_on_ranks.profile_killed_and_again, config, 1)
    left, summary, whole = results[0]
    left, whole = (Profile.from_json(text.encode()) for text in (left, whole))
    n_samples = {point.key: point.n_samples for point in left.measurements}
    assert set(n_samples.values()) == {2, 4}
    missing = [key for key, n in n_samples.items() if n == 2]
    assert (summary["n_measured"], summary["n_known"]) == (
        len(missing), len(n_samples) - len(missing),
    )  # fmt: skip
    assert {point.n_samples for point in whole.measurements} == {4}
    # What was whole stays as it was.
    kept = {point.key: point for point in whole.measurements}
    assert all(kept[p.key] == p for p in left.measurements if p.n_samples == 4)


@pytest.fixture
def profiled(tmp_path):
    """A run of the profile workload whose results were moved after it."""
    graph = captured_model("lenet", 8)
    summary = {
        "profile": "/gone/profile-lenet.json", "graph": "/gone/profile-lenet.graph.json",
        "n_measured": 1, "n_known": 0,
    }  # fmt: skip
    header = local_header(["a"], workload="profile", config={"model": "lenet"}, summary=summary)
    profile = as_profile(graph, points_of(graph, [1], [1]))
    (tmp_path / "profile-lenet.json").write_bytes(profile.to_json())
    (tmp_path / "profile-lenet.graph.json").write_bytes(graph.to_json())
    return Run(path=tmp_path / "run", header=header, ranks={})


def test_files_are_found_beside_results_that_moved(profiled):
    text = profile_text([profiled])
    assert "heaviest operators" in text
    assert f"--profile {profiled.path.parent / 'profile-lenet.json'} " in text


def test_kinds_of_device_that_have_not_measured_the_graph_have_no_row(profiled):
    path, graph = profiled.path.parent / "profile-lenet.json", captured_model("lenet", 6)
    other = as_profile(graph, points_of(graph, [1], [1]), kind="other kind").measurements
    profile = Profile.load(path)
    points = [*profile.measurements, *other]
    path.write_bytes(msgspec.structs.replace(profile, measurements=points).to_json())
    text = profile_text([profiled])
    assert "other kind" not in text
    assert "13 of 13" in text


def test_a_later_step_replaces_the_one_before():
    graph = captured_model("lenet", 8)
    own = graph.content_hash()
    profile = profile_by_keys(graph, (1.0, 2.0), "a")
    first = with_whole_steps(profile, graph, "float32", {("a", 8): [2.0, 9.0, 3.0], ("b", 8): [1]})
    (step,) = first.whole_steps  # no operator was measured on the other kind of device
    n_operators = sum(map(has_tasks, graph.operators))
    assert (step.step_s, step.operators_s) == (3.0, 3.0 * n_operators)
    later = with_whole_steps(first, graph, "float32", {("a", 8): [6.0], ("a", 1): []})
    assert [step.step_s for step in later.whole_steps] == [6.0]
    assert later.calibration_of(own, "a", 8).factor == 2 * first.calibration_of(own, "a", 8).factor


def test_rounds_take_the_samples_of_an_operator_apart_in_fp16_too(tmp_path):
    config = replace(
        QUICK, dtype="fp16", profile_file=tmp_path / "lenet.json", shards=(1, 2), rounds=2,
        min_samples=2,
    )  # fmt: skip
    _, run = run_on_ranks(profile_on_ranks.profile_kinds, (config, ["cpu"]), 1)
    samples = values(run, "operator_forward_s")
    points = [(sample.labels["operator"], sample.labels["shape"]) for sample in samples]
    n = len(points) // 2
    assert points[:n] == points[n:]  # everything once, then everything again
    assert [sample.step for sample in samples] == [0] * n + [1] * n
    measured = Profile.load(tmp_path / "lenet.json").measurements
    assert [one.dtype for one in measured] == ["float16"] * n


def test_values_that_a_mask_makes_infinite_are_measured(tmp_path):
    config = replace(
        QUICK, model="profile_on_ranks:masked", image_size=8, n_channels=1, shards=(1,),
        profile_file=tmp_path / "masked.json",
    )  # fmt: skip
    _, run = run_on_ranks(profile_on_ranks.run_profile, config, 1)
    found = read_profile(tmp_path / "masked.json", config.model, "float32").measurements
    assert any("masked_fill" in point.operator for point in found)
    assert not values(run, "operator_skipped")


def test_an_operator_out_of_memory_is_a_row(tmp_path):
    config = replace(QUICK, profile_file=tmp_path / "lenet.json", shards=(1,))
    argument = (config, "features.3")
    results, run = run_on_ranks(profile_on_ranks.profile_without_memory, argument, 1)
    (skipped,) = values(run, "operator_skipped")
    assert skipped.labels["operator"] == "features.3"
    assert "Tried to allocate 9 GiB" in skipped.labels["reason"]
    # All others are measured, in parts of the model without it.
    found = read_profile(tmp_path / "lenet.json", config.model, "float32").measurements
    points = points_of(Graph.load(tmp_path / "lenet.graph.json"), [1], [1])
    assert len(found) == len(points) - 1
    assert not values(run, "profile_calibration")  # the sum would lack an operator
    run = replace(run, header=msgspec.structs.replace(run.header, summary=results[0]))
    assert "features.3" in profile_text([run])


def test_a_linear_operator_is_measured_by_feature_and_by_contraction():
    points = [p for p in points_of(captured_model("lenet", 2), [1], [2]) if "linear" in p.key]
    assert [(p.shape, p.dim, p.size) for p in points[:3]] == [
        ({"sample": 2, "feature": 120}, "", 0),
        ({"sample": 2, "feature": 60}, "feature", 60),
        ({"sample": 2, "feature": 120, "contraction": 200}, "contraction", 200),
    ]

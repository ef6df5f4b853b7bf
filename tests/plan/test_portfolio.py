import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from made_graphs import GB, changed, layers, profile_of, request_of, unlike_cluster

from harness.domain.cluster import Cluster
from harness.domain.graph import Operator
from harness.domain.sharding import weight_cuts
from harness.domain.strategy import Stage, check_fresh, validate
from harness.errors import PlanError, StrategyError
from harness.plan import builders
from harness.plan.costs import PlanRequest
from harness.plan.portfolio import plan as plan_with_simulator
from harness.plan.portfolio import search_portfolio
from harness.plan.published.pipedream.planner import plan as plan_by_pipedream
from harness.plan.report import describe_strategy, result_lines
from harness.plan.search.objective import Objective
from harness.plan.search.pipelines import Form, Pipeline, PipelineSearch, schedules_for
from harness.plan.search.space import (
    Space,
    balanced_pipeline,
    leaner,
    microbatch_counts,
    standard_strategies,
)
from harness.plan.simulate.simulator import Simulator

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from planner_cases import enumerated_step_s, random_request


def test_builders_make_what_their_names_say():
    graph, _ = layers()
    cluster = Cluster.uniform(2, 2, inside_bytes_per_s=1e6, memory_bytes=GB)
    named = {
        describe_strategy(s, graph)
        for s in (
            builders.single(graph, 8),
            builders.ddp(graph, cluster, 8),
            builders.tensor_parallel(graph, cluster, 8),
        )
    }
    assert named == {"single device", "data-parallel MLPs", "feature-parallel MLPs"}
    with pytest.raises(StrategyError, match="a sample per device: batch 3 on 4 devices"):
        builders.ddp(graph, cluster, 3)


def test_data_parallel_on_the_node_that_computes_most_is_tried():
    graph, profile = layers(batch=12)
    cluster = Cluster.uniform(
        3, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e3, memory_bytes=GB
    )
    devices = cluster.devices
    speeds = (1, 1, 1, 2, 1, 0.5)
    cluster = cluster.with_devices(
        msgspec.structs.replace(device, speed=speed)
        for device, speed in zip(devices, speeds, strict=True)
    )
    found = list(standard_strategies(Simulator(graph, profile, cluster), 12))
    (own,) = (one for one in found if one.name.endswith(" on node1"))
    validate(own, graph, cluster)
    plan = own.operators["fc0"]
    assert (own.name, plan.devices) == ("ddp by speed on node1", [2, 3])
    assert plan.partition == {"sample": [4, 8]}
    for n_nodes, n_each in ((1, 4), (4, 1)):
        alone = Cluster.uniform(n_nodes, n_each, inside_bytes_per_s=1e9, memory_bytes=GB)
        names = [one.name for one in standard_strategies(Simulator(graph, profile, alone), 12)]
        assert not any(" on node" in name for name in names)


@pytest.mark.parametrize("n_devices", [1, 2, 4, 6])
def test_every_standard_strategy_is_valid(n_devices):
    graph, profile = layers(7, batch=32)
    cluster = Cluster.uniform(1, n_devices, inside_bytes_per_s=1e6, memory_bytes=GB)
    simulator = Simulator(graph, profile, cluster)
    found = list(standard_strategies(simulator, 32))
    for strategy in found:
        validate(strategy, graph, cluster)
    assert len(found) == {1: 1, 2: 10, 4: 7, 6: 7}[n_devices]


def test_what_does_not_fit_is_tried_with_sharded_state_and_with_recomputation():
    graph, profile = layers(16, batch=32)
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e6, memory_bytes=GB)
    simulator = Simulator(graph, profile, cluster)
    ddp, pipeline = builders.ddp(graph, cluster, 32), balanced_pipeline(simulator, 32, 2)
    forms = {form.name: form for one in (ddp, pipeline) for form in leaner(one, simulator)}
    assert {name: form.stages[0] for name, form in forms.items()} == {
        "ddp, sharded optimizer": Stage(),
        "ddp, sharded gradients": Stage(),
        "ddp, sharded parameters": Stage(),
        "ddp, recomputed": Stage(recompute=True, segments=64),
        "ddp, recomputed, sharded parameters": Stage(recompute=True, segments=64),
        "pipeline, recomputed": Stage(recompute=True),
        "pipeline, recomputed in segments": Stage(recompute=True, segments=64),
    }
    for form in forms.values():
        validate(form, graph, cluster)
    graph = changed(layers(1, batch=32)[0], ["fc0"], attrs={"writes_buffers": ["mean"]})
    simulator = Simulator(graph, profile, cluster)
    assert not list(leaner(builders.single(graph, 32), simulator))


# Enumerating three operators on three devices takes seconds.
@pytest.mark.parametrize(("seed", "n_ops", "n_devices"), [(0, 4, 2), (1, 4, 2), (0, 2, 3)])
def test_searches_find_what_enumeration_finds(seed, n_ops, n_devices):
    request = random_request(seed, n_ops=n_ops, n_devices=n_devices)
    want, _ = enumerated_step_s(request)
    request = replace(request, budget=2000)
    try:
        found = search_portfolio(request).best.step_s
    except PlanError:
        found = math.inf
    # Microbatches and pipelines may be better than all that was enumerated.
    assert found <= want


def every_pipeline(search, n_devices):
    """All cuts into stages and all ordered choices of disjoint groups."""
    n = len(search.segments)
    subsets = [
        s for k in range(1, n_devices + 1) for s in itertools.combinations(range(n_devices), k)
    ]
    for n_stages in range(2, n_devices + 1):
        for cuts in itertools.combinations(range(1, n), n_stages - 1):
            for groups in itertools.permutations(subsets, n_stages):
                if len({d for g in groups for d in g}) == sum(map(len, groups)):
                    yield Pipeline(0.0, (*cuts, n), groups)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_microbatches", [1, 4])
def test_pipeline_programme_finds_the_fastest_pipeline(seed, n_microbatches):
    request = random_request(seed, n_ops=5, n_devices=3)
    simulator = Simulator(request.graph, request.profile, request.cluster, memory_bytes=GB)
    search = PipelineSearch(simulator, 8, n_microbatches)

    def best(pipelines):
        objective = Objective(simulator)
        return min(
            search.judge(p, objective, Form(schedule))
            for p in pipelines
            for schedule in schedules_for(n_microbatches)
            if all(len(g) <= search.fewest for g in p.groups)
        )

    assert best(search.candidates(120)) == best(every_pipeline(search, 3))


@pytest.mark.parametrize("at", [0, 3, 5])
@pytest.mark.parametrize("is_slow", [True, False], ids=["slow link", "fast devices"])
def test_the_place_of_an_unlike_node_in_the_cluster_does_not_matter(at, is_slow):
    graph, profile = layers(8)
    fast = profile_of(graph, (0.1, 0.2), kind="fast")
    profile = msgspec.structs.replace(
        profile, measurements=[*profile.measurements, *fast.measurements]
    )
    cluster = Cluster.uniform(6, 1, inside_bytes_per_s=1e4, memory_bytes=GB)
    nodes = list(cluster.nodes)
    if is_slow:
        nodes[at] = msgspec.structs.replace(nodes[at], nic_bytes_per_s=1.0)
    else:  # two neighbours
        for k in (at, (at + 1) % 6):
            own = [msgspec.structs.replace(d, kind="fast") for d in nodes[k].devices]
            nodes[k] = msgspec.structs.replace(nodes[k], devices=own)
    cluster = msgspec.structs.replace(cluster, nodes=nodes)
    simulator = Simulator(graph, profile, cluster)
    best = PipelineSearch(simulator, 8, 8).candidates(1)[0]
    assert best.bound_s == pytest.approx(7.5128 if is_slow else 1.3564)
    sets = Space(simulator.costs(8), cluster, simulator.placed).menus[1]
    others = [(at + 1) % 6, at] if not is_slow else [k for k in range(6) if k != at]
    assert sorted(others) in [plan.devices for plan in sets]
    named = {one.name: one for one in standard_strategies(simulator, 8)}
    assert named[f"ddp on {len(others)} devices"].operators["fc0"].devices == sorted(others)


def test_searches_cut_what_no_sample_affects_by_the_samples_of_its_readers():
    graph, profile = layers(3)
    graph = changed(graph, ["fc0"], shape={"feature": 4}, inputs=[], attrs={"reads_samples": False})
    cluster = Cluster.uniform(2, 1, inside_bytes_per_s=1e9, memory_bytes=GB)
    simulator = Simulator(graph, profile, cluster)
    op = graph.index()["fc0"]
    for samples in (8, 1):
        menu = Space(simulator.costs(samples), cluster, simulator.placed).menus[op]
        assert any(plan.partition == {"sample": 2} for plan in menu) == (samples > 1)
    search = PipelineSearch(simulator, 8, 1)
    found = search.strategy(Pipeline(0.0, (3,), ((0, 1),)))
    assert found.operators["fc0"].partition == {"sample": 2}
    validate(found, graph, cluster)


@pytest.mark.parametrize("order", list(itertools.permutations((1.0, 0.6, 0.3))))
def test_interleaved_stages_find_the_order_of_unlike_devices(order):
    graph, profile = layers(8)
    simulator = Simulator(graph, profile, unlike_cluster(order), memory_bytes=GB)
    objective = Objective(simulator)
    PipelineSearch(simulator, 8, 6).take_turns((0, 1, 2), objective)
    of_order = [
        simulator.step_s(
            balanced_pipeline(simulator, 8, 6, schedule="interleaved", devices=devices)
        )
        for devices in itertools.permutations(range(3))
    ]
    assert objective.best is not None
    assert objective.best.step_s == pytest.approx(min(of_order))


@pytest.mark.parametrize("budget", [40, 100])
def test_a_search_on_unlike_devices_keeps_its_budget(budget):
    graph, profile = layers(12, batch=32)
    cluster = unlike_cluster((1.0, 0.7, 0.5, 0.3, 0.2))
    found = search_portfolio(request_of(graph, profile, cluster, budget=budget))
    judged = found.objective.n_proposals - len(found.standards)
    assert judged <= budget + 8  # each of some chains judges its start


def test_the_bound_of_a_pipeline_counts_both_neighbours_on_the_nic_between_them():
    graph, profile = layers(3)
    cluster = Cluster.uniform(3, 1, inside_bytes_per_s=32.0, memory_bytes=GB)
    found = PipelineSearch(Simulator(graph, profile, cluster), 8, 8).candidates(120)
    # Of each microbatch the middle stage sends an output and a gradient of 32 B.
    assert min(p.bound_s for p in found if len(p.groups) == 3) == pytest.approx(8 * 2)


def test_what_crosses_a_cut_does_not_grow_with_the_features_that_an_output_sums_over():
    graph, profile = layers(2)
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=256.0, memory_bytes=GB)
    for one in (graph, changed(graph, ["fc0", "fc1"], attrs={"in_features": 8})):
        (best,) = PipelineSearch(Simulator(one, profile, cluster), 8, 1).candidates(1)
        assert best.bound_s == 2 * 3 + 2 * 1  # layers of 3 s, and 256 B each way


def test_the_result_is_never_worse_than_a_standard_strategy():
    for seed in range(8):
        request = replace(random_request(100 + seed, n_ops=6, n_devices=4), budget=60)
        simulator = Simulator(request.graph, request.profile, request.cluster)
        standard = [simulator.step_s(s) for s in standard_strategies(simulator, 8)]
        try:
            found = plan_with_simulator(request)
        except PlanError:
            assert min(standard) == math.inf
            continue
        assert found.predicted_step_s <= min(standard)
        validate(found.strategy, request.graph, request.cluster)
        assert simulator.step_s(found.strategy) == found.predicted_step_s


def test_equal_seeds_give_equal_plans():
    request = replace(random_request(3, n_ops=6, n_devices=4), budget=100)
    first, second = plan_with_simulator(request), plan_with_simulator(request)
    assert first.strategy == second.strategy
    assert first.n_proposals == second.n_proposals


def test_memory_limits_are_respected():
    graph, profile = layers(4, parameters=1000)
    # One device would hold 4 x 3000 B; each of four has room for two layers only.
    limit = 2 * 3000 + 900
    found = plan_with_simulator(request_of(graph, profile, memory_bytes=limit))
    assert max(found.memory_bytes.values()) <= limit
    assert any(r.step_s is None and "out of memory" in r.note for r in found.runners_up)


def test_memory_that_nothing_fits_is_one_error():
    graph, profile = layers(4, parameters=10**6)
    with pytest.raises(PlanError, match=r"no strategy of 'layers' fits: of \d+ tried"):
        plan_with_simulator(request_of(graph, profile, memory_bytes=1000))


def test_recomputation_is_used_when_activations_alone_do_not_fit():
    graph, profile = layers(8, batch=8, parameters=10)
    cluster = Cluster.uniform(1, 1, inside_bytes_per_s=1e6, memory_bytes=GB)
    # Eight outputs of 256 B do not fit at once in the only device.
    found = plan_with_simulator(request_of(graph, profile, cluster, memory_bytes=1000, batch=8))
    assert found.strategy.n_microbatches > 1 or found.strategy.stages == [Stage(recompute=True)]


def test_recomputation_is_tried_where_something_slower_fits():
    graph, profile = layers(8, batch=8, parameters=10)
    change = msgspec.structs.replace
    saving = [change(op, attrs={"saved_bytes": 512}) for op in graph.operators[1:]]
    graph = change(graph, operators=[graph.operators[0], *saving])
    profile = change(profile, graph_hash="")
    cluster = Cluster.uniform(1, 3, inside_bytes_per_s=100, memory_bytes=500)
    first, *others = cluster.devices
    cluster = cluster.with_devices([msgspec.structs.replace(first, memory_bytes=GB), *others])
    simulator = Simulator(graph, profile, cluster)
    assert simulator.step_s(builders.single(graph, 8)) == 24.0
    found = plan_with_simulator(request_of(graph, profile, cluster, budget=600))
    assert any(stage.recompute for stage in found.strategy.stages)
    assert found.predicted_step_s < 16


@pytest.mark.parametrize("planner", [plan_with_simulator, plan_by_pipedream])
def test_times_of_zero_are_refused(planner):
    graph, profile = layers(seconds=0.0)
    with pytest.raises(PlanError, match=r"all operators .*take 0 s on 'device'"):
        planner(request_of(graph, profile))


def test_without_a_sample_for_each_device_nothing_is_compared_with_data_parallel():
    graph, profile = layers(batch=2)
    found = plan_with_simulator(request_of(graph, profile))
    assert math.isnan(found.speedup_over_ddp)
    text = "\n".join(result_lines(found))
    assert "times as fast as one device" in text
    assert "data parallel" not in text


def test_an_interrupt_returns_the_best_found():
    graph, profile = layers(6)
    calls = []

    def interrupt(progress):
        calls.append(progress)
        raise KeyboardInterrupt

    request = request_of(graph, profile, progress=interrupt)
    request = replace(request, budget=10**6, seconds=60)
    found = plan_with_simulator(request)
    assert found.interrupted
    assert len(calls) == 1
    assert found.predicted_step_s <= calls[0].best_step_s


def test_time_limit_ends_the_search():
    graph, profile = layers(6)
    request = replace(request_of(graph, profile), budget=10**7, seconds=0.5)
    assert plan_with_simulator(request).n_proposals < 10**5


def test_without_time_one_device_is_all_that_is_judged():
    graph, profile = layers(6)
    found = plan_with_simulator(request_of(graph, profile, seconds=1e-9))
    assert (found.n_proposals, found.method) == (1, "single")
    assert math.isnan(found.speedup_over_ddp)
    with pytest.raises(
        PlanError, match=r"of 1 tried in the time given.*give more --search-seconds"
    ):
        plan_with_simulator(request_of(graph, profile, seconds=1e-9, memory_bytes=1))


def test_the_plan_carries_hashes_and_explains_itself():
    graph, profile = layers(4)
    request = request_of(graph, profile)
    found = plan_with_simulator(request)
    check_fresh(found.strategy, graph, request.cluster)
    other, _ = layers(5)
    with pytest.raises(StrategyError, match="operator 'fc4' is new"):
        check_fresh(found.strategy, other, request.cluster)
    text = "\n".join(found.explanation)
    assert "the step is bound by" in text
    assert "data parallel takes" in text
    assert {"single", "ddp"} <= {r.name for r in found.runners_up} | {found.method}


def test_an_imported_plan_is_a_start_and_one_that_does_not_fit_is_refused():
    graph, profile = layers(4)
    best = plan_with_simulator(request_of(graph, profile)).strategy
    request = replace(request_of(graph, profile), budget=1, start=best)
    again = plan_with_simulator(request)
    assert again.predicted_step_s <= Simulator(graph, profile, request.cluster).step_s(best)
    assert f"start: {best.name}" in {r.name for r in again.runners_up} | {again.method}
    stale = msgspec.structs.replace(best.made_for, graph_hash="0")
    for changes, message in (
        ({"made_for": stale}, "is stale"),
        ({"batch": 4}, "has a batch of 4, the search one of 8"),
        ({"operators": {}}, "does not place operator 'fc0'"),
    ):
        start = msgspec.structs.replace(best, **changes)
        with pytest.raises(StrategyError, match=message):
            plan_with_simulator(replace(request, start=start))


def test_a_start_called_ddp_is_not_what_data_parallel_is_compared_with():
    graph, profile = layers(4)
    request = request_of(graph, profile, budget=1)
    slow = msgspec.structs.replace(builders.single(graph, 8), name="ddp")
    found = plan_with_simulator(replace(request, start=slow))
    assert found.speedup_over_ddp == plan_with_simulator(request).speedup_over_ddp


def test_missing_model_or_batch_is_one_error():
    graph, profile = layers()
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e6, memory_bytes=GB)
    with pytest.raises(PlanError, match="give a graph and its profile"):
        plan_with_simulator(PlanRequest(cluster=cluster))
    nameless = msgspec.structs.replace(graph, batch=None)
    with pytest.raises(PlanError, match="give --batch-size"):
        plan_with_simulator(PlanRequest(graph=nameless, profile=profile, cluster=cluster))


def test_microbatches_are_searched_in_multiples_of_the_devices_too():
    graph, profile = layers(7, batch=32)
    cluster = Cluster.uniform(1, 3, inside_bytes_per_s=1e6, memory_bytes=GB)
    simulator = Simulator(graph, profile, cluster)
    assert microbatch_counts(simulator, 32) == [1, 2, 3, 4, 6, 8, 12]
    assert microbatch_counts(simulator, 5) == [1, 2, 3, 4]


def test_fewer_samples_than_devices_have_a_pipeline():
    graph, profile = layers(7, batch=1)
    cluster = Cluster.uniform(1, 3, inside_bytes_per_s=1e6, memory_bytes=GB)
    names = [one.name for one in standard_strategies(Simulator(graph, profile, cluster), 1)]
    assert [name for name in names if "pipeline" in name] == ["pipeline of 3, 1 microbatch"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_standard_pipeline_does_not_send_wide_outputs(schedule):
    """Stages of equal time would cut behind `wide`, whose output takes seconds to cross."""
    graph, _ = layers(3)
    shape = {"sample": 8, "feature": 1_000_000}
    for name in ("wide", "last"):
        inputs = [graph.operators[-1].name]
        graph.operators.append(
            Operator(
                name=name, kind="linear", inputs=inputs, shape=shape, activation_bytes=32 * 10**6
            )
        )
    seconds = {"fc0": 1.0, "fc1": 1.0, "fc2": 1.0, "wide": 2.0, "last": 2.0}
    profile = profile_of(graph, {name: (s, s) for name, s in seconds.items()})
    cluster = Cluster.uniform(3, 1, inside_bytes_per_s=1e6, memory_bytes=GB)
    found = balanced_pipeline(
        Simulator(graph, profile, cluster), 8, 2, n_stages=3, schedule=schedule
    )
    assert found.operators["wide"].stage == found.operators["last"].stage


@pytest.mark.parametrize("n_devices", [2, 3])
def test_a_search_never_loses_to_the_pipelines_that_training_names(n_devices):
    graph, profile = layers(7, batch=32)
    cluster = Cluster.uniform(n_devices, 1, inside_bytes_per_s=1e6, memory_bytes=GB)
    request = request_of(graph, profile, cluster)
    found = search_portfolio(request)
    named = [
        found.simulator.step_s(balanced_pipeline(found.simulator, 32, n, schedule=schedule))
        for n in (n_devices, 2 * n_devices, 4 * n_devices)
        for schedule in ("1f1b", "interleaved")
    ]
    assert found.best.step_s <= min(named)


def test_under_a_profile_in_bf16_what_travels_is_priced_so():
    graph, profile = layers()
    points = [msgspec.structs.replace(one, dtype="bfloat16") for one in profile.measurements]
    in_bf16 = msgspec.structs.replace(profile, measurements=points)
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=GB, kind="device")
    shares = [
        search_portfolio(
            PlanRequest(cluster=cluster, graph=graph, profile=one, budget=10)
        ).simulator.options.wire_bytes_per_fp32_byte
        for one in (profile, in_bf16)
    ]
    assert shares == [1.0, 0.5]


def with_norms(graph, *calls):
    """The graph, of which these operators call one batch norm."""
    shares = {"shares_norm_with": calls[0]}
    graph = changed(graph, calls[:1], kind="batch_norm")
    return changed(graph, calls[1:], kind="batch_norm", attrs=shares)


def test_every_plan_of_a_search_has_all_calls_of_a_batch_norm_alike():
    graph, profile = layers(4)
    graph = with_norms(graph, "fc1", "fc3")
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e6, memory_bytes=GB)
    request = request_of(graph, profile, cluster)
    found = search_portfolio(request)
    ranked = found.ranked()
    assert len(ranked) > 3
    for candidate in ranked:
        validate(found.strategy(candidate), graph, cluster)
    assert found.best.n_devices == 2
    names = [one.strategy.name for one in found.standards]
    assert "ddp" in names
    assert not any("pipeline" in name for name in names)


def test_every_plan_of_a_search_has_a_written_buffer_on_one_device():
    graph, profile = layers(4)
    attrs = {"writes_buffers": ["seen"], "mixes_samples": True, "is_cut_by_samples": False}
    graph = changed(graph, ["fc1", "fc3"], kind="other", attrs=attrs)
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=GB)
    found = search_portfolio(request_of(graph, profile, cluster))
    for candidate in found.ranked():
        validate(found.strategy(candidate), graph, cluster)
    assert found.best.n_devices == 2


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_search_cuts_a_weight_alike_for_all_operators_that_use_it(is_tied):
    graph, profile = layers(4, parameters=100_000)
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e6, memory_bytes=GB)
    if is_tied:
        graph = changed(graph, ["fc1"], attrs={"tied_to": "fc0"})
    request = request_of(graph, profile, cluster)
    found = search_portfolio(request)
    plans = [candidate.strategy.operators for candidate in found.ranked()]
    tied = graph.operators[1:3]
    cuts = [[weight_cuts(op, own[op.name].partition) for op in tied] for own in plans]
    assert any(first != other for first, other in cuts) != is_tied
    assert any(first for first, _ in cuts)

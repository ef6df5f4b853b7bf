"""What results hold for planning: which cluster, whether a profile, which plan."""

import os

import msgspec
import planned_results
import pytest
from made_runs import header_of

from harness.domain.cluster import CLUSTER_FILE, Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph, Operator
from harness.domain.prediction import Prediction
from harness.domain.profile import Measurement, Profile
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import ConfigError
from harness.measure.store import read_header, write_header
from harness.plan import builders
from harness.plan.simulate.simulator import Simulator
from harness.runtime.ranks.host import code_commit
from harness.workloads.common.contract import config_json
from harness.workloads.planning.config import SearchConfig, search_cases
from harness.workloads.planning.files import (
    find_cluster,
    find_plan,
    find_search,
    has_profiled,
    only_devices,
    write_plan,
)
from harness.workloads.planning.inputs import capture_graph, predict, search_need

QUESTION = search_cases(SearchConfig(model="lenet", batch_size=8), 2)[0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"momentum": -1.0}, "--momentum -1.0 must be at least 0"),
        ({"dropout": 2.0}, "--dropout 2.0 is a probability"),
        ({"dlrm_lookups": 0}, "--dlrm-lookups 0 must be at least 1"),
        ({"search_seconds": float("nan")}, "--search-seconds nan must be above 0"),
    ],
)
def test_a_search_refuses_what_makes_no_sense(flags, message):
    with pytest.raises(ConfigError, match=message):
        search_cases(SearchConfig(**flags), 2)


def test_the_newest_links_of_these_very_nodes_count(tmp_path):
    here = planned_results.launched_cluster(2)
    assert find_cluster(tmp_path, here) is None
    planned_results.write_links(tmp_path, 2, start_utc="2026-01-02", rate=2.0)
    planned_results.write_links(tmp_path, 2, start_utc="2026-01-01", rate=1.0)
    found = find_cluster(tmp_path, here)
    assert {link.bandwidth_bytes_per_s for link in found.links} == {250e6}


def test_a_pipe_in_place_of_a_file_is_passed_over(tmp_path):
    links, here = planned_results.write_links(tmp_path, 2), planned_results.launched_cluster(2)
    (links / CLUSTER_FILE).unlink()
    os.mkfifo(links / CLUSTER_FILE)
    assert find_cluster(tmp_path, here) is None
    os.mkfifo(tmp_path / "profile.json")
    file = tmp_path / "profile.json"
    assert not has_profiled(tmp_path, {}, here, file=file, parts=(8,))


@pytest.mark.parametrize("ranks", [[0, 1], [0, 2], [1, 2]])
def test_some_ranks_of_a_measured_cluster_are_known_too(tmp_path, ranks):
    planned_results.write_links(tmp_path, 3)
    nodes = [planned_results.launched_cluster(3).nodes[rank] for rank in ranks]
    found = find_cluster(
        tmp_path, msgspec.structs.replace(planned_results.launched_cluster(2), nodes=nodes)
    )
    assert found == only_devices(planned_results.measured_cluster(3), ranks)
    assert [device.name for device in found.devices] == [f"node{rank}:0" for rank in ranks]
    assert len(found.links) == 2
    assert find_cluster(tmp_path, planned_results.launched_cluster(4)) is None


@pytest.mark.parametrize(
    "told", [{"measure": "collectives"}, {"transport": "mpi"}, {"pair_sizes": ["1KiB"]}]
)
def test_links_of_which_a_part_was_measured_do_not_count(tmp_path, told):
    planned_results.write_links(tmp_path, 2, start_utc="2026-01-01")
    newer = planned_results.write_links(tmp_path, 2, start_utc="2026-01-02", rate=2.0)
    write_header(newer, msgspec.structs.replace(read_header(newer), config=told))
    found = find_cluster(tmp_path, planned_results.launched_cluster(2))
    assert {link.bandwidth_bytes_per_s for link in found.links} == {125e6}


@pytest.mark.parametrize("change", ["name", "nic", "kind"])
def test_links_of_other_nodes_do_not_count(tmp_path, change):
    planned_results.write_links(tmp_path, 2)
    here = planned_results.launched_cluster(2)
    first, second = here.nodes
    changed = {
        "name": {"name": "elsewhere"},
        "nic": {"nic_bytes_per_s": 12.5e6},
        "kind": {"devices": [msgspec.structs.replace(second.devices[0], kind="other")]},
    }[change]
    there = msgspec.structs.replace(here, nodes=[first, msgspec.structs.replace(second, **changed)])
    assert find_cluster(tmp_path, there) is None


def test_a_profile_counts_where_it_is_of_the_same_model_and_devices(tmp_path):
    planned_results.write_profile(tmp_path, QUESTION, 2)
    config = QUESTION.profile_config()
    wanted = {"model": "lenet", "batch_size": 8}
    here = planned_results.launched_cluster(2)
    file = config.path(tmp_path)

    def known(wanted=wanted, cluster=here, file=file, parts=(8, 2), code=""):
        return has_profiled(tmp_path, wanted, cluster, file=file, parts=parts, code=code)

    assert known()
    assert not known(code="edited")
    assert not known(wanted={**wanted, "batch_size": 16})
    assert not known(parts=(8, 3))
    assert not known(file=tmp_path / "gone.json")
    other = msgspec.structs.replace(here.nodes[0].devices[0], kind="other")
    node = msgspec.structs.replace(here.nodes[0], devices=[other])
    assert not known(cluster=msgspec.structs.replace(here, nodes=[node]))
    profile = Profile.load(file)
    left = [point for point in profile.measurements if point.shape["sample"] != 2]
    file.write_bytes(msgspec.structs.replace(profile, measurements=left).to_json())
    assert not known()
    assert known(parts=[8])


def write_run(path, workload, **told):
    header = header_of(
        [], cluster=planned_results.launched_cluster(2), run_id=path.name, workload=workload,
        **{"key": "", "start_utc": "2026", "status": "ok", **told},
    )  # fmt: skip
    write_header(path, header)
    return header


@pytest.fixture(scope="session")
def planned():
    graph, cluster = capture_graph(QUESTION), planned_results.measured_cluster(2)
    made_for = fingerprint(graph, cluster, Profile(model="lenet", measurements=[]))
    strategy = msgspec.structs.replace(builders.ddp(graph, cluster, 8), made_for=made_for)
    return strategy, Prediction(strategy="ddp", method="builder", step_s=0.25)


def test_a_repeat_takes_the_plan_of_an_earlier_one(planned, tmp_path):
    strategy, prediction = planned
    run = tmp_path / "1-train-a"
    header = write_run(run, "train", key="same", commit="abc")
    write_plan(run, strategy, prediction)
    assert find_plan(tmp_path, header, strategy.made_for) == planned
    for changed in ({"key": "other"}, {"commit": "abd"}):
        another = msgspec.structs.replace(header, **changed)
        assert find_plan(tmp_path, another, strategy.made_for) is None
    other = msgspec.structs.replace(strategy.made_for, profile_hash="another profile")
    assert find_plan(tmp_path, header, other) is None
    assert find_plan(tmp_path, header, other, any_profile=True) == planned
    other = msgspec.structs.replace(other, graph_hash="another model")
    assert find_plan(tmp_path, header, other, any_profile=True) is None


def test_a_search_is_needed_again_where_code_or_measurements_changed(tmp_path):
    links, here = planned_results.write_links(tmp_path, 2), planned_results.launched_cluster(2)
    planned_results.write_profile(tmp_path, QUESTION, 2)
    file = QUESTION.profile_config().path(tmp_path)
    graph, cluster = capture_graph(QUESTION), find_cluster(tmp_path, here)
    made_for = fingerprint(graph, cluster, Profile.load(file))
    strategy = msgspec.structs.replace(builders.ddp(graph, cluster, 8), made_for=made_for)
    run = tmp_path / "1-search-a"
    header = write_run(run, "search", config=config_json(QUESTION), commit=code_commit())
    write_plan(run, strategy, Prediction(strategy="ddp", method="builder", step_s=0.25))
    need = search_need(QUESTION)
    assert need.is_met(tmp_path, here)
    write_header(run, msgspec.structs.replace(header, commit="older"))
    assert not need.is_met(tmp_path, here)
    write_header(run, header)
    faster = [msgspec.structs.replace(link, latency_s=1e-6) for link in cluster.links]
    measured = (links / CLUSTER_FILE).read_bytes()
    (links / CLUSTER_FILE).write_bytes(msgspec.structs.replace(cluster, links=faster).to_json())
    assert not need.is_met(tmp_path, here)
    (links / CLUSTER_FILE).write_bytes(measured)
    assert need.is_met(tmp_path, here)
    left = Profile.load(file).measurements[1:]
    file.write_bytes(msgspec.structs.replace(Profile.load(file), measurements=left).to_json())
    assert not need.is_met(tmp_path, here)


def test_a_search_answers_its_own_question(planned, tmp_path):
    run, here = tmp_path / "1-search-a", planned_results.launched_cluster(2)
    write_run(run, "search", config=config_json(QUESTION))
    write_plan(run, *planned)
    assert find_search(tmp_path, config_json(QUESTION), here) == planned
    assert find_search(tmp_path, config_json(QUESTION), here, planned[0].made_for) == planned
    assert find_search(tmp_path, config_json(QUESTION), here, planned[0].made_for, "") == planned
    assert find_search(tmp_path, config_json(QUESTION), here, planned[0].made_for, "abd") is None
    assert find_search(tmp_path, {**config_json(QUESTION), "batch_size": 9}, here) is None
    assert find_search(tmp_path, config_json(QUESTION), planned_results.launched_cluster(3)) is None


def predicted(sizes, n_microbatches):
    """Of one operator on one of two devices, measured at some numbers of samples of eight."""
    graph = Graph(
        name="one",
        batch=8,
        operators=[
            Operator(name="in", kind="input", shape={"sample": 8}),
            Operator(name="a", kind="elementwise", inputs=["in"], shape={"sample": 8}),
        ],
    )
    points = [
        Measurement(
            device_kind="device", operator="a", shape={"sample": n}, forward_s=1.0 + n, backward_s=n
        )
        for n in sizes
    ]
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e9, memory_bytes=10**6)
    simulator = Simulator(graph, Profile(model="one", measurements=points), cluster)
    plans = {"a": OperatorPlan({}, [0])}
    strategy = Strategy(name="s", batch=8, operators=plans, n_microbatches=n_microbatches)
    return predict(simulator, strategy, method="builder")


def test_the_fit_error_is_of_all_sizes_of_microbatch():
    assert predicted([8, 3, 2], 3).profile_fit_error is None  # three, three and two samples
    assert predicted([8, 3, 1], 3).profile_fit_error == pytest.approx(0, abs=1e-9)
    assert predicted([8, 2, 1], 3).profile_fit_error == pytest.approx(0, abs=1e-9)


def test_every_rank_has_its_contention():
    assert predicted([8], 1).contention_s == {"0": 0.0, "1": 0.0}

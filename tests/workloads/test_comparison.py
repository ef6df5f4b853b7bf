"""What `./entry.sh` runs without a workload."""

from collections import Counter

import pytest

from harness.measure.statistics import verdict
from harness.workloads import load_workload
from harness.workloads.common.contract import config_json
from harness.workloads.comparison import comparison
from harness.workloads.planning.files import is_complete
from harness.workloads.train.plan import search_config_of


@pytest.mark.parametrize("has_gpu", [False, True])
def test_everything_is_measured_before_it_is_planned_and_planned_before_it_is_trained(has_gpu):
    parts = comparison(has_gpu=has_gpu, n_ranks=5)
    assert [name for name, _ in parts] == ["matmul", "links", "profile", "search", "train"]


@pytest.mark.parametrize("n_ranks", [2, 5])
def test_the_runs_of_training_need_nothing_that_the_comparison_has_not_made(n_ranks):
    """Configurations are compared as results hold them."""
    parts = dict(comparison(has_gpu=False, n_ranks=n_ranks))
    cases = {name: load_workload(name).cases(part, n_ranks) for name, part in parts.items()}
    searched = next(case for case in cases["train"] if case.strategy == "searched")
    assert config_json(search_config_of(searched)) == config_json(cases["search"][0])
    for case in cases["train"]:
        for need in load_workload("train").needs(case):
            assert need.name in parts
    assert is_complete(config_json(parts["links"]))
    (profile,) = cases["profile"]
    wanted = config_json(search_config_of(searched).profile_config())
    same = {"model", "batch_size", "image_size", "n_classes", "n_channels", "dropout", "dtype"}
    assert {name: config_json(profile)[name] for name in same} == {
        name: wanted[name] for name in same
    }
    assert 1 in profile.shards


def test_repeats_are_as_many_as_a_verdict_needs():
    parts = dict(comparison(has_gpu=False, n_ranks=5))
    counts = Counter(case.strategy for case in load_workload("train").cases(parts["train"], 5))
    assert counts == dict.fromkeys(("single", "ddp", "pipeline", "searched"), 7)
    slow = [1.0 + k / 1000 for k in range(7)]
    assert verdict([s / 2 for s in slow], slow).outcome == "faster"
    assert verdict([s / 2 for s in slow[1:]], slow[1:]).outcome == "inconclusive"


def test_one_rank_trains_by_one_strategy():
    parts = dict(comparison(has_gpu=False, n_ranks=1))
    assert {case.strategy for case in load_workload("train").cases(parts["train"], 1)} == {"single"}

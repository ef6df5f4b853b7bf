"""What `./entry.sh` runs without a workload."""

from collections import Counter

import pytest

from harness.domain.run import RankInfo
from harness.measure.statistics import verdict
from harness.runtime.devices.peaks import peak_flops_per_s
from harness.workloads import load_workload
from harness.workloads.common.contract import config_json
from harness.workloads.comparison import ComparisonConfig, comparison
from harness.workloads.planning.files import is_complete
from harness.workloads.train.plan import search_config_of


@pytest.mark.parametrize("gpus", [None, []])
def test_everything_is_measured_before_it_is_planned_and_planned_before_it_is_trained(gpus):
    parts = comparison(ComparisonConfig(), gpus=gpus, n_ranks=5)
    assert [name for name, _ in parts] == ["matmul", "links", "profile", "search", "train"]


@pytest.mark.parametrize("n_ranks", [2, 5])
def test_the_runs_of_training_need_nothing_that_the_comparison_has_not_made(n_ranks):
    """Configurations are compared as results hold them."""
    parts = dict(comparison(ComparisonConfig(), gpus=None, n_ranks=n_ranks))
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
    parts = dict(comparison(ComparisonConfig(), gpus=None, n_ranks=5))
    counts = Counter(case.strategy for case in load_workload("train").cases(parts["train"], 5))
    assert counts == dict.fromkeys(("single", "ddp", "pipeline", "searched"), 7)
    slow = [1.0 + k / 1000 for k in range(7)]
    assert verdict([s / 2 for s in slow], slow).outcome == "faster"
    assert verdict([s / 2 for s in slow[1:]], slow[1:]).outcome == "inconclusive"


@pytest.mark.parametrize("gpus", [None, []])
def test_a_users_model_and_batch_go_through_all_workloads(gpus):
    asked = ComparisonConfig(model="lenet", batch_size=40, dtype="fp32")
    parts = dict(comparison(asked, gpus=gpus, n_ranks=5))
    for name in ("profile", "search", "train"):
        for case in load_workload(name).cases(parts[name], 5):
            assert (case.model, case.dtype) == ("lenet", "fp32")
    assert {case.batch for case in load_workload("train").cases(parts["train"], 5)} == {40}
    assert parts["search"].batch_size == 40


def test_one_rank_trains_by_one_strategy():
    assert dict(comparison(ComparisonConfig(), gpus=[], n_ranks=1))["profile"].shards == (1,)
    parts = dict(comparison(ComparisonConfig(), gpus=None, n_ranks=1))
    assert {case.strategy for case in load_workload("train").cases(parts["train"], 1)} == {"single"}


@pytest.mark.parametrize(
    ("kinds", "gib", "dtype", "batch"),
    [
        (["NVIDIA GeForce RTX 3070"] * 3, 8, "bf16", 128),
        (["NVIDIA GeForce RTX 3070", "Tesla T4"], 8, "fp16", 128),
        (["NVIDIA GeForce RTX 3070", "Tesla P4", "NVIDIA GeForce GTX 1070"], 8, "fp32", 64),
        (["NVIDIA GeForce RTX 2060"], 6, "fp16", 64),
        (["a board of next year"], 192, "bf16", 128),
    ],
)
def test_all_gpus_have_the_dtype_and_the_memory_for_the_batch(kinds, gib, dtype, batch):
    gpus = [
        RankInfo(
            rank=rank,
            hostname="",
            device="cuda:0",
            device_kind=kind,
            n_cores=1,
            memory_bytes=gib << 30,
            peak_flops_per_s=peak_flops_per_s(kind),
        )
        for rank, kind in enumerate(kinds)
    ]
    parts = comparison(ComparisonConfig(), gpus=gpus, n_ranks=2)
    training, *by_speed = [part for name, part in parts if name == "train"]
    assert (training.dtype, training.batch_size) == ((dtype,), (batch,))
    assert [one.balance for one in by_speed] == ["speed"] * (len(set(kinds)) > 1)

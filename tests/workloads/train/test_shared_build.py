"""A model that is built once for the ranks of a host equals one that a rank builds by itself."""

import pytest
import shared_builds
from local_ranks import run_on_ranks

SHARED = ["tied", "converted"]
REBUILT = ["reads_weights", "holds_loose_tensor", "draws_example"]
MODELS = SHARED + REBUILT


@pytest.fixture(scope="module")
def built():
    """By rank: what it saw of each model. Ranks 0 and 1 share a host, rank 2 has one of its own."""
    return run_on_ranks(shared_builds.build_all, MODELS, 3)[0]


@pytest.mark.parametrize("model", MODELS)
def test_every_rank_has_the_model_that_it_builds_by_itself(built, model):
    alone = built[2][model]["state"]
    assert [rank[model]["state"] for rank in built] == [alone] * 3
    for key in ("random", "rows"):
        assert [rank[model][key] for rank in built] == [built[2][model][key]] * 3


@pytest.mark.parametrize("model", MODELS)
def test_a_write_of_one_rank_is_its_own(built, model):
    assert [rank[model]["is_unchanged"] for rank in built] == [True, False, True]


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_mapped_where_the_model_allows_it(built, model):
    mapped = [rank[model]["n_mapped"] > 0 for rank in built]
    assert mapped == [True, model in SHARED, False]


def test_a_full_disk_leaves_each_rank_a_model_of_its_own(built):
    assert [rank["full"]["state"] for rank in built] == [built[2]["tied"]["state"]] * 3
    assert not any(rank["full"]["n_mapped"] for rank in built)


def test_names_of_one_weight_stay_tied(built):
    assert all(rank["tied"]["is_tied"] for rank in built)

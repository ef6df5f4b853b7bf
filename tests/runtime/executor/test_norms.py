"""Batch norms over all samples, beside what their devices do not have in common."""

import pytest
from equivalence_check import check
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond
from equivalence_norms import joined_parameters, norms_case, train_joined_on_rank_1
from equivalence_reference import train_alone
from equivalence_training import merged

from harness.domain.strategy import OperatorPlan, Stage


def assert_equal(case, ranks):
    finding = check(case, ranks)
    assert finding.is_equal, finding.text()


@pytest.fixture
def uneven_case():
    """Device 0 is fed more than its 2 MiB of weights by two microbatches, device 1 less."""
    stem, others = (OperatorPlan({"sample": [4, 1]}, [0, 1], stage) for stage in (0, 1))
    flow = {"n_microbatches": 2, "stages": [Stage(), Stage()]}
    return norms_case("wide_head", {"stem": stem}, 100, others=others, **flow)


def test_microbatches_are_joined_alike_where_weights_are_held_together(uneven_case, ranks):
    assert ranks.run(2, joined_parameters, uneven_case) == [0, 0]
    assert_equal(uneven_case, ranks)


def test_statistics_do_not_meet_gradients_that_start_when_each_device_has_them(uneven_case, ranks):
    found = merged(ranks.run(2, train_joined_on_rank_1, uneven_case))
    assert first_beyond(found, train_alone(uneven_case), FLOAT64_TOLERANCES["sgd"]) is None


@pytest.mark.parametrize("recompute", [False, True])
def test_a_block_of_a_norm_that_nobody_reads_takes_part_in_its_sums(recompute, ranks):
    norm = {"norm": OperatorPlan({"height": [6, 1]}, [0, 1])}
    case = norms_case("unread_row", norm, 4, stages=[Stage(recompute)])
    assert_equal(case, ranks)

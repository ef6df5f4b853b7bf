"""Messages are received in the order of sending, and kept for as long as anybody reads them."""

from functools import partial

import pytest
from equivalence_cases import random_case
from equivalence_check import check, reference
from equivalence_compare import FLOAT64_TOLERANCES, first_beyond
from equivalence_order import (
    order_of_messages,
    read_ahead,
    read_as_view,
    read_by_two_stages,
    third_branch_copied,
)
from equivalence_training import merged, train_in_pairs


# NCCL pairs sends and receives by their order.
@pytest.mark.parametrize("make_case", [third_branch_copied, read_ahead])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_messages_are_received_in_the_order_in_which_they_are_sent(way, make_case, ranks):
    first, second = (one[way] for one in ranks.run(2, order_of_messages, make_case()))
    assert (first[0], second[0]) == (second[1], first[1])
    assert max(map(len, [*first[0].values(), *second[0].values()])) > 1


# Over gloo too a message has no tag, then, by which it could be told from another.
@pytest.mark.parametrize(
    "make_case",
    [third_branch_copied, read_ahead, *(partial(random_case, 0, index) for index in (1, 10, 292))],
)
def test_what_order_alone_pairs_trains_the_same(make_case, ranks):
    case = make_case()
    found = merged(ranks.run(case.n_ranks, train_in_pairs, case))
    tolerance = FLOAT64_TOLERANCES[case.optimizer]
    assert first_beyond(found, reference(case, ranks), tolerance) is None


@pytest.mark.parametrize("make_case", [read_by_two_stages, read_as_view])
def test_what_joined_gradients_are_computed_from_is_not_received_into(make_case, ranks):
    finding = check(make_case(), ranks)
    assert finding.is_equal, finding.text()


def test_a_message_that_waits_for_what_does_not_travel_trains_the_same(ranks):
    finding = check(third_branch_copied(), ranks)
    assert finding.is_equal, finding.text()

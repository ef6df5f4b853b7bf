"""Messages are received in the order of sending, and kept for as long as anybody reads them."""

from __future__ import annotations

import pytest
from equivalence_check import check
from equivalence_order import order_of_messages, read_by_two_stages, third_branch_copied


# NCCL pairs sends and receives by their order.
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_messages_are_received_in_the_order_in_which_they_are_sent(way, ranks):
    first, second = (one[way] for one in ranks.run(2, order_of_messages, third_branch_copied()))
    assert (first[0], second[0]) == (second[1], first[1])
    assert max(len(first[0]), len(second[0])) > 1


def test_what_joined_gradients_are_computed_from_is_not_received_into(ranks):
    finding = check(read_by_two_stages(), ranks)
    assert finding.is_equal, finding.text()


def test_a_message_that_waits_for_what_does_not_travel_trains_the_same(ranks):
    finding = check(third_branch_copied(), ranks)
    assert finding.is_equal, finding.text()

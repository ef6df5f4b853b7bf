"""Partial sums that all holders want whole are one all_reduce, and train the same."""

from __future__ import annotations

import pytest
import torch
from equivalence_check import check
from equivalence_sums import SumsCase, by_sums, towers

from harness.runtime.capture import capture
from harness.runtime.executor.layout import Layout
from harness.runtime.executor.messages import SharedSum, shared_sums
from harness.runtime.executor.values import MetaModel

BATCH = 6


def layout_of(strategy):
    task = towers()
    captured = capture(task, BATCH, "towers")
    return Layout(captured, MetaModel(captured, task.inputs, torch.device("cpu")), strategy, BATCH)


def test_a_sum_is_shared_where_all_holders_want_all_of_it():
    layout = layout_of(by_sums(3, BATCH))
    # The first narrow layer is read whole by the wide one after it, the last by samples.
    assert {layout.wants[number].value for number in shared_sums(layout)} == {"_2"}
    assert set(shared_sums(layout).values()) == {SharedSum((0, 1, 2), goes=True, returns=True)}
    assert {want.value for want in layout.wants if want.is_sum} == {"_2", "_5"}


def test_two_devices_exchange_their_sums():
    assert shared_sums(layout_of(by_sums(2, BATCH))) == {}


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_shared_sums_train_what_one_device_trains(n_microbatches, ranks):
    strategy = by_sums(3, BATCH, n_microbatches)
    case = SumsCase(name="sums", model="towers", n_ranks=3, strategy=strategy)
    finding = check(case, ranks)
    assert finding.is_equal, finding.text()

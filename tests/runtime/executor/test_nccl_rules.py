"""The executor's NCCL path on CPUs: under NCCL's rules it trains as one device does."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from equivalence_cases import any_case
from equivalence_check import assert_equal
from equivalence_exchanges import sharded
from equivalence_named import make_case, pipeline_case
from equivalence_priming import evaluated, first_called_beside_receives
from equivalence_ranks import RanksFailedError

from harness.runtime.executor.transport.groups import Groups, scatter_sum


@pytest.fixture
def ranks(nccl_ranks):
    return nccl_ranks


@pytest.mark.parametrize("index", range(4))
def test_random_strategies_train_what_one_device_trains(index, ranks):
    assert_equal(any_case(7, index), ranks)


@pytest.mark.parametrize("state", ["parameters", "gradients_in_node", "parameters_in_node"])
def test_state_that_is_sharded_over_two_nodes_trains_what_one_device_trains(state, ranks):
    case = make_case("lenet", "ddp", 4, 8, seed=5)  # of small buckets
    assert_equal(sharded(case, state), ranks)


def cross(is_batched, world):
    """Each of two ranks sends, then receives."""
    sent, received, other = torch.full((2,), world.rank), torch.zeros(2, dtype=int), 1 - world.rank
    ways = [(dist.isend, sent), (dist.irecv, received)]
    if is_batched:
        works = dist.batch_isend_irecv([dist.P2POp(way, x, other) for way, x in ways])
    else:
        works = [way(x, other) for way, x in ways]
    for work in works:
        work.wait()
    return received


def test_sends_of_two_ranks_to_each_other_wait_for_ever_unless_batched(ranks):
    assert [x.tolist() for x in ranks.run(2, cross, True)] == [[1, 1], [0, 0]]
    with pytest.raises(RanksFailedError, match="no answer"):
        ranks.run(2, cross, False, timeout_s=2.0)


def swap(_, world):
    """The order of two messages differs between sender and receiver."""
    small, large = torch.zeros(2), torch.ones(3)
    sizes = [small, large] if world.is_first else [large, small]
    way = dist.isend if world.is_first else dist.irecv
    for work in [way(x, 1 - world.rank) for x in sizes]:
        work.wait()


def test_messages_meet_by_their_order(ranks):
    with pytest.raises(RanksFailedError, match="received"):
        ranks.run(2, swap, None, timeout_s=2.0)


def sum_before_sending(sizes, world):
    """One rank starts a sum, then sends what the other waits for before the sum.

    Args:
        sizes: elements of each rank's part; None: each gets the whole.
    """
    groups = Groups(world, 5.0)
    sums = groups.for_gradients((0, 1), is_scattered=sizes is not None)
    pair, message = groups.for_transfers(0, 1), torch.ones(2)
    whole = part = torch.ones(64)
    if not world.is_first:
        dist.recv(message, 0, group=pair)
    if sizes is None:
        work = dist.all_reduce(whole, group=sums, async_op=True)
    else:
        part = torch.zeros(sizes[world.rank])
        parts = list(whole.split(sizes))
        work = (
            scatter_sum(part, whole, sums, is_async=True)
            if len(set(sizes)) == 1
            else dist.reduce_scatter(part, parts, group=sums, async_op=True)
        )
    if world.is_first:
        dist.send(message, 1, group=pair)
    work.wait()
    return part.tolist()


@pytest.mark.parametrize("sizes", [None, [32, 32], [40, 24]])
def test_no_sum_of_a_step_is_the_first_of_its_algorithm(sizes, ranks):
    found = ranks.run(2, sum_before_sending, sizes, timeout_s=30.0)
    assert found == [[2.0] * n for n in sizes or [64, 64]]


def pipeline(shard_state="none", **changes):
    return sharded(pipeline_case("lenet", 6, [[0, 1], [2]], 3, **changes), shard_state)


@pytest.mark.parametrize(
    "make",
    [
        partial(pipeline, is_asynchronous=True, optimizer="adamw"),
        partial(pipeline, dtype="float32"),
        partial(pipeline, "parameters", dtype="float32"),
        partial(pipeline, "parameters", dtype="bfloat16"),
        partial(any_case, 11, 26),
    ],
    ids=["asynchronous", "rounded sums", "gathered weights", "rounded weights", "integers"],
)
def test_no_kernel_is_loaded_beside_receives(make, ranks):
    case = make()
    assert ranks.run(case.n_ranks, first_called_beside_receives, case) == [[]] * case.n_ranks


@pytest.mark.parametrize(
    "make",
    [partial(any_case, 11, 26), partial(make_case, "gpt2", "tensor parallel")],
    ids=["any", "cut loss"],
)
def test_a_first_evaluation_runs_without_messages_before(make, ranks):
    case = make()
    found = ranks.run(case.n_ranks, evaluated, case)
    for *evaluations, n_muted in found:
        assert evaluations[:2] == evaluations[2:]
        assert n_muted == 1
    assert sum(n_samples for _, n_samples, *_ in found) == case.strategy.batch

"""What each collective must deliver, on a transport that moves nothing by itself."""

from threading import Barrier, Thread

import pytest
import torch
from fake_clock import FakeClock

from harness.errors import VerificationError
from harness.workloads.links.operations import OPERATIONS, make_trial, time_trial


class Board:
    """Where ranks that are threads meet: everybody's data by rank."""

    def __init__(self, size):
        self.size = size
        self.data: dict[int, torch.Tensor] = {}
        self._barrier = Barrier(size)

    def exchange(self, rank, data):
        self.data[rank] = data.clone()
        self._barrier.wait()
        everyone = [self.data[r] for r in range(self.size)]
        self._barrier.wait()
        return everyone


class ThreadTransport:
    """The meaning of each collective, from the definitions of MPI."""

    name = "threads"

    def __init__(self, board, rank):
        self.board, self.rank, self.size = board, rank, board.size
        self.device, self.clock = torch.device("cpu"), FakeClock()

    def barrier(self):
        self.board.exchange(self.rank, torch.zeros(1))

    def all_reduce(self, data):
        data.copy_(torch.stack(self.board.exchange(self.rank, data)).sum(0))

    def all_gather(self, out, data):
        out.copy_(torch.cat(self.board.exchange(self.rank, data)))

    def reduce_scatter(self, out, data):
        total = torch.stack(self.board.exchange(self.rank, data)).sum(0)
        out.copy_(total.chunk(self.size)[self.rank])

    def broadcast(self, data):
        data.copy_(self.board.exchange(self.rank, data)[0])

    def all_to_all(self, out, data):
        everyone = self.board.exchange(self.rank, data)
        out.copy_(torch.cat([other.chunk(self.size)[self.rank] for other in everyone]))

    def send_recv(self, out, data):
        out.copy_(self.board.exchange(self.rank, data)[self.rank - 1])


def on_ranks(size, function):
    """Run function(transport) on every rank; what each returned."""
    board, found = Board(size), {}
    threads = [
        Thread(target=lambda r=rank: found.update({r: function(ThreadTransport(board, r))}))
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_right_collective_passes_again_and_again(operation, size):
    def work(transport):
        trial = make_trial(operation, 1000, transport)
        for _ in range(2):
            trial.reset()
            trial.run()
            trial.check()
        return trial.n_bytes

    assert on_ranks(size, work) == [1000] * size  # 250 elements, which divide by each size


@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_wrong_element_is_named(operation):
    def work(transport):
        trial = make_trial(operation, 240, transport)
        trial.reset()
        trial.run()
        trial.out[7] += 1
        with pytest.raises(VerificationError, match=rf"{operation} .* element 7 of rank"):
            trial.check()

    on_ranks(3, work)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_collective_that_did_nothing_fails(operation):
    def work(transport):
        trial = make_trial(operation, 240, transport)
        trial.reset()
        try:
            trial.check()
        except VerificationError:
            return True
        return False

    assert any(on_ranks(3, work))  # the root of a broadcast has the data from the start


@pytest.mark.parametrize("size", [3, 5, 7])
def test_sizes_are_rounded_up_to_whole_elements_on_every_rank(size):
    def work(transport):
        return [make_trial("all_gather", n, transport).n_bytes for n in (1, 4096)]

    smallest, page = on_ranks(size, work)[0]
    assert smallest == 4 * size
    assert page % (4 * size) == 0
    assert 4096 <= page < 4096 + 4 * size


def test_only_the_operation_is_timed():
    def work(transport):
        trial = make_trial("all_reduce", 64, transport)
        run = trial.run

        def slowly():
            run()
            transport.clock.advance(0.5)

        def barrier():
            transport.clock.advance(100.0)

        trial.run, transport.barrier = slowly, barrier
        return time_trial(trial, transport, 3)

    assert on_ranks(2, work) == [[0.5, 0.5, 0.5]] * 2

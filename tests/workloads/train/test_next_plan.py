"""A search beside training answers as a search in this process, or says why it does not."""

import time

from made_graphs import layers, unlike_cluster

from harness.plan import builders
from harness.plan.again import SearchAgain, search_again
from harness.plan.simulate.options import SimulatorOptions
from harness.workloads.train import next_plan
from harness.workloads.train.next_plan import BesideSearch


def request(memory_bytes=10**9):
    """Four equal layers on two devices, the second of which is four times slower."""
    graph, profile = layers()
    cluster = unlike_cluster([1.0, 0.25], memory_bytes)
    return SearchAgain(
        graph=graph,
        cluster=cluster,
        profile=profile,
        options=SimulatorOptions(),
        batch=8,
        budget=200,
        start=builders.ddp(graph, cluster, 8),
    )


def answer_of(search):
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        if (found := search.poll()) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("no answer in five minutes")


def test_a_search_beside_training_answers_as_one_in_this_process():
    search, asked = BesideSearch(), request()
    search.start(asked)
    assert search.is_running
    assert search.poll() is None
    found = answer_of(search)
    assert found == search_again(asked)
    # ddp waits for the slow device: half the samples of 12 s, at a quarter of the speed.
    assert found.start_step_s > 24
    assert found.step_s < 12.1
    assert not search.is_running
    assert search.poll() is None
    process = search._process
    search.start(asked)
    assert answer_of(search) == found
    assert search._process is process
    search.close()


def test_a_search_that_dies_within_its_answer_has_none(monkeypatch):
    monkeypatch.setattr(next_plan, "_COMMAND", ("sh", "-c", "printf '{\"step_s\"'; exit 9"))
    search = BesideSearch()
    search.start(request())
    assert answer_of(search).error == "the search beside training ended with exit code 9"


def test_a_search_without_a_plan_says_so():
    search = BesideSearch()
    search.start(request(memory_bytes=1000))
    assert "no strategy of 'layers' fits" in answer_of(search).error
    search.close()


def test_a_search_that_ends_is_an_error(capfd):
    """When training ends, its request is gone before the search has read it."""
    search = BesideSearch()
    search.start(request())
    search._asked.close()
    assert answer_of(search).error == "the search beside training ended with exit code 1"
    assert capfd.readouterr().err == ""

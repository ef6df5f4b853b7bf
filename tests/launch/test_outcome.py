"""Which rank's reason a failed run is given."""

from __future__ import annotations

from harness.outcome import Outcome, worst

HOSTS = ["a", "b", "c", "d"]
OK = Outcome(status="ok")


def waited(*peers: int) -> Outcome:
    words = " or ".join(map(str, peers))
    return Outcome(status="crash", reason=f"waited for rank {words}", peers=peers)


def test_the_first_of_the_worst_decides():
    crash, oom = (
        Outcome(status="crash", reason="no such file"),
        Outcome(status="oom", reason="9 GiB"),
    )
    assert worst([OK, crash, oom, crash], HOSTS) == ("oom", "rank 2 (c): 9 GiB")
    assert worst([OK] * 4, HOSTS) == ("ok", "")


def test_a_rank_that_died_comes_before_those_that_waited_one_for_another():
    killed = Outcome(status="crash", reason="killed by SIGKILL")
    status, reason = worst([waited(1), waited(2), waited(3), killed], HOSTS)
    assert status == "crash"
    assert reason == "rank 3 (d): killed by SIGKILL; rank 2 (c): waited for rank 3"


def test_a_rank_that_hangs_is_named_though_it_says_nothing():
    stopped = Outcome(status="skipped", reason="stopped: rank 2 failed")
    _, reason = worst([waited(1), waited(2), waited(3), stopped], HOSTS)
    assert reason.startswith("rank 2 (c): waited for rank 3; ")
    assert reason.endswith("; no answer came from rank 3 (d)")


def test_in_a_sum_of_all_the_rank_that_did_not_take_part_is_named():
    stopped = Outcome(status="skipped", reason="stopped: rank 0 failed")
    _, reason = worst([waited(1, 2, 3), waited(0, 2, 3), stopped, waited(0, 1, 2)], HOSTS)
    assert reason.endswith("; no answer came from rank 2 (c)")


def test_lines_below_a_reason_stay_with_the_first():
    trace = Outcome(status="crash", reason="ValueError: no\nTraceback")
    _, reason = worst([OK, trace, Outcome(status="crash", reason="other\nlines"), OK], HOSTS)
    assert reason == "rank 1 (b): ValueError: no; rank 2 (c): other\nTraceback"


def test_after_an_exception_nobody_hears_of_those_that_waited_for_it():
    raised = Outcome(status="crash", reason="KeyError: 'x' (m.py:3 in f: x)", is_explained=True)
    lost = Outcome(status="skipped", reason="lost its peer: Connection closed by peer")
    for outcomes in ([waited(1), raised, waited(1), lost], [lost, raised, waited(0, 1), OK]):
        assert worst(outcomes, HOSTS) == ("crash", "rank 1 (b): KeyError: 'x' (m.py:3 in f: x)")


def test_two_ranks_that_raise_unlike_exceptions_are_both_heard():
    one = Outcome(status="crash", reason="KeyError: 'x'", is_explained=True)
    other = Outcome(status="crash", reason="ValueError: y", is_explained=True)
    _, reason = worst([one, waited(0), other, one], HOSTS)
    assert reason == "rank 0 (a): KeyError: 'x'; rank 2 (c): ValueError: y"

"""Which rank's reason a failed run is given."""

import msgspec
import pytest

from harness.errors import (
    ModelError,
    PeerError,
    ResultsError,
    StrategyError,
    VerificationError,
)
from harness.measure.reached import Standstill
from harness.run import Outcome, _classify, lost_ranks, worst

HOSTS = ["a", "b", "c", "d"]
OK = Outcome(status="ok")


def waited(*peers):
    words = " or ".join(map(str, peers))
    return Outcome(status="crash", reason=f"waited for rank {words}", peers=peers)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelError("refused"), "invalid"),
        (StrategyError("refused"), "invalid"),
        (VerificationError("wrong"), "invalid"),
        (ResultsError("full"), "crash"),
        (PeerError("gone", [1]), "crash"),
    ],
)
def test_a_run_is_invalid_if_its_inputs_are_refused_or_its_result_is_wrong(error, status):
    found = _classify(error, None)
    assert (found.status, found.reason) == (status, str(error))
    assert found.is_explained == (not isinstance(error, PeerError))


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


def test_ranks_that_the_watchdog_aborts_are_not_the_lost_ones():
    killed = Outcome(status="crash", reason="killed by SIGKILL", is_lost=True)
    aborted = msgspec.structs.replace(killed, reason="killed by SIGABRT", is_aborted=True)
    assert lost_ranks([aborted, OK, killed, aborted]) == [2]
    assert lost_ranks([aborted, aborted, OK]) == [0, 1]
    _, reason = worst([aborted, aborted, killed, aborted], HOSTS)
    assert reason == "rank 2 (c): killed by SIGKILL; rank 0 (a): killed by SIGABRT"


SKIPPED = Outcome(status="skipped", reason="stopped: rank 0 failed")
TIMED_OUT = Outcome(status="timeout", reason="not done after 60 s")


def test_a_rank_that_hangs_is_named_though_it_says_nothing():
    _, reason = worst([waited(1), waited(2), waited(3), SKIPPED], HOSTS)
    assert reason.startswith("rank 2 (c): waited for rank 3; ")
    assert reason.endswith("; no answer came from rank 3 (d)")


def test_in_a_sum_of_all_the_rank_that_did_not_take_part_is_named():
    _, reason = worst([waited(1, 2, 3), waited(0, 2, 3), SKIPPED, waited(0, 1, 2)], HOSTS)
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


def stuck(outcome, step, phase, *, is_stopped=False):
    place = Standstill(step=step, phase=phase, for_s=21.0, is_stopped=is_stopped)
    return msgspec.structs.replace(outcome, standstill=place)


CRASH = Outcome(status="crash", reason="killed by SIGKILL")


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        # The one behind the others comes before those that waited, an earlier step being behind
        # whatever its phase, and computing behind communication.
        (
            [stuck(waited(1, 2), 12, "backward"), stuck(SKIPPED, 12, "forward"),
             stuck(waited(0, 1), 12, "backward")],
            "rank 1 (b): no progress for 21 s, in forward of step 12; rank 0 (a): waited for rank "
            "1 or",
        ),
        (
            [stuck(waited(1), 4, "forward"), stuck(SKIPPED, 3, "optimizer")],
            "rank 1 (b): no progress for 21 s, in optimizer of step 3",
        ),
        (
            [stuck(waited(1), 2, "communication"), stuck(SKIPPED, 2, "optimizer")],
            "rank 1 (b): no progress",
        ),
        # Those that stand at the same place, or go on until a timeout, accuse nobody.
        (
            [stuck(waited(1), 2, "backward"), stuck(SKIPPED, 2, "backward")],
            "rank 0 (a): waited for rank 1; no answer came from rank 1 (b)",
        ),
        ([TIMED_OUT, TIMED_OUT], "rank 0 (a): not done after 60 s"),
        # A stopped process is named wherever it stands.
        (
            [stuck(TIMED_OUT, 2, "forward"),
             stuck(TIMED_OUT, 2, "communication", is_stopped=True)],
            "rank 1 (b): no progress for 21 s, in communication of step 2; its process",
        ),
        # A reason of its own leaves no question.
        (
            [stuck(waited(1), 2, "forward"), CRASH, stuck(waited(1), 2, "backward")],
            "rank 1 (b): killed by SIGKILL",
        ),
    ],
)  # fmt: skip
def test_the_rank_behind_the_others_is_named(ranks, wanted):
    status, reason = worst(ranks, HOSTS)
    assert reason.startswith(wanted)
    assert ("not done after 60 s" in reason) == (status == "timeout")

"""Which rank's reason a failed run is given."""

import msgspec
import pytest

from harness.errors import ModelError, PeerError, ResultsError, StrategyError, VerificationError
from harness.measure.reached import Standstill
from harness.run import Outcome, _classify, lost_ranks, with_note, worst

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


def test_a_note_stands_in_the_first_line_of_a_reason():
    """Rank 0 shows that line alone, and not the traceback below it."""
    assert with_note("rank 0 (a): no\nTraceback", "left") == "rank 0 (a): no; left\nTraceback"
    assert with_note("", "records stay") == "records stay"


def test_ranks_that_the_watchdog_aborts_are_not_the_lost_ones():
    killed = Outcome(status="crash", reason="killed by SIGKILL", is_lost=True)
    aborted = msgspec.structs.replace(killed, reason="killed by SIGABRT", is_aborted=True)
    assert lost_ranks([aborted, OK, killed, aborted]) == [2]
    assert lost_ranks([aborted, aborted, OK]) == [0, 1]
    _, reason = worst([aborted, aborted, killed, aborted], HOSTS)
    assert reason == "rank 2 (c): killed by SIGKILL; rank 0 (a): killed by SIGABRT"


SKIPPED = Outcome(status="skipped", reason="stopped: rank 0 failed")
TIMED_OUT = Outcome(status="timeout", reason="not done after 60 s")
CRASH = Outcome(status="crash", reason="killed by SIGKILL")
TRACE = Outcome(status="crash", reason="ValueError: no\nTraceback")
RAISED = Outcome(status="crash", reason="KeyError: 'x' (m.py:3 in f: x)", is_explained=True)
OTHER = Outcome(status="crash", reason="ValueError: y", is_explained=True)
LOST = Outcome(status="skipped", reason="lost its peer: Connection closed by peer")


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        # A rank that died comes before those that waited one for another.
        (
            [waited(1), waited(2), waited(3), CRASH],
            "rank 3 (d): killed by SIGKILL; rank 2 (c): waited for rank 3",
        ),
        # A rank that hangs is named though it says nothing, also in a sum of all.
        (
            [waited(1), waited(2), waited(3), SKIPPED],
            "rank 2 (c): waited for rank 3; rank 0 (a): waited for rank 1; no answer came from "
            "rank 3 (d)",
        ),
        (
            [waited(1, 2, 3), waited(0, 2, 3), SKIPPED, waited(0, 1, 2)],
            "rank 0 (a): waited for rank 1 or 2 or 3; rank 1 (b): waited for rank 0 or 2 or 3; no "
            "answer came from rank 2 (c)",
        ),
        # Lines below a reason stay with the first.
        (
            [OK, TRACE, Outcome(status="crash", reason="other\nlines"), OK],
            "rank 1 (b): ValueError: no; rank 2 (c): other\nTraceback",
        ),
        # After an exception nobody hears of those that waited for it.
        ([waited(1), RAISED, waited(1), LOST], f"rank 1 (b): {RAISED.reason}"),
        ([LOST, RAISED, waited(0, 1), OK], f"rank 1 (b): {RAISED.reason}"),
        # Two ranks that raise unlike exceptions are both heard.
        (
            [RAISED, waited(0), OTHER, RAISED],
            f"rank 0 (a): {RAISED.reason}; rank 2 (c): ValueError: y",
        ),
    ],
)
def test_of_several_failed_ranks_those_that_explain_it_are_named(outcomes, wanted):
    assert worst(outcomes, HOSTS) == ("crash", wanted)


def stuck(outcome, step, phase, *, is_stopped=False):
    place = Standstill(step=step, phase=phase, for_s=21.0, is_stopped=is_stopped)
    return msgspec.structs.replace(outcome, standstill=place)


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

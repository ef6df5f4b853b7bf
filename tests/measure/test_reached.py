"""How far a run has come is read by another process, by a clock that the test moves."""

import subprocess
import sys

import pytest
from fake_clock import FakeClock

from harness.measure.reached import Reached, ReachedReader
from harness.measure.recorder import Recorder


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def reader(clock):
    made = ReachedReader(lambda: clock.now_s)
    yield made
    made.close()


def test_a_rank_that_moves_on_does_not_stand_still(clock, reader):
    writer = Reached(reader.path)
    for step in range(5):
        writer.begin_step(step)
        for phase in ("data", "forward", "backward", "optimizer"):
            writer.begin(phase)
            clock.advance(2.0)
            reader.poll()
            assert reader.standstill(is_stopped=False) is None


def test_a_rank_that_stands_still_is_known_by_step_phase_and_time(clock, reader):
    recorder = Recorder(FakeClock(), Reached(reader.path))
    recorder.step = 7
    with recorder.span("communication"):
        reader.poll()
        clock.advance(20.0)
        found = reader.standstill(is_stopped=False)
    assert (found.step, found.phase) == (7, "communication")
    assert (found.for_s, found.is_waiting) == (20.0, True)
    assert found.text == "no progress for 20 s, in communication of step 7"


def test_a_run_that_says_nothing_is_not_judged_unless_it_is_stopped(clock, reader):
    clock.advance(60.0)
    assert reader.standstill(is_stopped=False) is None
    found = reader.standstill(is_stopped=True)
    assert found.text == "no progress for 60 s; its process is stopped (SIGSTOP or SIGTSTP)"


def test_warm_up_is_told_from_measured_steps(clock, reader):
    writer = Reached(reader.path)
    writer.begin_step(-2)
    writer.begin("forward")
    reader.poll()
    clock.advance(5.0)
    found = reader.standstill(is_stopped=False)
    assert found.text == "no progress for 5 s, in forward of a warm-up step"


def test_another_process_writes(clock, reader):
    program = (
        "import sys; from harness.measure.reached import Reached\n"
        "r = Reached(sys.argv[1]); r.begin_step(3); r.begin('backward')"
    )
    subprocess.run([sys.executable, "-c", program, reader.path], check=True, timeout=60)
    reader.poll()
    clock.advance(4.0)
    found = reader.standstill(is_stopped=False)
    assert (found.step, found.phase) == (3, "backward")

"""Marks become spans only when they can be read."""

from fake_clock import FakeClock

from harness.domain.record import Sample, Span
from harness.measure.recorder import Recorder


class LateClock(FakeClock):
    """A clock whose marks can be read a while after they were taken, as a GPU's."""

    def __init__(self):
        super().__init__()
        self.passed_s = 0.0

    def is_ready(self, mark):
        return mark <= self.passed_s

    def settle(self):
        self.passed_s = self.now_s


def test_a_span_has_its_start_duration_and_step():
    clock = FakeClock()
    recorder = Recorder(clock)
    recorder.step = 7
    clock.advance(2.0)
    with recorder.span("backward", name="all", n_bytes=4):
        clock.advance(0.25)
    recorder.sample("loss", 1.5, part="a")
    assert recorder.collect() == [
        Span(kind="backward", name="all", start_s=2.0, duration_s=0.25, step=7, n_bytes=4),
        Sample(metric="loss", value=1.5, labels={"part": "a"}, step=7),
    ]
    assert recorder.collect() == []


def test_spans_come_in_order_of_their_start():
    clock = FakeClock()
    recorder = Recorder(clock)
    recorder.add_marks("backward", 3.0, 4.0)
    recorder.add_marks("forward", 1.0, 2.0)
    clock.advance(5.0)
    assert [record.kind for record in recorder.collect()] == ["forward", "backward"]


def test_marks_that_are_not_ready_wait_for_the_next_time():
    clock = LateClock()
    recorder = Recorder(clock)
    recorder.add_marks("forward", 0.0, 1.0)
    recorder.add_marks("backward", 1.0, 2.0)
    clock.now_s, clock.passed_s = 2.0, 1.5
    assert [record.kind for record in recorder.collect_ready()] == ["forward"]
    assert [record.kind for record in recorder.collect()] == ["backward"]


def test_a_span_waits_for_its_start_too_which_may_lie_on_another_stream():
    clock = LateClock()
    recorder = Recorder(clock)
    recorder.add_marks("communication", 2.0, 1.0)
    clock.now_s, clock.passed_s = 2.0, 1.5
    assert recorder.collect_ready() == []
    assert [record.kind for record in recorder.collect()] == ["communication"]


def test_what_the_warm_up_left_is_forgotten():
    recorder = Recorder(FakeClock())
    recorder.add_marks("forward", 0.0, 0.0)
    recorder.sample("loss", 1.0)
    recorder.discard()
    assert recorder.collect() == []

"""Spans from marks, columns of one rank's records, and tables of text."""

import numpy as np
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from harness.domain.record import Record, Sample, Span
from harness.measure.derive.spans import StepWindows, covered_s, waited_s
from harness.measure.rank_records import KIND_CODES, Records
from harness.measure.recorder import Recorder
from harness.measure.text import columns, table


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


def test_a_span_whose_streams_passed_its_marks_in_reverse_has_no_duration():
    clock = FakeClock()
    recorder = Recorder(clock)
    clock.advance(4.0)
    recorder.add_marks("backward", 3.0, 2.0)
    (span,) = recorder.collect()
    assert (span.start_s, span.duration_s) == (3.0, 0.0)


def test_what_the_warm_up_left_is_forgotten():
    recorder = Recorder(FakeClock())
    recorder.add_marks("forward", 0.0, 0.0)
    recorder.sample("loss", 1.0)
    recorder.discard()
    assert recorder.collect() == []


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12), st.booleans()), max_size=20
)


@given(STEPS)
def test_steps_taken_together_cover_what_each_does_alone(intervals):
    """Columns of a rank against one step after another; steps may overlap in time."""
    whole = [Span(kind="step", step=step, start_s=5, duration_s=30) for step in range(4)]
    parts: list[Record] = [
        Span(
            kind="communication" if is_wait else "forward",
            is_wait=is_wait,
            step=step,
            start_s=start,
            duration_s=length,
        )
        for step, start, length, is_wait in intervals
    ]
    records = Records([*whole, *parts])
    windows, columns = StepWindows(records.columns), records.columns
    waited = dict(zip(map(id, columns.spans), waited_s(columns).tolist(), strict=True))
    every = np.ones(len(columns.spans), dtype=bool)
    for step, spans in records.by_step.items():
        own = [one for one in spans if one.kind != "step"]
        waits = [one for one in own if one.kind == "communication"]
        chosen = every & (columns.kind != KIND_CODES["step"])
        assert windows.covered_s(chosen)[step] == covered_s(own, whole[step])
        working_s = covered_s(own, whole[step]) - covered_s(waits, whole[step])
        assert windows.working_s(chosen)[step] == working_s
        for one in own:
            assert waited[id(one)] == covered_s(waits, one)


def test_a_rank_without_spans_has_no_steps():
    assert Records([]).by_step == {}


def test_columns_are_aligned_to_the_left():
    text = columns(["run", "step"], [["ddp", "1.5 ms"], ["single", "20 ms"]])
    assert text == "run     step\nddp     1.5 ms\nsingle  20 ms"


def test_numbers_stand_to_the_right_under_a_rule():
    assert table(["op", "bytes"], [["conv", "10"], ["fc", "-"]]) == [
        "op    bytes",
        "-----------",
        "conv     10",
        "fc        -",
    ]

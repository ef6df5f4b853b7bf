"""Columns of one rank's records give what its records give one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.domain.record import Record, Span
from harness.measure.derive.spans import StepWindows, covered_s, waited_s
from harness.measure.rank_records import KIND_CODES, Records

STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 12), st.booleans()),
    max_size=20,
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

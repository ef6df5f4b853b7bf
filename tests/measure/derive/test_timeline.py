"""Steps of ranks whose clocks stand apart by a known offset, and what is warned of beside them."""

import msgspec
import pytest
from made_runs import run_of

from harness.domain.prediction import Prediction
from harness.domain.record import Sample, Span
from harness.measure.derive.devices import unpublished_peaks
from harness.measure.derive.doubts import stolen_shares, stolen_warnings
from harness.measure.derive.spans import phase_table
from harness.measure.derive.steps import step_times
from harness.measure.derive.timeline import (
    clock_offsets,
    measured_timeline,
    median_step,
    predicted_timeline,
)
from harness.measure.store import Run


def rank(offset_s, *starts_and_durations):
    """One rank: its clock's offset, and a step with a forward pass of half its length each."""
    records = []
    if offset_s is not None:
        records = [
            Sample(metric="clock_offset_s", value=offset_s),
            Sample(metric="clock_offset_error_s", value=abs(offset_s) / 1000),
        ]
    for step, (start_s, duration_s) in enumerate(starts_and_durations):
        records += [
            Span(kind="step", step=step, start_s=start_s, duration_s=duration_s),
            Span(kind="forward", step=step, start_s=start_s, duration_s=duration_s / 2),
        ]
    return records


def test_a_rank_that_a_strategy_leaves_out_neither_begins_the_step_nor_is_shown():
    idle = [
        Sample(metric="clock_offset_s", value=0.0),
        Sample(metric="clock_offset_error_s", value=0.0),
        Span(kind="step", step=0, start_s=2.0, duration_s=0.001),
    ]
    timeline = measured_timeline(run_of(rank(0.0, (10, 4)), rank(0.0, (11, 3)), idle))
    starts = {rank: spans[0].start_s for rank, spans in timeline.spans.items()}
    assert starts == {0: 0.0, 1: 1.0}


def test_offsets_are_subtracted_and_their_largest_error_is_stated():
    timeline = measured_timeline(run_of(rank(0.0, (10, 4)), rank(100.0, (111, 3))))
    # On rank 0's clock rank 1 starts at 11, a second after rank 0.
    assert [spans[0].start_s for spans in timeline.spans.values()] == [0.0, 1.0]
    assert timeline.clock_error_s == pytest.approx(0.1)
    assert timeline.duration_s == 4.0


def test_clocks_that_were_not_measured_count_from_each_ranks_own_start():
    timeline = measured_timeline(run_of(rank(0.0, (10, 4)), rank(None, (500, 3))))
    assert timeline.clock_error_s is None
    assert [spans[0].start_s for spans in timeline.spans.values()] == [0.0, 0.0]
    assert list(clock_offsets(run_of(rank(0.0), rank(None)))) == [0]


def test_the_step_of_median_duration_is_shown():
    timeline = measured_timeline(run_of(rank(0.0, (0, 9), (10, 1), (20, 3))))
    assert (timeline.step, timeline.duration_s) == (2, 3.0)
    assert timeline.spans[0][0].start_s == 0.0
    assert median_step({0: 2.0, 1: 1.0}) == 1  # the lower of two
    assert median_step({}) is None


def test_a_step_without_details_is_not_shown_but_timed():
    long = [(20.0 * step, 9.0) for step in range(1001)] + [(20.0 * 1001, 1.0)] * 1001
    records = [r for r in rank(0.0, *long) if r.step != 1001 or r.kind == "step"]
    bare = [r for r in records if not (isinstance(r, Span) and r.step > 1001 and r.kind != "step")]
    timeline = measured_timeline(run_of(bare))
    # Of 1,001 short steps 100 have details.
    assert (timeline.step, timeline.duration_s) == (450, 9.0)
    table = phase_table(bare)
    assert table.steps.tolist() == [*range(1001), *range(1010, 2002, 10)]
    assert len(step_times(run_of(bare))) == 2002


def test_a_run_without_a_finished_step_has_no_timeline():
    unfinished = Span(kind="forward", step=0, start_s=0, duration_s=1)
    assert measured_timeline(run_of([unfinished])) is None


def test_a_prediction_is_a_timeline_without_error():
    spans = {"10": [Span(kind="forward", step=0, start_s=0.0, duration_s=1.0)], "2": []}
    prediction = Prediction(strategy="ddp", method="builder", step_s=2.0, spans=spans)
    timeline = predicted_timeline(prediction)
    assert (timeline.step, timeline.clock_error_s, list(timeline.spans)) == (None, 0.0, [10])


def disturbed(run_id, *shares, status="ok"):
    """A run of one rank on each of hosts a and b, of whose time these shares were stolen."""
    samples = [[Sample(metric="cpu_stolen_share", value=share)] for share in shares]
    info = {"device": "cpu", "device_kind": "CPU"}
    return run_of(*samples, hosts="ab", run_id=run_id, info=info, status=status)


def shares_of(*runs):
    return [(run, stolen_shares(run)) for run in runs]


def test_each_host_has_its_share():
    assert stolen_shares(disturbed("r", 0.0, 0.25)) == {"a": 0.0, "b": 0.25}


def test_the_worst_of_disturbed_runs_is_named():
    runs = [disturbed("r0", 0.01, 0.02), disturbed("r1", 0.03, 0.21), disturbed("r2", 0.05, 0.04)]
    (line,) = stolen_warnings(shares_of(*runs))
    assert line.startswith("in 2 of 3 runs a hypervisor gave more than 2% of a host's")
    assert "(most: 21% on b in r1)" in line


def test_quiet_and_older_runs_are_not_warned_of():
    assert stolen_warnings(shares_of(disturbed("r0", 0.0, 0.02), disturbed("older"))) == []
    assert stolen_warnings(shares_of(disturbed("failed", 0.5, 0.5, status="crash"))) == []


def test_a_gpu_without_a_published_peak_is_named():
    run = disturbed("r", 0.0, 0.0)
    assert unpublished_peaks([run]) == []  # a CPU has none to know
    infos = [
        msgspec.structs.replace(info, device="cuda:0", device_kind=kind, peak_flops_per_s=peaks)
        for info, kind, peaks in zip(
            run.header.ranks, ("GTX 680", "Tesla P4"), ({}, {"fp32": 5.5e12}), strict=True
        )
    ]
    header = msgspec.structs.replace(run.header, ranks=infos)
    (line,) = unpublished_peaks([Run(path=run.path, header=header, ranks={})] * 2)
    assert line.startswith("no published peak of 'GTX 680' is known")

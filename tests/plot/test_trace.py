"""Traces against the rules of the Trace Event Format, and what they say of a run."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import defaultdict
from typing import Any

import pytest

from harness.domain.prediction import PREDICTION_FILE, Prediction
from harness.domain.record import Span
from harness.plot.__main__ import main
from harness.plot.trace import TraceEvents, _flows

Event = dict[str, Any]


def trace_of(run_dir, out):
    assert main(["trace", str(run_dir), "-o", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def trace(planned, tmp_path_factory):
    return trace_of(planned / "pipeline-0", tmp_path_factory.mktemp("trace") / "t.json")


def threads(events):
    by_thread: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_thread[event["pid"], event["tid"]].append(event)
    return by_thread


def names(trace, what):
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == what
    }


def test_every_event_has_what_its_phase_needs(trace):
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["ph"] in ("M", "X", "s", "f")
        if event["ph"] == "X":
            assert event["name"]
            assert event["cat"]
            assert event["dur"] >= 0
        elif event["ph"] in ("s", "f"):
            assert isinstance(event["id"], int)


def test_no_two_events_of_a_thread_overlap(trace):
    for events in threads(trace["traceEvents"]).values():
        # Whole nanoseconds: the microseconds of a float hold them exactly enough to round back.
        times = sorted(
            (round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3))
            for event in events
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))


def test_nodes_are_processes_and_ranks_have_a_row_for_each_kind(trace):
    processes = list(names(trace, "process_name").values())
    nodes = [f"tesla{i}" for i in range(5)]
    assert processes == [*nodes, *(f"predicted: {node}" for node in nodes)]
    rows = set(names(trace, "thread_name").values())
    assert {"rank 3 step", "rank 3 work", "rank 3 communication"} <= rows
    numbers = [tid for _, tid in names(trace, "thread_name")]
    assert len(numbers) == len(set(numbers))


def test_every_span_is_there_in_microseconds(trace, planned):
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    n_predicted = sum(
        len(spans)
        for spans in Prediction.load(planned / "pipeline-0" / PREDICTION_FILE).spans.values()
    )
    records = [
        line
        for path in (planned / "pipeline-0").glob("rank*.jsonl")
        for line in path.read_text().splitlines()
        if json.loads(line)["type"] == "span"
    ]
    assert len(slices) == len(records) + n_predicted
    step = next(event for event in slices if event["name"] == "step 1")
    assert step["dur"] == pytest.approx(trace["otherData"]["median_step_us"], abs=1e-3)


def test_ranks_stand_on_one_clock_and_its_error_is_stated(trace):
    starts = [event["ts"] for event in trace["traceEvents"] if event.get("name") == "step 1"]
    assert len(starts) == 5  # the predicted step is step 0
    # Clocks stand 1000 s apart; the stages begin a step within 18 ms, as the first one is filled.
    assert max(starts) - min(starts) < 18e3
    facts = trace["otherData"]
    assert facts["clocks"] == "clocks aligned to ± 400 us"
    assert facts["clock_offsets"]["rank 2"] == {"offset_us": 2e9, "error_us": pytest.approx(200)}
    labels = [e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels"]
    assert labels == ["clocks aligned to ± 400 us"] * 5 + ["beside step 1"] * 5


def test_the_predicted_step_begins_with_the_measured_median_one(trace, planned):
    processes = names(trace, "process_name")
    predicted = {pid for (pid, _), name in processes.items() if name.startswith("predicted")}
    steps = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
    start = min(event["ts"] for event in steps if event["pid"] in predicted)
    measured = min(e["ts"] for e in steps if e["name"] == "step 1" and e["pid"] not in predicted)
    assert start == pytest.approx(measured, abs=1e-2)
    prediction = Prediction.load(planned / "pipeline-0" / PREDICTION_FILE)
    assert trace["otherData"]["predicted_step_us"] == prediction.step_s * 1e6


def test_arrows_lead_from_the_senders_pass_into_the_wait(trace):
    slices = threads(trace["traceEvents"])
    ends: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in ("s", "f"):
            ends[event["id"]][event["ph"]] = event
    assert ends
    for pair in ends.values():
        source, target = (_holding(slices, pair[ph]) for ph in ("s", "f"))
        assert (
            source["name"] == "forward stage1 #0"
        )  # every wait of the fixture names rank 1's first pass
        assert target["name"].startswith("wait ")
        assert source["ts"] < target["ts"] + target["dur"]


def test_no_arrow_leaves_after_it_arrives():
    """A pass of which parts went out early: one ended before the wait did, one while it ran on."""
    for parts, leaving in (
        ([(0.0, 1.0), (2.0, 5.0)], (0.0, 1.0)),
        ([(1.0, 6.0)], (1.0, 4.0)),
        ([(0.0, 1.0), (2.0, 4.05)], (2.0, 4.0)),  # as long as clocks tell
    ):
        events = TraceEvents()
        sender = [
            Span(kind="forward", stage=0, microbatch=0, start_s=a * 1e-3, duration_s=(b - a) * 1e-3)
            for a, b in parts
        ]
        wait = [
            Span(
                kind="communication",
                microbatch=0,
                pass_="forward",
                peer=0,
                is_wait=True,
                start_s=1e-3,
                duration_s=3e-3,
            )
        ]
        slices = [(0, item) for item in events.add_rank(1, 0, sender)]
        slices += [(1, item) for item in events.add_rank(2, 1, wait)]
        ((sent, waited),) = _flows(slices, error_s=1e-4)
        events.add_flow(sent, waited)
        left, arrived = events.events[-2:]
        assert (sent.start_ns / 1e6, pytest.approx(left["ts"] / 1e3, abs=1e-5)) == leaving
        assert left["ts"] <= arrived["ts"] == pytest.approx(4e3, abs=1e-2)


def _holding(slices, end):
    (found,) = (
        event
        for event in slices[end["pid"], end["tid"]]
        if event["ts"] <= end["ts"] < event["ts"] + event["dur"]
    )
    return found


def test_a_run_without_prediction_or_clocks_is_a_trace_as_well(comparison, tmp_path):
    found = trace_of(comparison / "ddp-160-0", tmp_path / "deep" / "t.json")
    assert list(names(found, "process_name").values()) == [f"tesla{i}" for i in range(5)]
    assert found["otherData"]["clocks"].startswith("clocks not measured: step ")
    assert "predicted_step_us" not in found["otherData"]


def test_what_cannot_be_traced_is_said(planned, tmp_path, capsys):
    assert main(["trace", str(planned)]) == 2
    assert "give one run's directory" in capsys.readouterr().err
    assert main(["trace", str(planned / "tensor-0"), "-o", str(tmp_path / "t.json")]) == 2
    assert "holds no finished step" in capsys.readouterr().err
    root = tmp_path / "run"
    shutil.copytree(planned / "ddp-0", root)
    (root / PREDICTION_FILE).write_text("{")
    found = trace_of(root, tmp_path / "t.json")
    assert f"skipped {root / PREDICTION_FILE}" in capsys.readouterr().err
    assert "predicted_step_us" not in found["otherData"]

"""Changes of strategy and published steps: derived, read beside runs, and drawn."""

from pathlib import Path
from types import SimpleNamespace

from made_runs import run_of

from harness.domain.prediction import ValidatedPoint, Validation
from harness.domain.record import Record, Sample, Span
from harness.measure.derive.changes import change_rows
from harness.measure.derive.steps import change_times, step_times
from harness.measure.derive.training import training_summary
from harness.measure.store import Run, find_runs
from harness.plot.catalog import Catalog, read_validations
from harness.plot.figures import changes, validation
from harness.plot.numbers import RunNumbers
from harness.plot.render import image_bytes


def step(number, duration_s):
    return Span(kind="step", step=number, start_s=float(number), duration_s=duration_s)


def sample(metric, value, change=0, **labels):
    return Sample(metric=metric, value=value, step=3, labels={"change": change, **labels})


RECORDS: list[Record] = [
    *(step(number, 0.5) for number in range(3)),
    *(step(number, 0.1) for number in range(3, 8)),
    sample("cache_received_bytes", 512),
    sample("change_s", 2.0, before="ddp", after="pipeline", why="--change 3:next.json"),
    sample("change_predicted_s", 1.5),
    sample("change_build_s", 4.0),
    sample("change_step_predicted_s", 0.4, side="before"),
    sample("change_step_predicted_s", 0.2, side="after"),
    sample("change_bytes", 1000, source=0, target=1),
    sample("change_bytes", 3000, source=2, target=1),
    sample("change_predicted_bytes", 4000, source=2, target=1),
]
RUN = Run(path=Path("run"), header=SimpleNamespace(), ranks={0: RECORDS})  # type: ignore[arg-type]


def test_a_change_stands_between_the_steps_before_and_after():
    (change,) = change_rows(RUN)
    assert (change.before, change.after, change.why) == ("ddp", "pipeline", "--change 3:next.json")
    assert (change.still_s, change.predicted_still_s, change.build_s) == (2.0, 1.5, 4.0)
    assert (change.step_before_s, change.step_after_s) == (0.5, 0.1)
    assert (change.predicted_before_s, change.predicted_after_s) == (0.4, 0.2)
    assert change.moved_bytes == {(0, 1): 1000, (2, 1): 3000}
    assert change.break_even_steps == 5  # 2 s over 0.4 s a step


def test_changes_at_one_step_keep_their_own_numbers():
    failed = sample("cache_received_bytes", 9.0, change=1)
    second = [
        sample("cache_received_bytes", 7.0, change=2),
        sample("change_s", 0.5, change=2, before="pipeline", after="tensor", why="drift"),
        sample("change_build_s", 3.0, change=2),
        sample("change_step_predicted_s", 0.2, change=2, side="before"),
        sample("change_bytes", 70, change=2, source=0, target=1),
    ]
    filled = [sample("cache_received_bytes", 100.0)]
    run = run_of([*second, failed, *RECORDS], filled)  # in any order
    first, then = change_rows(run)
    assert (first.still_s, first.build_s, first.moved_bytes[0, 1]) == (2.0, 4.0, 1000)
    assert (then.still_s, then.build_s, then.moved_bytes) == (0.5, 3.0, {(0, 1): 70})
    assert (first.cached_bytes, then.cached_bytes) == (612, 7)
    assert (first.predicted_still_s, then.predicted_still_s) == (1.5, None)
    # No step was trained by the strategy in between.
    assert (first.step_before_s, first.step_after_s, first.break_even_steps) == (0.5, None, None)
    assert (then.step_before_s, then.step_after_s) == (None, 0.1)
    assert change_times(run) == {3: 2.5}
    summary = training_summary(run)
    assert summary.duration is not None
    assert round(summary.duration.median, 9) == round((3 * 0.5 + 5 * 0.1 + 2.5) / 8, 9)
    numbers = RunNumbers(
        path=run.path, header=run.header, times=step_times(run), changes=change_rows(run)
    )
    assert round(numbers.reached_s()[3], 9) == 3 * 0.5 + 2.5 + 0.1


def test_the_figure_has_a_row_for_each_change():
    run = SimpleNamespace(changes=change_rows(RUN), header=SimpleNamespace(run_id="a-train"))
    case = SimpleNamespace(runs=[run])
    named = {"label": "lenet · ddp", "status": "ok", "reason": ""}
    training = SimpleNamespace(named=named, case=case)
    table = changes.FIGURE.table(SimpleNamespace(training=[training]))  # type: ignore[arg-type]
    (row,) = table.to_dict("records")
    assert (row["label"], row["step"], row["why"]) == ("lenet · ddp", 3, "--change 3:next.json")
    assert (row["moved_bytes"], row["predicted_bytes"], row["cached_bytes"]) == (4000, 4000, 512)
    assert row["busiest_pair"] == "2 to 1: 2.93 KiB"
    drawn = image_bytes(changes.FIGURE, table, "svg")[0]
    assert b"the slowest link moves its bytes" in drawn
    assert b"3.91 KiB + 512 B of activations" in drawn


def point(name, measured_s, calibrates=""):
    return ValidatedPoint(
        name=name,
        cell="gpt",
        samples=8,
        measured_s=measured_s,
        predicted_s=1.5,
        fits=True,
        predicted_bytes=0,
        calibrates=calibrates,
    )


SET = Validation(
    set="amp",
    n_points=3,
    n_expressed=2,
    median_error=0.5,
    p90_error=0.5,
    spearman=None,
    regret=None,
    source_median_error=None,
    trivial_median_error=None,
    not_expressed={"calibrates the others": 1},
    points=[point("tp2", 1.0), point("tp4", None), point("dp2", 1.5, "gives the bandwidth")],
)


def test_files_beside_runs_are_read_and_malformed_ones_named(tmp_path):
    (tmp_path / "validation-amp.json").write_bytes(SET.to_json())
    (tmp_path / "validation-bad.json").write_text("{")
    found, problems = read_validations(tmp_path)
    assert found == [SET]
    assert [path.name for path, _ in problems] == ["validation-bad.json"]
    assert find_runs(tmp_path) == ([], [])


def test_every_step_has_a_row_and_a_set_its_panel():
    table = validation.FIGURE.table(Catalog([], [], [SET]))
    assert table["error"].tolist()[0] == 0.5
    assert table["status"].tolist() == ["ok", "failed", "ok"]
    (row,) = validation.FIGURE.report_table(table).to_dict("records")
    assert (row["set"], row["n_points"], row["median_error"]) == ("amp", 1, 0.5)
    drawn = image_bytes(validation.FIGURE, table, "svg")[0]
    assert b"amp: median error 50.0%" in drawn
    for words in (b"judged", b"calibrates: not judged", b"within 10 %", b"exact"):
        assert b"<!-- " + words + b" -->" in drawn
    judged = image_bytes(validation.FIGURE, table[table["judged"]], "svg")[0]
    assert b"calibrates" not in judged  # no such point

"""Changes of strategy: derived from records, and drawn."""

from pathlib import Path
from types import SimpleNamespace

from harness.domain.record import Record, Sample, Span
from harness.measure.derive.changes import change_rows
from harness.measure.store import Run
from harness.plot.figures.changes import FIGURE
from harness.plot.render import image_bytes


def step(number, duration_s):
    return Span(kind="step", step=number, start_s=float(number), duration_s=duration_s)


def sample(metric, value, **labels):
    return Sample(metric=metric, value=value, step=3, labels=labels)


RECORDS: list[Record] = [
    *(step(number, 0.5) for number in range(3)),
    *(step(number, 0.1) for number in range(3, 8)),
    sample("change_s", 2.0, before="ddp", after="pipeline", why="--change 3:next.json"),
    sample("change_predicted_s", 1.5),
    sample("change_build_s", 4.0),
    sample("change_step_predicted_s", 0.4, side="before"),
    sample("change_step_predicted_s", 0.2, side="after"),
    sample("change_bytes", 1000, source=0, target=1),
    sample("change_bytes", 3000, source=2, target=1),
    sample("change_predicted_bytes", 4000, source=2, target=1),
    sample("cache_received_bytes", 512),
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


def test_the_figure_has_a_row_for_each_change():
    run = SimpleNamespace(changes=change_rows(RUN), header=SimpleNamespace(run_id="a-train"))
    case = SimpleNamespace(runs=[run])
    named = {"label": "lenet · ddp", "status": "ok", "reason": ""}
    training = SimpleNamespace(named=named, case=case)
    table = FIGURE.table(SimpleNamespace(training=[training]))  # type: ignore[arg-type]
    (row,) = table.to_dict("records")
    assert (row["label"], row["step"], row["why"]) == ("lenet · ddp", 3, "--change 3:next.json")
    assert (row["moved_bytes"], row["predicted_bytes"], row["cached_bytes"]) == (4000, 4000, 512)
    assert row["busiest_pair"] == "2 to 1: 2.93 KiB"
    drawn = image_bytes(FIGURE, table, "svg")[0]
    assert b"the slowest link moves its bytes" in drawn
    assert b"3.91 KiB + 512 B of activations" in drawn

"""The time of a training that several runs took, in parts."""

from itertools import chain

from made_runs import run_of

from harness.domain.record import Sample, Span
from harness.measure.derive.goodput import continued_runs, goodput, step_clock
from harness.plot.catalog import Catalog
from harness.plot.figures import goodput as figure
from harness.plot.numbers import RunNumbers
from harness.plot.render import image_bytes
from harness.plot.report import format_value


def trained(run_id, begun, steps, *others, continues=""):
    """A run whose steps take a second each, with half a second between them."""
    spans = [
        Span(kind="step", step=step, start_s=3.0 + 1.5 * at, duration_s=1.0)
        for at, step in enumerate(steps)
    ]
    return run_of(
        [*spans, *others],
        run_id=run_id,
        start_utc=f"2026-01-01T00:{begun}+00:00",
        config={"continues": continues, "survive": True},
    )


def sample(metric, step, value):
    return Sample(metric=metric, step=step, value=value)


FIRST = trained("a", "00:00", range(10), sample("save_s", 3, 0.25), sample("save_s", 9, 9.0))
CHANGES = sample("change_s", 7, 9.0), sample("change_s", 8, 0.2)
SECOND = trained("b", "00:30", range(7, 12), *CHANGES, continues="a")
CLOCKS = {run.header.run_id: step_clock(run) for run in (FIRST, SECOND)}


def test_runs_that_continue_each_other_are_in_order():
    third = trained("c", "00:50", [], continues="b")
    other = trained("d", "00:50", [], continues="not there")
    headers = [run.header for run in (third, other, SECOND, FIRST)]
    assert continued_runs(headers) == [("a", "b", "c"), ("d",)]


def test_steps_count_once_and_all_parts_sum_to_the_time():
    """The first step begins at 3 s, the first run's last one ends at 17.5 s; the second run's steps
    are those from 33 to 40 s."""
    found = goodput(("a", "b"), CLOCKS)
    assert (found.n_steps, found.n_repeated) == (12, 3)
    assert (found.wall_s, found.steps_s, found.repeated_s) == (37.0, 12.0, 3.0)
    assert found.restarting_s == 15.5
    assert (found.saving_s, found.changing_s) == (0.25, 0.2)  # not those between the runs
    assert round(found.other_s, 6) == 37 - 12 - 3 - 15.5 - 0.45
    assert round(found.share, 6) == round(12 / 37, 6)


def test_a_step_is_trained_again_by_any_later_run():
    """The third run begins at step 5, before the second one."""
    third = step_clock(trained("c", "00:50", range(5, 12), continues="b"))
    found = goodput(("a", "b", "c"), CLOCKS | {"c": third})
    assert (found.n_steps, found.n_repeated, found.steps_s) == (12, 10, 12.0)


def test_a_step_counts_that_rank_0_did_not_live_to_record():
    """Rank 1, whose clock is 100 s ahead, has recorded step 2 too; the next run goes on at 3."""

    def step(number, start_s):
        return Span(kind="step", step=number, start_s=start_s, duration_s=1.0)

    offsets = [sample("clock_offset_s", None, 100.0), sample("clock_offset_error_s", None, 0.0)]
    lost = run_of(
        [step(number, 2.0 * number) for number in range(2)],
        [*offsets, *(step(number, 100 + 2.0 * number + 0.25) for number in range(3))],
        run_id="a",
        config={"survive": True},
    )
    clock = step_clock(lost)
    assert clock is not None
    begun_s = clock.steps[0][0]
    assert [start_s - begun_s for start_s, _ in clock.steps.values()] == [0.0, 2.0, 4.25]
    then = trained("b", "00:30", range(3, 5), continues="a")
    found = goodput(("a", "b"), {"a": clock, "b": step_clock(then)})
    assert (found.n_steps, found.n_repeated, found.steps_s) == (5, 0, 5.0)
    assert found.restarting_s == 33 - 5.25


def test_a_rank_that_idles_has_trained_no_step():
    """Rank 0 idles from step 2 on, and is two steps ahead when another is lost in step 4."""

    def step(number, duration_s, *kinds):
        return [
            Span(kind=kind, step=number, start_s=10.0 * number, duration_s=duration_s)
            for kind in ("step", *kinds)
        ]

    computing = [step(number, 8.0, "forward", "optimizer") for number in range(4)]
    idle = [step(2, 0.5, "optimizer"), *(step(number, 0.5) for number in range(3, 6))]
    ranks = [[*computing[:2], *idle], computing]
    lost = run_of(*map(list, map(chain.from_iterable, ranks)), run_id="a", config={"survive": True})
    then = trained("b", "00:50", range(4, 6), continues="a")
    found = goodput(("a", "b"), {"a": step_clock(lost), "b": step_clock(then)})
    assert (found.n_steps, found.n_repeated, found.steps_s) == (6, 0, 34.0)


def test_a_run_without_saves_and_changes_has_none():
    clocks = {"a": step_clock(trained("a", "00:00", range(3)))}
    assert goodput(("a",), clocks) is None
    assert goodput(("a",), {"a": step_clock(trained("a", "soon", range(3)))}) is None
    assert goodput(("b",), {"b": step_clock(trained("b", "00:00", []))}) is None
    assert step_clock(run_of([Span(kind="step", step=0, start_s=0.0, duration_s=1.0)])) is None


def test_a_clock_that_was_set_back_has_no_goodput():
    later, earlier = trained("a", "50:00", range(3)), trained("b", "00:00", [3], continues="a")
    assert goodput(("a", "b"), {"a": step_clock(later), "b": step_clock(earlier)}) is None
    # A second host's clock is behind by less than the runs take.
    behind = trained("b", "00:10", range(7, 12), continues="a")
    assert goodput(("a", "b"), {"a": CLOCKS["a"], "b": step_clock(behind)}) is None


def test_the_figure_has_a_bar_for_each_training():
    from harness.measure.derive.training import training_summary

    runs = [
        RunNumbers(
            path=run.path,
            header=run.header,
            summary=training_summary(run),
            clock=CLOCKS[run.header.run_id],
        )
        for run in (FIRST, SECOND)
    ]
    table = figure.FIGURE.table(Catalog(runs))
    (row,) = table.to_dict("records")
    assert (row["runs"], row["n_repeated"], row["status"]) == ("a b", 3, "ok")
    assert b"32% of 37 s" in image_bytes(figure.FIGURE, table, "svg")[0]
    hours = table.assign(wall_s=12345.0)
    assert b"32% of 12345 s" in image_bytes(figure.FIGURE, hours, "svg")[0]
    assert format_value("goodput", row["goodput"]) == "32.4%"

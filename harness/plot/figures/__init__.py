"""The figures, in the order of the report: one module each, imported when it is drawn.

A figure is a pure table of results, and a drawing of that table only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from harness.plot.style import Axes as Axes
from harness.plot.style import Canvas as Canvas
from harness.plot.style import note_cut

if TYPE_CHECKING:
    import pandas as pd

    from harness.plot.catalog import Catalog, RepeatGroup, TrainingCase

FIGURES = {
    "throughput": "Training throughput by strategy",
    "step_breakdown": "Where the time of a step goes",
    "scaling": "Strong and weak scaling efficiency",
    "batches": "Time to the same loss by batch",
    "prediction": "Predicted against measured step time",
    "prediction_choice": "Regret of the predicted choice",
    "prediction_error": "Prediction error by part of the step",
    "validation": "Predicted against published steps of GPU clusters",
    "timeline": "One step of every rank, predicted and measured",
    "changes": "Changes of strategy while training",
    "goodput": "Goodput: steps that count in the time of a training",
    "pipeline_bubble": "Pipeline bubble",
    "stage_times": "Time of each pipeline stage",
    "step_time": "Time of every step",
    "loss": "Loss by step and by time",
    "memory": "Peak memory",
    "matmul": "Matrix multiplication on each device",
    "memory_bandwidth": "Memory bandwidth of each device",
    "summa": "One matrix product over all devices",
    "bandwidth": "Bandwidth against message size",
    "link_heatmap": "Links between every pair of ranks",
    "device_load": "Device load and temperature over time",
}


Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One entry of FIGURES.

    Attributes:
        caption: explains the drawing to a reader who has not seen the code.
        better: which way is better, such as "higher is better"; empty when neither is.
        needs: the command that makes the data, shown when there is none.
        rows: every number that is drawn, one row each; columns end in their units. Rows that are
            not ok are there too, without numbers.
        draw: draws the table into an empty figure and sets its size.
        name, title: by `FIGURES`.
        measured: columns without any value of which there is nothing to draw.
        columns: all of the table, where it is drawn even if no row has some of them.
        digest: a shorter table for the report, when the table has a row per step or so.
        unit: columns that identify a drawn element, such as a bar.
        most: limit of drawn units, so that a figure stays readable.
    """

    caption: str
    better: str
    needs: str
    rows: Callable[[Catalog], Rows]
    draw: Callable[[pd.DataFrame, Canvas], None]
    name: str = ""
    title: str = ""
    measured: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None
    digest: Callable[[pd.DataFrame], pd.DataFrame] | None = None
    unit: tuple[str, ...] = ("label",)
    most: int = 48

    def table(self, catalog: Catalog) -> pd.DataFrame:
        """The rows; none where there is nothing to draw."""
        import pandas as pd

        frame = pd.DataFrame(self.rows(catalog), columns=self.columns)
        known = [name for name in self.measured if name in frame]
        return frame if not self.measured or frame[known].notna().any(axis=None) else frame.iloc[:0]

    def draw_most(self, table: pd.DataFrame, canvas: Canvas) -> None:
        """Draw as many units as can be read, ok ones first, and say how many there are."""
        numbers = table.groupby(list(self.unit), sort=False, dropna=False).ngroup()
        is_ok = table["status"] == "ok"
        order = list(dict.fromkeys([*numbers[is_ok], *numbers[~is_ok]]))
        self.draw(table[numbers.isin(order[: self.most])], canvas)
        note_cut(canvas, self.most, len(order), "entries")

    def report_table(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table as the report shows it."""
        return self.digest(table) if self.digest else table


def of_training(rows: Callable[[TrainingCase], Rows]) -> Callable[[Catalog], Rows]:
    """The rows of every training case."""
    return partial(_training_rows, rows)  # which a worker can unpickle


def _training_rows(rows: Callable[[TrainingCase], Rows], catalog: Catalog) -> Rows:
    return [row for case in catalog.training for row in rows(case)]


def of_workload(name: str, rows: Callable[[RepeatGroup], Rows]) -> Callable[[Catalog], Rows]:
    """The rows of every case of a workload; one that is not ok has a row without numbers."""
    return partial(_workload_rows, name, rows)


def _workload_rows(name: str, rows: Callable[[RepeatGroup], Rows], catalog: Catalog) -> Rows:
    cases = catalog.cases(name)
    return [row for case in cases for row in (rows(case) if case.is_ok else [case.identity])]


def load_figure(name: str) -> Figure:
    figure: Figure = import_module(f"{__name__}.{name}").FIGURE
    return replace(figure, name=name, title=FIGURES[name])

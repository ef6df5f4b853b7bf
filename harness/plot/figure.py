"""What a figure is: a pure table of results, and a drawing of that table alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as Canvas

    from harness.plot.catalog import Catalog


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One entry of FIGURES.

    Attributes:
        caption: what is drawn, in words for somebody who has not read the code.
        better: which way is better, such as "higher is better"; empty when neither is.
        needs: what makes the data, shown when there is none.
        table: every number that is drawn, one row each; columns end in their units. Rows that are
            not ok are there too, without numbers.
        draw: draws the table into an empty figure and sets its size.
        digest: a shorter table for the report, when the table has a row per step or so.
    """

    name: str
    title: str
    caption: str
    better: str
    needs: str
    table: Callable[[Catalog], pd.DataFrame]
    draw: Callable[[pd.DataFrame, Canvas], None]
    digest: Callable[[pd.DataFrame], pd.DataFrame] | None = None

    def report_table(self, table: pd.DataFrame) -> pd.DataFrame:
        """The table as the report shows it."""
        return self.digest(table) if self.digest else table

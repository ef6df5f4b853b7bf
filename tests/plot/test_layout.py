"""Figures have room for what is written into them, and say what they leave out."""

from itertools import pairwise

import pandas as pd
import pytest

from harness.measure.store import find_runs
from harness.plot.catalog import read_catalog
from harness.plot.figures import load_figure
from harness.plot.render import image_bytes
from harness.plot.style import draw_bar_panels, label_bars


def test_a_figure_draws_what_can_be_read_and_says_how_much_there_is(comparison):
    figure = load_figure("throughput")
    table = figure.table(read_catalog(*find_runs(comparison))).iloc[:1]
    many = pd.concat([table.assign(label=f"case {n}") for n in range(5000)], ignore_index=True)
    many.loc[:4900, "status"] = "crash"
    few = image_bytes(figure, many.iloc[4890:4910], "svg")
    (image,) = image_bytes(figure, many, "svg")
    assert b"48 of 5000 entries; all are in the table" in image
    assert b"case 4901" in image  # ok ones first
    assert b"case 4860" not in image
    assert len(image) < 5 * len(few[0])


LONG = " · ".join("a setting that differs" for _ in range(10))


@pytest.mark.parametrize(("label", "is_taller"), [("ddp", False), (LONG, True)])
def test_a_panel_grows_where_its_labels_have_many_lines(label, is_taller):
    from matplotlib.figure import Figure  # not in every worker, which collects all tests

    canvas = Figure(layout="constrained")
    groups = [(name, pd.DataFrame(index=range(6))) for name in ("first", "second")]
    _, second = draw_bar_panels(canvas, groups, lambda axes, name, rows: None)
    before = canvas.get_figheight()
    label_bars(second, [label] * 6)
    assert (canvas.get_figheight() > before) == is_taller
    canvas.draw_without_rendering()
    boxes = [tick.get_window_extent() for tick in second.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))

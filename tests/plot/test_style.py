"""Figures have room for what is written into them."""

from itertools import pairwise

import pandas as pd
import pytest

from harness.plot.style import draw_bar_panels, label_bars

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

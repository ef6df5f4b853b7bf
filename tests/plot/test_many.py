"""Results of many runs: figures stay readable, and say what they leave out."""

import pandas as pd

from harness.measure.store import find_runs
from harness.plot.catalog import read_catalog
from harness.plot.figures import load_figure
from harness.plot.render import image_bytes


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

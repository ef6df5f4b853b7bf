"""The report in headless Chromium, at 1280 and at 400 px; figures have room for their texts."""

import json
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from launching import completed

from harness.measure.store import find_runs
from harness.plot.__main__ import main
from harness.plot.catalog import read_catalog
from harness.plot.figures import load_figure
from harness.plot.render import image_bytes
from harness.plot.style import draw_bar_panels, joint_legend, label_bars, note_failures

SAMPLES = Path(__file__).parents[2] / "results"
HEIGHT = 800
# Reports in frames, because a window is at least 500 px wide, and all in one window, because each
# takes a second to open. The script is outside the frames: a report's policy allows none.
FRAME = '<iframe style="width: {width}px; height: 800px; border: 0" srcdoc="{report}"></iframe>'
PAGE = """<!doctype html>
{frames}
<pre id="probe"></pre><script>
const measure = frame => {{
  const page = frame.contentDocument;
  const shown = [...page.querySelectorAll(".sentence, #strategies .answer *, #warnings *")]
    .filter(e => e.checkVisibility() && (!e.closest("details") || e.closest("summary")));
  const boxes = shown.map(e => e.getBoundingClientRect());
  return {{
    width: frame.contentWindow.innerWidth,
    page_width: page.documentElement.scrollWidth,
    right: Math.max(...boxes.map(box => box.right)),
    bottom: Math.max(...boxes.map(box => box.bottom)),
    texts: shown.map(e => e.textContent),
    is_folded: [...page.querySelectorAll("#warnings details")].every(e => !e.open),
  }};
}};
onload = () => {{
  const measured = [...document.querySelectorAll("iframe")].map(measure);
  document.querySelector("pre").textContent = JSON.stringify(measured);
}};
</script>"""
VIEWS = [(name, width) for name in ("sample", "failed") for width in (1280, 400)]


class Probed(HTMLParser):
    """The JSON that the script wrote into `#probe`."""

    def __init__(self, html):
        super().__init__()
        self.json, self._is_inside = "", False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._is_inside = ("id", "probe") in attrs

    def handle_data(self, data):
        self.json += data if self._is_inside else ""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """Opens a page; returns its document and the lines of its console."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("Chromium is missing: apt-get install chromium")
    if subprocess.run([path, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{path} does not start: apt-get install chromium")
    profile = tmp_path_factory.mktemp("profile")

    def open_page(page):
        flags = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--user-data-dir={profile}", f"--window-size=1280,{HEIGHT}"),
            *("--enable-logging=stderr", "--v=0", "--dump-dom"),
        ]
        done = completed(path, *flags, page.as_uri(), timeout_s=240)
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, "\n".join(console)

    return open_page


@pytest.fixture(scope="module")
def reports(planned, tmp_path_factory):
    """Of the committed sample, with a longer name of its model, too, and of runs of which one
    failed."""
    out = tmp_path_factory.mktemp("reports")
    found = {}
    for name, root in (("sample", SAMPLES), ("failed", planned)):
        only = ("--only", "throughput", "timeline")
        assert main([str(root), "--output", str(out / name), *only]) == 0
        found[name] = out / name / "report.html"
    found["long"] = out / "long.html"
    page = found["sample"].read_text()
    found["long"].write_text(page.replace("dlrm", "package.of_modules.models:make_the_transformer"))
    return found


def open_frames(pages_and_widths, place, open_page):
    """What is measured of each report, and the console's lines of all."""
    frames = [
        FRAME.format(width=width, report=escape(page.read_text()))
        for page, width in pages_and_widths
    ]
    place.write_text(PAGE.format(frames="\n".join(frames)))
    html, console = open_page(place)
    return json.loads(Probed(html).json), console


@pytest.fixture(scope="module")
def opened(reports, chromium, tmp_path_factory):
    views = [(reports[name], width) for name, width in [*VIEWS, ("long", 400)]]
    return open_frames(views, tmp_path_factory.mktemp("page") / "page.html", chromium)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def test_answer_table_and_warnings_are_on_the_first_screen(view, opened):
    measured, width = opened[0][VIEWS.index(view)], view[1]
    assert measured["width"] == width
    assert measured["page_width"] <= width
    assert measured["right"] <= width
    assert measured["bottom"] <= HEIGHT
    texts = "\n".join(measured["texts"])
    for shown in ("No verdict yet: ", "verdict", "inconclusive", "baseline", "Outlier steps ("):
        assert shown in texts
    assert measured["is_folded"]


def test_the_name_of_a_users_model_is_broken_into_lines(opened):
    assert opened[0][-1]["page_width"] <= 400


def test_the_console_has_no_errors(opened):
    assert opened[1] == ""


def test_a_script_in_the_report_is_refused_on_the_console(reports, chromium, tmp_path):
    """The report's policy holds, and the lines that the test above looks for are seen."""
    changed = tmp_path / "changed.html"
    script = "<script>document.body.textContent = 'ran'</script>"
    changed.write_text(reports["failed"].read_text().replace("</body>", f"{script}</body>"))
    (measured,), console = open_frames([(changed, 1280)], tmp_path / "page.html", chromium)
    assert any("No verdict yet" in text for text in measured["texts"])
    assert "Content Security Policy" in console


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


def test_failures_and_a_legend_take_no_room_from_the_bars():
    from matplotlib.figure import Figure

    canvas = Figure(layout="constrained")
    rows = pd.DataFrame({"label": [f"run {k}" for k in range(6)]})
    (axes,) = draw_bar_panels(canvas, [("model", rows)], lambda axes, name, rows: None)
    label_bars(axes, ["first line of a label, long · its second line, as long · and its third"] * 6)
    for name in "abcdef":
        axes.barh(0, 1, label=name * 80)
    joint_legend(canvas, [axes], n_columns=3)
    note_failures(canvas, rows.assign(status="crash", reason="killed"))
    canvas.draw_without_rendering()
    boxes = [tick.get_window_extent() for tick in axes.get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))

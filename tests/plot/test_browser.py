"""The report in headless Chromium: its first screen at 1280 and at 400 px, and its console."""

import json
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.plot.__main__ import main

SAMPLES = Path(__file__).parents[2] / "results"
HEIGHT = 800
# The report in a frame, because a window is at least 500 px wide. The script is outside the frame,
# because the report's policy allows none.
FRAME = """<!doctype html>
<iframe style="width: {width}px; height: 800px; border: 0" srcdoc="{report}"></iframe>
<pre id="probe"></pre><script>
onload = () => {{
  const frame = document.querySelector("iframe");
  const page = frame.contentDocument;
  const shown = [...page.querySelectorAll(".sentence, #strategies .answer *, #warnings *")]
    .filter(e => e.checkVisibility() && (!e.closest("details") || e.closest("summary")));
  const boxes = shown.map(e => e.getBoundingClientRect());
  document.querySelector("pre").textContent = JSON.stringify({{
    width: frame.contentWindow.innerWidth,
    page_width: page.documentElement.scrollWidth,
    right: Math.max(...boxes.map(box => box.right)),
    bottom: Math.max(...boxes.map(box => box.bottom)),
    texts: shown.map(e => e.textContent),
    is_folded: [...page.querySelectorAll("#warnings details")].every(e => !e.open),
  }});
}};
</script>"""


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
        done = subprocess.run(
            [path, *flags, page.as_uri()], capture_output=True, text=True, timeout=240, check=True
        )
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return done.stdout, "\n".join(console)

    return open_page


@pytest.fixture(scope="module")
def reports(planned, tmp_path_factory):
    """Of the committed sample, and of runs of which one failed."""
    out = tmp_path_factory.mktemp("reports")
    found = {}
    for name, root in (("sample", SAMPLES), ("failed", planned)):
        only = ("--only", "throughput", "timeline")
        assert main([str(root), "--out", str(out / name), *only]) == 0
        found[name] = out / name / "report.html"
    return found


def measure(page, width, open_page):
    """The size of the page, and of what is shown of the answer and of the warnings."""
    frame = page.with_name(f"frame{width}.html")
    frame.write_text(FRAME.format(width=width, report=escape(page.read_text())))
    measured: dict[str, Any] = json.loads(Probed(open_page(frame)[0]).json)
    return measured


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["sample", "failed"])
def test_answer_table_and_warnings_are_on_the_first_screen(name, width, reports, chromium):
    measured = measure(reports[name], width, chromium)
    assert measured["width"] == width
    assert measured["page_width"] <= width
    assert measured["right"] <= width
    assert measured["bottom"] <= HEIGHT
    texts = "\n".join(measured["texts"])
    for shown in ("No verdict yet: ", "verdict", "inconclusive", "baseline", "Outlier steps ("):
        assert shown in texts
    assert measured["is_folded"]


def test_the_console_has_no_errors(reports, chromium):
    assert [chromium(page)[1] for page in reports.values()] == ["", ""]


def test_a_script_in_the_report_is_refused_on_the_console(reports, chromium):
    """The report's policy holds, and the lines that the test above looks for are seen."""
    page = reports["failed"]
    changed = page.with_name("changed.html")
    script = "<script>document.body.textContent = 'ran'</script>"
    changed.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    html, console = chromium(changed)
    assert "No verdict yet" in html
    assert "Content Security Policy" in console

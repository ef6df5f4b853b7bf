"""README.md and docs/: every relative link leads somewhere, and lists are whole."""

import re

import pytest
from launching import ROOT

from harness.plot.figures import FIGURES
from harness.virtual.lifecycle import KINDS

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
    if not path.relative_to(ROOT).parts[0].startswith(".")
)
# The target of [text](target) or ![text](target), without a title.
_LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def broken_links(page):
    """Relative links of a page whose file, or whose heading in it, does not exist."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    return [link for link in links if not _leads_somewhere(page, link)]


def _leads_somewhere(page, link):
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    if not target.exists():
        return False
    return not anchor or anchor in _anchors(target)


def _anchors(page):
    """Headings as GitHub names them: lower case, without punctuation, spaces as hyphens."""
    headings = _HEADING.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_files_and_headings(page):
    assert broken_links(page) == []


def test_link_to_a_missing_file_or_heading_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A b?\n[1](page.md) [2](#a-b) [3](none.md) [4](page.md#c) [5](https://x.y)\n")

    assert broken_links(page) == ["none.md", "page.md#c"]


def test_readme_has_at_most_120_lines():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_page_of_the_report_names_every_figure():
    text = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert [name for name in FIGURES if f"\n| `{name}` |" not in text] == []


def test_the_page_of_virtual_clusters_names_every_fault():
    text = (ROOT / "docs" / "design" / "virtual-cluster.md").read_text(encoding="utf-8")
    assert [kind for kind in KINDS if f"\n| `{kind}` |" not in text] == []

"""The page of readings, made from benchmarks/figures/."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def readings(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import readings

    yield readings
    sys.modules.pop("readings", None)


def test_latest_row_of_a_name_counts_in_the_place_of_the_first(readings):
    rows = [{"name": "a", "n": 1}, {"name": "b", "n": 2}, {"other": 0}, {"name": "a", "n": 3}]

    assert readings.latest(rows, "name") == [{"name": "a", "n": 3}, {"name": "b", "n": 2}]


def test_bar_within_a_cell_does_not_end_it(readings):
    assert readings.table(["a", "b"], [["1|2", "3"]]) == "| a | b |\n| --- | --- |\n| 1/2 | 3 |\n"


def test_comparison_shows_its_latest_ratio_with_interval_and_pairs(readings, monkeypatch, tmp_path):
    (tmp_path / "x.jsonl").write_text(
        '{"name": "n", "ratio": 2, "low": 1, "high": 3, "n_pairs": 4, "commit": "0123456789"}\n'
        '{"name": "n", "ratio": 1.5, "low": 1.25, "high": 2, "n_pairs": 8, "commit": "abcdef012"}\n'
        '{"name": "once", "ratio": 1, "low": 1, "high": 1, "n_pairs": 1, "commit": "abcdef012"}\n'
    )
    monkeypatch.setattr(readings, "FIGURES", tmp_path)

    assert list(readings.comparisons()) == [
        ["x", "n", "1.5", "1.25 to 2 (8)", "abcdef0"],
        ["x", "once", "1", "", "abcdef0"],
    ]


def test_page_in_docs_is_made_from_the_figures_in_the_tree(readings):
    page = (ROOT / "docs/readings.md").read_text(encoding="utf-8")

    assert page == readings.page(), "run: python benchmarks/readings.py >docs/readings.md"

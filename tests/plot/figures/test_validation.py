"""Published steps: read beside runs, and drawn."""

from harness.domain.validation import ValidatedPoint, Validation
from harness.measure.store import find_runs
from harness.plot.catalog import Catalog, read_validations
from harness.plot.figures.validation import FIGURE
from harness.plot.render import image_bytes


def point(name, measured_s, calibrates=""):
    return ValidatedPoint(
        name=name,
        cell="gpt",
        samples=8,
        measured_s=measured_s,
        predicted_s=1.5,
        fits=True,
        predicted_bytes=0,
        calibrates=calibrates,
    )


SET = Validation(
    set="amp",
    n_points=3,
    n_expressed=2,
    median_error=0.5,
    p90_error=0.5,
    spearman=None,
    regret=None,
    source_median_error=None,
    trivial_median_error=None,
    not_expressed={"calibrates the others": 1},
    points=[point("tp2", 1.0), point("tp4", None), point("dp2", 1.5, "gives the bandwidth")],
)


def test_files_beside_runs_are_read_and_malformed_ones_named(tmp_path):
    (tmp_path / "validation-amp.json").write_bytes(SET.to_json())
    (tmp_path / "validation-bad.json").write_text("{")
    found, problems = read_validations(tmp_path)
    assert found == [SET]
    assert [path.name for path, _ in problems] == ["validation-bad.json"]
    assert find_runs(tmp_path) == ([], [])


def test_every_step_has_a_row_and_a_set_its_panel():
    table = FIGURE.table(Catalog([], [], [SET]))
    assert table["error"].tolist()[0] == 0.5
    assert table["status"].tolist() == ["ok", "failed", "ok"]
    (row,) = FIGURE.report_table(table).to_dict("records")
    assert (row["set"], row["n_points"], row["median_error"]) == ("amp", 1, 0.5)
    assert b"amp: median error 50.0%" in image_bytes(FIGURE, table, "svg")[0]

"""The published sets, where they lie beside the project."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.plan.commands import main

DATA = Path(__file__).parents[4] / "shared/data/gpu_clusters"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gpu_clusters")


def validated(capsys: pytest.CaptureFixture[str], *args: object) -> list[dict[str, object]]:
    assert main(["validate", "--json", *map(str, args)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def sample_of(source: Path, target: Path, *keep: str) -> None:
    """Copy the header and the rows that contain one of some texts."""
    head, *rows = source.read_text(encoding="utf-8-sig").splitlines()
    target.write_text(
        "\n".join([head, *(row for row in rows if any(text in row for text in keep))]) + "\n"
    )


def test_vtrain_predicts_other_layouts_from_pure_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [f",{batch},1,1024,16,{n},1024," for batch in (4, 8) for n in (12, 24)]
    sample_of(DATA / "vtrain/ground_truth_single.csv", tmp_path / "iterations.csv", *kept)
    shutil.copytree(DATA / "vtrain/trace", tmp_path / "trace")
    (found,) = validated(capsys, tmp_path)
    assert (found["n_points"], found["n_expressed"]) == (62, 46)
    assert found["median_error"] < 0.02
    assert found["p90_error"] < 0.05
    assert found["regret"] < 0.01  # type: ignore[operator]


def test_tesla_machines_are_better_used_one_by_one_at_batch_16(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (found,) = validated(capsys, DATA / "scalable_vit_dt/tesla")
    assert found["set"] == "scalable_vit_dt"
    assert (found["n_points"], found["n_expressed"]) == (16, 10)
    assert found["median_error"] < 0.05
    assert found["regret"] == 0


def test_pollux_needs_the_bandwidth_of_one_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cifar10"
    folder.mkdir()
    sample_of(DATA / "pollux/cifar10/placements.csv", folder / "placements.csv", ",129,")
    (found,) = validated(capsys, tmp_path)
    assert found["not_expressed"] == {"calibrates the others": 2}
    assert found["median_error"] < 0.09
    assert found["p90_error"] < 0.25


def test_a_folder_without_a_set_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", str(tmp_path)]) == 2
    assert "holds no data set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cell", "message"), [("nan", "write a number"), ("0", "above 0"), ("1,2", "cells")]
)
def test_a_bad_cell_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cell: str, message: str
) -> None:
    folder = tmp_path / "resnet"
    folder.mkdir()
    (folder / "p.csv").write_text(f"placement,local_bsz,step_time,sync_time\n1,8,{cell},0\n")
    assert main(["validate", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err

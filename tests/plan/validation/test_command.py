"""The published sets, where they lie beside the project, and scores of predictions."""

import json
import shutil
from pathlib import Path

import pytest

from harness.measure.statistics import rank_correlation
from harness.plan.validation.command import percentile_error, regret_of
from harness.plan.validation.points import fit_amounts, solve_all

DATA = Path(__file__).parents[4] / "shared/data/gpu_clusters"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data/gpu_clusters")


@pytest.fixture
def validated(printed):
    return lambda folder: json.loads(printed("validate --json", folder).out)


def sample_of(source, target, *keep):
    """Copy the header and the rows that contain one of some texts."""
    head, *rows = source.read_text(encoding="utf-8-sig").splitlines()
    target.write_text(
        "\n".join([head, *(row for row in rows if any(text in row for text in keep))]) + "\n"
    )


def test_vtrain_predicts_other_layouts_from_pure_ones(tmp_path, validated):
    kept = [f",{batch},1,1024,16,{n},1024," for batch in (4, 8) for n in (12, 24)]
    sample_of(DATA / "vtrain/ground_truth_single.csv", tmp_path / "iterations.csv", *kept)
    shutil.copytree(DATA / "vtrain/trace", tmp_path / "trace")
    found = validated(tmp_path)
    assert (found["n_points"], found["n_expressed"]) == (62, 46)
    assert found["median_error"] < 0.02
    assert found["p90_error"] < 0.05
    assert found["regret"] < 0.01


def test_tesla_machines_are_better_used_one_by_one_at_batch_16(validated):
    found = validated(DATA / "scalable_vit_dt/tesla")
    assert found["set"] == "scalable_vit_dt"
    assert (found["n_points"], found["n_expressed"]) == (16, 8)
    assert found["median_error"] < 0.05
    assert found["regret"] == 0


def test_unlike_gpus_need_a_run_on_one_of_each_kind(tmp_path, validated):
    # Seconds of an epoch of 100, 10, 50, 5, 25 and 34 steps.
    runs = {
        "1_GPU/p1_b500_e1": (100, "A"),
        "1_GPU/p0.1_b500_e1": (30, "B"),
        "2_GPUs/p1_b500_e1": (60, "AA"),
        "2_GPUs/p0.1_b500_e1": (7, "AA"),  # the same step again
        "2_GPUs/p0.5_b500_e1": (80, "AB"),
        "3_GPUs/p1_b500_e1": (60, "AAC"),
    }
    for name, (seconds, kinds) in runs.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        rows = [f"{rank},1,{seconds},0,{kind}" for rank, kind in enumerate(kinds)]
        header = "Rank,Epoch,Computation_Time,GPU_ID,GPU_Name"
        (folder / "metrics.csv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "2_GPUs/p1_b500_e1").rename(tmp_path / "2_GPUs/p1_b500_e1_r1")
    shutil.copytree(tmp_path / "1_GPU/p1_b500_e1", tmp_path / "1_GPU/alone")
    found = validated(tmp_path)
    assert "left out: 1 metrics.csv whose directories are not named" in found["notes"][-1]
    assert found["not_expressed"] == {
        "calibrates the others": 4, "no run on one C has its batch on this cluster": 1}  # fmt: skip
    # 3 s of B and 0.2 s of synchronisation, which the pair of A shows.
    assert found["median_error"] == pytest.approx(0, abs=1e-6)


def test_pollux_needs_two_placements(tmp_path, validated):
    folder = tmp_path / "cifar10"
    folder.mkdir()
    sample_of(DATA / "pollux/cifar10/placements.csv", folder / "placements.csv", ",129,")
    found = validated(tmp_path)
    assert found["not_expressed"] == {"calibrates the others": 3}
    assert "4 GPUs of a node compute 6% slower; 1+1+1+1 GPUs give" in found["notes"][0]
    assert found["median_error"] < 0.09
    assert found["p90_error"] < 0.25


@pytest.mark.parametrize(
    ("name", "keep", "n_expressed", "most", "fewest_failures"),
    [
        (
            "amp",
            ("het_model,1,8", "het_model,2,8", "homogeneous,4,4,", "homogeneous,1,8"),
            9,
            0.2,
            4,
        ),
        ("sailor", ("/N1/", "/N2/"), 3, 0.1, 0),
        ("torchgpipe", (",",), 16, 0.15, 0),
        ("pipetransformer", (",",), 15, 0.15, 0),
    ],
)
def test_bars_of_other_sets(tmp_path, validated, name, keep, n_expressed, most, fewest_failures):
    for path in (DATA / name).iterdir():
        if path.suffix == ".csv":
            sample_of(path, tmp_path / path.name, *keep)
        else:
            (tmp_path / path.name).symlink_to(path)
    found = validated(tmp_path)
    assert (found["set"], found["n_expressed"]) == (name, n_expressed)
    assert found["median_error"] < most
    assert found["n_failed_called"] >= fewest_failures


def test_all_chunks_of_gpipe_but_the_last_run_forward_again(tmp_path, validated):
    # A sample takes 1 s forward and 2 s backward; two stages of a pipeline divide that.
    steps = {
        "baseline,1,1,": 3.0,
        "pipeline1,2,2,9": 2 * 4 - 1,
        '"pipeline2",2,2,"4,5"': (3 * 4 - 1) / 2,
        '"always2",2,1,"4,5"': 2 * 4,
    }
    rows = ["model,experiment,batch,chunks,layers_per_partition,samples_per_s"]
    for words, step_s in steps.items():
        rows.append(f"m,{words},{int(words.split(',')[1]) / step_s}")
    (tmp_path / "points.csv").write_text("\n".join(rows))
    found = validated(tmp_path)
    assert found["n_expressed"] == 3
    assert found["p90_error"] == pytest.approx(0, abs=1e-6)


def test_a_choice_that_failed_is_said_beside_the_regret(tmp_path, validated):
    (tmp_path / "known_cost").symlink_to(DATA / "amp/known_cost")
    sample_of(DATA / "amp/trials.csv", tmp_path / "trials.csv", "homogeneous,1,16,1,2")
    assert (
        "homogeneous: assumed, because no layout without a pipeline ran: 0 ms of"
        in (validated(tmp_path)["notes"][0])
    )
    sample_of(DATA / "amp/trials.csv", tmp_path / "trials.csv", "homogeneous,1,16", "ous,4,4,1")
    assert validated(tmp_path)["missing"][-1] == (
        "the predicted fastest of homogeneous, tp1 dp16 pp1 microbatch 2, failed: its regret is "
        "that of runs that ran"
    )


@pytest.mark.parametrize(
    ("name", "keep", "was", "now", "why"),
    [
        ("amp", ("ous,4,4,1", "ous,1,8,2"), "0,15,30", "0,15,31",
         "its partition is of 31 layers, gpt2 has 30"),
        ("sailor", ("/N1/", "N2_D2"), ",2,2,32,", ",2,2,33,",
         "its batch is no multiple of its microbatches"),
        ("sailor", ("/N1/", "N2_D2"), "/OPT-350/", "/O**T/",
         "no times of microbatch 1 at tp 4 of O**T on GH-96"),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_its_model_is_not_judged(
    tmp_path, validated, name, keep, was, now, why
):
    for path in (DATA / name).iterdir():
        if path.suffix == ".csv":
            sample_of(path, tmp_path / path.name, *keep)
            text = (tmp_path / path.name).read_text()
            assert was in text
            (tmp_path / path.name).write_text(text.replace(was, now))
        else:
            (tmp_path / path.name).symlink_to(path)
    assert validated(tmp_path)["not_expressed"][why] > 0


def test_a_prediction_of_the_source_may_be_in_milliseconds(tmp_path, validated):
    (tmp_path / "known_cost").symlink_to(DATA / "amp/known_cost")
    trials = tmp_path / "trials.csv"
    sample_of(DATA / "amp/trials.csv", trials, "homogeneous,1,8,2", "homogeneous,4,4,1,1")
    theirs = validated(tmp_path)["source_median_error"]
    head, *rows = trials.read_text().splitlines()
    scaled = []
    for row in rows:
        before, predicted, after = row.rsplit(",", 2)
        scaled.append(f"{before},{1e3 * float(predicted)},{after}")
    trials.write_text("\n".join([head.replace("predicted_s", "predicted_ms"), *scaled]))
    assert validated(tmp_path)["source_median_error"] == pytest.approx(theirs)


def test_one_layer_of_neusight_stands_for_all(tmp_path, validated):
    source = DATA / "neusight/label/Tesla_V100-PCIE-32GB"
    for name in ("bert_large-train-512-8.csv", "bert_large-train-512-8.json"):
        (tmp_path / name).symlink_to(source / name)
    (tmp_path / "bert_large-inf-512-8.json").symlink_to(source / "bert_large-inf-512-8.json")
    found = validated(tmp_path)
    assert found["not_expressed"] == {"no table of its operators (inf)": 1}
    assert found["median_error"] < 0.08


def test_lines_may_end_with_a_carriage_return(tmp_path, validated):
    text = (DATA / "torchgpipe/points.csv").read_text()
    (tmp_path / "points.csv").write_bytes(text.replace("\n", "\r").encode())
    assert validated(tmp_path)["n_points"] == 19


def test_two_folders_of_one_set_would_be_written_into_one_file(tmp_path, refused):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.csv").write_text("placement,local_bsz,step_time\n1,8,1\n")
    folders = (tmp_path / "a", tmp_path / "b")
    said = refused("validate", *folders, "--output", tmp_path / "out")
    assert "2 directories hold pollux, and --output gets one file for each set" in said


def repeated(target, *rows):
    """Write a table, twice: once with its rows in reverse."""
    head, *rows = (row.strip() for row in rows)
    for name, own in (("there", rows), ("back", rows[::-1])):
        path = target / name / "cifar10" / "points.csv"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join([head, *own]) + "\n")
        yield path.parent


@pytest.mark.parametrize(
    "rows",
    [
        ("placement,local_bsz,step_time", "1,8,0.1", "1,8,0.3", "4,8,0.4", "1111,8,0.5",
         "44,8,0.6"),
        ("model,experiment,batch,chunks,layers_per_partition,samples_per_s",
         'm,n2,8,2,"4,5",10', 'm,n2,8,2,"4,5",14', 'm,n3,8,2,"3,3,3",15'),
        ("global_batch,pipe_length,chunks_over_pipe_length,images_per_s",
         "400,2,1,120", "400,2,1,160", "400,4,1,200"),
    ],
)  # fmt: skip
def test_runs_that_repeat_a_calibrating_one_count_by_their_median(tmp_path, validated, rows):
    there, back = (validated(folder) for folder in repeated(tmp_path, *rows))
    assert there["n_expressed"] == 1
    assert sum(there["not_expressed"].values()) == len(rows) - 2
    assert {**there, "notes": back["notes"]} == back


def test_placements_without_a_calibration_are_not_judged(tmp_path, validated):
    head = "placement,local_bsz,step_time"
    folders = repeated(tmp_path, head, "1,8,0.1", "2,8,0.2", "4,8,0.3", "22,8,0.2")
    found = validated(next(folders))
    assert found["n_expressed"] == 1
    assert found["not_expressed"] == {
        "calibrates the others": 2,
        "no row with one GPU on each node gives the bandwidth": 1,
    }
    (tmp_path / "there/cifar10/points.csv").write_text(f"{head}\n1,8,0.1\n11,8,0.1\n22,8,0.2\n")
    found = validated(tmp_path / "there")
    assert found["not_expressed"]["no row with several GPUs of one node gives their times"] == 1
    assert "1+1 GPUs give 1e+03 GB/s or more between nodes" in found["notes"][0]


def test_a_step_time_may_be_in_milliseconds(tmp_path, validated, refused):
    head, *rows = "placement,local_bsz,step_time", "1,8,{}1", "4,8,{}3", "11,8,{}2", "44,8,{}4"
    found = []
    for unit, whole, more in (("", "0.", ""), ("_ms", "", "00"), (" (ms)", "", "00")):
        each = [row.format(whole) + more for row in rows]
        (folder, _) = repeated(tmp_path / f"in{unit}", head + unit, *each)
        found.append(validated(folder))
    assert found[0]["n_expressed"] == 1
    assert found == found[:1] * 3
    table = folder / "points.csv"
    table.write_text(table.read_text().replace("step_time (ms)", "steps"))
    assert "has no column 'step_time', only 'placement, local_bsz, steps'" in refused(
        "validate", folder
    )


def test_the_working_directory_is_named_by_its_path(tmp_path, validated, monkeypatch):
    (folder,) = [*repeated(tmp_path, "placement,local_bsz,step_time", "1,8,0.1")][:1]
    monkeypatch.chdir(folder)
    assert "ResNet18 (cifar10)" in validated(".")["notes"][0]


def test_a_bad_set_is_refused_before_others_are_predicted(tmp_path, printed, refused):
    head = "global_batch,pipe_length,chunks_over_pipe_length,images_per_s\n"
    for name in "abc":
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.csv").write_text(f"{head}400,2,1,120\n")
    found = printed("validate --json", tmp_path).out.splitlines()
    assert [json.loads(line)["set"] for line in found] == [
        f"pipetransformer in {tmp_path / name}" for name in "abc"
    ]
    (tmp_path / "c/p.csv").write_text(f"{head}400,2,1,OOM\n")
    said = refused("validate --json", tmp_path)
    assert f"{tmp_path}/c/p.csv:2: images_per_s is 'OOM': write a number" in said
    assert "leave out the row of a run that failed" in said


def test_a_set_lies_beside_directories_of_others(tmp_path, printed):
    (folder,) = [*repeated(tmp_path, "placement,local_bsz,step_time", "1,8,0.1")][:1]
    (folder / "pipes").mkdir()
    (folder / "pipes/p.csv").write_text(
        "global_batch,pipe_length,chunks_over_pipe_length,images_per_s\n400,2,1,120\n"
    )
    found = printed("validate --json", folder).out.splitlines()
    assert [json.loads(line)["set"] for line in found] == ["pollux", "pipetransformer"]


def test_vtrain_names_what_stands_in_for_curves(tmp_path, validated, refused):
    (tmp_path / "i.csv").write_text(
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
        "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
        "1,16,8,1024,16,24,1024,1,1,1,742.5\n"
    )
    config = tmp_path / "config.json"
    config.write_text('{"gpu_name": "H100", "intra_node_bandwidth": 450}')
    assert (
        f"assumed: 450 GB/s within a node, as {tmp_path}/trace/h100 has no AR_GPU* curve"
        in validated(tmp_path)["notes"]
    )
    config.write_text('{"node_size": 0}')
    assert "config.json" in refused("validate", tmp_path)


def test_a_folder_without_a_set_is_refused(tmp_path, refused):
    assert "holds no data set" in refused("validate", tmp_path)


@pytest.mark.parametrize(
    ("cell", "message"), [("nan", "write a number"), ("0", "above 0"), ("1,2", "cells")]
)
def test_a_bad_cell_is_named(tmp_path, refused, cell, message):
    folder = tmp_path / "resnet"
    folder.mkdir()
    (folder / "p.csv").write_text(f"placement,local_bsz,step_time,sync_time\n1,8,{cell},0\n")
    assert message in refused("validate", tmp_path)


def test_scores_of_a_hand_sized_cell():
    pairs = [(1.0, 2.0), (2.0, 1.0), (3.0, 4.0), (4.0, 4.0)]  # predicted, measured
    assert percentile_error(pairs, 50) == pytest.approx(0.375)
    assert regret_of(pairs) == 1.0
    assert rank_correlation([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_runs_of_one_choice_count_by_their_mean():
    assert regret_of([(1.0, 1.0), (1.0, 3.0), (2.0, 1.6)]) == pytest.approx(2.0 / 1.6 - 1)
    assert regret_of([(1.0, 1.0), (1.0, 3.0)]) is None


def test_a_term_that_would_be_negative_is_left_out():
    assert fit_amounts([[1, 1], [2, 1]], [3, 5]) == pytest.approx([2, 1])
    assert fit_amounts([[1, 1], [2, 1]], [3, 7])[1] == 0


def test_bisection_finds_the_bandwidth_and_stops_at_a_bound():
    assert solve_all(lambda _, rate: 10 / rate, [2.0], 0.1, 100) == pytest.approx(5)
    assert solve_all(lambda _, rate: 10 / rate, [1e-9], 0.1, 100) == pytest.approx(100)

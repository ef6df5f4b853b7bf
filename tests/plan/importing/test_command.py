"""`python -m harness.plan import` and `predict --layout`, from files to a step."""

import json

import pytest

from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.plan.__main__ import main

TIMES = """\
layer,tp,microbatch,forward_s,backward_s,parameter_bytes,output_bytes
a,1,2,1,2,100,50
b,1,2,1,2,100,50
a,2,2,0.75,1.5,100,50
b,2,2,0.75,1.5,100,50
"""
CURVE = "size(B),time(ms)\n100,250\n200,500\n"


@pytest.fixture
def imported(tmp_path, capsys):
    (tmp_path / "gpt.csv").write_text(TIMES)
    (tmp_path / "gpus_2.csv").write_text(CURVE)
    words = ["--layer-times", tmp_path / "gpt.csv", "--collectives", tmp_path / "gpus_2.csv"]
    words += ["--topology", "1x4", "--memory", "1GB", "--output", tmp_path]
    assert main(["import", *map(str, words)]) == 0
    said = capsys.readouterr().out
    assert "every link has 4e-07 GB/s, by all-reduce of 2" in said
    assert "taken off by the cluster" in said
    return tmp_path


def test_collectives_are_taken_off_and_predicted_again(imported, capsys):
    profile = Profile.load(imported / "profile-gpt.json")
    # Two devices exchange 100 B at 400 B/s: 0.25 s after a, and before b for the gradient.
    found = [(p.forward_s, p.backward_s) for p in profile.measurements if "heads" in p.shape]
    assert found == [(0.5, 1.5), (0.75, 1.25)]
    step = predicted(imported, capsys, "tp=2", "--batch-size", 2)
    assert step["step_s"] == pytest.approx(4.5)
    assert step["strategy"]["operators"]["a"]["devices"] == [0, 1]


def test_pipeline_of_a_layout_fills_and_drains(imported, capsys):
    words = ("--batch-size", 4, "--microbatches", 2, "--schedule", "gpipe")
    step = predicted(imported, capsys, "pp=2,cuts=1", *words)
    # Three slots of forward and of backward, and 0.25 s of transfer in each.
    assert step["step_s"] == pytest.approx(3 * 3 + 2 * 0.25)


@pytest.mark.parametrize(
    "times",
    [
        "backward_s;forward_s\r\n50;2;a;1;2;1\r\n",
        "Backward (ms);Forward_us\r\n50;2;a;1;2000;1000000\r\n",
    ],
)
def test_columns_may_stand_in_any_order_in_capitals_in_other_units_parted_by_semicolons(
    tmp_path, capsys, times
):
    text = "Output_Bytes;microbatch;LAYER;tp;" + times
    (tmp_path / "gpt.csv").write_bytes(text.encode())
    words = ["--layer-times", str(tmp_path / "gpt.csv"), "--output", str(tmp_path)]
    assert main(["import", *words]) == 0
    (point,) = Profile.load(tmp_path / "profile-gpt.json").measurements
    assert (point.forward_s, point.backward_s) == (1, 2)
    graph = Graph.load(tmp_path / "profile-gpt.graph.json")
    assert graph.operators[0].activation_bytes == 50


def predicted(folder, capsys, layout, *words):
    files = ("--profile", folder / "profile-gpt.json", "--cluster", folder / "cluster.json")
    assert main(["predict", "--json", "--layout", layout, *map(str, (*files, *words))]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("a,1,2,1,2,100,50\na,1,2,1,2,100,50", "two times"),
        ("a,1,2,1,2,100,50\na,2,2,1,2,101,50", "other bytes"),
        ("a,1,2,1,2,1,1\nb,1,2,1,2,1,1\na,2,2,1,2,1,1", "has no time"),
        ("a,1,2,-1,2,1,1", "write a number"),
        (",1,2,1,2,1,1", "layer is empty"),
        ("a,1048575,2,1,2,1,1\na,1048573,2,1,2,1,1", "needs 1099507433475 heads, 1048576 are the"),
        ('{"traceEvents": []}', "is JSON, not a table"),
    ],
)
def test_bad_layer_times_are_refused(tmp_path, capsys, rows, message):
    header = "" if rows.startswith("{") else TIMES.splitlines()[0] + "\n"
    (tmp_path / "gpt.csv").write_text(header + rows + "\n")
    words = ["--layer-times", str(tmp_path / "gpt.csv"), "--output", str(tmp_path)]
    assert main(["import", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("ouput_bytes", "a column 'ouput_bytes': is it 'output_bytes'? rename"),
        ("comment", "a column 'comment', which is none of layer, tp"),
        ("output_bytes,Output_Bytes", "column 'output_bytes' twice"),
    ],
)
def test_a_column_that_would_be_ignored_is_refused(tmp_path, capsys, columns, message):
    cells = ",".join("1" * (1 + columns.count(",")))
    text = f"layer,tp,microbatch,forward_s,backward_s,{columns}\na,1,2,1,2,{cells}\n"
    (tmp_path / "gpt.csv").write_text(text)
    words = ["--layer-times", str(tmp_path / "gpt.csv"), "--output", str(tmp_path)]
    assert main(["import", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "flags", "message"),
    [
        ("input_nodes\na,1,2,{}", (), "has a column 'input_nodes': is it '_input_nodes'?"),
        ("_input_nodes\na,1,2,{b: None}\nb,1,2,{}", (), "'a' reads 'b', which is no row above"),
        ("_input_nodes\n,1,2,{}", (), "Name is empty"),
        ("meta\na,1,2,x", ("--n-layers", "0"), "--n-layers is 0: give a number from 1 to 10000"),
        ("meta\na,1,2,x", ("--ranks", "-3"), "--ranks is -3"),
    ],
)
def test_bad_operators_are_refused(tmp_path, capsys, rows, flags, message):
    (tmp_path / "o.csv").write_text(f"Name,fw_latency,bw_latency,{rows}\n")
    words = ["--operators", str(tmp_path / "o.csv"), "--batch-size", "8", "--output", str(tmp_path)]
    assert main(["import", *words, *flags]) == 2
    assert message in capsys.readouterr().err

"""Graphs, plans and strategies as other tools and their forks write them."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.plan.formats.detect import read_strategy_file
from harness.plan.formats.flexflow import parse_text, print_text
from harness.plan.formats.pipedream import PipeDreamPlan, parse_graph_txt

CASES = Path(__file__).parents[1] / "cases" / "graphs"


def entries(name):
    content = read_strategy_file(CASES / name).content
    assert isinstance(content, list)
    return {entry.name: entry for entry in content}


@pytest.mark.parametrize("name", ["d01-ff-tutorial.txt", "d03-ff-old-names.txt"])
def test_flexflows_names_of_operators_say_their_kinds(name):
    found = entries(name)
    assert len(found) == 16
    imported = read_strategy_file(CASES / name)
    assert imported.describe() == (
        "data-parallel MLPs (3 of 7), MLPs (2 of 7) on one device each, feature-parallel MLPs "
        "(2 of 7), tables on one device each"
    )


def test_the_tutorials_lines_mean_what_flexflow_means():
    found = entries("d01-ff-tutorial.txt")
    assert found["Dense_512_100"].cuts() == {"sample": 4, "feature": 1}
    assert found["Dense_1024_114"].cuts() == {"sample": 1, "feature": 2}
    assert found["Dense_1024_114"].devices == (1, 2)


def test_operators_of_later_versions_are_shown():
    found = entries("d05-ff-stage-names.txt")
    assert found["Reshape_106"].shown_cuts()["sample"] == 4
    described = read_strategy_file(CASES / "d05-ff-stage-names.txt").describe()
    assert described == "data-parallel attention, data-parallel convolutions"


@pytest.mark.parametrize(
    ("name", "ranks", "described"),
    [
        ("d11-dp_conf.json", [[0, 1, 2, 3]], "pipeline of 1 stage with 4 replicas"),
        ("d13-no-depth.json", [[0, 1, 2], [3]], "pipeline of 2 stages with 3-1 replicas"),
    ],
)
def test_plans_without_depths_are_taken(name, ranks, described):
    imported = read_strategy_file(CASES / name)
    assert isinstance(imported.content, PipeDreamPlan)
    assert imported.content.ranks() == ranks
    assert imported.describe() == described


def test_numbers_as_names_are_taken():
    text = (CASES / "d26-int-names.txt").read_text()
    found, profile = parse_graph_txt(text, name="g")
    assert [(op.name, op.inputs) for op in found.operators] == [("1", []), ("2", ["1"])]
    assert found.operators[1].parameter_bytes == 80
    assert profile.measurements[1].forward_s == 1e-3


def test_the_layout_of_one_operator_is_found(printed):
    flags = "--cost layouts --topology 1x2 --bandwidth 1e9 --memory 12GB --batch-size 8"
    found = printed("search", flags, "--profile", CASES / "d26-int-names.txt")
    assert "best plan by layouts: 1.5 ms per step" in found.out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("d17-null.json", "has no stages (module_to_stage_map is null"),
        ("d28-nan.txt", "d28-nan.txt:2: forward_compute_time of 'node2' is 'nan': write a number"),
        ("d34-compression.txt", "'compression_ratio=0.5': remove it"),
    ],
)
def test_what_has_no_meaning_here_is_refused_with_what_to_do(name, message, refused):
    assert message in refused("show", CASES / name)


@pytest.mark.parametrize("name", ["d20-gpt2-no-backward.txt", "d32-all-zero.txt"])
def test_a_profile_without_backward_is_shown_and_not_planned_by(name, printed, refused):
    printed("show", CASES / name)
    flags = "--topology 1x2 --bandwidth 1e9 --batch-size 8 --cost pipedream"
    said = refused("search", flags, "--profile", CASES / name)
    assert "has backward_compute_time=0 for every operator" in said
    assert "profile it too" in said


HAND_WRITTEN = (
    b"2\nfc 1\n0\n 2\n1 4\n4\n0 1  2\t3\nemb\n1\n2\n1\t1\n1\n2\n\n\n",
    b"\xef\xbb\xbf1\r\nfc\r\n0\r\n2\r\n1\t1 \r\n1\r\n0\r\n",
    b"1\nfc\n0\n1\n01\n1\n0",
)


@pytest.mark.parametrize("data", HAND_WRITTEN)
def test_hand_written_text_comes_back_but_for_its_spacing(data, tmp_path, printed):
    source, copy = tmp_path / "in", tmp_path / "out"
    source.write_bytes(data)
    printed("convert", source, "--to flexflow-text --output", copy)
    entries = parse_text(data.decode())
    assert parse_text(copy.read_text()) == entries
    assert copy.read_text() == print_text(entries)


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


@pytest.mark.parametrize(
    "numbers", [b"\x12" + varint(10**6) + b"\x02" * 10**6, b"\x10\x02" * 10**6, b"\x10\x01" * 10**6]
)
def test_a_protobuf_of_a_million_dims_is_refused(numbers, tmp_path):
    message = b"\x0a\x01a" + numbers
    path = tmp_path / "strategy.pb"
    path.write_bytes(b"\x0a" + varint(len(message)) + message)
    with pytest.raises(HarnessError, match=r"more than 65536 values|no FlexFlow strategy"):
        read_strategy_file(path)

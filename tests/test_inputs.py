"""Files, text, JSON and numbers that others wrote."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.domain.cluster import Cluster
from harness.errors import ClusterError, ConfigError, GraphError, HarnessError
from harness.inputs import (
    MOST_COUNT,
    decode_text,
    find_int,
    find_number,
    one_line,
    parse_int,
    parse_json,
    parse_number,
    read_file,
    refuse_empty,
    shorten,
)


@pytest.mark.parametrize(("text", "value"), [("0", 0), (" 12\n", 12), ("007", 7), ("+3", 3)])
def test_integers_are_read_from_ascii_digits(text, value):
    assert find_int(text) == value
    assert parse_int(text, "slots") == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "²", "١٢", "1_000", "1.0", "0x10", "-1", "9" * 5000, " " * 10**6 + "x", "9" * 20],
)
def test_other_integers_are_refused(text):
    assert find_int(text) is None
    with pytest.raises(
        ConfigError, match=r"^slots is .{2,60}: write a whole number from 0 to 9007"
    ):
        parse_int(text, "slots")


def test_bounds_hold():
    assert find_int("-3", -3, 5) == -3
    assert find_int("6", -3, 5) is None
    assert find_int(str(MOST_COUNT)) == MOST_COUNT
    assert find_number("1e-30") == 1e-30
    assert find_number("0.0") == 0
    assert find_number("1e-31") is None
    assert find_number("-2.5", -3) == -2.5


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("1.", 1), (".5", 0.5), ("1.5e3", 1500), ("1E-3", 0.001)]
)
def test_numbers(text, value):
    assert parse_number(text, "time") == value


@pytest.mark.parametrize(
    "text", ["", ".", "nan", "inf", "1e308", "1e-320", "1e400", "½", "1,5", "1_0.0", "1" * 5000]
)
def test_other_numbers_are_refused(text):
    with pytest.raises(
        GraphError, match=r"^time is .{2,60}: write a number from 0 to 1e.30; in ms"
    ):
        parse_number(text, "time", error=GraphError, remedy="in ms")


@given(st.text(), st.integers(), st.integers())
def test_an_integer_within_bounds_or_none(text, low, high):
    value = find_int(text, low, high)
    assert value is None or low <= value <= high


@given(st.integers(-(2**70), 2**70))
def test_python_writes_what_is_read(value):
    assert find_int(str(value), -(2**70), 2**70) == value


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"a":' * 5000, "1" * 5000, "NaN", "1e400", "-Infinity", b"\xff\xfe"],
)
def test_json_beyond_bounds_is_refused_in_one_line(text):
    with pytest.raises(ConfigError, match=r"^state is not JSON that can be read") as caught:
        parse_json(text, "state")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@given(st.text() | st.binary())
def test_json_ends_in_a_value_or_in_the_error(text):
    with suppress(GraphError):
        parse_json(text, "state", GraphError)


def test_text_is_what_a_mark_says_and_its_lines_end_alike():
    assert decode_text(b"a\r\nb\rc\n", "f") == "a\nb\nc\n"
    for codec in ("utf-8", "utf-8-sig", "utf-16"):
        assert decode_text("h\u00e9\n".encode(codec), "f") == "h\u00e9\n"
    with pytest.raises(ConfigError, match=r"^f is not UTF-8 at byte 1: save it"):
        decode_text(b"a\xff", "f")


@given(st.binary())
def test_bytes_are_text_or_refused(data):
    with suppress(HarnessError):
        assert "\r" not in decode_text(data, "f")


def test_files_are_bounded(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert read_file(path, "graph file", at_most=5) == b"12345"
    with pytest.raises(GraphError, match=r"graph file .*f has more than 0 MiB"):
        read_file(path, "graph file", GraphError, at_most=4)
    with pytest.raises(GraphError, match="directory"):
        read_file(tmp_path, "graph file", GraphError)
    with pytest.raises(GraphError, match="No such file"):
        read_file(tmp_path / "missing", "graph file", GraphError)
    with pytest.raises(ConfigError, match="null"):
        read_file(Path("a\0b"), "graph file")


def test_a_pipe_is_read_where_a_flag_names_it(tmp_path):
    pipe = tmp_path / "cluster.json"
    os.mkfifo(pipe)
    with pytest.raises(ClusterError, match=r"^cluster file .*cluster.json: Not a regular file: "):
        Cluster.load(pipe)
    with pytest.raises(ConfigError, match="graph file /dev/zero: Not a regular file"):
        read_file(Path("/dev/zero"), "graph file")
    with ThreadPoolExecutor() as pool:
        pool.submit(pipe.write_bytes, b"12345")
        assert read_file(pipe, "graph file", is_given=True) == b"12345"


def test_long_values_are_shortened():
    assert shorten("x") == "'x'"
    assert len(shorten("9" * 5000)) == 60
    assert one_line("a\nb\x1b[31m") == "a b [31m"
    assert len(one_line("x" * 5000)) == 300


def test_an_empty_word_is_refused_unless_it_is_another_programs():
    with pytest.raises(ConfigError, match="argument 2 has an empty value"):
        refuse_empty(["exec", "", "--", "ls"])
    refuse_empty(["exec", "node0", "--", "printf", "", "--to="])
